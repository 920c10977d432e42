"""One adapter per kind of Lightning strategy: what its checkpoints hold and how the engine may copy it."""

from __future__ import annotations

__all__: list[str] = []
