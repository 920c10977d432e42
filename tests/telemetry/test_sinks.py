"""Optional sinks: an outage harms nothing, and what they write can be read by the tools they are for."""

from __future__ import annotations

import importlib
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from resiliency.events import Event, EventKind, EventWriter
from resiliency.telemetry import sinks
from resiliency.telemetry.sinks import CloudLoggingSink, PrometheusTextSink, TensorBoardSink


def event(kind: str = EventKind.CHECKPOINT_SAVED, step: int | None = 1, **fields: Any) -> Event:
    return Event(
        kind=kind, time=1.76e9, monotonic_s=1.0, run='a"b', attempt=0, rank=0, host="h", step=step, fields=fields
    )


def step_event(step: int, **fields: Any) -> Event:
    base = {"step_s": 2.0, "data_wait_s": 0.5, "stall_s": 0.0, "save_in_flight": False}
    return event(EventKind.STEP, step, **{**base, **fields})


def test_cloud_logging_gets_events_in_order_and_no_steps() -> None:
    sent: list[dict[str, Any]] = []
    names: list[str] = []

    def connect(name: str) -> Any:
        names.append(name)
        return sent.append

    sink = CloudLoggingSink("job-goodput", connect=connect)
    for step in range(50):
        sink.emit(event(step=step))
        sink.emit(step_event(step))
    sink.close()
    sink.close()
    sink.emit(event())
    assert names == ["job-goodput"]
    assert [entry["step"] for entry in sent] == list(range(50))
    assert sent[0]["event_type"] == "checkpoint_saved"
    assert (sink.sent, sink.dropped) == (50, 0)


def test_a_cloud_outage_neither_blocks_nor_raises(caplog: pytest.LogCaptureFixture) -> None:
    def connect(name: str) -> Any:
        raise ConnectionError("no cloud today")

    sink = CloudLoggingSink("job-goodput", connect=connect, capacity=10, close_within=timedelta(seconds=1))
    began = time.monotonic()
    for step in range(1000):
        sink.emit(event(step=step))
    emitting = time.monotonic() - began
    sink.close()
    assert emitting < 1.0
    assert time.monotonic() - began < 5.0
    assert sink.sent == 0
    assert sink.dropped >= 980
    assert sum("cannot send events" in record.message for record in caplog.records) <= 1
    assert not any(thread.name == "resiliency-cloud-logging" and thread.is_alive() for thread in threading.enumerate())


def test_a_cloud_that_hangs_is_left_behind_at_close() -> None:
    release = threading.Event()

    def connect(name: str) -> Any:
        return send

    def send(entry: Any) -> None:
        hangs.set()
        answered.append(release.wait(30))

    hangs = threading.Event()
    answered: list[bool] = []
    sink = CloudLoggingSink("job-goodput", connect=connect, capacity=4, close_within=timedelta(seconds=0.2))
    sink.emit(event())
    assert hangs.wait(10)
    for step in range(100):
        sink.emit(event(step=step))  # more than it holds: there is no room to tell the thread of the end
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "resiliency-cloud-logging"]
    sink.close()
    assert thread.is_alive() and answered == [], "it waited for the cloud"
    release.set()
    thread.join(5)
    assert answered == [True] and not thread.is_alive(), "it stays, or sends what was given up"


def test_tensorboard_scalars_can_be_read_back(tmp_path: Path) -> None:
    accumulator = importlib.import_module(
        "tensorboard.backend.event_processing.event_accumulator"
    )  # in the dev extra: absent is a failure
    sink = TensorBoardSink(tmp_path)
    sink.emit(step_event(10))
    sink.emit(step_event(14, step_s=8.0, data_wait_s=2.0, count=4, step_max_s=3.0))
    sink.emit(event())
    sink.close()
    read = accumulator.EventAccumulator(str(tmp_path))
    read.Reload()
    scalars = read.Scalars("goodput/step_s")
    assert [(scalar.step, scalar.value) for scalar in scalars] == [(10, 2.0), (14, 2.0)]


def test_a_broken_tensorboard_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        calls = 0

        def add_scalar(self, *args: Any, **kwargs: Any) -> None:
            self.calls += 1
            raise OSError("disk full")

    broken = Broken()
    monkeypatch.setattr(sinks, "ScalarFile", lambda folder: broken)
    writer = EventWriter(run="r", attempt=0, rank=0, host="h", sinks=(TensorBoardSink("unused"),))
    for step in range(5):
        writer.emit(EventKind.STEP, step=step, step_s=1.0)
    assert broken.calls == 1


def test_the_prometheus_file_parses_and_counts(tmp_path: Path) -> None:
    parser = importlib.import_module("prometheus_client.parser")  # in the dev extra: absent is a failure
    path = tmp_path / "resiliency.prom"
    sink = PrometheusTextSink(path, every=timedelta(hours=1))
    sink.emit(step_event(1))
    early = path.read_text()
    for step in range(2, 6):
        sink.emit(step_event(step))
    sink.emit(step_event(9, step_s=8.0, count=4))
    sink.emit(event())
    assert path.read_text() == early, "written at most once an hour here"
    sink.close()
    samples = {
        (sample.name, sample.labels.get("phase") or sample.labels.get("event")): sample.value
        for family in parser.text_string_to_metric_families(path.read_text())
        for sample in family.samples
        if sample.labels["run"] == 'a"b'
    }
    assert samples["resiliency_steps_total", None] == 9
    assert samples["resiliency_step", None] == 9
    assert samples["resiliency_train_seconds_total", "step"] == 18.0
    assert samples["resiliency_events_total", "checkpoint_saved"] == 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_prometheus_file_that_cannot_be_written_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = PrometheusTextSink(tmp_path / "missing" / "x.prom", every=timedelta(0))
    for step in range(3):
        sink.emit(step_event(step))
    sink.close()
    assert sum("cannot be written" in record.message for record in caplog.records) == 1
