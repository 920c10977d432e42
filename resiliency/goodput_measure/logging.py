"""``from resiliency.goodput_measure import logging; logging.log_event(...)``: one logger per process."""

from __future__ import annotations

from functools import cache
from typing import Any

from resiliency.goodput.tracker import GoodputLogger

__all__ = ["GoodputLogger", "log_event"]


@cache
def _logger() -> GoodputLogger:
    return GoodputLogger()


def log_event(event_type: str, **fields: Any) -> None:
    """See :meth:`resiliency.goodput.tracker.GoodputLogger.log_event`."""
    _logger().log_event(event_type, **fields)
