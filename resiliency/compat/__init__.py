"""Names, arguments and tools of an older library, AI-Hypercomputer's ``resiliency``, over the code of this one."""

from __future__ import annotations

__all__: list[str] = []
