"""Tells files that the engine did not write, such as those of stock Lightning, from its own."""

from __future__ import annotations

import os

from resiliency.regular_file import NotAFile, open_own
from resiliency.storage.format_version import READ_VERSIONS
from resiliency.storage.manifest import META_DIR, shard_file
from resiliency.storage.shard_file import IDENTITY_BYTES, read_identity

__all__ = ["is_stock"]


def is_stock(path: str) -> bool:
    """True when ``path`` is a local file or folder that the engine did not write. False for addresses."""
    if "://" in path or not os.path.exists(path):
        return False
    if os.path.isdir(path):
        if META_DIR in path:
            return False
        shard = os.path.join(path, shard_file(0, replicated=False))  # stock files have this name, too
        if not os.path.exists(shard):
            return not any(os.path.exists(os.path.join(path, shard_file(0, version))) for version in READ_VERSIONS)
        path = shard
    try:
        with os.fdopen(open_own(path), "rb") as file:
            return read_identity(file.read(IDENTITY_BYTES), where=path) is None
    except NotAFile:
        return True
