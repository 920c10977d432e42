"""Hosts that are simulated on one machine: their processes, their network, and faults on purpose."""

from __future__ import annotations

__all__: list[str] = []
