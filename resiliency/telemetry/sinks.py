"""Optional sinks for events besides the JSON-lines file. None of them may slow, block or fail the trainer.

* :class:`CloudLoggingSink` Google Cloud Logging, from a thread of its own (extra ``gcp``).
* :class:`TensorBoardSink` step times and running goodput as scalars (extra ``tensorboard``).
* :class:`PrometheusTextSink` a text file for node_exporter's textfile collector; needs no package.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from resiliency.events import Event, EventKind
from resiliency.telemetry.text_file import replace_text

__all__ = [
    "CloudLoggingSink",
    "PrometheusTextSink",
    "ScalarFile",
    "TensorBoardSink",
    "cloud_logging_available",
    "escape_label",
]

logger = logging.getLogger(__name__)

#: Pause after a failure to send to the cloud.
_RETRY_S = 30.0

_Send = Callable[[dict[str, Any]], object]


def cloud_logging_available() -> bool:
    """True when google-cloud-logging can be imported; imports nothing itself."""
    try:
        return importlib.util.find_spec("google.cloud.logging") is not None
    except (ImportError, ValueError):
        return False


def _connect(log_name: str) -> _Send:
    """A function that sends one entry to Google Cloud Logging. Blocks on credentials; runs in the sink's thread."""
    from google import auth
    from google.cloud import logging as cloud

    _, project = auth.default()
    log = cloud.Client(project=project).logger(log_name)

    def send(entry: dict[str, Any]) -> None:
        log.log_struct(entry, severity="INFO")

    return send


class CloudLoggingSink:
    """Sends events to Google Cloud Logging from a daemon thread.

    ``emit`` puts the event on a bounded queue and returns (microseconds); when the cloud is down or slow, the oldest
    waiting events are dropped and counted, and the thread tries again after 30 seconds. Step events are not sent: they
    are too many for a paid log. Thread: any.

    Args:
        log_name: the older library's is ``<job>-goodput``.
        connect: makes the function that sends one entry (tests).
        capacity: events that may wait.
        close_within: how long ``close`` waits for what is still queued.
    """

    def __init__(
        self,
        log_name: str,
        *,
        connect: Callable[[str], _Send] = _connect,
        capacity: int = 4096,
        close_within: timedelta = timedelta(seconds=5),
    ) -> None:
        self.log_name = log_name
        self.dropped = 0
        self.sent = 0
        self._connect = connect
        self._close_s = close_within.total_seconds()
        self._queue: queue.Queue[dict[str, Any] | None] = queue.Queue(capacity)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._warned = False

    def emit(self, event: Event) -> None:
        if event.kind == EventKind.STEP or self._closing.is_set():
            return
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._work, name="resiliency-cloud-logging", daemon=True)
                    self._thread.start()
        entry: dict[str, Any] = json.loads(event.to_json())
        while True:
            try:
                self._queue.put_nowait(entry)
                return
            except queue.Full:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        try:
            self._queue.get_nowait()
            self.dropped += 1
        except queue.Empty:
            return  # the thread has just taken one, so there is room

    def _work(self) -> None:
        send: _Send | None = None
        while True:
            entry = self._queue.get()
            if entry is None or self._closing.is_set():
                return
            try:
                if send is None:
                    send = self._connect(self.log_name)
                send(entry)
                self.sent += 1
            except Exception:  # Boundary: the cloud client raises its own unrelated errors; training goes on.
                self.dropped += 1
                send = None
                if not self._warned:
                    self._warned = True
                    logger.warning(
                        "cannot send events of %s to Google Cloud Logging; retrying", self.log_name, exc_info=True
                    )
                if self._closing.wait(_RETRY_S):
                    return

    def close(self) -> None:
        """Waits up to ``close_within`` for queued events, then drops them. Idempotent."""
        if self._closing.is_set():
            return
        thread = self._thread
        if thread is not None:
            try:
                self._queue.put(None, timeout=self._close_s)
                if not self._warned:
                    thread.join(self._close_s)
            except queue.Full:
                logger.warning("%d events of %s were not sent", self._queue.qsize(), self.log_name)
        self._closing.set()
        if thread is not None:
            with contextlib.suppress(queue.Full):  # a full queue wakes the thread, too, and it ends then
                self._queue.put_nowait(None)
            thread.join(self._close_s)


class ScalarFile:
    """The part of ``SummaryWriter`` that is needed here, without torch. Thread: any.

    Raises:
        ImportError: tensorboard is not installed.
    """

    def __init__(self, folder: str) -> None:
        # import_module, because tensorboard ships no types.
        self._event: Any = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
        self._summary: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary
        writers: Any = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._file = writers.EventFileWriter(folder)

    def add_scalar(self, tag: str, value: float, step: int, walltime: float) -> None:
        summary = self._summary(value=[self._summary.Value(tag=tag, simple_value=value)])
        self._file.add_event(self._event(wall_time=walltime, step=step, summary=summary))

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Writes step times and the running goodput of its process as TensorBoard scalars under ``goodput/``.

    Thread: the one that emits steps.

    Args:
        folder: log folder of the run.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = os.fspath(folder)
        self._writer: ScalarFile | None = None
        self._broken = False
        self._began: float | None = None
        self._productive_s = 0.0

    def emit(self, event: Event) -> None:
        if self._broken:
            return
        if self._began is None:
            self._began = event.time
        if event.kind != EventKind.STEP or event.step is None:
            return
        try:
            if self._writer is None:
                self._writer = ScalarFile(self._folder)
            count = event.fields.get("count", 1)
            for name in ("step_s", "data_wait_s", "loop_s", "stall_s", "busy_s", "eval_s"):
                if name in event.fields:
                    self._writer.add_scalar(
                        f"goodput/{name}", event.fields[name] / count, event.step, walltime=event.time
                    )
            lost_s = sum(event.fields.get(name, 0.0) for name in ("data_wait_s", "loop_s", "stall_s"))
            self._productive_s += max(0.0, event.fields.get("step_s", 0.0) - lost_s)
            if event.time > self._began:
                share = min(1.0, self._productive_s / (event.time - self._began))
                self._writer.add_scalar("goodput/goodput", share, event.step, walltime=event.time)
        except Exception:  # Boundary: a dashboard must not end training.
            self._broken = True
            logger.warning("TensorBoard scalars of goodput are not written from now on", exc_info=True)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class PrometheusTextSink:
    """Writes counters for Prometheus to a small ``*.prom`` file, replaced by rename at most once per ``every``.

    Point node_exporter's ``--collector.textfile.directory`` at its folder. Thread: any, one at a time.
    """

    def __init__(self, path: str | os.PathLike[str], *, every: timedelta = timedelta(seconds=5)) -> None:
        self.path = os.fspath(path)
        self._every_s = every.total_seconds()
        self._next = 0.0
        self._sums: dict[str, float] = dict.fromkeys(("step_s", "data_wait_s", "loop_s", "stall_s", "eval_s"), 0.0)
        self._steps = 0
        self._step = 0
        self._events: Counter[str] = Counter()
        self._labels = ""
        self._lock = threading.Lock()
        self._warned = False

    def emit(self, event: Event) -> None:
        with self._lock:
            self._labels = f'run="{escape_label(event.run)}",rank="{event.rank}",host="{escape_label(event.host)}"'
            self._events[event.kind] += 1
            if event.kind == EventKind.STEP:
                self._steps += int(event.fields.get("count", 1))
                self._step = event.step or self._step
                for name in self._sums:
                    self._sums[name] += float(event.fields.get(name, 0.0))
            now = time.monotonic()
            if now >= self._next:
                self._next = now + self._every_s
                self._write()

    def text(self) -> str:
        """The counters in Prometheus' text format."""
        lines = []

        def metric(name: str, kind: str, help_text: str, samples: list[tuple[str, float]]) -> None:
            lines.append(f"# HELP resiliency_{name} {help_text}")
            lines.append(f"# TYPE resiliency_{name} {kind}")
            lines.extend(f"resiliency_{name}{{{self._labels}{labels}}} {value:.10g}" for labels, value in samples)

        metric("step", "gauge", "Last optimizer step.", [("", self._step)])
        metric("steps_total", "counter", "Steps run by this process.", [("", self._steps)])
        phases = [(f',phase="{name[:-2]}"', seconds) for name, seconds in self._sums.items()]
        metric("train_seconds_total", "counter", "Seconds of training; phase step holds the others.", phases)
        kinds = [(f',event="{escape_label(kind)}"', count) for kind, count in sorted(self._events.items())]
        metric("events_total", "counter", "Events by name.", [(labels, float(count)) for labels, count in kinds])
        return "\n".join(lines) + "\n"

    def _write(self) -> None:
        try:
            replace_text(self.path, self.text())
        except OSError:
            # Boundary: a full disk must not end training.
            if not self._warned:
                self._warned = True
                logger.warning("Prometheus file %s cannot be written", self.path, exc_info=True)

    def close(self) -> None:
        with self._lock:
            if self._events:
                self._write()


def escape_label(text: str) -> str:
    """``text`` escaped as a label value of Prometheus' text format."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
