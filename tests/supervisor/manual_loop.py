"""An event loop whose time passes when a test says so, at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

__all__ = ["Inline", "ManualLoop"]

T = TypeVar("T")
_MOST_ROUNDS = 10_000


class ManualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        self._error: BaseException | None = None
        self.set_exception_handler(self._failed)

    def time(self) -> float:
        return self.now_s

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._error = self._error or context.get("exception") or AssertionError(context["message"])

    def settle(self) -> None:
        """Runs all that is ready, and what follows from it, without time."""
        for _ in range(_MOST_ROUNDS):
            self.call_soon(self.stop)
            self.run_forever()
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            if not self._ready and self._next_s() > self.now_s:  # type: ignore[attr-defined]
                return
        raise AssertionError("it never comes to rest")

    def pass_time(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        self.settle()
        while (next_s := self._next_s()) <= end_s:
            self.now_s = max(self.now_s, next_s)
            self.settle()
        self.now_s = end_s
        self.settle()

    def complete(self, work: Awaitable[T]) -> T:
        """Its result. Time passes as far as it needs some."""
        task = asyncio.ensure_future(work, loop=self)
        self.settle()
        for _ in range(_MOST_ROUNDS):
            if task.done():
                return task.result()
            self.pass_time(0.05)
        raise AssertionError("it never ends")

    def _next_s(self) -> float:
        times = [each.when() for each in self._scheduled if not each.cancelled()]  # type: ignore[attr-defined]
        return min(times, default=float("inf"))


class Inline(Executor):
    """Runs what it is given in the caller's thread."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done
