"""State trees: how they are walked, described and pickled. Uses torch; touches no files and no other processes."""

from __future__ import annotations

__all__: list[str] = []
