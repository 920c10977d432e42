"""Exact resume: generators, data loaders, loops and half accumulated gradients of one rank."""

from __future__ import annotations

__all__: list[str] = []
