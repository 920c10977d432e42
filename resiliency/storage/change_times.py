"""Keeps the times of change (ctime) of checkpoints in the order of their steps. No torch.

Scripts find the newest checkpoint by it: ``max(glob("*.ckpt"), key=os.path.getctime)``. It is also the time at which
a file got or lost a name, and a checkpoint here has a second name that comes and goes. What changes in one tick of the
kernel's clock, of up to 10 ms, has one time, so what is to be the newer one is changed again until it is.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

__all__ = ["newer_than_before", "unlink_in_order"]

_PAUSE_S = 0.0005
#: Pauses in all for one file: a clock that stands, or has been set back, holds nobody up.
_PAUSES = 100
#: So many of the newest get a time of their own; of all others only the order of the calls is kept.
_NEWEST = 16


def unlink_in_order(paths: Iterable[str], copies: Mapping[str, Sequence[str]] | None = None) -> None:
    """Removes names of files that have others, those of the newest file last. What cannot be removed stays.

    Blocks: a tick for each of the last 16, and for each of their copies.

    Args:
        copies: path -> copies of its file, which are to be no older.
    """
    ordered = list(paths)
    last = 0
    for number, path in enumerate(ordered):
        with suppress(OSError), _opened(path) as fd:
            os.unlink(path)
            if fd is not None and number >= len(ordered) - _NEWEST:
                last = _change_after(fd, last)
        for copy in (copies or {}).get(path, ()):
            with _opened(copy) as fd:
                if fd is not None:
                    last = _change_after(fd, last)


@contextmanager
def newer_than_before(path: str) -> Iterator[None]:
    """In the block another file gets this name. Afterwards it is the newer one, if the one before has other names.

    Blocks: a tick, or not at all. A file of another user is left as it is.
    """
    with _opened(path) as before:
        yield
        if before is None:
            return
        was = os.fstat(before)
        with _opened(path) as now:
            if now is not None and was.st_nlink and not os.path.samestat(os.fstat(now), was):
                _change_after(now, was.st_ctime_ns)


@contextmanager
def _opened(path: str) -> Iterator[int | None]:
    fd = None
    with suppress(OSError):
        # For its status alone, which does not count as reading it (resiliency.agent.reader_watch).
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        yield fd if fd is not None and stat.S_ISREG(os.fstat(fd).st_mode) else None
    finally:
        if fd is not None:
            os.close(fd)


def _change_after(fd: int, last: int) -> int:
    """Changes a file until its time is above ``last``. Returns it."""
    found = os.fstat(fd)
    for _ in range(_PAUSES):
        if found.st_ctime_ns > last:
            break
        try:
            os.utime(f"/proc/self/fd/{fd}", ns=(found.st_atime_ns, found.st_mtime_ns))
        except OSError:
            break
        found = os.fstat(fd)
        if found.st_ctime_ns <= last:  # kernels from 6.13 on have a new time at once
            time.sleep(_PAUSE_S)
    return found.st_ctime_ns
