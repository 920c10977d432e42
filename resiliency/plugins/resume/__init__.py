"""Exact resume: random generators, data loaders, loops and partly accumulated gradients of one rank."""

from __future__ import annotations

__all__: list[str] = []
