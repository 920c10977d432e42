"""Gives each start of a job an attempt number of its own: the first start to claim a number gets it. No torch.

Two jobs that start on one folder at the same moment read the same last number. Without claims both would use the next
one; neither attempt would be the later one, and both would commit and delete.
"""

from __future__ import annotations

import errno
import logging
import os
import re
from contextlib import suppress

from resiliency.storage.tiers._keys import partial_name

__all__ = ["claim_attempt", "largest_claim"]

logger = logging.getLogger(__name__)

_CLAIM = re.compile(r"attempt-(\d{4,18})")
#: Errors of file systems without hard links.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)


def claim_attempt(folder: str, attempt: int, token: str) -> bool:
    """Claims an attempt number in the folder of a run for the start with this token. Safe to repeat.

    Returns:
        False when another start has the number. True also on file systems without hard links, where that is unknown.

    Raises:
        OSError: the folder cannot be written.
    """
    path = os.path.join(folder, f"attempt-{attempt:04d}")
    temp = os.path.join(folder, partial_name())
    os.makedirs(folder, exist_ok=True)
    with open(temp, "w", encoding="ascii") as file:
        file.write(token)
    try:
        os.link(temp, path)  # fails when the path exists; otherwise the path appears with its content
    except FileExistsError:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read() == token
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        logger.info("%s cannot be claimed on a file system without hard links (%s)", path, error)
    finally:
        os.unlink(temp)
    for number in _claims(folder):
        if number < attempt:
            with suppress(FileNotFoundError):  # another rank was first
                os.unlink(os.path.join(folder, f"attempt-{number:04d}"))
    return True


def largest_claim(folder: str) -> int:
    """The largest number that was claimed in the folder of a run, even by a start that was killed before it wrote
    anything else; 0 for none.

    Raises:
        OSError: the folder cannot be read.
    """
    return max(_claims(folder), default=0)


def _claims(folder: str) -> list[int]:
    return [int(found[1]) for name in os.listdir(folder) if (found := _CLAIM.fullmatch(name))]
