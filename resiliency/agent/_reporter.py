"""Reports the outcomes of saves: events in the agent's log, messages to the ranks of the host, warnings in the log.

A rank warns of what it is notified of (:mod:`resiliency.checkpoint.save_health`), where the user looks; the agent's own
log has the same as information.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from resiliency.agent._traces import Traces
from resiliency.agent.messages import Committed, Durable, Failed, NameRefused, Notice
from resiliency.events import EventKind, EventWriter
from resiliency.storage.stage import Stage
from resiliency.storage.step_id import StepId

__all__ = ["Notify", "Reporter"]

logger = logging.getLogger(__name__)

#: Called with (rank, message) from the agent's threads; must not block.
Notify = Callable[[int, Notice], None]

#: Stage -> kind of the event for it.
_EVENTS = {Stage.COMMITTED: EventKind.CHECKPOINT_SAVED, Stage.DURABLE: EventKind.CHECKPOINT_DURABLE}


class Reporter:
    """Sends notices, writes events and logs. Thread: any.

    Args:
        ranks: ranks of this host.
        notify: sends a message to a rank; must not block.
        events: the agent's event log.
    """

    def __init__(self, ranks: Sequence[int], notify: Notify, events: EventWriter) -> None:
        self.notify = notify
        self._ranks, self._events = tuple(ranks), events
        self._warned: set[str] = set()
        #: Sends spans of the agent's work to ranks that trace a save.
        self.traces = Traces(notify)

    def notify_reached(self, step: StepId, stage: Stage, tier: str, *, ranks: Iterable[int] | None = None) -> None:
        """Notifies ranks (None: all of this host) that a save is COMMITTED or DURABLE on a tier."""
        reached = Committed(id=step, tier=tier) if stage is Stage.COMMITTED else Durable(id=step, tier=tier)
        for rank in self._ranks if ranks is None else ranks:
            self.notify(rank, reached)

    def log_reached(
        self, step: StepId, stage: Stage, tier: str, *, duration_s: float, nbytes: int, names: Sequence[str] = ()
    ) -> None:
        """Writes the event of a reached stage.

        Args:
            duration_s: seconds since the save began; for a remote tier, of the upload.
        """
        self._events.emit(
            _EVENTS[stage],
            step=step.step,
            tier=tier,
            stage=str(stage),
            duration_s=round(duration_s, 6),
            bytes=nbytes,
            **({"names": list(names)} if stage is Stage.COMMITTED else {}),
        )

    def notify_failed(
        self,
        step: StepId,
        tier: str,
        reason: str,
        *,
        retrying: bool = False,
        gave_way: bool = False,
        ranks: Iterable[int] | None = None,
    ) -> None:
        """Notifies ranks (None: all of this host) that a save failed to reach its next stage on a tier."""
        failed = Failed(id=step, tier=tier, reason=reason, retrying=retrying, gave_way=gave_way)
        for rank in self._ranks if ranks is None else ranks:
            self.notify(rank, failed)

    def log_failed(
        self, step: StepId, stage: Stage, tier: str, reason: str, *, will_retry: bool, **facts: object
    ) -> None:
        """Writes the event of a failure to reach ``stage``.

        Args:
            will_retry: the work is retried, or a later save may succeed.
        """
        self._events.emit(
            EventKind.CHECKPOINT_FAILED,
            step=step.step,
            tier=tier,
            stage=str(stage),
            reason=reason,
            will_retry=will_retry,
            **facts,
        )

    def report_refused(self, step: StepId, tier: str, name: str, reason: str) -> None:
        """Writes the event of a name that could not be given to a step, and notifies the ranks."""
        self._events.emit(EventKind.CHECKPOINT_NAME_REFUSED, step=step.step, tier=tier, name=name, reason=reason)
        logger.info("step %d was not given the name %r on %s: %s", step.step, name, tier, reason)
        for rank in self._ranks:
            self.notify(rank, NameRefused(id=step, tier=tier, name=name, reason=reason))

    def log_deleted(self, step: StepId, tier: str) -> None:
        """Writes the event of a step that was deleted from a tier."""
        self._events.emit(EventKind.CHECKPOINT_DELETED, step=step.step, tier=tier)

    def warn_once(self, about: str, text: str, *args: object) -> None:
        """Logs the first failure of kind ``about`` as a warning; later ones at debug level, until :meth:`recovered`."""
        level = logging.DEBUG if about in self._warned else logging.WARNING
        self._warned.add(about)
        logger.log(level, text, *args)

    def recovered(self, about: str) -> None:
        """Call when this kind of failure has ended: the next one is a warning again."""
        self._warned.discard(about)
