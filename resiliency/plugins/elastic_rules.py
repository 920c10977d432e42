"""Computes gradient accumulation and learning rates for another number of data parallel ranks. Pure functions.

Both depend only on the two sizes and on the settings that the job began with, so that a job that returns to an earlier
size has exactly the numbers that it had there. Scaling the rate with the global batch is the rule of Goyal et al.
("Accurate, Large Minibatch SGD", 2017), scaling it with the square root that of Krizhevsky ("One weird trick", 2014)
for adaptive optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from resiliency.errors import ConfigError

__all__ = ["RULES", "Rate", "accumulation", "rate_factor", "rescaled"]

#: The rules a user can name.
RULES = ("keep_global_batch", "linear_lr", "sqrt_lr")


def accumulation(*, began_with: int, accumulated: int, size: int, nearest: bool) -> int:
    """Number of batches to accumulate at ``size`` ranks, for the global batch that the job began with.

    Args:
        began_with: number of data parallel ranks that the job began with.
        accumulated: number of batches that each of them accumulated.
        nearest: when the global batch cannot be kept, take the nearest one.

    Raises:
        ConfigError: the global batch cannot be kept, and ``nearest`` is False.
    """
    whole, rest = divmod(began_with * accumulated, size)
    if whole and not rest:
        return whole
    if nearest:
        return max(1, round(began_with * accumulated / size))
    sizes = [str(other) for other in range(1, began_with * accumulated + 1) if began_with * accumulated % other == 0]
    raise ConfigError(
        f"rule='keep_global_batch': {began_with} ranks that accumulate {accumulated} batches have a global batch of"
        f" {began_with * accumulated} rank batches, which {size} ranks cannot divide; run on {', '.join(sizes)} ranks,"
        " or pass nearest=True for the nearest global batch"
    )


def rate_factor(rule: str | None, *, began_with: int, size: int) -> float:
    """The factor at ``size`` ranks for the learning rates that the job began with; 1.0 without a rule for rates."""
    if rule == "linear_lr":
        return size / began_with
    if rule == "sqrt_lr":
        return math.sqrt(size / began_with)
    return 1.0


@dataclass(frozen=True, kw_only=True)
class Rate:
    """One learning rate, or a bound of a rate, of an optimizer or a scheduler.

    Attributes:
        base: its value at the number of ranks that the job began with.
        placed: the value that it was set to for the present number of ranks. ``base`` is exact as long as the rate
            still has this value.
    """

    base: float
    placed: float


def rescaled(known: Sequence[Rate], now: Sequence[float], *, before: float, factor: float) -> list[Rate]:
    """The rates at another number of ranks.

    A rate that still has its ``placed`` value is computed from its base, so that it is not rounded twice. For a rate
    that a scheduler has changed, the base is the present value divided by ``before``.

    Args:
        known: the rates of the last resize, or of the beginning.
        now: the present values, in the same order; there may be more or fewer when the script has other optimizers now.
        before: the factor that applied to ``now``.
        factor: the new factor.
    """
    if len(known) != len(now):
        known = [Rate(base=value / before, placed=value) for value in now]
    bases = [rate.base if value == rate.placed else value / before for rate, value in zip(known, now, strict=True)]
    return [Rate(base=base, placed=base * factor) for base in bases]
