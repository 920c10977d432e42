"""What of this library would work on a host, found out before a job does: facts, and rules over them. No torch."""

from __future__ import annotations

__all__: list[str] = []
