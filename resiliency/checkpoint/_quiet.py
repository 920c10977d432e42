"""Asks the main thread how often tensors were changed in place, at a moment when it runs no torch kernel.

Torch counts a change in place when its kernel ends, so an unchanged count proves nothing while a kernel may be running.
No kernel runs between two byte codes of the thread that changes tensors, and the interpreter offers such moments to C
programs: a function passed to ``Py_AddPendingCall`` runs on the main thread as soon as that thread is between two byte
codes.

The call consists only of functions written in C, so that no signal handler runs inside it: an exception of a handler
(KeyboardInterrupt) would be lost there.
"""

from __future__ import annotations

import ctypes
import operator
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

from torch import Tensor

__all__ = ["Question", "can_ask"]

_VERSION = operator.attrgetter("_version")
#: Module imported by the first torch.compile. Compiled code counts the changes of its kernels only after all of them,
#: and runs byte codes in between, so the counts cannot be trusted.
_COMPILED = "torch._functorch.aot_autograd"


def can_ask() -> bool:
    """True on the main thread, which is the one that answers."""
    return threading.current_thread() is threading.main_thread()


class Question:
    """The change counts of some tensors, at a moment between two byte codes of the main thread.

    Thread: any. The constructor asks, and does not block.

    Args:
        tensors: no inference tensors, because those have no count.
        wake: called on the main thread with None when the answer is there. It must be written in C and take no lock
            that the main thread may hold (``queue.SimpleQueue.put``).
    """

    #: Open questions, kept referenced here, because the interpreter holds no reference to the function it will call.
    _open: list[Question] = []  # noqa: RUF012 - of all threads

    def __init__(self, tensors: Sequence[Tensor], wake: Callable[[None], None]) -> None:
        self._count = len(tensors)
        self._found: list[int] = []
        steps = chain(map(self._found.append, map(_VERSION, tensors)), map(wake, (None,)))
        # All steps return None, so countOf finds no True and returns 0, which tells the interpreter that the call
        # succeeded.
        self._call = ctypes.PYFUNCTYPE(ctypes.c_int)(partial(operator.countOf, steps, True))
        type(self)._open = [asked for asked in self._open if not asked._answered] + [self]
        if ctypes.pythonapi.Py_AddPendingCall(self._call, None) != 0:
            self._open.remove(self)  # the interpreter's queue of 32 calls is full; then only the fence can decide

    @property
    def _answered(self) -> bool:
        return len(self._found) == self._count

    @property
    def answer(self) -> list[int] | None:
        """The counts, in the order of the tensors; None: not known yet, or not to be trusted."""
        return self._found if self._answered and _COMPILED not in sys.modules else None
