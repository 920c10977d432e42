"""Events of a training loop: step observer, sinks, and readers of event logs. No torch."""

from __future__ import annotations

__all__: list[str] = []
