"""What tests need of a torch that is not the newest: names that it has elsewhere or not at all, with the version.

Importing this does not import torch.
"""

from __future__ import annotations

import _codecs
import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["NOT_STORED", "TORCH", "allowed", "load_values", "placements"]

#: The first two numbers of the version.
TORCH = tuple(map(int, importlib.metadata.version("torch").split(".")[:2]))
#: By their names connections of gloo are found; 2.11 has none, 2.13 has.
#: Torch 2.4 has tensors of these, and does not store them.
NOT_STORED = ["torch.uint16", "torch.uint32", "torch.uint64"] if TORCH < (2, 5) else []
#: Later ones allow these by themselves.
_VALUES = [_codecs.encode, set] if TORCH < (2, 6) else []


@contextmanager
def allowed(*classes: Any) -> Iterator[None]:
    """``torch.serialization.safe_globals``, which torch 2.4 has not."""
    import torch

    before = list(torch.serialization.get_safe_globals())
    torch.serialization.add_safe_globals(list(classes))
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def load_values(file: Any, **how: Any) -> Any:
    """``torch.load(weights_only=True)`` of a file that holds bytes, which torch 2.4 allows only when it is told to."""
    import torch

    with allowed(*_VALUES):
        return torch.load(file, weights_only=True, **how)


def placements() -> Any:
    """The module with ``Shard``, ``Replicate`` and ``distribute_tensor``."""
    import torch.distributed.tensor as public

    if hasattr(public, "Shard"):
        return public
    import torch.distributed._tensor as private  # torch 2.4

    return private
