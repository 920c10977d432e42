"""What is to be closed when a process that goes on leaves the attempt that has ended."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["close_held", "close_when_left"]

logger = logging.getLogger(__name__)

Held = TypeVar("Held")
#: Objects that a thread keeps alive beyond the frames of an attempt -> the function that closes them.
_to_close: weakref.WeakKeyDictionary[Any, Callable[[Any], None]] = weakref.WeakKeyDictionary()


def close_when_left(held: Held, close: Callable[[Held], None]) -> None:
    """Registers an object to be closed when this process leaves its attempt. Its owner may have been interrupted while
    opening or closing it, so that nobody else would close it. Thread: any.

    Args:
        held: an object that one of its own threads keeps alive.
        close: idempotent; must not refer to ``held`` except by its argument. The next attempt waits for it.
    """
    _to_close[held] = close


def close_held() -> None:
    """Closes what is registered, because this process leaves its attempt. An error of a ``close`` is logged."""
    for held, close in list(_to_close.items()):
        _to_close.pop(held, None)
        try:
            close(held)
        except Exception:  # Boundary: leftovers of a failed attempt must not make the next one fail.
            logger.warning("%s of the attempt that ended was not closed cleanly", type(held).__name__, exc_info=True)
