"""A notice that this job is to go: where it comes from, and how all ranks agree where to stop. No torch."""

from __future__ import annotations

__all__: list[str] = []
