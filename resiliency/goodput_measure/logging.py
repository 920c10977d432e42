"""``from resiliency.goodput_measure import logging; logging.log_event(...)``: see
:mod:`resiliency.goodput_measure.tracker`."""

from __future__ import annotations

from resiliency.goodput_measure.tracker import GoodputLogger, log_event

__all__ = ["GoodputLogger", "log_event"]
