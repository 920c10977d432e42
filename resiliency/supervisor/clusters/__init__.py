"""Backends that tell a cluster about hosts."""

__all__: list[str] = []
