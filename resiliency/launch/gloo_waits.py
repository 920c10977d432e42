"""Ends waits in gloo that nothing else would end, when a rank leaves an attempt.

When a connection ends, gloo tells the buffers that wait to be sent or received. Three kinds of buffer are not told,
because ``Pair::signalException`` looks at neither ``tx_`` nor ``rx_``: one whose bytes could not all be written,
because the peer had died a moment before or did not read (``Pair::write`` takes a reset for a full pipe, and
``Pair::sendAsyncMode`` leaves the buffer in ``tx_``); one that was received in part when the peer died in the middle of
its message (``Pair::prepareRead`` has moved it to ``rx_``); and one that receives from any rank. The thread that waits
for such a buffer, and with it the rank, is stuck until its group's timeout of half an hour.

Gloo ends a buffer's wait with ``UnboundBuffer::signalException``, and so does this file: the operation raises.
(``UnboundBuffer::abortWaitSend`` would let it go on: gloo's collective operations do not check whether a wait was
aborted, and return what they have. A thread that is not interrupted, such as one that saves, would take that for the
result.) The buffer is found through the waiting thread: the kernel shows the argument of the thread's system call,
which points to a member of the buffer, and the buffer begins, a little below, with a pointer to its class's virtual
function table.
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
_TABLE, _SIGNAL = f"_ZTV{_CLASS}E", f"_Z{_CLASS}15signalExceptionENSt15__exception_ptr13exception_ptrE"
#: Bytes at the start of a virtual function table; an object points behind these first two words.
_HEAD = 2 * struct.calcsize("P")
_POINTER = struct.Struct("P")
#: Bytes from the start of a buffer to the end of the member that is waited on. Less than the buffer's size, so that
#: memory behind it is not taken for it.
_REACH = 192
#: Bytes of a ``std::runtime_error``: a table pointer and a text pointer.
_ERROR_SIZE = 2 * struct.calcsize("P")
_TEXT = b"[gloo] the connection to a peer has ended"


@dataclass(frozen=True)
class _Gloo:
    #: The first word of every buffer: the address of its class's virtual function table.
    table: int
    signal: Callable[[ctypes.c_void_p, Any], Any]
    #: Constructor and destructor of the one-word exception pointer, as ``std::make_exception_ptr`` uses them.
    hold: Callable[[Any, ctypes.c_void_p], Any]
    drop: Callable[[Any], Any]
    allocate: Callable[[int], int]
    begin: Callable[[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p], Any]
    construct: Callable[[ctypes.c_void_p, bytes], Any]
    error: tuple[int, int]
    """Addresses of the error's type description and of its destructor."""

    def end(self, buffer: int) -> None:
        error = ctypes.c_void_p(self.allocate(_ERROR_SIZE))
        self.begin(error, *map(ctypes.c_void_p, self.error))
        self.construct(error, _TEXT)
        held = ctypes.c_void_p()
        self.hold(ctypes.byref(held), error)
        # Passed by address, because its type has a destructor, which the caller calls.
        self.signal(ctypes.c_void_p(buffer), ctypes.byref(held))
        self.drop(ctypes.byref(held))


class GlooWaits:
    """The gloo waits of this process while it leaves one attempt. Thread: one at a time."""

    def __init__(self) -> None:
        self._gloo = _loaded()
        self._seen: set[tuple[int, int]] = set()

    def end(self, *, closed: bool) -> int:
        """Ends, with an error, each wait that was also there at the previous call.

        Args:
            closed: all gloo connections of this process are closed, so that nothing else can end a wait meanwhile;
                False: nothing is ended, and the next call counts as the first.

        Returns:
            The number of waits ended.
        """
        if self._gloo is None or not closed:
            self._seen = set()
            return 0
        before, self._seen = self._seen, set(_buffers(self._gloo.table))
        lasting = before & self._seen
        for _, address in lasting:
            self._gloo.end(address)
        if lasting:
            logger.info("%d waits of gloo for a connection that has ended were ended", len(lasting))
        return len(lasting)


def _loaded() -> _Gloo | None:
    """The functions of the imported torch's gloo; None: torch is not imported, or its gloo differs."""
    torch: Any = sys.modules.get("torch")
    name = os.path.join(os.path.dirname(getattr(torch, "__file__", None) or ""), "lib", "libtorch_cpu.so")
    address, word = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
    try:
        library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)

        def function(symbol: str, result: Any, *arguments: Any) -> Any:
            return ctypes.CFUNCTYPE(result, *arguments)((symbol, library))

        return _Gloo(
            table=_address(library, _TABLE) + _HEAD,
            signal=function(_SIGNAL, None, address, word),
            hold=function("_ZNSt15__exception_ptr13exception_ptrC1EPv", None, word, address),
            drop=function("_ZNSt15__exception_ptr13exception_ptrD1Ev", None, word),
            allocate=function("__cxa_allocate_exception", address, ctypes.c_size_t),
            begin=function("__cxa_init_primary_exception", address, address, address, address),
            construct=function("_ZNSt13runtime_errorC1EPKc", None, address, ctypes.c_char_p),
            error=(_address(library, "_ZTISt13runtime_error"), _address(library, "_ZNSt13runtime_errorD1Ev")),
        )
    except (OSError, ValueError, AttributeError) as error:
        logger.debug("waits of gloo cannot be ended: %s", error)
        return None


def _address(library: ctypes.CDLL, symbol: str) -> int:
    return ctypes.addressof(ctypes.c_char.in_dll(library, symbol))


def _buffers(table: int) -> Iterator[tuple[int, int]]:
    """Yields (thread id, buffer address) for each thread that waits inside a gloo buffer."""
    with suppress(OSError), open("/proc/self/mem", "rb", buffering=0) as memory:  # a process can hide its memory
        for task in os.listdir("/proc/self/task"):
            address = _waits_on(task)
            for at in range(address, max(address - _REACH, 0), -_POINTER.size):
                if _word(memory.fileno(), at) == table:
                    yield int(task), at
                    break


def _waits_on(task: str) -> int:
    """The aligned address that the first argument of a thread's system call points to; 0: the thread runs, has ended,
    or is hidden."""
    with suppress(OSError, ValueError, IndexError), open(f"/proc/self/task/{task}/syscall") as file:
        argument = int(file.read().split()[1], 16)
        return argument - argument % _POINTER.size
    return 0


def _word(memory: int, address: int) -> int | None:
    """The word at an address; None when nothing is mapped there, because the argument was not an address."""
    with suppress(OSError, OverflowError, struct.error):
        return int(_POINTER.unpack(os.pread(memory, _POINTER.size, address))[0])
    return None
