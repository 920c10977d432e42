"""Tells all ranks of a notice through the job's store. It uses connections of its own, because a wait blocks its
connection.

Every rank waits for one key. The rank that receives a notice sets the keys of all others. Waiting costs no requests.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from resiliency.preemption.notice import Notice

__all__ = ["Board", "own_connection"]

logger = logging.getLogger(__name__)

_WAIT = timedelta(hours=1)


def own_connection(store: Any) -> Any:
    """Returns a connection to the server of a torch store that nobody else waits on, for the same keys."""
    return store.clone()


class Board:
    """This rank's connection to the keys. Thread: any; ``told`` is called on a thread of this object.

    Args:
        store: a torch store.
        prefix: of the keys, unique for each fit on this store.
        told: called with the first notice of another rank.
    """

    def __init__(self, store: Any, *, prefix: str, rank: int, world_size: int, told: Callable[[Notice], None]) -> None:
        self._prefix, self._rank, self._world_size = prefix, rank, world_size
        self._told = told
        self._store = own_connection(store)
        self._waiting = own_connection(store)
        self._closed = False
        self._thread = threading.Thread(target=self._wait, name="resiliency-notice-board", daemon=True)
        self._thread.start()

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/notice/{rank}"

    def _wait(self) -> None:
        key = self._key(self._rank)
        try:
            while not self._closed:
                with suppress(RuntimeError):  # raised by torch's stores after the time, and without their server
                    self._waiting.wait([key], _WAIT)
                if self._waiting.check([key]):
                    break
            data = self._waiting.get(key)
        except RuntimeError as error:
            logger.debug("rank %d hears no notices any more, the job's store is gone: %s", self._rank, error)
            return
        if data and not self._closed:
            try:
                notice = Notice.from_bytes(data)
            except ValueError:
                logger.warning("rank %d was told something that is no notice", self._rank, exc_info=True)
                return
            self._told(notice)

    def announce(self, notice: Notice) -> None:
        """Tells all other ranks. Blocks: for one answer of the store, or one per rank where it cannot set several keys.

        Raises:
            RuntimeError: the store does not answer.
        """
        keys = [self._key(rank) for rank in range(self._world_size) if rank != self._rank]
        text = notice.to_bytes().decode()
        if self._store.has_extended_api():
            self._store.multi_set(keys, [text] * len(keys))
            return
        for key in keys:
            self._store.set(key, text)

    def close(self) -> None:
        """Ends the wait. Idempotent. Blocks: up to a second."""
        if self._closed:
            return
        self._closed = True
        # On a thread of its own, because a store whose process was stopped does not answer.
        threading.Thread(target=self._wake, name="resiliency-notice-close", daemon=True).start()
        self._thread.join(1)

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the store is gone, and so the thread ends too
            self._store.set(self._key(self._rank), "")
