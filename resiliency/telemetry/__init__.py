"""What a running job writes about itself, and how it is read back: step events, sinks, event logs. No torch."""

from __future__ import annotations

__all__: list[str] = []
