"""Callbacks that log step times, throughput, memory and stragglers, and that write each rank's log to a file.

Scripts and log scrapers depend on the names, arguments and log lines of StepLoggingCallback, TPSLoggingCallback,
MemoryLoggingCallback and TensorboardCallback. Importing a class gives it for the Lightning that is imported
(``lightning.pytorch`` or ``pytorch_lightning``); ``build(namespace)`` of this module gives StepLoggingCallback for a
named package.
"""

from __future__ import annotations

from typing import Any

from resiliency.callbacks import _log_directory, _memory_log, _step_log, _straggler_log, _tensorboard, _tps_log

__all__ = [  # noqa: F822 - classes are built on first use
    "LogDirectoryCallback",
    "MemoryLoggingCallback",
    "StepLoggingCallback",
    "StragglerLoggingCallback",
    "TPSLoggingCallback",
    "TensorboardCallback",
    "build",
]

build = _step_log.build
_MODULES = {
    "LogDirectoryCallback": _log_directory,
    "MemoryLoggingCallback": _memory_log,
    "StepLoggingCallback": _step_log,
    "StragglerLoggingCallback": _straggler_log,
    "TPSLoggingCallback": _tps_log,
    "TensorboardCallback": _tensorboard,
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(_MODULES[name], name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
