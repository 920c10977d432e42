"""Reads and sets the learning rates of optimizers and schedulers, and the bounds that scale with them.

In an optimizer these are ``lr`` of each parameter group and the values that schedulers keep there (``initial_lr``,
``max_lr``, ``min_lr``). In a scheduler these are ``base_lrs``, ``max_lrs``, ``min_lrs`` and ``_last_lr``, also of the
schedulers inside ``SequentialLR`` and ``ChainedScheduler``. A rate that is a tensor is changed in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

__all__ = ["read_rates", "write_rates"]

_OF_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr")
_OF_SCHEDULERS = ("base_lrs", "max_lrs", "min_lrs", "_last_lr")


def read_rates(optimizers: Sequence[Any], schedulers: Sequence[Any]) -> list[float]:
    """All rates, in an order that depends only on the optimizers and schedulers."""
    return [float(holder[key]) for holder, key in _places(optimizers, schedulers)]


def write_rates(optimizers: Sequence[Any], schedulers: Sequence[Any], rates: Sequence[float]) -> None:
    """Sets all rates, in the order of :func:`read_rates`."""
    for (holder, key), rate in zip(list(_places(optimizers, schedulers)), rates, strict=True):
        if isinstance(holder[key], torch.Tensor):
            holder[key].fill_(rate)  # in place, because a capturable optimizer reads this tensor object
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
        # SequentialLR shares the list object of one of its schedulers.
        if isinstance(rates, list) and id(rates) not in seen:
            seen.add(id(rates))
            yield from ((rates, index) for index in range(len(rates)))
