"""Connects Lightning and NeMo to the checkpoint engine; the only code that uses their private attributes."""

from __future__ import annotations

__all__: list[str] = []
