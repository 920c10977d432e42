"""Watches for the commit of steps of which this host has sent its part to a remote tier, and other hosts have not yet.

The agent that sends the last part writes the manifest, and the agents of the other hosts are not told. So each of them
looks for it, with growing pauses, to notify its own ranks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from resiliency.agent._reporter import Reporter
from resiliency.agent._worker import Worker
from resiliency.agent.config import TierSpec
from resiliency.agent.step_sender import read_sent
from resiliency.errors import TierError
from resiliency.storage.manifest import Manifest
from resiliency.storage.names import missing_names
from resiliency.storage.stage import Stage
from resiliency.storage.step_id import StepId
from resiliency.storage.tiers.base import Tier

__all__ = ["CommitWatch"]

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
#: Seconds for which a commit's names are waited for: that agent gives them right after the manifest, unless a name is
#: refused.
_NAMES_S = 5.0


class CommitWatch:
    """The steps that other agents are to commit on one remote tier.

    Thread: all methods from any; the work is done on ``resiliency-agent-watch-<tier>``, which exists once there is any.

    Args:
        run: name of the run.
        spec: of the tier.
        open_tier: returns the tier.
        reporter: notifies the ranks.
    """

    def __init__(self, run: str, spec: TierSpec, open_tier: Callable[[], Tier], reporter: Reporter) -> None:
        self._run, self._spec, self._open, self._reporter = run, spec, open_tier, reporter
        self._worker = Worker(f"resiliency-agent-watch-{spec.name}")
        self._lock = threading.Condition()
        self._steps: dict[StepId, float | None] = {}  # step -> monotonic seconds when its manifest was first seen
        self._newest: StepId | None = None  # the newest step known to be committed on the tier
        self._pause = _FIRST_PAUSE_S
        self._closing = False

    def add(self, step: StepId) -> None:
        """Looks for the commit of a step, until it is there, or a later step is committed instead."""
        with self._lock:
            self._steps.setdefault(step, None)
            self._pause = _FIRST_PAUSE_S
            self._lock.notify_all()
        self._worker.submit(self._watch)

    def committed(self, step: StepId) -> None:
        """Tells that a step is committed on the tier: of older ones, those that are not will not be."""
        with self._lock:
            self._newest = step if self._newest is None else max(self._newest, step)
            self._lock.notify_all()

    def close(self) -> None:
        """Ends the thread. Blocks: up to 5 s for a running call to the tier."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._worker.close()

    def _watch(self) -> None:
        while True:
            with self._lock:
                steps = sorted(self._steps, reverse=True)
            try:
                self._look(steps)
            except (TierError, OSError) as error:
                logger.info("cannot read what is committed on %s: %s", self._spec.address, error)
            with self._lock:
                if self._steps and not self._closing:
                    self._lock.wait(self._pause)
                    self._pause = min(1.5 * self._pause, _LONGEST_PAUSE_S)
                if not self._steps or self._closing:
                    return

    def _look(self, steps: list[StepId]) -> None:
        """Looks once for each step, the newest first: what is older than a committed one will not be committed any
        more, because each host sends its steps in order."""
        for step in steps:
            sent = read_sent(self._open(), self._run, step)
            with self._lock:
                newest = self._newest
            overtaken = newest is not None and step < newest
            if sent is not None and (overtaken or self._has_names(sent)):
                self.committed(step)
                self._reporter.notify_reached(step, Stage.DURABLE, self._spec.name)
            elif sent is None and newest is not None and overtaken:
                reason = (
                    f"step {newest.step} is on {self._spec.address} instead; another host did not send its part of step"
                    f" {step.step}, or the step was deleted there"
                )
                self._reporter.notify_failed(step, self._spec.name, reason, gave_way=True)
            else:
                continue
            with self._lock:
                del self._steps[step]

    def _has_names(self, sent: Manifest) -> bool:
        with self._lock:
            seen = self._steps[sent.id] = self._steps[sent.id] or time.monotonic()
        return time.monotonic() > seen + _NAMES_S or not missing_names(self._open(), sent)
