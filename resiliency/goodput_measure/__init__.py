"""The older library's module path of its goodput tools; the tools themselves are in :mod:`resiliency.goodput`."""

from __future__ import annotations

__all__: list[str] = []
