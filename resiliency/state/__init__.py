"""State trees: how they are walked, described and pickled. torch; no files, no other processes."""

from __future__ import annotations

__all__: list[str] = []
