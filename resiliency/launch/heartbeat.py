"""A rank's progress in shared memory, where the launcher reads it, whatever the rank does or does not do.

A beat is two stores into a mapped page: under a microsecond, no system call, no lock. A process that holds the GIL, or
that is stopped, is seen to make none.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import socket
import struct
import time
from dataclasses import dataclass

from resiliency.launch.channel import send
from resiliency.settings import LAUNCHER_VARIABLE, all_variables

__all__ = ["STACKS_SIGNAL", "Heartbeat", "Page", "beat", "pause"]

#: Number of beats, monotonic nanoseconds of the last one, the longest time between two in nanoseconds, and whether
#: the rank is to be watched: a word each, so that a reader sees each of them whole.
_PAGE = struct.Struct("<QQQQ")
_NBYTES = mmap.PAGESIZE
#: The first times between beats, in which caches are filled and kernels are chosen, tell nothing of the next ones.
_WARM_UP = 3
#: Makes a rank write the stacks of all its threads to its standard error, also while native code holds the GIL.
STACKS_SIGNAL = signal.SIGRTMIN + 11


@dataclass(frozen=True, kw_only=True)
class Page:
    """What a rank has written.

    Attributes:
        beats: since its attempt began.
        last_s: monotonic seconds of the last one.
        longest_s: the longest time between two beats, without the first few.
        watched: it is to beat again.
    """

    beats: int
    last_s: float
    longest_s: float
    watched: bool

    @classmethod
    def read(cls, page: mmap.mmap) -> Page:
        beats, last, longest, watched = _PAGE.unpack_from(page)
        return cls(beats=beats, last_s=last / 1e9, longest_s=longest / 1e9, watched=bool(watched))


class Heartbeat:
    """The page of this process. Thread: the training thread."""

    def __init__(self) -> None:
        fd = os.memfd_create("resiliency-heartbeat", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, _NBYTES)
            self._page = mmap.mmap(fd, _NBYTES)
            self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._connection.connect("\0" + all_variables()[LAUNCHER_VARIABLE])
            send(self._connection, {"kind": "heartbeat", "number": 0}, [fd])
        finally:
            os.close(fd)
        faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)
        self.start_anew()

    def start_anew(self) -> None:
        """What was observed in an attempt before means nothing."""
        self._beats = self._last = self._longest = 0
        self._write(watched=False)

    def beat(self) -> None:
        """The rank has made progress, and will again."""
        now = time.monotonic_ns()
        if self._beats > _WARM_UP and self._last:
            self._longest = max(self._longest, now - self._last)
        self._beats += 1
        self._last = now
        self._write(watched=True)

    def pause(self) -> None:
        """Nothing is expected of the rank until it beats again."""
        self._last = 0
        self._write(watched=False)

    def _write(self, *, watched: bool) -> None:
        _PAGE.pack_into(self._page, 0, self._beats, self._last, self._longest, watched)


#: Of this process, by its id; None where there is no launcher.
_own: dict[int, Heartbeat | None] = {}


def _heartbeat() -> Heartbeat | None:
    pid = os.getpid()
    if pid not in _own:
        _own.clear()  # of a parent
        try:
            _own[pid] = Heartbeat() if all_variables().get(LAUNCHER_VARIABLE) else None
        except OSError:
            _own[pid] = None  # no launcher any more
    return _own[pid]


def beat() -> None:
    """Tells ``resiliency run`` that this rank makes progress: call it once a step in a loop of your own.

    With a callback of this library it is called after each batch. From then on a rank that does not call it for long
    (``--hang-timeout``) is taken for hung. Elsewhere it does nothing. Thread: the training thread. Costs: under a
    microsecond, and a connection to the launcher the first time.
    """
    heartbeat = _heartbeat()
    if heartbeat is not None:
        heartbeat.beat()


def pause() -> None:
    """Tells ``resiliency run`` to expect nothing of this rank until it calls :func:`beat` again."""
    heartbeat = _own.get(os.getpid())
    if heartbeat is not None:
        heartbeat.pause()


def start_anew() -> None:
    """Counts from zero again, in a process that begins another attempt."""
    heartbeat = _own.get(os.getpid())
    if heartbeat is not None:
        heartbeat.start_anew()
