"""The `resiliency` command: arguments in, text out; the work is done elsewhere."""

from __future__ import annotations

__all__: list[str] = []
