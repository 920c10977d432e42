"""``ProfileCheckpointCallback``: traces where the time of a save goes, in the training process and in the host agent.

``from resiliency.callbacks.profile import ProfileCheckpointCallback`` gives the class for the Lightning that is
imported (``lightning.pytorch`` or ``pytorch_lightning``); ``build(namespace)`` gives it for a named one.
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Any

from resiliency.callbacks.checkpointing.places import EngineKey
from resiliency.callbacks.checkpointing.trainer_session import trainer_session
from resiliency.checkpoint.save_trace import FinishedTrace, SaveTrace
from resiliency.errors import ConfigError
from resiliency.plugins.namespaces import AdapterClass, require_trainer_of
from resiliency.plugins.step_hooks import StepHooks
from resiliency.regular_file import open_regular
from resiliency.telemetry.chrome_trace import TraceEvents, TraceFiles

__all__ = ["ProfileCheckpointCallback", "build"]  # noqa: F822 - ProfileCheckpointCallback is built on first use

logger = logging.getLogger(__name__)


class TracesSaves(StepHooks):
    """Traces every n-th save of each :mod:`~resiliency.callbacks.model_checkpoint` callback of the Trainer.

    Each rank writes ``<trace_dir>/ckpt_rank{r}_step{n}_trace.json`` in the Chrome trace event format; open it at
    https://ui.perfetto.dev. The file shows the work of this rank and of its host's agent on one clock, with the ids and
    names of their processes and threads. The trace of a failed save says why it failed. When several callbacks save one
    step, the file contains all of these saves.

    A separate thread writes the trace when the save has reached its last tier, or after ``timeout``. Only the end of a
    fit waits for that thread, up to 10 s. Saves that are not traced cost nothing more. When a trace cannot be written,
    one warning is logged per fit.

    Thread: the training thread. Collective: at the start of a fit.

    Args:
        trace_dir: local folder; it is created if missing.
        profile_checkpoint_interval: 1: trace every save; 2: trace every second save, that is saves 2, 4, 6; and so on.
        timeout: after this time the trace is written even if the save is not finished, for example when a tier is down.

    Raises:
        ConfigError: an argument has a value that cannot work; at the start of a fit, on all ranks, one of them cannot
            write to the folder.
    """

    def __init__(
        self,
        trace_dir: str | os.PathLike[str],
        profile_checkpoint_interval: int,
        *,
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        super().__init__()
        given = os.fspath(trace_dir)
        if not given or "://" in given:
            raise ConfigError(f"trace_dir={given!r}: pass the path of a folder; traces are local files")
        self._trace_dir = os.path.abspath(given)
        interval = profile_checkpoint_interval
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
            raise ConfigError(
                f"profile_checkpoint_interval={interval!r}: pass a number of saves, 1 for a trace of each"
            )
        if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
            raise ConfigError(f"timeout={timeout!r}: pass a timedelta of more than zero")
        self._interval = interval
        self._timeout = timeout
        self._saves: dict[EngineKey, int] = {}
        self._files: TraceFiles | None = None  # from the start of a fit on
        self._warned = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy made in a fit does not trace that fit's saves."""
        return {**vars(self), "_files": None}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        require_trainer_of(self.namespace, trainer, "ProfileCheckpointCallback", __name__)
        super().setup(trainer, pl_module, stage)
        if stage != "fit" or trainer.fast_dev_run:
            return
        problem = _unwritable(self._trace_dir, trainer.global_rank)
        if not trainer.strategy.reduce_boolean_decision(not problem, all=True):
            raise ConfigError(
                f"trace_dir={self._trace_dir}: {problem or 'another rank cannot write there'}; pass a folder that every"
                " rank can write to, or leave ProfileCheckpointCallback out"
            )
        self._files = TraceFiles(self._trace_dir, trainer.global_rank)
        self._saves.clear()
        self._warned = False

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_fit_start(trainer, pl_module)
        if self._files is None:
            return
        session = trainer_session(trainer)
        if not session.users:
            session.end()
            logger.warning(
                "there is no save to trace: ProfileCheckpointCallback needs a ModelCheckpoint of this library whose"
                " checkpoints the engine writes"
            )
            return
        rank = trainer.global_rank

        def trace_save(key: EngineKey) -> SaveTrace | None:
            count = self._saves[key] = self._saves.get(key, 0) + 1
            if self._files is None or count % self._interval:
                return None
            return SaveTrace(
                step=trainer.global_step, rank=rank, write=self._write, timeout_s=self._timeout.total_seconds()
            )

        session.trace_save = trace_save

    def _write(self, trace: FinishedTrace) -> None:
        """Writes the file of a finished trace. Runs in the trace's own thread."""
        files = self._files
        if files is None:
            return
        threads = {(one.pid, one.thread): one.thread_name for one in trace.moments}
        threads |= {(one.pid, one.thread): one.thread_name for one in trace.spans}
        agents = {pid: "checkpoint agent" for pid, _ in threads}
        try:
            path = files.write(
                trace.step,
                TraceEvents(
                    spans=[
                        (one.name, one.began_ns, one.ended_ns, one.pid, one.thread, one.facts) for one in trace.spans
                    ],
                    moments=[(one.name, one.at_ns, one.pid, one.thread, one.facts) for one in trace.moments],
                    processes={**agents, trace.pid: f"rank {trace.rank}"},
                    threads=threads,
                    facts={"step": trace.step, "rank": trace.rank, "outcome": trace.outcome},
                ),
            )
        except OSError as error:
            if not self._warned:
                self._warned = True
                logger.warning("the trace of the save of step %d is not written: %s", trace.step, error)
            return
        logger.info("the save of step %d is traced in %s (%s)", trace.step, path, trace.outcome)


def _unwritable(folder: str, rank: int) -> str:
    """Creates the folder. Returns why it cannot be written to; "" when it can."""
    probe = os.path.join(folder, f".write-{rank:05d}")
    try:
        os.makedirs(folder, exist_ok=True)
        with open(probe, "wb", opener=open_regular):
            os.unlink(probe)
    except OSError as error:
        return str(error)
    return ""


_adapter = AdapterClass(__name__, "ProfileCheckpointCallback", TracesSaves, base="callbacks:Callback")
build = _adapter.build


def __getattr__(name: str) -> Any:
    return _adapter.attribute(name)
