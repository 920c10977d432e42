"""Checkpoint names in a folder or store: which the engine can write, which are taken, which are stock Lightning's."""

from __future__ import annotations

import logging
import os
import posixpath

from resiliency.errors import TierError
from resiliency.regular_file import NotAFile, opened
from resiliency.storage.catalog import scan
from resiliency.storage.manifest import META_DIR, shard_file
from resiliency.storage.retention import live_names
from resiliency.storage.shard_file import IDENTITY_BYTES, read_identity
from resiliency.storage.tiers import open_tier

__all__ = ["engine_name", "is_stock", "names_on_disk"]

logger = logging.getLogger(__name__)


#: Bytes of one part of a path, on every file system of Linux.
_LONGEST_PART = 255


def engine_name(path: str, dirpath: str) -> str | None:
    """The name, relative to ``dirpath``, under which the engine saves a checkpoint for ``path``.

    None when it cannot: the path is not below ``dirpath``, is hidden, as the engine's own folder is, or has a part
    that no tier takes (longer than 255 bytes, or not UTF-8): the stock class writes it, or raises.
    """
    root = dirpath.rstrip("/") + "/"
    if not path.startswith(root):
        return None
    name = posixpath.normpath(path.removeprefix(root))
    if name.startswith((".", "/")) or META_DIR in name.split("/") or any(ord(character) < 32 for character in name):
        return None
    try:
        fits = all(len(part.encode()) <= _LONGEST_PART for part in name.split("/"))
    except UnicodeEncodeError:
        return None
    return name if fits else None


def names_on_disk(dirpath: str, run: str, ending: str) -> list[str]:
    """All names in ``dirpath`` that a version counter must skip: the engine's and stock checkpoints, sorted.

    In a folder these are its files: a name that the user has deleted is free, though its step may still be there, as it
    is after a crash. In a store also the names of all steps, whose copies may be on their way.

    Blocks: one listing. Returns no names when ``dirpath`` cannot be listed.
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
            # A link to nothing is no checkpoint, as the stock class sees it.
            there = [path for name in (*files, *folders) if os.path.exists(path := os.path.join(folder, name))]
            names |= {os.path.relpath(path, dirpath) for path in there}
    return sorted(name for name in names if name.endswith(ending))


def is_stock(path: str) -> bool:
    """True when a local file or folder is a checkpoint that the engine did not write."""
    if "://" in path or not os.path.exists(path):
        return False
    if os.path.isdir(path):
        return META_DIR not in path and not os.path.exists(os.path.join(path, shard_file(0)))
    try:
        with opened(path) as file:
            return read_identity(file.read(IDENTITY_BYTES), where=path) is None
    except NotAFile:
        return True
