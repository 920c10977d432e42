"""Steps within Cloud Logging's entries: the quick way finds what parsing finds, and nothing else."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resiliency.events import EventKind
from resiliency.goodput.ledger import account
from resiliency.goodput.summary import summarize
from resiliency.telemetry import reader as reader_module
from resiliency.telemetry.reader import LogReader
from resiliency.telemetry.wrapped_steps import find_step
from tests.goodput.scripted import Job


def job_with_all() -> Job:
    job = Job(ranks=2)
    job.start()
    job.steps(30, data=0.25, loop=0.5)
    job.steps(20, stall=0.125, in_flight=True)
    job.save()
    for _ in range(10):
        job.step += 4
        job.now += 9.0
        for rank in range(2):
            fields = {"step_s": 9.0, "data_wait_s": 1e-05, "stall_s": 0.0, "save_in_flight": False, "busy_s": 1.5}
            job.emit(EventKind.STEP, rank, step=job.step, **fields, eval_s=1.0, count=4, step_max_s=3.0)
    job.finish()
    return job


def wrapped(event: Any, *, ordered: bool, floats: bool = False) -> dict[str, Any]:
    payload = json.loads(event.to_json())
    if floats:
        payload = {key: float(value) if type(value) is int else value for key, value in payload.items()}
    if ordered:
        payload = dict(sorted(payload.items()))
    return {
        "insertId": "1",
        "jsonPayload": payload,
        "logName": "projects/p/logs/job-goodput",
        "timestamp": payload["timestamp"],
    }


def summary_of(path: Path) -> tuple[LogReader, dict[str, Any]]:
    reader = LogReader()
    reader.read([path])
    (run,) = reader.collector.runs.values()
    return reader, summarize(account(run))


@pytest.mark.parametrize("floats", [False, True], ids=["whole", "40.0"])
@pytest.mark.parametrize("ordered", [True, False], ids=["alphabet", "as written"])
@pytest.mark.parametrize("shape", ["lines", "array", "compact array"])
def test_wrapped_logs_give_the_account_of_plain_ones(
    tmp_path: Path, shape: str, ordered: bool, floats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_with_all()
    plain, path = tmp_path / "plain.jsonl", tmp_path / "wrapped.json"
    plain.write_text("".join(event.to_json() + "\n" for event in job.events))
    entries = [wrapped(event, ordered=ordered, floats=floats) for event in job.events]
    if shape == "lines":
        path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    else:
        path.write_text(json.dumps(entries[::-1], indent=2 if shape == "array" else None))
    parsed: list[Any] = []
    for name in ("_loads", "_decode"):
        parse = getattr(reader_module, name)
        monkeypatch.setattr(reader_module, name, lambda text, parse=parse: parsed.append(text) or parse(text))
    reader, found = summary_of(path)
    if shape != "compact array":
        assert len(parsed) == sum(event.kind != EventKind.STEP for event in job.events), "steps need no parsing"
    _, expected = summary_of(plain)
    assert found == expected
    assert (reader.torn_lines, reader.foreign_lines, reader.lines) == (0, 0, len(job.events))


def test_lines_are_taken_one_by_one_as_they_come(tmp_path: Path) -> None:
    job, path = job_with_all(), tmp_path / "wrapped.jsonl"
    lines = [json.dumps(wrapped(event, ordered=True)) + "\n" for event in job.events]
    text, reader = "".join(lines), LogReader()
    for cut in range(0, len(text), 7001):
        path.write_text(text[:cut])
        reader.read([path], final=False)
    path.write_text(text + text)
    reader.read([path])
    (run,) = reader.collector.runs.values()
    assert sum(segment.steps.n for segment in run.segments) == 2 * (50 + 40)
    assert run.quality["duplicates"] > 0


STEP = wrapped(next(event for event in job_with_all().events if event.kind == EventKind.STEP), ordered=True)


def test_a_torn_entry_is_counted_as_torn(tmp_path: Path) -> None:
    path = tmp_path / "wrapped.jsonl"
    path.write_text(json.dumps(STEP)[:-20] + "\n" + json.dumps(STEP) + "\n")
    reader, _ = summary_of(path)
    assert reader.torn_lines == 1
    assert reader.collector.runs["job"].events == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step_s", -1.0),
        ("step_s", 1e12),
        ("step", "7"),
        ("v", 2),
        ("rank", -1),
        ("rank", 2.5),
        ("event_type", "steps"),
        ("host", 'a"b'),
        ("job_name", "a\\b"),
        ("extra", 1),
    ],
)
def test_what_is_not_quite_a_step_goes_the_slow_way(field: str, value: object) -> None:
    payload = dict(sorted({**STEP["jsonPayload"], field: value}.items()))
    assert find_step(json.dumps({**STEP, "jsonPayload": payload}).encode()) is None
    assert find_step(json.dumps(STEP).encode()) is not None


def test_steps_cost_little_more_than_to_parse_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "wrapped.jsonl"
    lines = []
    for step in range(1, 8001):
        stamp = f"2025-10-09T{8 + step // 3600:02d}:{step // 60 % 60:02d}:{step % 60:02d}.000000+00:00"
        payload = {**STEP["jsonPayload"], "step": step, "timestamp": stamp, "monotonic_s": float(step)}
        lines.append(json.dumps({**STEP, "jsonPayload": payload}))
    path.write_text("\n".join(lines) + "\n")

    def seconds(work: Callable[[], object]) -> float:
        took = []
        for _ in range(3):
            began = time.process_time()
            work()
            took.append(time.process_time() - began)
        return min(took)

    reading = seconds(lambda: LogReader().read([path]))
    parsing = seconds(lambda: [json.loads(line) for line in lines])
    assert reading < 1.6 * parsing, "without the quick way it is four times"


def test_a_step_within_a_text_is_none() -> None:
    assert find_step(json.dumps({"textPayload": json.dumps(STEP)}).encode()) is None
