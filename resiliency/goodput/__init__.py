"""Accounts for every second of a run: ledger and report. No torch."""

from __future__ import annotations

__all__: list[str] = []
