"""``from resiliency.goodput_measure import logging; logging.log_event(...)``: see
:mod:`resiliency.compat.goodput_tracker`."""

from __future__ import annotations

from resiliency.compat.goodput_tracker import GoodputLogger, log_event

__all__ = ["GoodputLogger", "log_event"]
