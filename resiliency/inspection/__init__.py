"""Looking at checkpoints from outside: list, verify, contents, prune, export, load by path."""

from __future__ import annotations

__all__: list[str] = []
