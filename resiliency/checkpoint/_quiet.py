"""Asks the main thread how often tensors were changed, at a moment when it runs none of torch's kernels.

Torch counts a change in place when its kernel ends. So a count that has not moved proves nothing while a kernel may be
running. None runs between two byte codes of the thread that changes tensors, and the interpreter offers such moments to
C programs: what is passed to ``Py_AddPendingCall`` runs on the main thread, as soon as that is between two byte codes.

The call is made of functions written in C alone, so that it is no place where a signal's handler runs: what that raises
(KeyboardInterrupt) would be lost in it.
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
#: Imported by the first torch.compile. Compiled code counts what its kernels change when all of them are done, and is
#: at byte codes in between.
_COMPILED = "torch._functorch.aot_autograd"


def can_ask() -> bool:
    """True on the thread that answers."""
    return threading.current_thread() is threading.main_thread()


class Question:
    """The counts of changes in place of some tensors, at a moment between two byte codes of the main thread.

    Thread: any; asked by the constructor, which does not block.

    Args:
        tensors: none of them an inference tensor, which has no count.
        wake: called on the main thread with None when the answer is there; must be written in C and take no lock that
            the main thread may hold (``queue.SimpleQueue.put``).
    """

    #: The interpreter holds no reference to what it is to call.
    _open: list[Question] = []  # noqa: RUF012 - of all threads

    def __init__(self, tensors: Sequence[Tensor], wake: Callable[[None], None]) -> None:
        self._count = len(tensors)
        self._found: list[int] = []
        steps = chain(map(self._found.append, map(_VERSION, tensors)), map(wake, (None,)))
        # Each step returns None, so that the count is 0, which tells the interpreter that all went well.
        self._call = ctypes.PYFUNCTYPE(ctypes.c_int)(partial(operator.countOf, steps, True))
        type(self)._open = [asked for asked in self._open if not asked._answered] + [self]
        if ctypes.pythonapi.Py_AddPendingCall(self._call, None) != 0:
            self._open.remove(self)  # it takes no more than 32; then only the fence can tell

    @property
    def _answered(self) -> bool:
        return len(self._found) == self._count

    @property
    def answer(self) -> list[int] | None:
        """The counts, in the order of the tensors; None: not known yet, or not to be trusted."""
        return self._found if self._answered and _COMPILED not in sys.modules else None
