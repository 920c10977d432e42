"""Callbacks for a Lightning Trainer; import the module you need."""

from __future__ import annotations

__all__: list[str] = []
