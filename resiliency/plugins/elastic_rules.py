"""What changes with the number of data parallel ranks: gradient accumulation and learning rates. Pure.

Both follow from the sizes alone, and from what the job began with, so that a job that comes back to an earlier size has
the very numbers that it had there. Scaling the rate with the global batch is the rule of Goyal et al. ("Accurate, Large
Minibatch SGD", 2017), with its square root that of Krizhevsky ("One weird trick", 2014) for adaptive optimizers.
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
    """Batches to accumulate at ``size`` ranks, for the global batch that the job began with.

    Args:
        began_with: data parallel ranks at the beginning.
        accumulated: batches that each accumulated then.
        nearest: where the global batch cannot be kept, take what comes nearest.

    Raises:
        ConfigError: it cannot be kept, and ``nearest`` is False.
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
    """By what the learning rates that the job began with are multiplied at ``size`` ranks."""
    if rule == "linear_lr":
        return size / began_with
    if rule == "sqrt_lr":
        return math.sqrt(size / began_with)
    return 1.0


@dataclass(frozen=True, kw_only=True)
class Rate:
    """One learning rate, or a bound of one, of an optimizer or a scheduler.

    Attributes:
        base: what it is at the number of ranks that the job began with.
        placed: what it was set to for the present number. As long as it is that, ``base`` is exact.
    """

    base: float
    placed: float


def rescaled(known: Sequence[Rate], now: Sequence[float], *, before: float, factor: float) -> list[Rate]:
    """The rates at another number of ranks.

    A rate that nobody has changed since it was set is worked out from its base, without rounding twice. One that a
    scheduler has changed is divided by the factor it had.

    Args:
        known: those of the last resize, or of the beginning.
        now: present values, in the same order; the number differs when the script has other optimizers now.
        before: the factor that applied to ``now``.
        factor: the new one.
    """
    if len(known) != len(now):
        known = [Rate(base=value / before, placed=value) for value in now]
    bases = [rate.base if value == rate.placed else value / before for rate, value in zip(known, now, strict=True)]
    return [Rate(base=base, placed=base * factor) for base in bases]
