"""Test suites and test doubles for code that extends the library; shipped, but imported by tests only."""

from __future__ import annotations

__all__: list[str] = []
