"""The host monitor, one process per host: it makes its host do what a supervisor wants. No torch."""

from __future__ import annotations

__all__: list[str] = []
