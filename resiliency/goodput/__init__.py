"""Where every second of a run went: ledger, calculator and report. No torch."""

from __future__ import annotations

__all__: list[str] = []
