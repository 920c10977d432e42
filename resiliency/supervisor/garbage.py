"""When a supervisor's process looks for garbage that refers to itself.

Python looks when there are so many more objects than before, at all that are new since it looked last. Where objects of
10,000 hosts take each other's place their number stays the same, so that it looks rarely, at very many: for 0.3 s, in
which nobody is heard; and for 0.7 s at all there are, several times in a burst of failures. So new objects are looked
at by the clock, some milliseconds at a time. What outlives that is hardly ever garbage: all of it is looked at every
ten minutes.
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
    """For the whole process. Blocks it: milliseconds, and every ten minutes for a collection of everything."""
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
