"""``TPSLoggingCallback``: logs tokens (or samples) per second."""

from __future__ import annotations

import os
from typing import Any

from resiliency.callbacks._scalars import Scalars
from resiliency.callbacks._step_lines import LogsSteps, say
from resiliency.errors import ConfigError
from resiliency.plugins.namespaces import AdapterClass
from resiliency.telemetry.step_observer import StepSubscriber, StepTiming

__all__ = ["TPSLoggingCallback", "build"]  # noqa: F822 - TPSLoggingCallback is built on first use


class Throughput(StepSubscriber):
    """Logs and writes the throughput of each step."""

    def __init__(self, namespace: str, tokens: int, scalars: Scalars | None) -> None:
        self._namespace, self._tokens, self._scalars = namespace, tokens, scalars

    def step_ended(self, timing: StepTiming) -> None:
        if timing.active_s <= 0:
            return
        rate = self._tokens / timing.active_s
        say(self._namespace, f"TPS for step {timing.step}: {rate:.3f}")
        if self._scalars is not None:
            self._scalars.write("train/tps", rate, timing.step)


class LogsThroughput(LogsSteps):
    """Logs on rank 0 the tokens per second of each step, over all ranks: ``TPS for step 2: 20177.340``.

    The figure is the number of tokens of an optimizer step divided by the step time that StepLoggingCallback logs,
    which does not include the time between steps. The scalar is ``train/tps``.

    Thread: the training thread. Collective: no.

    Args:
        gbs: global batch size: sequences (samples) per optimizer step, over all ranks and accumulated batches.
        seq_length: tokens per sequence; 1 for samples per second.
        tb_dir: as in TensorboardCallback, except None: the Trainer's TensorBoardLogger if it has one, else no scalars.

    Raises:
        ConfigError: ``gbs`` or ``seq_length`` is no whole number of at least 1; at the start of a fit, ``tb_dir``
            cannot be used.
    """

    def __init__(self, gbs: int, seq_length: int, tb_dir: str | os.PathLike[str] | None = None) -> None:
        super().__init__(tb_dir)
        for name, value in (("gbs", gbs), ("seq_length", seq_length)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name}={value!r}: pass a whole number of at least 1")
        self._tokens = gbs * seq_length

    def _make_subscriber(self, trainer: Any, scalars: Scalars | None) -> StepSubscriber | None:
        return Throughput(self.namespace, self._tokens, scalars)


_adapter = AdapterClass(__name__, "TPSLoggingCallback", LogsThroughput, base="callbacks:Callback")
build = _adapter.build


def __getattr__(name: str) -> Any:
    return _adapter.attribute(name)
