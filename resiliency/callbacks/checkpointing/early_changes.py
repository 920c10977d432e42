"""Detects in the first steps of a fit whether something changes parameters while a late copy would read them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

__all__ = ["EarlyChanges"]

#: Number of batches after which it looks.
_TIMES = 3


class EarlyChanges:
    """Compares torch's version counters of tensors between the end of a batch and the next fence.

    A layer like ``torch.nn.Embedding(max_norm=...)`` changes its weight in each forward, so that every checkpoint that
    is copied during a forward would be given up. This class detects that before the first save, if a step precedes it.

    Threads: training thread. Costs two reads of a counter per tensor, in the first steps only.
    """

    def __init__(self) -> None:
        self._looks = 0
        self._counts: list[tuple[Tensor, int]] = []

    def begin(self, trainer: Any) -> None:
        """Notes the counters. Call it at the end of a batch, where a save would begin. Only the first 3 calls count."""
        if self._looks < _TIMES:
            self._looks += 1
            self._counts = [
                (tensor, tensor._version) for tensor in _of_optimizers(trainer) if not tensor.is_inference()
            ]

    def end(self) -> bool:
        """True when a tensor was changed since :meth:`begin`. Call it where a late copy would end."""
        counts, self._counts = self._counts, []
        return any(tensor._version != count for tensor, count in counts)


def _of_optimizers(trainer: Any) -> Iterator[Tensor]:
    for optimizer in trainer.optimizers:
        for group in getattr(optimizer, "param_groups", ()):
            yield from (value for value in group["params"] if isinstance(value, Tensor))
        for state in getattr(optimizer, "state", {}).values():
            if isinstance(state, Mapping):
                yield from (value for value in state.values() if isinstance(value, Tensor))
