"""Object stores for a job that starts: with short timeouts, and without asking a silent store again.

A job lists the store several times before it trains: for names, for the number of its attempt, for steps to resume
from. A store that hangs would hold up each listing for as long as an upload or a restore may wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from resiliency.errors import TierError
from resiliency.storage.tiers.object_store import ObjectStoreTier

__all__ = ["GlancedStore"]

T = TypeVar("T")

_PATIENCE = timedelta(seconds=60)
#: Seconds for which a store that did not answer is not asked again.
_SILENT_S = 300.0

#: address -> until when it is not asked again (monotonic seconds), and the error it gave.
_silent: dict[str, tuple[float, TierError]] = {}


class GlancedStore(ObjectStoreTier):
    """An object store with short timeouts. Blocks: up to a minute for a listing, and not at all when the store did not
    answer within the last five minutes."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(
            url, **{"retry_timeout": _PATIENCE, "attempts": 2, "request_timeout": timedelta(seconds=30), **options}
        )

    def _do(self, action: str, key: str, call: Callable[[Any], T]) -> T:
        until, error = _silent.get(self.root, (0.0, None))
        if error is not None and time.monotonic() < until:
            raise TierError(f"{error}; it is not asked again for now", retryable=True) from error
        try:
            found = super()._do(action, key, call)
        except TierError as failure:
            if failure.retryable:
                _silent[self.root] = (time.monotonic() + _SILENT_S, failure)
            raise
        _silent.pop(self.root, None)
        return found
