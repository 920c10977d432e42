"""Digests a shard file while it is still being filled, so that the digest ends with the copy and not after it."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from resiliency import faultpoints
from resiliency.checkpoint.catalog import block_digest
from resiliency.checkpoint.manifest import BLOCK_BYTES, StepId

__all__ = ["Fill", "MapCache", "digest"]


@dataclass
class Fill:
    """A shard being written by a rank; guarded by ``changed``.

    Attributes:
        upto: file offset below which the content is final.
        seal: the rank's seal message once everything is written.
        aborted: the rank gave up or died.
    """

    id: StepId
    rank: int
    path: str
    inode: int
    nbytes: int
    upto: int = 0
    seal: Mapping[str, Any] | None = None
    aborted: bool = False
    changed: threading.Condition = field(default_factory=threading.Condition)

    def advance(self, upto: int) -> None:
        with self.changed:
            self.upto = max(self.upto, upto)
            self.changed.notify_all()

    def finish(self, seal: Mapping[str, Any]) -> None:
        with self.changed:
            self.upto, self.seal = self.nbytes, seal
            self.changed.notify_all()

    def abort(self) -> None:
        with self.changed:
            self.aborted = True
            self.changed.notify_all()

    def wait_for(self, upto: int) -> bool:
        """Waits until ``[0, upto)`` is final (the whole file: until sealed); False when aborted.

        No deadline of its own: the connection to the rank is the deadline, its end aborts the fill.
        """
        with self.changed:
            self.changed.wait_for(lambda: self.aborted or self.seal is not None or (self.upto >= upto and upto < self.nbytes))
            return not self.aborted


class MapCache:
    """Read-only mappings by inode, kept because the same files come back step after step. Thread: one."""

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}

    def get(self, path: str, nbytes: int) -> mmap.mmap:
        """Maps the file. Raises OSError when it is gone or shorter than ``nbytes``."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            info = os.fstat(fd)
            if info.st_size != nbytes:
                raise OSError(f"{path} has {info.st_size} bytes instead of {nbytes}")
            found = self._maps.get(info.st_ino)
            if found is None or len(found) != nbytes:
                if found is not None:
                    found.close()
                found = self._maps[info.st_ino] = mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)
            return found
        finally:
            os.close(fd)

    def drop(self, inode: int) -> None:
        found = self._maps.pop(inode, None)
        if found is not None:
            found.close()

    def close(self) -> None:
        for inode in list(self._maps):
            self.drop(inode)


def digest(fill: Fill, maps: MapCache, path: str) -> tuple[str, ...] | None:
    """Digests of all blocks, following the fill; None when it was aborted. Blocks: until the rank seals or goes.

    Raises:
        OSError: the file cannot be read.
    """
    view = memoryview(maps.get(path, fill.nbytes))
    digests = []
    try:
        for start in range(0, fill.nbytes, BLOCK_BYTES):
            end = min(start + BLOCK_BYTES, fill.nbytes)
            if not fill.wait_for(end):
                return None
            with view[start:end] as block:
                digests.append(block_digest(block))
        faultpoints.hit("agent.digest", rank=fill.rank)
        return tuple(digests) if fill.wait_for(fill.nbytes) else None
    finally:
        view.release()
