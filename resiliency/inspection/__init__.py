"""Inspects checkpoints from outside a job: list, verify, contents, prune, export, load by path."""

from __future__ import annotations

__all__: list[str] = []
