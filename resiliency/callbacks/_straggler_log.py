"""``StragglerLoggingCallback``: names the ranks that hold up the others."""

from __future__ import annotations

import logging
import threading
from datetime import timedelta
from typing import Any

from resiliency.callbacks._step_lines import say
from resiliency.checkpoint.checkpointer import default_coordinator
from resiliency.checkpoint.coordinator import StoreCoordinator
from resiliency.errors import ConfigError
from resiliency.plugins.namespaces import AdapterClass, require_trainer_of
from resiliency.plugins.step_hooks import StepHooks, step_observer
from resiliency.preemption.board import own_connection
from resiliency.settings import environment
from resiliency.telemetry.step_observer import StepSubscriber, StepTiming
from resiliency.telemetry.step_spread import RankSteps, StepWindow, spread_text, straggler_text, stragglers

__all__ = ["StragglerLoggingCallback", "build"]  # noqa: F822 - StragglerLoggingCallback is built on first use

logger = logging.getLogger(__name__)

#: Seconds that close() waits for the thread; the thread takes longer only while the store does not answer.
_CLOSE_S = 1.0


class StepTimesOnStore(StepSubscriber):
    """Publishes this rank's step times in the job's store at intervals, one key per rank; rank 0 reads and logs all.

    Threads: ``step_ended`` and ``close`` run in the training thread. A thread of this object uses the store; no step
    waits for it.

    Args:
        store: a torch store, over a connection that only this object uses.
        prefix: of the keys, unique for each fit.
        every: time between two comparisons.
        factor: as of :class:`LogsStragglers`.
        namespace: the Lightning package whose logger gets the lines.
    """

    def __init__(
        self, store: Any, *, prefix: str, rank: int, world_size: int, every: timedelta, factor: float, namespace: str
    ) -> None:
        self._store, self._prefix = store, prefix
        self._rank, self._world_size = rank, world_size
        self._every_s, self._factor, self._namespace = every.total_seconds(), factor, namespace
        self._lock = threading.Lock()
        self._window = StepWindow(rank, environment().node)
        self._seen: dict[int, int] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="resiliency-stragglers", daemon=True)
        self._thread.start()

    def step_ended(self, timing: StepTiming) -> None:
        with self._lock:
            self._window.add(timing)

    def close(self) -> None:
        """Idempotent. Blocks: up to a second."""
        self._closing.set()
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        try:
            while not self._closing.wait(self._every_s):
                with self._lock:
                    mine = self._window.take()
                if mine is not None:
                    self._store.set(self._key(self._rank), mine.to_text())
                if self._rank == 0:
                    self._report(self._read())
        except RuntimeError as error:  # torch's stores raise it when their server is gone
            logger.info("ranks are not compared any more, the job's store is gone: %s", str(error).partition("\n")[0])

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/steps/{rank}"

    def _read(self) -> list[RankSteps]:
        """The step times that ranks have published since the last call."""
        found = []
        for rank in range(self._world_size):
            key = self._key(rank)
            if not self._store.check([key]):
                continue  # this rank has not ended a step yet
            one = RankSteps.from_text(self._store.get(key))
            if self._seen.get(rank) != one.window:
                self._seen[rank] = one.window
                found.append(one)
        return found

    def _report(self, ranks: list[RankSteps]) -> None:
        if len(ranks) < 2:
            return
        say(self._namespace, spread_text(ranks, world_size=self._world_size))
        for one in stragglers(ranks, factor=self._factor):
            logger.warning("%s", straggler_text(one, ranks))


class LogsStragglers(StepHooks):
    """Logs on rank 0 how much the ranks' step times differ, and warns of ranks that hold up the others, with host.

    Ranks are compared by their own work in a step: waiting for data and the forward pass, before the ranks first wait
    for one another. On a GPU the forward pass returns before the GPU has done it; with
    ``StepLoggingCallback(timer_kwargs={"sync_cuda": True})`` the GPU's time is measured. The times go through the job's
    store in the background, so that no step waits. A rank that is lost or hangs is missing from the line and delays no
    other rank.

    Thread: the training thread, and a thread of its own. Collective: at the start of training, for a moment.

    Args:
        every: time between two comparisons.
        factor: a rank is a straggler when its own work takes more than ``factor`` times the median of the ranks, and
            exceeds the median by more than 2% of its step and more than 1 ms.

    Raises:
        ConfigError: an argument has a value that cannot work.
    """

    def __init__(self, *, every: timedelta = timedelta(seconds=30), factor: float = 1.5) -> None:
        super().__init__()
        if not isinstance(every, timedelta) or every <= timedelta(0):
            raise ConfigError(f"every={every!r}: pass a positive timedelta, as timedelta(seconds=30)")
        if not factor > 1:
            raise ConfigError(f"factor={factor!r}: pass a number above 1")
        self._every, self._factor = every, factor
        self._times_on_store: StepTimesOnStore | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_times_on_store": None}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        require_trainer_of(self.namespace, trainer, "StragglerLoggingCallback", f"{__package__}.logging")
        super().setup(trainer, pl_module, stage)
        self._finish(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        try:
            coordinator = default_coordinator(trainer.global_rank, trainer.world_size)
        except ConfigError as error:
            logger.warning("ranks are not compared: %s", error)
            return
        if not isinstance(coordinator, StoreCoordinator):
            return  # one rank
        self._times_on_store = StepTimesOnStore(
            own_connection(coordinator.store),
            prefix=coordinator.prefix,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            every=self._every,
            factor=self._factor,
            namespace=self.namespace,
        )
        step_observer(trainer).subscribe(self._times_on_store)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_end(trainer, pl_module)
        self._finish(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        self._finish(trainer)

    def _finish(self, trainer: Any) -> None:
        if self._times_on_store is not None:
            step_observer(trainer).unsubscribe(self._times_on_store)
            self._times_on_store.close()
            self._times_on_store = None


_adapter = AdapterClass(__name__, "StragglerLoggingCallback", LogsStragglers, base="callbacks:Callback")
build = _adapter.build


def __getattr__(name: str) -> Any:
    return _adapter.attribute(name)
