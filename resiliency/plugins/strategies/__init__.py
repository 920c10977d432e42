"""One adapter per kind of Lightning strategy: it says what checkpoints contain and how the engine may copy it."""

from __future__ import annotations

__all__: list[str] = []
