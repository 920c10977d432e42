"""Keeps data loader workers alive when a signal is sent to the process group of their rank.

Torch's workers end at SIGTERM, and the rank then fails at its next batch, before it can save. Shielded workers end when
the rank tells them to, or when the rank has ended, which torch has them check for.
"""

from __future__ import annotations

import _posixsubprocess
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Shield"]


@dataclass(frozen=True)
class Shield:
    """A ``worker_init_fn`` for a torch ``DataLoader``. It can be pickled if ``then`` can.

    Attributes:
        signals: numbers of signals that are ignored, unless the rank itself sent them: it ends workers with SIGTERM.
        then: the loader's own ``worker_init_fn``, or None.
    """

    signals: tuple[int, ...]
    then: Callable[[int], Any] | None

    def __call__(self, worker: int) -> None:
        # Block the signals and wait for them: a Python handler does not learn the sender, and torch's own ends the
        # process.
        signal.pthread_sigmask(signal.SIG_BLOCK, self.signals)
        _let_children_have(self.signals)
        threading.Thread(target=self._wait, name="resiliency-shield", daemon=True).start()
        if self.then is not None:
            self.then(worker)

    def _wait(self) -> None:
        while True:
            if signal.sigwaitinfo(self.signals).si_pid == os.getppid():
                os._exit(0)


def _let_children_have(signals: tuple[int, ...]) -> None:
    """Unblocks the signals in child processes, which inherit blocked signals and could not be ended by them."""

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)

    os.register_at_fork(after_in_child=unblock)
    original = _posixsubprocess.fork_exec

    def fork_exec(*args: Any) -> int:
        unblock()
        try:
            return int(original(*args))
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, signals)

    _posixsubprocess.fork_exec = fork_exec
    if hasattr(subprocess, "_fork_exec"):  # Python 3.11 and later look it up there
        subprocess._fork_exec = fork_exec
