"""What code can change of its process and its main thread, and put back only by itself: a survivor puts it back.

An attempt is left by an exception that comes at any place: between a ``torch.set_grad_enabled(False)`` and the call
that takes it back, or within the ``__enter__`` of a context manager, whose ``__exit__`` is not called then. The next
attempt would train under autocast, or in another folder, and its peer, a new process, would not.
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
    """Of the main thread; the defaults are those of a new process."""

    grad: bool = True
    #: None: float32.
    dtype: Any = None
    #: What ``set_default_device`` holds, and what ``with torch.device`` and the like have pushed.
    device: Any = None
    current_device: Any = None
    modes: tuple[Any, ...] = ()
    #: By type of device, whether it is on, and to which dtype (None: not said).
    autocast: dict[str, tuple[bool, Any]] = field(default_factory=lambda: dict.fromkeys(_DEVICES, (False, None)))
    autocast_cache: bool = True
    autocast_depth: int = 0


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """As a function was called. Thread: main.

    Attributes:
        folder: working directory; None: it is gone.
        umask: of new files.
        blocked: signals that the thread does not take.
        timers: those that were not set. One that was set before belongs to somebody else.
        streams: of the interpreter, and what prints an exception.
        torch: defaults where torch was not imported; None: this torch has others, and nothing of it is restored.
    """

    folder: str | None
    umask: int
    blocked: frozenset[int]
    timers: tuple[int, ...]
    streams: dict[str, Any]
    torch: _TorchState | None

    def restore(self) -> None:
        """Makes it so again. Idempotent. Blocks: no."""
        for timer in self.timers:
            signal.setitimer(timer, 0)  # its handler is taken back, and the signal would end the process
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)
        os.umask(self.umask)
        for name, value in self.streams.items():
            setattr(sys, name, value)
        try:
            if self.folder is not None and self.folder != _folder():
                os.chdir(self.folder)
        except OSError as error:
            logger.warning("the attempt that ended has left the folder %s, which is gone: %s", self.folder, error)
        torch: Any = sys.modules.get("torch")
        if torch is None or self.torch is None:
            return
        for step in (_restore_modes, _restore_numbers, _restore_autocast):
            _run(step, torch, self.torch)


def process_state() -> ProcessState:
    """As it is now."""
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
    """Without a moment in which it is another one, for the files of other threads."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1], 8) for line in file if line.startswith("Umask:"))


# -- torch ------------------------------------------------------------------------------------------------------------


def _torch_state(torch: Any) -> _TorchState | None:
    try:
        return _read(torch)
    except Exception:  # Boundary: private functions of torch; without them the next attempt finds what this one leaves.
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
    else:  # torch 2.4 takes it for a context whenever it is there
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
    torch.clear_autocast_cache()  # weights of the attempt; it is emptied by the outermost context as that ends


def _run(step: Callable[[Any, _TorchState], None], torch: Any, before: _TorchState) -> None:
    try:
        step(torch, before)
    except Exception:  # Boundary: as above.
        logger.warning("settings of torch that the attempt that ended has made stay", exc_info=True)
