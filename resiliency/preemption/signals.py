"""Receives notices by signal.

Python runs a handler in the main thread, between two of its instructions, but not while that thread waits in native
code for a peer, perhaps for ever. The C handler also writes the signal's number into a socket, on whichever thread it
runs, and a thread of ours reads it there.

A forked process gets the handlers that it would have without this module.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

__all__ = ["Signals", "has_native_handler"]

logger = logging.getLogger(__name__)


class Signals:
    """Handles signals of this process until :meth:`close`. Thread: main.

    Args:
        signals: their numbers.
        told: called with the number, on a thread of this object, each time a signal arrives.
        also: called with number and frame, in the main thread, when the handler runs there.
        in_children: handlers for forked processes, by number; the default handler for numbers that are missing.
    """

    def __init__(
        self,
        signals: Sequence[int],
        told: Callable[[int], None],
        also: Callable[[int, FrameType | None], None] | None = None,
        in_children: Mapping[int, Any] | None = None,
    ) -> None:
        self._told, self._also = told, also
        self._numbers = frozenset(signals)
        self._in_children = in_children or {}
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._before_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._before: dict[int, Any] = {number: signal.signal(number, self._handle) for number in signals}
        self._thread = threading.Thread(target=self._read, name="resiliency-signals", daemon=True)
        self._thread.start()
        _installed.append(self)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._also is not None:
            self._also(number, frame)

    def _read(self) -> None:
        while data := self._reader.recv(64):
            for number in data:
                if number in self._numbers:
                    self._told(number)
                elif number == 0:
                    return
            if self._before_fd >= 0:
                with suppress(OSError):  # the process that set it has closed it or does not read
                    os.write(self._before_fd, data)

    def close(self) -> None:
        """Restores the earlier handlers, except where they were changed since. Idempotent."""
        if self not in _installed:
            return
        _installed.remove(self)
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if _is(signal.set_wakeup_fd(-1), self._writer):
            signal.set_wakeup_fd(self._before_fd, warn_on_full_buffer=False)
        self._writer.send(b"\0")
        self._thread.join(1)
        self._reader.close()
        self._writer.close()


def has_native_handler(number: int) -> bool:
    """Returns True where native code handles the signal and Python does not know, as after
    ``faulthandler.register``."""
    if signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN, None):
        return False
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (number - 1) & 1)


def _is(fd: int, one: socket.socket) -> bool:
    return fd == one.fileno()


_installed: list[Signals] = []


def _in_a_forked_child() -> None:
    for one in _installed:
        # The socket is shared with the parent, which must not be told of signals to this process.
        if _is(signal.set_wakeup_fd(-1), one._writer):
            signal.set_wakeup_fd(one._before_fd, warn_on_full_buffer=False)
        for number in one._before:
            if signal.getsignal(number) == one._handle:
                handler = one._in_children.get(number)
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
    _installed.clear()


os.register_at_fork(after_in_child=_in_a_forked_child)
