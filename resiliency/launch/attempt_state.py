"""Saves and restores process-wide and main-thread settings, so that an ended attempt leaves none of its own behind.

A process that goes on (:mod:`~resiliency.launch.survivor`) leaves its attempt by an exception that can come anywhere:
between ``torch.set_grad_enabled(False)`` and the call that reverts it, or inside the ``__enter__`` of a context
manager, whose ``__exit__`` is then not called. Without a restore the next attempt of this process would train under
autocast, or in another folder, while its peer, a new process, would not.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ProcessState", "process_state"]

logger = logging.getLogger(__name__)

_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class _TorchState:
    """Torch's settings of the main thread; the defaults are those of a new process."""

    grad: bool = True
    #: Default dtype; None means float32.
    dtype: Any = None
    #: The device set by ``set_default_device``; ``current_device`` and ``modes`` are what ``with torch.device`` pushes.
    device: Any = None
    current_device: Any = None
    modes: tuple[Any, ...] = ()
    #: Device type -> (whether autocast is on, its dtype; None: torch's default).
    autocast: dict[str, tuple[bool, Any]] = field(default_factory=lambda: dict.fromkeys(_DEVICES, (False, None)))
    autocast_cache: bool = True
    autocast_depth: int = 0


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """The settings of this process at the time of :func:`process_state`. Thread: main.

    Attributes:
        folder: working directory; None: it was deleted.
        umask: for new files.
        blocked: signals blocked in the main thread.
        timers: interval timers that were not running. A running one belongs to somebody else and is left alone.
        streams: ``sys.stdout``, ``sys.stderr`` and ``sys.excepthook``.
        torch: torch's settings, defaults when torch was not imported; None: this version of torch lacks the functions
            that read them, and nothing of torch is restored.
    """

    folder: str | None
    umask: int
    blocked: frozenset[int]
    timers: tuple[int, ...]
    streams: dict[str, Any]
    torch: _TorchState | None

    def restore(self) -> None:
        """Sets everything back to the recorded values. Idempotent. Blocks: no. Failures are logged, not raised."""
        for timer in self.timers:
            signal.setitimer(timer, 0)  # its handler is restored too, so a later signal would end the process
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)
        os.umask(self.umask)
        for name, value in self.streams.items():
            setattr(sys, name, value)
        try:
            if self.folder is not None and self.folder != _folder():
                os.chdir(self.folder)
        except OSError as error:
            logger.warning(
                "the working directory %s of before the attempt cannot be returned to: %s", self.folder, error
            )
        torch: Any = sys.modules.get("torch")
        if torch is None or self.torch is None:
            return
        for step in (_restore_modes, _restore_numbers, _restore_autocast):
            _run(step, torch, self.torch)


def process_state() -> ProcessState:
    """Records the current settings."""
    torch: Any = sys.modules.get("torch")
    return ProcessState(
        folder=_folder(),
        umask=_umask(),
        blocked=frozenset(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
        timers=tuple(timer for timer in _TIMERS if not any(signal.getitimer(timer))),
        streams={name: getattr(sys, name) for name in ("stdout", "stderr", "excepthook")},
        torch=_TorchState() if torch is None else _torch_state(torch),
    )


def _folder() -> str | None:
    with suppress(FileNotFoundError):
        return os.getcwd()
    return None


def _umask() -> int:
    """Read from ``/proc``, because ``os.umask`` would change it for a moment, for files of other threads too."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1], 8) for line in file if line.startswith("Umask:"))


# -- torch ------------------------------------------------------------------------------------------------------------


def _torch_state(torch: Any) -> _TorchState | None:
    try:
        return _read(torch)
    except Exception:  # Boundary: private torch functions; without them settings of the ended attempt stay.
        logger.debug("settings of torch cannot be read", exc_info=True)
        return None


def _read(torch: Any) -> _TorchState:
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    devices = sys.modules.get("torch.utils._device")
    return _TorchState(
        grad=torch.is_grad_enabled(),
        dtype=torch.get_default_dtype(),
        device=getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None),
        current_device=getattr(devices, "CURRENT_DEVICE", None),
        modes=tuple(_modes(torch)),
        autocast={one: (torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)) for one in _DEVICES},
        autocast_cache=torch.is_autocast_cache_enabled(),
        autocast_depth=depth,
    )


def _modes(torch: Any) -> list[Any]:
    return [torch._C._get_function_stack_at(at) for at in range(torch._C._len_torch_function_stack())]


def _restore_modes(torch: Any, before: _TorchState) -> None:
    found = _modes(torch)
    if [*map(id, found)] == [*map(id, before.modes)]:
        return
    for _ in found:
        torch._C._pop_torch_function_stack()
    for mode in before.modes:
        torch._C._push_on_torch_function_stack(mode)
    if before.device is not None:
        torch._GLOBAL_DEVICE_CONTEXT.device_context = before.device
    else:
        vars(torch._GLOBAL_DEVICE_CONTEXT).pop("device_context", None)
    devices: Any = sys.modules.get("torch.utils._device")
    if devices is not None:
        devices.CURRENT_DEVICE = before.current_device


def _restore_numbers(torch: Any, before: _TorchState) -> None:
    torch.set_grad_enabled(before.grad)
    torch.set_default_dtype(before.dtype or torch.float32)


def _restore_autocast(torch: Any, before: _TorchState) -> None:
    for device, (enabled, dtype) in before.autocast.items():
        torch.set_autocast_enabled(device, enabled)
        if dtype is not None:
            torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(before.autocast_cache)
    for _ in range(torch.autocast_increment_nesting() - before.autocast_depth):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()  # holds weights of the ended attempt; else only the outermost autocast exit clears it


def _run(step: Callable[[Any, _TorchState], None], torch: Any, before: _TorchState) -> None:
    try:
        step(torch, before)
    except Exception:  # Boundary: private functions of torch, as above.
        logger.warning(
            "torch settings of the ended attempt (autocast, grad mode, device) could not be reset and stay",
            exc_info=True,
        )
