"""Events: one append-only JSON line each, read by people, the goodput ledger and the supervisor.

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
from collections.abc import Callable, Mapping
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

#: Most reads of the end of a log before an unfinished line there counts as torn.
_TAIL_READS = 100


class EventKind:
    """Names of events. The first six are the older library's; a reader must skip names it does not know.

    Times inside ``fields`` carry ``_s`` (seconds) and sizes ``_bytes``.
    """

    USER_SCHEDULED = "user_scheduled"
    USER_TERMINATED = "user_terminated"
    #: One per rank and attempt, when training has its checkpointer. since_process_s, since_callback_s, since_group_s,
    #: opening_s and since_launcher_s: seconds since the process, the callback, the process group, the opening of the
    #: checkpointer and the launcher began. imports_s, group_s: seconds that imports and the process group took. boot:
    #: the boot that monotonic_s counts from.
    JOB_STARTED = "job_started"
    JOB_TERMINATED = "job_terminated"  # reason: "finished" | "exception" | "signal"
    CHECKPOINT_LOADED = "checkpoint_loaded"  # step, duration_s, source tier, bytes
    CHECKPOINT_SAVED = "checkpoint_saved"  # step is committed (manifest written) on `tier`

    TRAIN_STARTED = "train_started"  # the first batch is about to run: start-up and restore are over
    TRAIN_ENDED = "train_ended"
    #: A step has finished: step_s wall time, data_wait_s, stall_s (checkpoint part), save_in_flight bool; optional
    #: busy_s (own work before first waiting for other ranks), eval_s (validation), loop_s (between two batches, without
    #: the wait for data and the above). With `count` the line covers that many steps, the last of them `step`: seconds
    #: are then sums, and step_max_s is the longest step.
    STEP = "step"
    SPAN_STARTED = "span_started"  # span: the name that the script gives to a part of its work
    SPAN_ENDED = "span_ended"  # span, span_s: how long it took
    CHECKPOINT_STARTED = "checkpoint_started"  # step, stall_s of the eager part, bytes of this rank's shard
    CHECKPOINT_FENCED = "checkpoint_fenced"  # fence before the optimizer step: stall_s it waited
    CHECKPOINT_DURABLE = "checkpoint_durable"  # fsync done / object stored: tier, stage, duration_s
    CHECKPOINT_SKIPPED = "checkpoint_skipped"  # reason
    CHECKPOINT_FAILED = "checkpoint_failed"  # reason, tier, stage not reached, will_retry
    CHECKPOINT_DELETED = "checkpoint_deleted"  # step, tier, name
    CHECKPOINT_CORRUPT = "checkpoint_corrupt"  # path, ranges
    CHECKPOINT_REPAIRED = "checkpoint_repaired"  # path, source
    CHECKPOINT_PASSED_OVER = "checkpoint_passed_over"  # step: damaged; taken: the step loaded instead; reason
    CHECKPOINT_NAME_REFUSED = "checkpoint_name_refused"  # step, tier, name, reason why the step does not get the name
    RESTORE_STARTED = "restore_started"
    AGENT_STARTED = "agent_started"
    AGENT_LOST = "agent_lost"
    WORKER_LOST = "worker_lost"  # seen by a launcher or monitor: worker (rank that was lost), exit_code or signal
    HANG_DETECTED = "hang_detected"  # worker (rank), quiet_s: seconds without progress
    #: The launcher of a host. Its events carry the attempt that a rank has reported to it last.
    LAUNCHER_STARTED = "launcher_started"  # since_process_s, boot
    RANKS_STARTED = "ranks_started"  # it starts its host's ranks: count, kept (those whose process goes on)
    LAUNCHER_ENDED = "launcher_ended"
    #: The interpreter ends: of a rank that a launcher has started, or (rank -1) of a ``resiliency run`` launcher.
    PROCESS_ENDED = "process_ended"
    PREEMPTION_NOTICE = "preemption_notice"  # lost_host, deadline_s
    RESTART_REQUESTED = "restart_requested"  # remedy, reason
    HOST_LOST = "host_lost"  # lost_host, reason
    HOST_SWAPPED = "host_swapped"  # old, new: host names
    WORLD_RESIZED = "world_resized"  # old, new: number of hosts
    #: The supervisor. Its events carry the generation of the workload as their attempt.
    SUPERVISOR_LEADS = "supervisor_leads"  # term
    GENERATION_ADOPTED = "generation_adopted"  # generation; ranks ran that the supervisor's state did not know
    HOST_STATE = "host_state"  # changed_host, state, reason
    WORKLOAD_STATE = "workload_state"  # state, reason
    INCIDENT_OPENED = "incident_opened"  # incident
    OBSERVED = "observed"  # incident, observation, reason: an observation without an event kind of its own
    PLAN_ENDED = "plan_ended"  # incident, plan, remedy, outcome, reason
    INCIDENT_CLOSED = "incident_closed"  # incident
    OPERATOR = "operator"  # what somebody has requested by hand


def boot_seconds() -> float:
    """Seconds since this host's boot, by a clock that nobody sets and that runs on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@functools.cache
def boot_id() -> str:
    """Id of the boot that :func:`boot_seconds` counts from; "" when the kernel does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", "").strip()[:12]
    except OSError:
        return ""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened. ``time``: UTC seconds since the epoch. ``monotonic_s``: :func:`boot_seconds`."""

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
        """A copy of this event with the current time."""
        return replace(self, time=time.time(), monotonic_s=boot_seconds())

    def to_json(self) -> str:
        """The JSON line without its newline. Keys of the older library come first."""
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

    Thread: any. Events that cannot be written are dropped and counted in ``dropped``. The first one of a run of dropped
        events is logged as a warning, and so is the end of the run.
    """

    _fd: int | None = None  # of the class, because __del__ also runs when Ctrl-C ends __init__ at its begin

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.dropped = 0
        self._reported = 0  # how many of the dropped events were logged
        self._closed = False

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the descriptor: it is this sink's to close, and might mean another file later. A copy opens its
        own."""
        return {**vars(self), "_fd": None}

    def emit(self, event: Event) -> None:
        if self._closed:
            return
        try:
            if self._fd is None:
                os.makedirs(os.path.dirname(self.path) or ".", exist_ok=True)
                # Readable and writable for everyone whom the umask allows, because users may share a folder.
                self._fd = open_regular(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                self._heal_torn_tail(self._fd)
            os.write(self._fd, event.to_json().encode() + b"\n")
        except (OSError, ValueError, TypeError) as error:
            # Boundary: training goes on without its event log (disk full, read-only, unusual field values).
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
        """Ends a line that a killed writer has left unfinished, so that only that line is lost."""
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
                os.sched_yield()  # lets another writer, which may be in the middle of a long line, finish
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
        self._close_file()  # an interrupted trainer may leave nobody else to close its log


class BackgroundSink:
    """Passes events to another sink on its own thread, for callers that must not wait.

    A ``write(2)`` takes microseconds, except while the file system commits its journal, which the fsync of a large
    checkpoint causes: then it takes tens of milliseconds, for which the training step would wait. A killed process
    loses only the events of that time.

    Thread: any. ``close`` and ``drain`` block for up to ``drain_s`` seconds while it writes what is queued.
    """

    def __init__(self, inner: EventSink, *, drain_s: float = 5.0) -> None:
        self._inner = inner
        self._drain_s = drain_s
        self._queue: SimpleQueue[Event | Callable[[], None] | None] = SimpleQueue()
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
            if not isinstance(event, Event):
                event()
                continue
            try:
                self._inner.emit(event)
            except Exception:  # Boundary: a user's sink must not end the log.
                logger.warning("event sink %r failed on %s", self._inner, event.kind, exc_info=True)

    def drain(self) -> None:
        """Returns when all events before this call are written."""
        with self._lock:
            thread = None if self._closed else self._thread
        if thread is not None and thread.is_alive():
            written = threading.Event()
            self._queue.put(written.set)
            written.wait(self._drain_s)

    def close(self) -> None:
        with self._lock:
            thread, self._closed = self._thread, True
            self._queue.put(None)
        if thread is not None and thread.is_alive():
            thread.join(self._drain_s)
        self._inner.close()


class EventWriter:
    """Adds time, run, attempt, rank and host to events and passes them to sinks. Thread: any. Raises: nothing."""

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

    def drain(self) -> None:
        """Returns when the events so far are written, or after 5 s."""
        for sink in self._sinks:
            if isinstance(sink, BackgroundSink):
                sink.drain()

    def close(self) -> None:
        for sink in self._sinks:
            try:
                sink.close()
            except Exception:  # Boundary: as above.
                logger.warning("event sink %r failed to close", sink, exc_info=True)
