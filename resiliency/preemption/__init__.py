"""Notices that this job must stop: where they come from, and how all ranks agree on where to stop. No torch."""

from __future__ import annotations

__all__: list[str] = []
