"""What lies on disk and where: format, tiers, catalog, retention. No torch."""

from __future__ import annotations

__all__: list[str] = []
