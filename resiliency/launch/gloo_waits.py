"""Ends waits of gloo that nothing else ends.

A buffer of gloo's is told that its connection has ended where it waits to be sent or received. Not told is one whose
bytes could not all be written, because the peer had died a moment before or did not read (``Pair::write`` takes a
reset for a full pipe, and ``Pair::sendAsyncMode`` leaves the buffer in ``tx_``), and one that was received in part, as
the peer died in the middle of its message (``Pair::prepareRead`` has moved it to ``rx_``): ``Pair::signalException``
looks at neither. The thread that waits for it is left until the timeout of its group, which is half an hour, and with
it the rank.

Gloo can end such a wait (``UnboundBuffer::abortWaitSend``, ``abortWaitRecv``), but torch calls that for single messages
only, and never for collective operations. So it is called here. The buffer is found by where its thread waits: on a
member of it, by what the kernel says of the thread's system call, above a pointer to the table of its class.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

__all__ = ["GlooWaits"]

logger = logging.getLogger(__name__)

_CLASS = "N4gloo9transport3tcp13UnboundBuffer"
_TABLE, _ENDS = f"_ZTV{_CLASS}E", (f"_Z{_CLASS}13abortWaitSendEv", f"_Z{_CLASS}13abortWaitRecvEv")
#: Of a table of virtual functions: an object points behind its first two words.
_HEAD = 2 * struct.calcsize("P")
_POINTER = struct.Struct("P")
#: Bytes of a buffer up to the end of what is waited on in it. Less than its size, so nothing behind it is taken for it.
_REACH = 192


@dataclass(frozen=True)
class _Gloo:
    #: What the first word of a buffer is.
    table: int
    ends: tuple[Callable[[ctypes.c_void_p], Any], ...]


class GlooWaits:
    """Those of this process, while it leaves one attempt. Thread: one at a time."""

    def __init__(self) -> None:
        self._gloo = _loaded()
        self._seen: set[tuple[int, int]] = set()

    def end(self, *, closed: bool) -> int:
        """Ends those that were there at the call before, too. An operation goes on then, with what it has; it raises
        with the next connection that it uses, or returns wrong numbers: whoever waits for it must be interrupted.

        Args:
            closed: all connections of gloo are: nobody ends the wait meanwhile, and no wrong number reaches a peer.

        Returns:
            How many.
        """
        if self._gloo is None or not closed:
            self._seen = set()
            return 0
        before, self._seen = self._seen, set(_buffers(self._gloo.table))
        lasting = before & self._seen
        for _, address in lasting:
            for end in self._gloo.ends:
                end(ctypes.c_void_p(address))
        if lasting:
            logger.info("%d waits of gloo for a connection that has ended were ended", len(lasting))
        return len(lasting)


def _loaded() -> _Gloo | None:
    """The gloo of the torch that is imported; None: there is none, or another one."""
    torch: Any = sys.modules.get("torch")
    name = os.path.join(os.path.dirname(getattr(torch, "__file__", None) or ""), "lib", "libtorch_cpu.so")
    try:
        library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        table = ctypes.addressof(ctypes.c_char.in_dll(library, _TABLE)) + _HEAD
        ends = tuple(getattr(library, end) for end in _ENDS)
    except (OSError, ValueError, AttributeError) as error:
        logger.debug("waits of gloo cannot be ended: %s", error)
        return None
    for end in ends:
        end.argtypes, end.restype = [ctypes.c_void_p], None
    return _Gloo(table=table, ends=ends)


def _buffers(table: int) -> Iterator[tuple[int, int]]:
    """Threads that wait on something in a buffer, and its address."""
    with suppress(OSError), open("/proc/self/mem", "rb", buffering=0) as memory:  # not of a process that hides it
        for task in os.listdir("/proc/self/task"):
            address = _waits_on(task)
            for at in range(address, max(address - _REACH, 0), -_POINTER.size):
                if _word(memory.fileno(), at) == table:
                    yield int(task), at
                    break


def _waits_on(task: str) -> int:
    """The word in which the first argument of a thread's system call points; 0: it runs, has ended, or is not shown."""
    with suppress(OSError, ValueError, IndexError), open(f"/proc/self/task/{task}/syscall") as file:
        argument = int(file.read().split()[1], 16)
        return argument - argument % _POINTER.size
    return 0


def _word(memory: int, address: int) -> int | None:
    """None: nothing is there, as the argument was no address."""
    with suppress(OSError, OverflowError, struct.error):
        return int(_POINTER.unpack(os.pread(memory, _POINTER.size, address))[0])
    return None
