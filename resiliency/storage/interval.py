"""Intervals at which saves also go to a slower tier. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from resiliency.errors import ConfigError

__all__ = ["Interval", "crossed"]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """How often a tier gets a checkpoint. With neither field set: every save.

    Attributes:
        steps: at every Nth step: the first save at or after each multiple of N, however the saves lie. It counts
            multiples, not N steps since the last one sent, so that all ranks and all starts of a job choose the same
            steps, and a tier holds the same ones whether or not a restart came in between. The last save of a training
            is sent, too.
        time: at the first save after that much time since the last one sent. Rank 0's clock decides for all ranks.
    """

    steps: int | None = None
    time: timedelta | None = None

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"interval of {self.steps} steps; pass 1 or more, or None for every save")
        if self.time is not None and self.time <= timedelta(0):
            raise ConfigError(f"interval of {self.time}; pass a positive timedelta, or None for every save")
        if self.steps is not None and self.time is not None:
            raise ConfigError("an interval is either in steps or in time; pass one of them")


def crossed(last: int, step: int, every: int) -> bool:
    """True when a multiple of ``every`` is after ``last`` and not after ``step``.

    Args:
        last: the previous save that was sent; before the first one, the step that the job began with.
    """
    return step // every > last // every
