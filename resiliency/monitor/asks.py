"""Plan steps that the supervisor asks this host to carry out. Each is begun once, and answered whenever it is asked
for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from resiliency.monitor.state import AskMemory, MonitorState
from resiliency.runtime.messages.monitor import Ask, StepEnded, StepKind
from resiliency.runtime.tasks import end_tasks

__all__ = ["Asks", "NotYet"]

logger = logging.getLogger(__name__)

#: Share of a step's timeout that its work may take; the rest is left for the answer to arrive in time.
_SHARE = 0.8
_LONGEST_DETAIL = 1000
#: Number of the plan, index of the step, and generation of the plan.
_Key = tuple[int, int, int]


def _key(ask: Ask) -> _Key:
    return ask.plan, ask.at, ask.generation


class NotYet(Exception):
    """The answer is not known yet and nothing is wrong. The work is tried again as long as the supervisor asks for
    it."""


class Asks:
    """Starts the steps that are asked for, and answers them. Thread: one, with an event loop.

    A check (``VERIFY``) may be repeated, and is when it is asked for anew. The other kinds have effects: their start is
    written to disk before they begin, and a step that a killed monitor has begun and not finished is answered as "not
    known whether it was done".

    Args:
        save: makes ``state`` durable; returns False when it could not.
        carry_out: per kind, does the work within the given seconds and returns the problem ("": none). A check may
            raise :class:`NotYet`.
        answer: sends the result to the supervisor.
    """

    def __init__(
        self,
        state: MonitorState,
        save: Callable[[], bool],
        carry_out: Mapping[StepKind, Callable[[Ask, float], Awaitable[str]]],
        answer: Callable[[StepEnded], None],
    ) -> None:
        self._state, self._save, self._carry_out, self._answer = state, save, carry_out, answer
        self._running: dict[_Key, asyncio.Task[None]] = {}
        self._checked: dict[_Key, str] = {}
        self._wanted: set[_Key] = set()

    def wanted(self, asks: Sequence[Ask]) -> None:
        """Takes the complete list of steps that the supervisor asks for now, and begins the new ones."""
        wanted = self._wanted = {_key(ask) for ask in asks}
        self._checked = {key: problem for key, problem in self._checked.items() if key in wanted}
        for ask in asks:
            key = _key(ask)
            if key in self._running:
                continue
            if key in self._checked:
                self._say(key, self._checked[key])
            elif ask.kind is not StepKind.VERIFY and key in self._state.asks:
                problem = self._state.asks[key].problem
                unknown = "the host's monitor was started again meanwhile; whether it was done is not known"
                self._say(key, unknown if problem is None else problem)
            else:
                self._running[key] = asyncio.create_task(self._do(ask))

    async def _do(self, ask: Ask) -> None:
        key = _key(ask)
        try:
            while (problem := await self._result(ask)) is None:
                if key not in self._wanted:
                    return
        finally:
            self._running.pop(key, None)
        problem = problem[:_LONGEST_DETAIL]
        if ask.kind is StepKind.VERIFY:
            self._checked[key] = problem
        elif self._is_kept(ask.kind):
            self._state.remember_ask(AskMemory(plan=ask.plan, at=ask.at, generation=ask.generation, problem=problem))
            self._save()
        if problem:
            logger.warning("%s, asked for by plan %d, was not done: %s", ask.kind, ask.plan, problem)
        self._say(key, problem)

    async def _result(self, ask: Ask) -> str | None:
        """Does the work and returns its problem ("": none), or None when the answer is not known yet."""
        carry_out = self._carry_out.get(ask.kind)
        if carry_out is None:
            return f"a host does not do {ask.kind}"
        if self._is_kept(ask.kind):
            self._state.remember_ask(AskMemory(plan=ask.plan, at=ask.at, generation=ask.generation))
            if not self._save():
                return "not begun: the monitor cannot write its state file"
        within_s = max(0.0, ask.timeout_s * _SHARE)
        try:
            return await asyncio.wait_for(carry_out(ask, within_s), within_s + (ask.timeout_s - within_s) / 2)
        except asyncio.TimeoutError:
            return f"{ask.kind} was not done within {within_s:.1f} s"
        except asyncio.CancelledError:
            raise
        except NotYet as why:
            logger.info("%s is not answered yet: %s", ask.kind, why)
            return None
        except Exception as error:
            logger.exception("%s failed in a way that was not foreseen", ask.kind)
            return f"{ask.kind} failed: {type(error).__name__}: {error}"

    @staticmethod
    def _is_kept(kind: StepKind) -> bool:
        return kind in (StepKind.CHECKPOINT, StepKind.RESET_DEVICES, StepKind.SIGNAL)

    def _say(self, key: _Key, problem: str) -> None:
        self._answer(StepEnded(plan=key[0], at=key[1], generation=key[2], problem=problem))

    async def close(self) -> None:
        """Cancels the steps that run, and waits until they have ended."""
        await end_tasks(list(self._running.values()))
