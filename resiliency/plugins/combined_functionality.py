"""``CombinedCheckpointIO``: a CheckpointIO plugin of the guide that saves with this library's engine.

It is :class:`resiliency.plugins.checkpoint_io.TieredCheckpointIO` with the guide's arguments, one of which names the
local tier's folder. ``build(namespace)`` gives the class for a named Lightning package.
"""

from __future__ import annotations

from typing import Any

from resiliency.plugins._local_tier_io import LocalTierIO
from resiliency.plugins.namespaces import AdapterClass

__all__ = ["CombinedCheckpointIO", "build"]  # noqa: F822 - built on first use

_adapter = AdapterClass(__name__, "CombinedCheckpointIO", LocalTierIO, base="plugins.io:TorchCheckpointIO")
build = _adapter.build


def __getattr__(name: str) -> Any:
    return _adapter.attribute(name)
