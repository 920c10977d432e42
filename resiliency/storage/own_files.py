"""Gives each name of a step a file of its own when a job has ended. No torch.

While a job runs, "best.ckpt" and "last.ckpt" of one step are one file with two names, so that nothing is written twice.
After it, scripts treat them as the two files that stock Lightning writes: ``torch.save(stripped, "last.ckpt")`` writes
into the file that is there, and would change the other, too; ``shutil.copy`` of one to the other would refuse.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Sequence

from resiliency.regular_file import open_regular
from resiliency.storage.shared_files import exchange
from resiliency.storage.tiers._keys import partial_name

__all__ = ["give_own_files"]

logger = logging.getLogger(__name__)

#: Bytes copied at a time.
_PIECE = 64 << 20
#: Errors of a file system whose kernel code cannot copy from file to file.
_CANNOT = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EBADF, errno.EPERM)


def give_own_files(paths: Sequence[str], *, through: str) -> list[str]:
    """Replaces all but the first of several names of one file by copies. Names that are not this file are left alone.

    A copy has the times and the mode of the file. It appears whole and fsynced, and not if the file was written while
    it was made. Where the file system can share blocks
    (XFS, Btrfs), it takes no room. When there is no room for a copy, the names stay one file.

    Blocks: for the copies, about a second per GiB and name.

    Args:
        through: folder for the copies while they are made, on the same file system. Whoever removes it stops this.

    Returns:
        The paths that are copies now.

    Raises:
        OSError: ``through`` is gone, or the disk failed.
    """
    copies: list[str] = []
    if len(paths) < 2:
        return copies
    try:
        fd = open_regular(paths[0], os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return copies  # the user has deleted it
    try:
        for path in paths[1:]:
            if _is(path, fd):
                temp = os.path.join(through, partial_name())
                try:
                    before = _version(fd)
                    _copy(fd, paths[0], temp)
                    if _version(fd) != before:
                        logger.info("%s and %s stay one file: it was written meanwhile", paths[0], path)
                        break
                    if _put(temp, path, fd):
                        copies.append(path)
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                        raise
                    logger.info(
                        "%s and %s stay one file, because there is no room for a second: a program that writes into"
                        " one of them changes both (%s)",
                        paths[0],
                        path,
                        error.strerror,
                    )
                finally:
                    if os.path.lexists(temp):
                        os.unlink(temp)
    finally:
        os.close(fd)
    return copies


def _version(fd: int) -> tuple[int, int]:
    """Differs after a program has written into the file, as ``torch.save`` to one of its names does: a copy may then
    mix old and new bytes."""
    found = os.fstat(fd)
    return found.st_size, found.st_mtime_ns


def _is(path: str, fd: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _copy(source: int, path: str, temp: str) -> None:
    target = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        found, at = os.fstat(source), 0
        while at < found.st_size:
            count = _copy_piece(source, target, min(_PIECE, found.st_size - at), at)
            if not count and os.fstat(source).st_size < found.st_size:
                return  # a program has written into it; the caller notices
            if not count:
                raise OSError(errno.EIO, "it ends before its size", path)
            at += count
        os.fchmod(target, stat.S_IMODE(found.st_mode))
        os.utime(target, ns=(found.st_atime_ns, found.st_mtime_ns))
        os.fsync(target)
    finally:
        os.close(target)


def _copy_piece(source: int, target: int, nbytes: int, at: int) -> int:
    try:
        return os.copy_file_range(source, target, nbytes, at, at)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
    return os.pwrite(target, os.pread(source, nbytes, at), at)


def _put(temp: str, path: str, fd: int) -> bool:
    """Puts a copy in the place of a name, unless another program has put something there meanwhile."""
    if not exchange(temp, path):
        if not _is(path, fd):
            return False
        os.replace(temp, path)  # the file system cannot exchange, and the moment since the look remains
    elif not _is(temp, fd):
        exchange(temp, path)
        return False
    return True
