"""Places where checkpoints are stored: the contract (:mod:`.base`), folders (:mod:`.local`) and object stores
(:mod:`.object_store`)."""

from __future__ import annotations

from typing import Any

from resiliency.storage.tiers._address import unknown_store
from resiliency.storage.tiers.base import ObjectInfo, Tier

__all__ = ["ObjectInfo", "Tier", "open_tier", "unknown_store"]


def open_tier(address: str, *, glance: bool = False, **options: Any) -> Tier:
    """The tier at an address. Opens no connection and accesses no disk before the first verb.

    Args:
        address: "/folder", "folder" or "file:///folder" give a :class:`~.local.LocalTier`; every other scheme
            ("gs://bucket/job", "memory://x") an :class:`~.object_store.ObjectStoreTier`.
        glance: for listings at the start of a job, which must not wait long for a store that hangs, and can do without
            its answer: see :mod:`~._glance`.
        options: of the class (``durable``, ``name``; ``storage_options``, ``retry_timeout``, ``attempts``, ``name``).

    Raises:
        ConfigError: the address is empty or malformed, or its scheme needs a package that is not installed.
    """
    from resiliency.storage.tiers._address import local_path

    path = local_path(address)
    if path is not None:
        from resiliency.storage.tiers.local import LocalTier

        return LocalTier(path, **options)
    if glance:
        from resiliency.storage.tiers._glance import GlancedStore

        return GlancedStore(address, **options)
    from resiliency.storage.tiers.object_store import ObjectStoreTier

    return ObjectStoreTier(address, **options)
