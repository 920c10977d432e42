"""Decides what to send to one remote tier and when: a queue, retries with growing pauses, giving up.

:mod:`resiliency.agent.step_sender` sends a step, :mod:`resiliency.agent.remote_pruner` deletes old ones. A tier that is
down is tried again for as long as the agent runs; training never waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any

from resiliency.agent._reporter import Reporter
from resiliency.agent._worker import Worker
from resiliency.agent.config import AgentConfig, TierSpec
from resiliency.agent.remote_pruner import RemotePruner
from resiliency.agent.step_sender import has_step, send_step
from resiliency.errors import ConfigError, CorruptShard, TierError
from resiliency.storage.manifest import ShardRecord
from resiliency.storage.retention import DeleteRequest
from resiliency.storage.stage import Stage
from resiliency.storage.step_id import StepId
from resiliency.storage.tiers import open_tier
from resiliency.storage.tiers._address import local_path
from resiliency.storage.tiers.base import Tier

__all__ = ["UploadOutcome", "Uploader"]

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


class UploadOutcome(str, Enum):
    """The outcome of uploading one step to one remote tier. Only RETRYING is followed by another one of that step."""

    #: The step is committed on the tier.
    DURABLE = "durable"
    #: This host's part is on the tier and another host will commit the step, or the step was committed before.
    PARTIAL = "partial"
    #: The tier failed; it is tried again.
    RETRYING = "retrying"
    #: Given up.
    FAILED = "failed"


#: Called with ``(tier, step, outcome, reason)`` on the uploader's thread; must not block. The reason is a log text.
Report = Callable[[TierSpec, StepId, UploadOutcome, str], None]


class Uploader:
    """Uploads to one remote tier, in the order of the calls.

    Thread: all methods from any; the work is done on ``resiliency-agent-upload-<tier>``.

    Args:
        config: of this attempt.
        spec: of the tier.
        path: local path of a step's shard file.
        report: called with each outcome.
        reporter: writes the events.
    """

    def __init__(
        self,
        config: AgentConfig,
        spec: TierSpec,
        path: Callable[[StepId, str], str],
        report: Report,
        reporter: Reporter,
    ) -> None:
        self.spec = spec
        self._config = config
        self._path = path
        self._report = report
        self._reporter = reporter
        self._worker = Worker(f"resiliency-agent-upload-{spec.name}")
        self._closing = threading.Event()
        self._tier: Tier | None = None
        self._down_since: float | None = None
        self._pruner = RemotePruner(config, spec, reporter)

    @property
    def idle(self) -> bool:
        """True when nothing is queued or being sent."""
        return self._worker.idle

    def wait_idle(self, deadline: float) -> bool:
        """Waits until nothing is queued or being sent; False when ``deadline`` (monotonic seconds) passes first."""
        return self._worker.wait_idle(deadline)

    def close(self) -> None:
        """Stops retrying and ends the thread. Blocks: up to 5 s for a running call to the tier."""
        self._closing.set()
        self._worker.close()
        close = getattr(self._tier, "close", None)
        if close is not None:
            close()

    def submit(self, step: StepId, records: Sequence[ShardRecord], *, only_if_missing: bool = False) -> None:
        """Queues this host's shards of a committed step. The step must stay on the local tier until its last outcome.

        Args:
            only_if_missing: send nothing when the step is already committed on the tier.
        """
        self._worker.submit(lambda: self._upload(step, records, only_if_missing))

    def delete(self, requests: Mapping[str, DeleteRequest]) -> None:
        """Adds names to delete on this tier, see :meth:`RemotePruner.request`."""
        self._pruner.request(requests)

    def holds(self, step: StepId) -> bool:
        """True when the step is committed on the tier. Blocks: one read, with the tier's own retries."""
        try:
            return has_step(self._open(), self._config.run, step)
        except (TierError, OSError) as error:
            logger.warning(
                "cannot read whether %s has step %d (%s); the local copy stays", self.spec.address, step.step, error
            )
            return False

    # -- on the uploader's thread -------------------------------------------------------------------------------

    def _upload(self, step: StepId, records: Sequence[ShardRecord], only_if_missing: bool) -> None:
        """Sends one step, with retries after growing pauses, until it is sent, given up, or the agent exits."""
        pause = _FIRST_PAUSE_S
        while not self._closing.is_set():
            began = time.monotonic()
            try:
                tier = self._open()
                if only_if_missing and has_step(tier, self._config.run, step):
                    self._report(self.spec, step, UploadOutcome.PARTIAL, "")
                    return
                committed = send_step(
                    tier,
                    self._config.run,
                    step,
                    records,
                    world_size=self._config.world_size,
                    path=partial(self._path, step),
                )
            except (TierError, OSError, CorruptShard, ConfigError) as error:
                if not _is_temporary(error):
                    self._give_up(step, str(error))
                    return
                self._report_down(step, error, pause)
                self._closing.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                self._report_up()
                self._report_sent(step, records, committed, time.monotonic() - began)
                self._pruner.prune(tier)
                return
        self._report(self.spec, step, UploadOutcome.FAILED, "the agent is exiting; the next start resumes the upload")

    def _open(self) -> Tier:
        if self._tier is None:
            options: dict[str, Any] = {}
            if local_path(self.spec.address) is None:
                # The tier's own retries stop pausing when the uploader is closed.
                options = {"storage_options": dict(self.spec.storage_options or {}), "pause": self._closing.wait}
            self._tier = open_tier(self.spec.address, name=self.spec.name, **options)
        return self._tier

    # -- reports ------------------------------------------------------------------------------------------------

    def _report_sent(self, step: StepId, records: Sequence[ShardRecord], committed: bool, duration_s: float) -> None:
        if committed:
            nbytes = sum(record.nbytes for record in records)
            self._reporter.log_reached(step, Stage.DURABLE, self.spec.name, duration_s=duration_s, nbytes=nbytes)
        self._report(self.spec, step, UploadOutcome.DURABLE if committed else UploadOutcome.PARTIAL, "")

    def _give_up(self, step: StepId, reason: str) -> None:
        self._reporter.log_failed(step, Stage.DURABLE, self.spec.name, reason, will_retry=False)
        logger.error("step %d is not stored on %s: %s; the local copy stays", step.step, self.spec.address, reason)
        self._report(self.spec, step, UploadOutcome.FAILED, reason)

    def _report_down(self, step: StepId, error: Exception, pause: float) -> None:
        """Reports a failure that will be retried; once, until the tier works again."""
        if self._down_since is not None:
            return
        self._down_since = time.monotonic()
        self._reporter.log_failed(step, Stage.DURABLE, self.spec.name, str(error), will_retry=True)
        logger.warning(
            "tier %s failed at step %d: %s; it is tried again in %.0f s and then with growing pauses",
            self.spec.address,
            step.step,
            error,
            pause,
        )
        self._report(self.spec, step, UploadOutcome.RETRYING, str(error))

    def _report_up(self) -> None:
        if self._down_since is not None:
            down_s = time.monotonic() - self._down_since
            logger.warning("tier %s answers again after %.0f s", self.spec.address, down_s)
            self._down_since = None


def _is_temporary(error: Exception) -> bool:
    """True when a retry may succeed: a tier's retryable error, or an error of the local disk."""
    return error.retryable if isinstance(error, TierError) else isinstance(error, OSError)
