"""Watchdogs: checks that a host and its devices are well. See :mod:`~resiliency.monitor.watchdogs.base`."""

from __future__ import annotations

__all__: list[str] = []
