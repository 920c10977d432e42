"""Gives each name of a step a file of its own when a job has ended. No torch.

While a job runs, "best.ckpt" and "last.ckpt" of one step are hard links to one file, so that nothing is written twice.
After it, scripts treat them as the two files that stock Lightning writes: ``torch.save(stripped, "last.ckpt")`` writes
into the file that is there, and would change the other, too; ``shutil.copy`` of one to the other would refuse.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Sequence

from resiliency.storage.tiers._keys import partial_name
from resiliency.storage.tiers.local import fsync_file

__all__ = ["unlink_hardlinks"]

logger = logging.getLogger(__name__)


def unlink_hardlinks(paths: Sequence[str], *, through: str) -> list[str]:
    """Replaces all but the first of several hard links to one file by copies of it, and returns their paths.

    A copy has the times and the mode of the file. It appears whole and fsynced, and not where a program has written
    into the file, or put another one in its place, while it was made. When there is no room for a copy, the links stay.
    Paths of other files are left alone.

    Blocks: for the copies, about a second per GiB and link.

    Args:
        through: folder for the copies while they are made, on the same file system. Whoever removes it stops this.

    Raises:
        OSError: ``through`` or a path is gone, or the disk failed.
    """
    copies: list[str] = []
    temp = os.path.join(through, partial_name())
    for path in paths[1:]:
        before = _version(path)
        if before != _version(paths[0]):
            continue
        try:
            shutil.copy2(path, temp)
            fsync_file(temp)
            if before == _version(path):
                os.replace(temp, path)
                copies.append(path)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            logger.info(
                "%s and %s stay one file, because there is no room for a second: a program that writes into one of"
                " them changes both (%s)",
                paths[0],
                path,
                error.strerror,
            )
        finally:
            if os.path.lexists(temp):
                os.unlink(temp)
    return copies


def _version(path: str) -> tuple[int, int, int]:
    """Differs once a program has written into the file, or put another one in its place."""
    found = os.lstat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns
