"""What processes are made of: how they start, end, talk to each other and show that they live. No torch."""

from __future__ import annotations

__all__: list[str] = []
