"""An event loop in a thread, for what blocks until its event loop has done something."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["Background"]

T = TypeVar("T")


class Background:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="resiliency-test-loop")
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result. Blocks: up to a minute."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        if left:
            self.loop.run_until_complete(asyncio.wait(left))
        self.loop.close()
