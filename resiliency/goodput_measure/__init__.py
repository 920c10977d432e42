"""The older library's goodput tools: its event logger, tracker and calculator, under its module path."""

from __future__ import annotations

__all__: list[str] = []
