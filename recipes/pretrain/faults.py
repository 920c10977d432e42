"""Simulated faults: ``--sim-fault-desc "random,120"`` kills or stops one rank 120 seconds after training starts."""

from __future__ import annotations

import enum
import logging
import os
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback

from resiliency.errors import ConfigError
from resiliency.settings import environment

__all__ = ["Fault", "FaultPlan", "SimulatedFault"]

logger = logging.getLogger(__name__)


class Fault(enum.Enum):
    """What happens to the rank. The value is the signal that it gets."""

    rank_killed = signal.SIGKILL
    rank_hung = signal.SIGSTOP


@dataclass(frozen=True, kw_only=True)
class FaultPlan:
    """The fault that each attempt of the job gets.

    Attributes:
        fault: None: one is drawn at random.
        delay_s: seconds after the start of training.
    """

    fault: Fault | None
    delay_s: float

    @classmethod
    def parse(cls, text: str) -> FaultPlan:
        """Reads "type,seconds".

        Raises:
            ConfigError: the text is not of this form, or the type is unknown.
        """
        kind, _, seconds = text.partition(",")
        known = {fault.name: fault for fault in Fault}
        try:
            delay_s = float(seconds)
        except ValueError:
            delay_s = -1.0
        if (kind not in known and kind != "random") or not 0 <= delay_s < float("inf"):
            raise ConfigError(
                f"--sim-fault-desc {text!r}: pass a type ({', '.join(known)} or random) and seconds, such as"
                f" 'random,120'"
            )
        return cls(fault=known.get(kind), delay_s=delay_s)

    def draw(self, *, seed: str, ranks: int) -> tuple[Fault, int]:
        """Draws the fault and the rank that it hits; the same on every rank for the same seed."""
        source = random.Random(seed)
        victim = source.randrange(ranks)
        return self.fault or source.choice(list(Fault)), victim


class SimulatedFault(Callback):
    """Sends one rank a signal, once in each attempt of the job.

    Args:
        plan: the fault and its delay.
        job: name of the job; with the restart count it is the seed of what is drawn.
        send: sends the signal; tests replace it.
    """

    def __init__(self, plan: FaultPlan, *, job: str, send: Callable[[int, int], Any] = os.kill) -> None:
        self._plan, self._job, self._send = plan, job, send
        self._timer: threading.Timer | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        seed = f"{self._job}-{environment().restart}"
        fault, victim = self._plan.draw(seed=seed, ranks=trainer.world_size)
        if trainer.global_rank != victim:
            return
        logger.warning("simulated fault: %s on rank %d in %g s", fault.name, victim, self._plan.delay_s)
        self._timer = threading.Timer(self._plan.delay_s, self._send, (os.getpid(), fault.value))
        self._timer.daemon = True
        self._timer.start()

    def _cancel(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
            timer.join(timeout=10)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._cancel()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._cancel()
