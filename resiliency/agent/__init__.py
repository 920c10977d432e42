"""The host agent: one process per host that commits, fsyncs, uploads and prunes. Imports no torch."""

from __future__ import annotations

__all__: list[str] = []
