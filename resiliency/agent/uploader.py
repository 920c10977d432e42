"""Decides what to send to one remote tier and when: one waiting step, retries with growing pauses, giving up.

:mod:`resiliency.agent.step_sender` sends a step, :mod:`resiliency.agent.remote_pruner` deletes old ones. A tier that is
down is retried for as long as the agent runs; training never waits for it. A step to be sent stays on the local tier,
which may be memory. So besides the step that is being sent only the newest one waits, whether the tier
is down, slow or hangs; older ones give way to it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from resiliency.agent._fence import Fence
from resiliency.agent._reporter import Reporter
from resiliency.agent._worker import Worker
from resiliency.agent.commit_watch import CommitWatch
from resiliency.agent.config import AgentConfig, TierSpec
from resiliency.agent.remote_pruner import RemotePruner
from resiliency.agent.step_sender import finish_step, has_part, read_sent, send_step
from resiliency.errors import AgentError, ConfigError, CorruptShard, TierError
from resiliency.storage.manifest import Manifest, ShardRecord
from resiliency.storage.retention import DeleteRequest, Hold
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
    """The outcome of uploading one step to one remote tier. Only RETRYING is followed by another outcome of that
    step."""

    #: The step is committed on the tier.
    DURABLE = "durable"
    #: This host's part is on the tier and another host will commit the step, which :class:`CommitWatch` looks for; or
    #: the step was committed before.
    PARTIAL = "partial"
    #: The tier failed; the upload is retried.
    RETRYING = "retrying"
    #: The upload was given up.
    FAILED = "failed"
    #: Not sent, because a newer step is to go to the tier instead.
    GAVE_WAY = "gave way"
    #: The agent exits; the next start resumes the upload of the newest step.
    INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class _Upload:
    """A step to send."""

    step: StepId
    records: Sequence[ShardRecord]
    only_if_missing: bool


#: Called with ``(tier, step, outcome, reason)`` on any thread; must not block. The reason is a log text. The ranks are
#: notified and warn where the user looks; the agent's own log has the reason at level INFO.
Report = Callable[[TierSpec, StepId, UploadOutcome, str], None]


class Uploader:
    """Uploads to one remote tier, in the order of the calls.

    Thread: all methods from any; the work is done on ``resiliency-agent-upload-<tier>``.

    Args:
        config: of this attempt.
        spec: of the tier.
        path: returns the local path of a step's shard file.
        report: called with each outcome.
        reporter: writes the events.
        fence: of this attempt.
        named: the newest step known to have had its names on the tier.
    """

    def __init__(
        self,
        config: AgentConfig,
        spec: TierSpec,
        path: Callable[[StepId, str], str],
        report: Report,
        reporter: Reporter,
        fence: Fence,
        *,
        named: StepId | None = None,
    ) -> None:
        self.spec = spec
        self._named = named
        self._fence = fence
        self._config = config
        self._path = path
        self._report = report
        self._reporter = reporter
        self._worker = Worker(f"resiliency-agent-upload-{spec.name}")
        self._closing = threading.Event()
        self._lock = threading.Condition()
        self._waiting: _Upload | None = None
        self._tier: Tier | None = None
        self._down_since: float | None = None
        self._sent: StepId | None = None  # the last step that this attempt has committed on the tier
        self._pruner = RemotePruner(config, spec, reporter, fence)
        self._others = CommitWatch(config.run, spec, self._open, reporter)

    def start(self) -> None:
        """Starts the thread. Raises: AgentError, when that cannot be."""
        self._worker.start()

    @property
    def idle(self) -> bool:
        """True when nothing is queued or being sent. Other hosts may still be sending their parts."""
        return self._worker.idle

    def wait_idle(self, deadline: float) -> bool:
        """Waits until nothing is queued or being sent; False when ``deadline`` (monotonic seconds) passes first."""
        return self._worker.wait_idle(deadline)

    def close(self) -> None:
        """Stops retrying and ends the threads. Blocks: up to 5 s for a running call to the tier on each of the two."""
        self._closing.set()
        with self._lock:
            self._lock.notify_all()  # ends the pause before the next try
        self._worker.close()
        self._others.close()
        close = getattr(self._tier, "close", None)
        if close is not None:
            close()

    def submit(self, step: StepId, records: Sequence[ShardRecord], *, only_if_missing: bool = False) -> None:
        """Queues this host's shards of a committed step. The step must stay on the local tier until its last outcome.

        At most one step waits: of two, the older one gives way.

        Args:
            only_if_missing: send nothing when the step is already committed on the tier.
        """
        upload = _Upload(step, records, only_if_missing)
        with self._lock:
            before = self._waiting
            # An agent may learn late that another agent has committed a step.
            self._waiting = upload if before is None or before.step <= step else before
            newest = self._waiting.step
            self._lock.notify_all()
        if before is None:
            self._worker.submit(self._upload_next)
        elif before.step == step:
            self._report(self.spec, step, UploadOutcome.PARTIAL, "")  # it is queued already
        else:
            self._give_way(min(before.step, step), newest)

    def resume(self, older: Mapping[StepId, Sequence[ShardRecord]], newest: StepId) -> None:
        """Handles the steps that an earlier agent of this attempt may have been sending when it was killed; call it
        before ``newest``, the newest step for this tier, is submitted. Uploads keep the order of steps: when one is on
        the tier, all before it have been reported, or this host's part of them is there. Of those after it, the ones of
        which this host's part is there are watched for, and the others give way.

        Args:
            older: steps for this tier before ``newest``, in order, each with the records that this host sends. Each
                must stay on the local tier until its outcome.
        """
        if older:
            self._worker.submit(partial(self._resume, dict(older), newest))

    def look_for(self, steps: Sequence[StepId]) -> None:
        """Finds out what has become of steps of this attempt that this host has nothing to send of any more. An earlier
        agent has sent its part; or, if this host is the only one, all of the step or nothing that counts."""
        for step in steps:
            self._worker.submit(partial(self._look_for, step))

    def delete(self, requests: Mapping[str, DeleteRequest]) -> None:
        """Adds names to delete on this tier, see :meth:`RemotePruner.request`."""
        self._pruner.request(requests)
        with self._lock:
            sent = self._sent
        # Otherwise the next upload deletes them; here the upload of the awaited step is over, and may have been the
        # last one.
        if sent is not None and any(request.is_due(sent) for request in requests.values()):
            self._worker.submit(partial(self._prune, sent))

    def hold(self, hold: Hold) -> None:
        """Keeps the step that the job was restored from, see :class:`Hold`."""
        self._pruner.hold(hold)

    def holds(self, step: StepId) -> bool:
        """True when the step is committed on the tier. Blocks: one read, with the tier's own retries."""
        try:
            return read_sent(self._open(), self._config.run, step) is not None
        except (TierError, OSError) as error:
            logger.warning(
                "cannot read whether %s has step %d (%s); the local copy stays", self.spec.address, step.step, error
            )
            return False

    @property
    def _several_hosts(self) -> bool:
        return len(self._config.local_ranks) < self._config.world_size

    # -- on the uploader's thread -------------------------------------------------------------------------------

    def _upload_next(self) -> None:
        """Sends the waiting step, with retries after growing pauses, until it is sent, gives way to a newer one, is
        given up, or the agent exits."""
        pause = _FIRST_PAUSE_S
        upload = self._take()
        while upload is not None and not self._closing.is_set():
            try:
                self._send(upload)
                return
            except (TierError, OSError, CorruptShard, ConfigError, AgentError) as error:
                if not _is_temporary(error):
                    self._give_up(upload.step, str(error))
                    return
                self._report_down(upload.step, error, pause)
            upload = self._newest_after_pause(upload, pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        if upload is not None:
            reason = "the agent is exiting; the next start resumes the upload"
            self._report(self.spec, upload.step, UploadOutcome.INTERRUPTED, reason)

    def _take(self) -> _Upload | None:
        with self._lock:
            taken, self._waiting = self._waiting, None
        return taken

    def _send(self, upload: _Upload) -> None:
        began = time.monotonic()
        tier = self._open()
        sent = read_sent(tier, self._config.run, upload.step) if upload.only_if_missing else None
        if sent is not None:
            self._finish(tier, sent)
            return
        with self._reporter.traces.span(f"upload {self.spec.name}", upload.step):
            committed = send_step(
                tier,
                self._config.run,
                upload.step,
                upload.records,
                world_size=self._config.world_size,
                path=partial(self._path, upload.step),
                fence=self._fence,
                refused=self._refused(upload.step),
            )
        self._report_up()
        self._report_sent(upload.step, upload.records, committed, time.monotonic() - began)
        if committed:
            with self._lock:
                self._sent = upload.step
        self._prune(upload.step)

    def _resume(self, older: Mapping[StepId, Sequence[ShardRecord]], newest: StepId) -> None:
        left = sorted(older)
        while left:
            step = left.pop()
            try:
                tier = self._open()
                sent = read_sent(tier, self._config.run, step)
                if sent is not None:
                    self._finish(tier, sent)
                    break
                if has_part(tier, self._config.run, step, older[step]):
                    self._report(self.spec, step, UploadOutcome.PARTIAL, "")
                    self._others.add(step)
                    continue
            except (TierError, OSError, CorruptShard, ConfigError, AgentError) as error:
                logger.info("cannot finish step %d on %s: %s", step.step, self.spec.address, error)
                self._give_way(step, newest)
                break  # the tier is down; it is not asked for the step before either
            self._give_way(step, newest)
        for step in left:
            self._report(self.spec, step, UploadOutcome.PARTIAL, "")
            if self._several_hosts and (self._named is None or step > self._named):
                self._others.add(step)  # the ranks may not have been told of it

    def _look_for(self, step: StepId) -> None:
        if self._several_hosts:
            self._report(self.spec, step, UploadOutcome.PARTIAL, "")
            self._others.add(step)
            return
        reason = "its local copy is gone"
        try:
            tier = self._open()
            sent = read_sent(tier, self._config.run, step)
            if sent is not None:
                self._finish(tier, sent)
                return
        except (TierError, OSError, CorruptShard, ConfigError, AgentError) as error:
            reason += f", and whether it was sent is not known: {error}"
        self._give_up(step, reason)

    def _finish(self, tier: Tier, sent: Manifest) -> None:
        """Handles a step that is on the tier already. An agent of this attempt may have been killed before it had given
        the names and notified the ranks."""
        if not sent.id.of_attempt(self._config.attempt, self._config.token):
            self._report(self.spec, sent.id, UploadOutcome.PARTIAL, "")
            return
        if self._named is None or self._named < sent.id:
            finish_step(tier, sent, fence=self._fence, refused=self._refused(sent.id))
        self._report_up()
        self._report(self.spec, sent.id, UploadOutcome.DURABLE, "")
        self._others.committed(sent.id)
        with self._lock:
            self._sent = sent.id
        self._prune(sent.id)

    def _refused(self, step: StepId) -> Callable[[str, str], None]:
        return partial(self._reporter.report_refused, step, self.spec.name)

    def _prune(self, sent: StepId) -> None:
        with self._reporter.traces.span("prune", tier=self.spec.name):
            self._pruner.prune(self._open(), sent)

    def _newest_after_pause(self, upload: _Upload, pause: float) -> _Upload:
        """Waits for ``pause`` seconds, and returns the newest step, which is tried next. Older steps give way as soon
        as a newer one comes, so that the local tier need not keep them."""
        deadline = time.monotonic() + pause
        while True:
            with self._lock:
                if self._waiting is None and not self._closing.is_set():
                    self._lock.wait(max(0.0, deadline - time.monotonic()))
            newer = self._take()
            if newer is not None:
                older, upload = sorted((upload, newer), key=lambda one: one.step)
                self._give_way(older.step, upload.step)
            if self._closing.is_set() or time.monotonic() >= deadline:
                return upload

    def _open(self) -> Tier:
        if self._tier is None:
            options: dict[str, Any] = {}
            if local_path(self.spec.address) is None:
                # Closing the uploader ends the pauses between the tier's own retries.
                options = {"storage_options": dict(self.spec.storage_options or {}), "pause": self._closing.wait}
            self._tier = open_tier(self.spec.address, name=self.spec.name, **options)
        return self._tier

    # -- reports ------------------------------------------------------------------------------------------------

    def _report_sent(self, step: StepId, records: Sequence[ShardRecord], committed: bool, duration_s: float) -> None:
        if committed:
            nbytes = sum(record.nbytes for record in records)
            self._reporter.log_reached(step, Stage.DURABLE, self.spec.name, duration_s=duration_s, nbytes=nbytes)
        self._report(self.spec, step, UploadOutcome.DURABLE if committed else UploadOutcome.PARTIAL, "")
        if committed:
            self._others.committed(step)
        else:
            self._others.add(step)

    def _give_up(self, step: StepId, reason: str) -> None:
        self._reporter.log_failed(step, Stage.DURABLE, self.spec.name, reason, will_retry=False)
        logger.info("step %d is not stored on %s: %s; the local copy stays", step.step, self.spec.address, reason)
        self._report(self.spec, step, UploadOutcome.FAILED, reason)

    def _give_way(self, step: StepId, newer: StepId) -> None:
        why = "is down" if self._down_since is not None else "is still busy with an earlier step"
        reason = f"{self.spec.address} {why}, and step {newer.step} is newer: only the newest step waits for it"
        self._reporter.log_failed(step, Stage.DURABLE, self.spec.name, reason, will_retry=False)
        logger.info("step %d is not stored on %s: %s", step.step, self.spec.name, reason)
        self._report(self.spec, step, UploadOutcome.GAVE_WAY, reason)

    def _report_down(self, step: StepId, error: Exception, pause: float) -> None:
        """Reports a failure that will be retried: once, until the tier works again."""
        if self._down_since is not None:
            return
        self._down_since = time.monotonic()
        self._reporter.log_failed(step, Stage.DURABLE, self.spec.name, str(error), will_retry=True)
        logger.info(
            "tier %s failed at step %d: %s; it is tried again in %.0f s and then with growing pauses",
            self.spec.address,
            step.step,
            error,
            pause,
        )
        self._report(self.spec, step, UploadOutcome.RETRYING, str(error))

    def _report_up(self) -> None:
        if self._down_since is not None:
            logger.info("tier %s answers again after %.0f s", self.spec.address, time.monotonic() - self._down_since)
            self._down_since = None


def _is_temporary(error: Exception) -> bool:
    """True when a retry may succeed: a tier's retryable error, or an error of the local disk."""
    return error.retryable if isinstance(error, TierError) else isinstance(error, OSError)
