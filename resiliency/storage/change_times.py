"""Keeps the times of change (ctime) of checkpoints in the order of their steps. No torch.

Scripts find the newest checkpoint by it: ``max(glob("*.ckpt"), key=os.path.getctime)``. It is also the time at which
a file got or lost a name, and a checkpoint here has a second name that comes and goes. What changes in one tick of the
kernel's clock, of up to 10 ms, has one time, so what is to be the newer one is changed again until it is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress

__all__ = ["change_in_order"]

_PAUSE_S = 0.0005
#: Pauses in all for one file: a clock that stands, or has been set back, holds nobody up.
_PAUSES = 100
#: So many of the newest get a time of their own.
_NEWEST = 16


def change_in_order(paths: Sequence[str]) -> None:
    """Gives the last 16 of these files times of change that are later than now and rise in this order; their other
    times stay. A file that cannot be changed is left as it is. Blocks: a tick for each."""
    last = time.time_ns()
    for path in paths[-_NEWEST:]:
        with suppress(OSError):
            last = _change_after(path, last)


def _change_after(path: str, last: int) -> int:
    """Changes a file until its time is above ``last``. Returns it."""
    found = os.stat(path)
    for _ in range(_PAUSES):
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
        found = os.stat(path)
        if found.st_ctime_ns > last:
            break
        time.sleep(_PAUSE_S)
    return max(last, found.st_ctime_ns)
