"""Shard files mapped into memory, recycled from step to step.

The files are in the local tier: copying a tensor into a mapped file is the write, and the page cache (or ramdisk) keeps
it when the trainer dies. The first touch of a page takes ten times as long as a later copy. So files of deleted steps
are recycled: the agent renames them back into ``arena/``, and their pages and this process's mapping are used again.
Disk blocks are allocated before a file is mapped, because a store into a hole on a full disk raises SIGBUS.

Threads: one at a time; the checkpointer uses the training thread.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import re
from contextlib import suppress
from dataclasses import dataclass

from resiliency.checkpoint._cuda import unpin
from resiliency.checkpoint._pages import fill, has_small_pages, page_faults
from resiliency.errors import TierError
from resiliency.storage.tiers.local import on_ramdisk

__all__ = ["Arena", "Slot"]

logger = logging.getLogger(__name__)

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in the mmap module of every Python we support
_SLOT_FILE = re.compile(r"^shard-(\d{5,})-(i?\d+)\.slot$")


@dataclass
class Slot:
    """One mapped shard file.

    Attributes:
        inode: identity of the file, which survives renames; the agent's messages identify slots by inode.
        path: path of the file while it is free or being filled.
        nbytes: current size of the file.
        capacity: bytes mapped; for a smaller step the file is shortened and the mapping stays.
        address: first byte of the mapping in this process.
        in_memory: the file is on a ramdisk.
        fresh: its pages may not be in memory yet; see :func:`resiliency.checkpoint._pages.fill`.
        small_pages: after each fsync, stores fault once per 4 KiB, so that ``pwrite`` is faster.
        pinned: registered as page-locked with CUDA; None: not tried yet, False: refused.
    """

    inode: int
    path: str
    fd: int
    map: mmap.mmap
    nbytes: int
    capacity: int
    address: int
    in_memory: bool = False
    fresh: bool = True
    small_pages: bool = False
    pinned: bool | None = None

    def view(self) -> memoryview:
        """The mapping as writable bytes. Release it before :meth:`Arena.close`."""
        return memoryview(self.map)

    def touch(self) -> None:
        """Brings all pages into memory, and maps them. Blocks: 0.3 to 3 s per GiB.

        Raises:
            OSError: the disk is full or failed.
        """
        if not self.in_memory:
            fill(self.fd, 0, self.nbytes)
        before = page_faults()
        try:
            self.map.madvise(_MADV_POPULATE_WRITE)
        except (OSError, ValueError):
            # Older kernels: touch one byte of each page; the file was just made, so writing zeros changes nothing.
            with self.view() as view:
                for offset in range(0, self.nbytes, mmap.PAGESIZE):
                    view[offset] = view[offset]
        self.fresh = False
        self.small_pages = not self.in_memory and has_small_pages(page_faults() - before, self.nbytes)


def _map(path: str, nbytes: int) -> Slot:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    before = os.fstat(fd).st_size
    try:
        if before != nbytes:
            os.ftruncate(fd, nbytes)
        _allocate(fd, nbytes)
        mapping = mmap.mmap(fd, nbytes)
    except BaseException:
        try:
            os.ftruncate(fd, before)
        finally:
            os.close(fd)
        raise
    anchor = ctypes.c_char.from_buffer(mapping)
    address = ctypes.addressof(anchor)
    del anchor
    return Slot(os.fstat(fd).st_ino, path, fd, mapping, nbytes, nbytes, address, in_memory=on_ramdisk(path))


def _allocate(fd: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        # Some network and FUSE file systems cannot allocate ahead; there the server reports a full disk.
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise


class Arena:
    """The shard files of one rank on one local tier.

    Args:
        folder: ``<root>/.resiliency/<run>/arena``; made when missing.
        rank: global rank, whose files are named after it.
    """

    def __init__(self, folder: str, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._slots: dict[int, Slot] = {}
        self._free: list[int] = []
        self._next = 0

    @property
    def mapped_bytes(self) -> int:
        """Bytes mapped by this rank now."""
        return sum(slot.capacity for slot in self._slots.values())

    @property
    def free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def adopt(self) -> None:
        """Takes over files an earlier attempt of this rank left in the folder. Call once, before the first acquire."""
        known = {os.path.basename(slot.path) for slot in self._slots.values()}
        for name in sorted(self._listing()):
            if name in known:
                continue
            match = _SLOT_FILE.match(name)
            if match is None or int(match[1]) != self._rank:
                continue
            path = os.path.join(self._folder, name)
            try:
                size = os.stat(path).st_size
                if size == 0:
                    os.unlink(path)
                    continue
                self._add(_map(path, size))
            except OSError as error:
                logger.warning(
                    "arena file %s of an earlier attempt cannot be reused (%s); a new one will be made", path, error
                )

    def _listing(self) -> list[str]:
        try:
            os.makedirs(self._folder, exist_ok=True)
            return os.listdir(self._folder)
        except OSError as error:
            raise _tier_error(error, self._folder, 0) from error

    def _add(self, slot: Slot) -> None:
        self._slots[slot.inode] = slot
        self._free.append(slot.inode)

    def grow(self, nbytes: int, *, populate: bool = True) -> None:
        """Adds one free slot of ``nbytes``.

        Args:
            populate: touch its pages now (:meth:`Slot.touch`); False leaves that to the copy.

        Raises:
            TierError: the disk is full or the folder cannot be written; nothing is left behind.
        """
        path = self._new_path()
        slot = None
        try:
            os.makedirs(self._folder, exist_ok=True)
            slot = _map(path, nbytes)
            if populate:
                slot.touch()
        except OSError as error:
            if slot is not None:
                _unmap(slot)
            with suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(path)
            raise _tier_error(error, self._folder, nbytes) from error
        self._add(slot)

    def _new_path(self) -> str:
        while True:
            path = os.path.join(self._folder, f"shard-{self._rank:05d}-{self._next:04d}.slot")
            self._next += 1
            if not os.path.exists(path):
                return path

    def acquire(self, nbytes: int) -> Slot | None:
        """A free slot of exactly ``nbytes``, or None when every slot is in use; see :meth:`grow`.

        A free slot that is too large is shortened; one that is too small is mapped anew, and its further pages are
        touched by the copy itself.

        Raises:
            TierError: as :meth:`grow`.
        """
        for inode in [inode for inode in self._free if not self._exists(inode)]:
            logger.warning(
                "arena file %s was deleted by another process; a new one will be made", self._slots[inode].path
            )
            self.forget(inode)
        if not self._free:
            return None
        best = min(
            self._free,
            key=lambda inode: (self._slots[inode].capacity < nbytes, abs(self._slots[inode].capacity - nbytes)),
        )
        slot = self._slots[best]
        try:
            if slot.capacity < nbytes:
                larger = _map(slot.path, nbytes)
                self._drop(best)
                slot = larger
            elif slot.nbytes != nbytes:
                try:
                    os.ftruncate(slot.fd, nbytes)
                    _allocate(slot.fd, nbytes)
                except OSError:
                    os.ftruncate(slot.fd, slot.nbytes)
                    raise
                slot.fresh |= nbytes > slot.nbytes  # pages were dropped when it was shortened
                slot.nbytes = nbytes
        except OSError as error:
            raise _tier_error(error, self._folder, nbytes) from error
        self._free.remove(best)
        # The slot acquired last is unmapped last, see trim.
        self._slots.pop(best, None)
        self._slots[slot.inode] = slot
        return slot

    def _exists(self, inode: int) -> bool:
        try:
            return os.stat(self._slots[inode].path).st_ino == inode
        except OSError:
            return False

    def release(self, inode: int, path: str) -> None:
        """Makes a slot free again; ``path`` is its file's path now. Maps the file again if it was unmapped."""
        slot = self._slots.get(inode)
        if slot is None:
            try:
                size = os.stat(path).st_size
                if size:
                    again = _map(path, size)
                    again.fresh = False  # filled by this process recently, so its pages are in memory
                    self._add(again)
            except OSError as error:
                logger.warning("arena file %s cannot be reused (%s); a new one will be made", path, error)
            return
        slot.path = path
        if inode not in self._free:
            self._free.append(inode)

    def trim(self, mapped: int) -> None:
        """Unmaps slots in use until at most ``mapped`` slots are mapped, oldest first: stored steps need no mapping."""
        for inode in [inode for inode in self._slots if inode not in self._free]:
            if len(self._slots) <= mapped:
                return
            self._drop(inode)

    def forget(self, inode: int) -> None:
        """Unmaps a slot whose file was deleted. A newer file that got the same inode number stays."""
        slot = self._slots.get(inode)
        if slot is not None and os.fstat(slot.fd).st_nlink:
            return
        if inode in self._free:
            self._free.remove(inode)
        self._drop(inode)

    def _drop(self, inode: int) -> None:
        slot = self._slots.pop(inode, None)
        if slot is not None:
            _unmap(slot)

    def close(self) -> None:
        """Unmaps everything. Files stay: they are checkpoints, or free slots for the next attempt."""
        for inode in list(self._slots):
            self._drop(inode)
        self._free.clear()


def _unmap(slot: Slot) -> None:
    if slot.pinned:
        unpin(slot.address)
    try:
        slot.map.close()
    except BufferError:
        # A tensor still uses the mapping; it is unmapped with the last such tensor.
        logger.debug("mapping of %s still has views", slot.path)
    os.close(slot.fd)


def _tier_error(error: OSError, folder: str, nbytes: int) -> TierError:
    advice = {
        errno.ENOSPC: "free space or choose another directory",
        errno.EDQUOT: "raise the quota or choose another directory",
        errno.EROFS: "the file system is read-only: choose another directory",
        errno.EACCES: "give this user write permission or choose another directory",
        errno.EPERM: "give this user write permission or choose another directory",
    }.get(error.errno or 0, "see the error above")
    permanent = error.errno in (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)
    return TierError(
        f"no shard file of {nbytes} bytes can be made in {folder} ({error.strerror or error}); {advice}",
        retryable=not permanent,
    )
