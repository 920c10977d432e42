"""What tests need of a torch that is not the newest: names that it has elsewhere or not at all, with the version."""

from __future__ import annotations

import _codecs
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["NOT_STORED", "allowed", "load_values", "placements"]

#: Torch 2.4 has tensors of these, and does not store them.
NOT_STORED = ["torch.uint16", "torch.uint32", "torch.uint64"] if torch.__version__ < "2.5" else []
#: Torch 2.5 and newer allow these by themselves.
_VALUES = [_codecs.encode, set] if torch.__version__ < "2.6" else []


@contextmanager
def allowed(*classes: Any) -> Iterator[None]:
    """``torch.serialization.safe_globals``, which torch 2.4 has not."""
    before = list(torch.serialization.get_safe_globals())
    torch.serialization.add_safe_globals(list(classes))
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def load_values(file: Any, **how: Any) -> Any:
    """``torch.load(weights_only=True)`` of a file that holds bytes, which torch 2.4 allows only when it is told to."""
    with allowed(*_VALUES):
        return torch.load(file, weights_only=True, **how)


def placements() -> Any:
    """The module with ``Shard``, ``Replicate`` and ``distribute_tensor``."""
    import torch.distributed.tensor as public

    if hasattr(public, "Shard"):
        return public
    import torch.distributed._tensor as private  # torch 2.4

    return private
