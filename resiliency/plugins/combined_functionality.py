"""``CombinedCheckpointIO``: a CheckpointIO plugin of the guide, on the engine of this library.

It is :class:`resiliency.plugins.checkpoint_io.TieredCheckpointIO` with the guide's arguments, and knows which folder is
the local tier. ``build(namespace)`` gives it for a named Lightning package.
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
