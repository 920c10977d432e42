"""Finds out what of this library would work on a host, before a job does: facts, and rules about them. No torch."""

from __future__ import annotations

__all__: list[str] = []
