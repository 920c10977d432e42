"""Events: one append-only JSON line each, for people, the goodput ledger and the supervisor.

A line is a superset of the older goodput library's (``timestamp``, ``job_name``, ``event_type``, ``step``,
``node_rank``), so both can read each other's files. Writing an event never raises in the caller. It costs one
``write(2)`` on an ``O_APPEND`` file (tens of microseconds, no lock, no buffer), and what is written survives SIGKILL.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from resiliency.regular_file import open_regular

__all__ = [
    "BackgroundSink",
    "Event",
    "EventKind",
    "EventSink",
    "EventWriter",
    "JsonlSink",
    "NullSink",
    "boot_id",
    "boot_seconds",
]

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1

#: How often the end of a log is read before an unfinished line there counts as torn.
_TAIL_READS = 100


class EventKind:
    """Names of events. The first six are the older library's; a reader must skip names it does not know.

    Times inside ``fields`` carry ``_s`` (seconds) and sizes ``_bytes``.
    """

    USER_SCHEDULED = "user_scheduled"
    USER_TERMINATED = "user_terminated"
    #: One per rank and attempt, when training has its checkpointer; since_process_s, since_callback_s, since_group_s,
    #: opening_s and since_launcher_s say how long ago the process, the callback, the process group, the checkpointer
    #: and the launcher began; imports_s and group_s how long imports and the process group took; boot, since when
    #: monotonic_s counts.
    JOB_STARTED = "job_started"
    JOB_TERMINATED = "job_terminated"  # reason: "finished" | "exception" | "signal"
    CHECKPOINT_LOADED = "checkpoint_loaded"  # step, duration_s, source tier, bytes
    CHECKPOINT_SAVED = "checkpoint_saved"  # step is committed (manifest written) on `tier`

    TRAIN_STARTED = "train_started"  # the first batch is about to run: start-up and restore are over
    TRAIN_ENDED = "train_ended"
    #: Step finished: step_s wall, data_wait_s, stall_s (checkpoint part), save_in_flight bool; optional busy_s (own
    #: work before first waiting for other ranks), eval_s (validation), loop_s (between two batches, without the wait
    #: for data and the above). With `count` the line holds that many steps, the last of them `step`: seconds are then
    #: sums, and step_max_s is the longest.
    STEP = "step"
    SPAN_STARTED = "span_started"  # span: a name that the script gives to a piece of its work
    SPAN_ENDED = "span_ended"  # span, span_s: how long it took
    CHECKPOINT_STARTED = "checkpoint_started"  # step, stall_s of the eager part, bytes of this rank's shard
    CHECKPOINT_FENCED = "checkpoint_fenced"  # fence before the optimizer step: stall_s it waited
    CHECKPOINT_DURABLE = "checkpoint_durable"  # fsync done / object stored: tier, stage, duration_s
    CHECKPOINT_SKIPPED = "checkpoint_skipped"  # reason
    CHECKPOINT_FAILED = "checkpoint_failed"  # reason, tier, stage not reached, will_retry
    CHECKPOINT_DELETED = "checkpoint_deleted"  # step, tier, name
    CHECKPOINT_CORRUPT = "checkpoint_corrupt"  # path, ranges
    CHECKPOINT_REPAIRED = "checkpoint_repaired"  # path, source
    CHECKPOINT_PASSED_OVER = "checkpoint_passed_over"  # a damaged step; taken: the step loaded instead, reasons
    CHECKPOINT_NAME_REFUSED = "checkpoint_name_refused"  # step, tier, name, reason: the step has not got that name
    RESTORE_STARTED = "restore_started"
    AGENT_STARTED = "agent_started"
    AGENT_LOST = "agent_lost"
    WORKER_LOST = "worker_lost"  # seen by a launcher or monitor: worker (the lost rank), exit_code or signal
    HANG_DETECTED = "hang_detected"  # worker, quiet_s: how long it had made no progress
    #: The launcher of a host. Its events carry the attempt that ranks have told it of last.
    LAUNCHER_STARTED = "launcher_started"  # since_process_s, boot
    RANKS_STARTED = "ranks_started"  # it starts its host's ranks: count, kept (those that stay in their process)
    LAUNCHER_ENDED = "launcher_ended"
    #: The interpreter of a rank ends, where a launcher has started it; or (rank -1) that of a launcher of ours.
    PROCESS_ENDED = "process_ended"
    PREEMPTION_NOTICE = "preemption_notice"  # lost_host, deadline_s
    RESTART_REQUESTED = "restart_requested"  # remedy, reason
    HOST_LOST = "host_lost"  # lost_host, reason
    HOST_SWAPPED = "host_swapped"  # old, new: names of hosts
    WORLD_RESIZED = "world_resized"  # old, new: number of hosts
    #: The supervisor. Its events carry the epoch of the workload as their attempt.
    SUPERVISOR_LEADS = "supervisor_leads"  # term
    HOST_STATE = "host_state"  # changed_host, state, reason
    WORKLOAD_STATE = "workload_state"  # state, reason
    INCIDENT_OPENED = "incident_opened"  # incident
    OBSERVED = "observed"  # incident, observation, reason: what has no kind of its own
    PLAN_ENDED = "plan_ended"  # incident, plan, remedy, outcome, reason
    INCIDENT_CLOSED = "incident_closed"  # incident
    OPERATOR = "operator"  # what somebody has asked for by hand


def boot_seconds() -> float:
    """This host's clock that nobody sets; it goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@functools.cache
def boot_id() -> str:
    """Which start of which machine :func:`boot_seconds` counts from; "": the kernel does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", "").strip()[:12]
    except OSError:
        return ""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened. ``time`` is UTC seconds since the epoch, ``monotonic_s`` :func:`boot_seconds`."""

    kind: str
    time: float
    monotonic_s: float
    run: str
    attempt: int
    rank: int
    host: str
    step: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    def at_once(self) -> Event:
        """This event, as of now."""
        return replace(self, time=time.time(), monotonic_s=boot_seconds())

    def to_json(self) -> str:
        """The line without its newline. Keys of the older library come first."""
        stamp = datetime.fromtimestamp(self.time, tz=timezone.utc).isoformat(timespec="microseconds")
        record: dict[str, Any] = {
            "timestamp": stamp,
            "job_name": self.run,
            "event_type": self.kind,
            "v": SCHEMA_VERSION,
            "monotonic_s": round(self.monotonic_s, 6),
            "attempt": self.attempt,
            "rank": self.rank,
            "host": self.host,
        }
        if self.step is not None:
            record["step"] = self.step
        for key, value in self.fields.items():
            record.setdefault(key, value)
        return json.dumps(record, separators=(",", ":"), default=str)


class EventSink(Protocol):
    """Receives events. ``emit`` may be called from any thread, must not raise and must not block for long."""

    def emit(self, event: Event) -> None: ...

    def close(self) -> None: ...


class NullSink:
    """Drops every event."""

    def emit(self, event: Event) -> None:
        return

    def close(self) -> None:
        return


class JsonlSink:
    """Appends JSON lines to one local file; the file is opened at the first event.

    Thread: any. Events that cannot be written are dropped and counted in ``dropped``. The first of a spell is reported
    through logging, and so is the end of the spell.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._fd: int | None = None  # first: a sink that cannot be made is taken apart, too
        self.path = os.fspath(path)
        self.dropped = 0
        self._reported = 0  # of those dropped
        self._closed = False

    def __getstate__(self) -> dict[str, Any]:
        """A copy opens the file for itself: the descriptor is this sink's to close, and may then be another file's."""
        return {**vars(self), "_fd": None}

    def emit(self, event: Event) -> None:
        if self._closed:
            return
        try:
            if self._fd is None:
                os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
                # Readable and writable for whom the umask allows: users may share a folder.
                self._fd = open_regular(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                self._heal_torn_tail(self._fd)
            os.write(self._fd, event.to_json().encode() + b"\n")
        except (OSError, ValueError, TypeError) as error:
            # Boundary: training goes on without its event log (disk full, read-only, odd field values).
            self.dropped += 1
            if self.dropped == self._reported + 1:
                logger.warning("an event is not in the log %s, which cannot be written: %s", self.path, error)
        else:
            self._report_end()

    def _report_end(self) -> None:
        count, self._reported = self.dropped - self._reported, self.dropped
        if count:
            logger.warning("the event log %s is written again; %d events before are not in it", self.path, count)

    def _heal_torn_tail(self, fd: int) -> None:
        """A writer killed inside write(2) can leave half a line; start a new line, so that only that one is lost."""
        size = os.fstat(fd).st_size
        if size == 0:
            return
        with open(self.path, "rb") as file:
            for _ in range(_TAIL_READS):
                size = os.fstat(fd).st_size
                if size == 0:
                    return
                file.seek(size - 1)
                if file.read(1) == b"\n":
                    return
                os.sched_yield()  # another writer may be in the middle of a long line: let it finish
        os.write(fd, b"\n")

    def close(self) -> None:
        if not self._closed and self.dropped > self._reported:
            count = self.dropped - self._reported
            logger.warning("the last %d events are not in the log %s, which could not be written", count, self.path)
        self._closed = True
        self._close_file()

    def _close_file(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __del__(self) -> None:
        self._close_file()  # a trainer that was interrupted may have nobody to close its log


class BackgroundSink:
    """Passes events to another sink on a thread of its own, for emitters that must not wait.

    A ``write(2)`` takes microseconds, except while the file system commits its journal, which an fsync of a large
    checkpoint makes it do: then it takes tens of milliseconds, and the training step would wait for it. A process
    that is killed loses only what was emitted in that time.

    Thread: any. ``close`` writes out what is queued, up to ``drain_s``.
    """

    def __init__(self, inner: EventSink, *, drain_s: float = 5.0) -> None:
        self._inner = inner
        self._drain_s = drain_s
        self._queue: SimpleQueue[Event | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False

    def emit(self, event: Event) -> None:
        if self._thread is None:
            with self._lock:
                if self._thread is None and not self._closed:
                    self._thread = threading.Thread(target=self._run, name="resiliency-events", daemon=True)
                    self._thread.start()
        self._queue.put(event)

    def _run(self) -> None:
        while (event := self._queue.get()) is not None:
            try:
                self._inner.emit(event)
            except Exception:  # Boundary: a user's sink must not end the log.
                logger.warning("event sink %r failed on %s", self._inner, event.kind, exc_info=True)

    def close(self) -> None:
        with self._lock:
            thread, self._closed = self._thread, True
        if thread is not None and thread.is_alive():
            self._queue.put(None)
            thread.join(self._drain_s)
        self._inner.close()


class EventWriter:
    """Adds time, run, attempt, rank and host to events and passes them to sinks. Thread: any. Never raises."""

    def __init__(self, *, run: str, attempt: int, rank: int, host: str, sinks: tuple[EventSink, ...]) -> None:
        self.run = run
        self.attempt = attempt
        self.rank = rank
        self.host = host
        self._sinks = sinks

    def emit(self, kind: str, *, step: int | None = None, **fields: Any) -> None:
        event = Event(
            kind=kind,
            time=time.time(),
            monotonic_s=boot_seconds(),
            run=self.run,
            attempt=self.attempt,
            rank=self.rank,
            host=self.host,
            step=step,
            fields=fields,
        )
        for sink in self._sinks:
            try:
                sink.emit(event)
            except Exception:  # Boundary: a user's sink must not end training.
                logger.warning("event sink %r failed on %s", sink, kind, exc_info=True)

    def close(self) -> None:
        for sink in self._sinks:
            try:
                sink.close()
            except Exception:  # Boundary: as above.
                logger.warning("event sink %r failed to close", sink, exc_info=True)
