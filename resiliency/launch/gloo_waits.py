"""Ends waits of gloo that nothing else ends.

A buffer of gloo's is told that its connection has ended where it waits to be sent or received. Not told is one whose
bytes could not all be written, because the peer had died a moment before or did not read (``Pair::write`` takes a
reset for a full pipe, and ``Pair::sendAsyncMode`` leaves the buffer in ``tx_``), and one that was received in part, as
the peer died in the middle of its message (``Pair::prepareRead`` has moved it to ``rx_``): ``Pair::signalException``
looks at neither. Nor is one told that receives from any rank. The thread that waits for it is left until the timeout of
its group, which is half an hour, and with it the rank.

Gloo tells a buffer by ``UnboundBuffer::signalException``, and so it is told here: the operation raises. (It must not go
on, as after ``UnboundBuffer::abortWaitSend``: gloo's collective operations do not ask whether a wait was aborted, and
return what they have. A thread that nobody interrupts, as one that saves, would take that for the result.) The buffer
is found by where its thread waits: on a member of it, by what the kernel says of the thread's system call, above a
pointer to the table of its class.
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
#: Of a table of virtual functions: an object points behind its first two words.
_HEAD = 2 * struct.calcsize("P")
_POINTER = struct.Struct("P")
#: Bytes of a buffer up to the end of what is waited on in it. Less than its size, so nothing behind it is taken for it.
_REACH = 192
#: Of ``std::runtime_error``: a table and a pointer to the text.
_ERROR_SIZE = 2 * struct.calcsize("P")
_TEXT = b"[gloo] the connection to a peer has ended"


@dataclass(frozen=True)
class _Gloo:
    #: What the first word of a buffer is.
    table: int
    signal: Callable[[ctypes.c_void_p, Any], Any]
    #: Makes what ``std::make_exception_ptr`` does, in a word of memory, and lets go of it.
    hold: Callable[[Any, ctypes.c_void_p], Any]
    drop: Callable[[Any], Any]
    allocate: Callable[[int], int]
    begin: Callable[[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p], Any]
    construct: Callable[[ctypes.c_void_p, bytes], Any]
    error: tuple[int, int]
    """Addresses of what describes the error and of its destructor."""

    def end(self, buffer: int) -> None:
        error = ctypes.c_void_p(self.allocate(_ERROR_SIZE))
        self.begin(error, *map(ctypes.c_void_p, self.error))
        self.construct(error, _TEXT)
        held = ctypes.c_void_p()
        self.hold(ctypes.byref(held), error)
        # Passed by its address, as it has a destructor, which is the caller's to call.
        self.signal(ctypes.c_void_p(buffer), ctypes.byref(held))
        self.drop(ctypes.byref(held))


class GlooWaits:
    """Those of this process, while it leaves one attempt. Thread: one at a time."""

    def __init__(self) -> None:
        self._gloo = _loaded()
        self._seen: set[tuple[int, int]] = set()

    def end(self, *, closed: bool) -> int:
        """Ends those that were there at the call before, too, with an error.

        Args:
            closed: all connections of gloo are, so nobody ends the wait meanwhile.

        Returns:
            How many.
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
    """The gloo of the torch that is imported; None: there is none, or another one."""
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
