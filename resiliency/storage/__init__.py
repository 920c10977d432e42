"""The format of checkpoints on disk, the tiers that store them, and their listing and retention. No torch."""

from __future__ import annotations

__all__: list[str] = []
