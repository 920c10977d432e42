"""Runs Python's collector of reference cycles by the clock in a supervisor's process.

By itself Python collects when enough more objects exist than before. Where the objects of 10,000 hosts replace each
other, their number stays the same, so that collections are rare and long: 0.3 s for the young objects, and 0.7 s for
all, several times in a burst of failures. No host is heard meanwhile. So young objects are collected by the clock, in
some milliseconds each time. What survives that is hardly ever garbage: a full collection runs every ten minutes.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["collected_by_the_clock"]

_NEW_EVERY_S, _ALL_EVERY_S = 0.1, 600.0


@asynccontextmanager
async def collected_by_the_clock() -> AsyncIterator[None]:
    """Replaces automatic collection in the whole process while the context is open. Blocks the process: some
    milliseconds ten times a second, and longer for the full collection every ten minutes."""
    was_enabled = gc.isenabled()
    gc.disable()
    task = asyncio.create_task(_collect())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if was_enabled:
            gc.enable()


async def _collect() -> None:
    while True:
        for _ in range(round(_ALL_EVERY_S / _NEW_EVERY_S)):
            await asyncio.sleep(_NEW_EVERY_S)
            gc.collect(0)
        gc.collect()
