"""The older library's module path of its goodput tools; the tools are in :mod:`resiliency.compat`."""

from __future__ import annotations

__all__: list[str] = []
