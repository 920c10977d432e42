"""Deletes folders that killed jobs left apart from their checkpoints (:mod:`resiliency.storage.meta_folder`), once the
checkpoints' directory has been deleted or moved: nobody would look for them there, and they hold disk space."""

from __future__ import annotations

import logging
import os
import shutil

from resiliency.agent.config import agent_address, is_served
from resiliency.storage.manifest import EVENTS_DIR
from resiliency.storage.meta_folder import folders_apart, is_left_behind, owner_of

__all__ = ["delete_abandoned"]

logger = logging.getLogger(__name__)


def delete_abandoned(meta: str) -> int:
    """Deletes the folders beside ``meta`` whose directories are gone, or others now; returns their number. Only logs
    what it cannot delete. Blocks: for one listing, and as long as the deletion takes.

    A folder stays while an agent of this host serves it: its job may go on, or will remove it itself.

    Args:
        meta: a folder that lies apart; nothing is done for another one.
    """
    deleted, own = 0, owner_of(meta)
    for folder in folders_apart(meta):
        directory = owner_of(folder)
        if folder == meta or directory is None or not (_is_gone(directory) or is_left_behind(folder)):
            continue
        if directory != own and _is_served(folder, directory):  # if it is ours, what is served is ``meta``
            continue
        nbytes = _size(folder)
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            continue  # another agent was first
        except OSError as error:
            logger.info("%s, of an earlier folder %s, cannot be deleted: %s", folder, directory, error)
            continue
        deleted += 1
        logger.info("deleted %s (%d MiB), because %s was deleted or moved", folder, nbytes >> 20, directory)
    return deleted


def _is_gone(directory: str) -> bool:
    """False also when that is not known: a folder above cannot be searched now, or its server does not answer."""
    try:
        os.lstat(directory)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError as error:
        logger.debug("whether %s exists is not known: %s", directory, error)
    return False


def _is_served(folder: str, directory: str) -> bool:
    return any(
        is_served(agent_address(directory, run, log.removeprefix("agent-").rpartition(".")[0]))
        for run in _names(folder)
        for kind in ("logs", EVENTS_DIR)
        for log in _names(os.path.join(folder, run, kind))
        if log.startswith("agent-")
    )


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _size(folder: str) -> int:
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(where, name)).st_size
            except OSError:
                continue  # gone meanwhile
    return total
