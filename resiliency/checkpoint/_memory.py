"""Memory at an address, seen as bytes."""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = ["view"]

# ctypes arrays would do, but a new array type for each length costs ten times the view.
_from_memory = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_WRITABLE = 0x200  # PyBUF_WRITE


def view(address: int, nbytes: int) -> memoryview:
    """``nbytes`` bytes from ``address`` on, writable, not copied. They must stay mapped while the view is used."""
    made: Any = _from_memory(address, nbytes, _WRITABLE)
    return made  # type: ignore[no-any-return]
