"""Ends a job's folder as its agent does at the end of a fit on one host."""

from __future__ import annotations

import os
from contextlib import suppress

from resiliency.storage import single_files
from resiliency.storage.manifest import META_DIR
from resiliency.storage.tiers.local import LocalTier

__all__ = ["drop_folders"]


def drop_folders(tier: LocalTier, run: str) -> str:
    """As :func:`resiliency.storage.single_files.drop_folders`, by way of a staging folder."""
    through = tier.location(f"{META_DIR}/{run}/staging-a0001-7f3c9b-00000000")
    os.makedirs(through, exist_ok=True)
    reason = single_files.drop_folders(tier, run, through=through)
    with suppress(OSError):
        os.rmdir(through)
    return reason
