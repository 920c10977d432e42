"""Helpers that wait in an event loop without losing a cancellation.

``asyncio.wait_for`` of Python before 3.12 drops a cancellation that arrives at the moment its wait ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

__all__ = ["end_tasks", "is_set_within"]

_AGAIN_S = 0.05


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels the tasks again and again until all have ended. Exceptions that they raise are dropped."""
    tasks = list(tasks)
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_AGAIN_S)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved, because asyncio logs those that are not


async def is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Waits for an event, and returns whether it is set. Blocks: up to ``seconds``."""
    if event.is_set():
        return True
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({waiting}, timeout=seconds)
    finally:
        waiting.cancel()
    return event.is_set()
