"""``MemoryLoggingCallback``: logs how much memory a process uses on the host and on its GPU."""

from __future__ import annotations

from typing import Any

import psutil
import torch

from resiliency.callbacks._scalars import Scalars
from resiliency.callbacks._step_lines import LogsSteps, say
from resiliency.errors import ConfigError
from resiliency.plugins.namespaces import AdapterClass
from resiliency.telemetry.step_observer import StepSubscriber, StepTiming

__all__ = ["MemoryLoggingCallback", "build", "memory_in_use"]  # noqa: F822 - the class is built on first use

_GIB = 1 << 30


def memory_in_use() -> dict[str, int]:
    """Memory of this process in bytes. ``cpu``: resident memory. If the process uses CUDA, also ``cuda_allocated`` and
    ``cuda_reserved``: what torch has allocated and reserved now, and ``cuda_peak``: the most it has allocated so far.
    """
    found = {"cpu": psutil.Process().memory_info().rss}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["cuda_allocated"] = torch.cuda.memory_allocated()
        found["cuda_reserved"] = torch.cuda.memory_reserved()
        found["cuda_peak"] = torch.cuda.max_memory_allocated()
    return found


class MemoryLines(StepSubscriber):
    """Logs the memory of this process after every n-th step."""

    def __init__(self, namespace: str, every_n_steps: int, scalars: Scalars | None) -> None:
        self._namespace, self._every, self._scalars = namespace, every_n_steps, scalars
        self._next = 0

    def training_started(self, step: int, world_size: int | None) -> None:
        self._next = step + 1

    def step_ended(self, timing: StepTiming) -> None:
        if timing.follows and timing.step < self._next:
            return
        self._next = timing.step + self._every
        memory = memory_in_use()
        said = ", ".join(f"{name.replace('_', ' ')} {value / _GIB:.3f} GiB" for name, value in memory.items())
        say(self._namespace, f"Memory after step {timing.step}: {said}")
        if self._scalars is not None:
            for name, value in memory.items():
                self._scalars.write(f"memory/{name}_gib", value / _GIB, timing.step)


class LogsMemory(LogsSteps):
    """Logs the memory of rank 0 after its first step and then every n-th step: ``Memory after step 50: cpu 1.204 GiB,
    cuda allocated 10.512 GiB, cuda reserved 11.002 GiB, cuda peak 10.961 GiB``.

    Without a GPU the line has only the first figure. The worker processes of a data loader are not counted.

    Thread: the training thread. Collective: no. Costs some ten microseconds per line.

    Args:
        every_n_steps: steps from one line to the next; None: the Trainer's ``log_every_n_steps``.
        tb_dir: where scalars ``memory/cpu_gib`` and so on go, as in TensorboardCallback, except None: the Trainer's
            TensorBoardLogger if it has one, else no scalars.

    Raises:
        ConfigError: ``every_n_steps`` is no whole number of at least 1; at the start of a fit, ``tb_dir`` cannot be
            used.
    """

    def __init__(self, *, every_n_steps: int | None = None, tb_dir: str | None = None) -> None:
        super().__init__(tb_dir)
        is_number = isinstance(every_n_steps, int) and not isinstance(every_n_steps, bool)
        if every_n_steps is not None and not (is_number and every_n_steps >= 1):
            raise ConfigError(f"every_n_steps={every_n_steps!r}: pass a whole number of at least 1")
        self._every_n_steps = every_n_steps

    def _make_subscriber(self, trainer: Any, scalars: Scalars | None) -> StepSubscriber | None:
        every = self._every_n_steps or max(1, trainer.log_every_n_steps)
        return MemoryLines(self.namespace, every, scalars)


_adapter = AdapterClass(__name__, "MemoryLoggingCallback", LogsMemory, base="callbacks:Callback")
build = _adapter.build


def __getattr__(name: str) -> Any:
    return _adapter.attribute(name)
