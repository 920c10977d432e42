"""Reads and sets the learning rates of optimizers and schedulers, all numbers that scale with a rate among them.

Of an optimizer: ``lr`` of each parameter group, and what schedulers keep there (``initial_lr``, ``max_lr``,
``min_lr``). Of a scheduler: ``base_lrs``, ``max_lrs``, ``min_lrs`` and ``_last_lr``, also of those within
``SequentialLR`` and ``ChainedScheduler``. Rates that are tensors stay the same tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

__all__ = ["read_rates", "write_rates"]

_OF_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr")
_OF_SCHEDULERS = ("base_lrs", "max_lrs", "min_lrs", "_last_lr")


def read_rates(optimizers: Sequence[Any], schedulers: Sequence[Any]) -> list[float]:
    """All rates, in an order that follows from the optimizers and schedulers."""
    return [float(holder[key]) for holder, key in _places(optimizers, schedulers)]


def write_rates(optimizers: Sequence[Any], schedulers: Sequence[Any], rates: Sequence[float]) -> None:
    """Sets all rates, in the order of :func:`read_rates`."""
    for (holder, key), rate in zip(list(_places(optimizers, schedulers)), rates, strict=True):
        if isinstance(holder[key], torch.Tensor):
            holder[key].fill_(rate)  # a capturable optimizer reads this very tensor
        else:
            holder[key] = rate


def _places(optimizers: Sequence[Any], schedulers: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    seen: set[int] = set()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from ((group, key) for key in _OF_GROUPS if key in group)
    for scheduler in schedulers:
        yield from _of_scheduler(scheduler, seen)


def _of_scheduler(scheduler: Any, seen: set[int]) -> Iterator[tuple[Any, Any]]:
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _of_scheduler(inner, seen)
    for name in _OF_SCHEDULERS:
        rates = getattr(scheduler, name, None)
        # SequentialLR has the very list of one of its schedulers.
        if isinstance(rates, list) and id(rates) not in seen:
            seen.add(id(rates))
            yield from ((rates, index) for index in range(len(rates)))
