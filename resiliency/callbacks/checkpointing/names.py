"""Tells which checkpoint names the engine can write, and which are taken."""

from __future__ import annotations

import logging
import os
import posixpath

from resiliency.errors import TierError
from resiliency.storage.catalog import scan
from resiliency.storage.manifest import META_DIR
from resiliency.storage.retention import live_names
from resiliency.storage.tiers import open_tier

__all__ = ["engine_name", "names_on_disk"]

logger = logging.getLogger(__name__)


#: Most bytes in one part of a path, on every file system of Linux.
_LONGEST_PART = 255


def engine_name(path: str, dirpath: str) -> str | None:
    """The name, relative to ``dirpath``, under which the engine saves a checkpoint for ``path``.

    None when the engine cannot: the path is not below ``dirpath``, is hidden or in a hidden folder (as the engine's
    own is), has a control character, or has a part that no tier accepts (longer than 255 bytes, or not UTF-8). Then the
    stock class writes the checkpoint, or raises.
    """
    root = dirpath.rstrip("/") + "/"
    if not path.startswith(root):
        return None
    name = posixpath.normpath(path.removeprefix(root))
    parts = name.split("/")
    if name.startswith("/") or any(part.startswith(".") for part in parts) or any(ord(char) < 32 for char in name):
        return None
    try:
        fits = all(len(part.encode()) <= _LONGEST_PART for part in parts)
    except UnicodeEncodeError:
        return None
    return name if fits else None


def names_on_disk(dirpath: str, run: str, ending: str) -> list[str]:
    """The names in ``dirpath`` with this ending, sorted: checkpoints of the engine and stock ones, which a version
    counter must skip.

    In a folder these are the files that exist. A name that the user has deleted is free, even if its step still exists,
    as it may after a crash. In an object store these are also the names of all steps, because their files may still be
    on the way.

    Blocks: for one listing. Returns [] when ``dirpath`` cannot be listed.
    """
    names: set[str] = set()
    if "://" in dirpath:
        try:
            tier = open_tier(dirpath, glance=True)
            names |= set(live_names([listing.manifest for listing in scan(tier, run) if listing.manifest is not None]))
            names |= {info.key for info in tier.list("") if not info.key.startswith(META_DIR + "/")}
        except (TierError, OSError) as error:
            logger.debug("names in %s cannot be listed: %s", dirpath, error)
    else:
        for folder, folders, files in os.walk(dirpath):
            folders[:] = [name for name in folders if name != META_DIR]
            # A dangling link does not count as a checkpoint, as in the stock class.
            there = [path for name in (*files, *folders) if os.path.exists(path := os.path.join(folder, name))]
            names |= {os.path.relpath(path, dirpath) for path in there}
    return sorted(name for name in names if name.endswith(ending))
