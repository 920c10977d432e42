"""What stands between Lightning or NeMo and the checkpoint engine; the only users of their private parts."""

from __future__ import annotations

__all__: list[str] = []
