"""The event log: one line for a fact, never an exception, nothing lost by a kill but the line being written."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import resiliency
from resiliency.events import BackgroundSink, Event, EventKind, EventWriter, JsonlSink, NullSink


def writer(*sinks: Any) -> EventWriter:
    return EventWriter(run="r", attempt=2, rank=1, host="h", sinks=sinks)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Collect:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        return


class Broken:
    def emit(self, event: Event) -> None:
        raise RuntimeError("sink")

    def close(self) -> None:
        raise RuntimeError("sink")


def test_a_line_says_who_what_and_when(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "e.jsonl"
    events = writer(JsonlSink(path))
    events.emit(EventKind.CHECKPOINT_SAVED, step=7, tier="local", duration_s=0.5)
    events.close()
    (line,) = lines(path)
    assert (
        line["job_name"],
        line["event_type"],
        line["step"],
        line["tier"],
        line["attempt"],
        line["rank"],
        line["host"],
    ) == (
        "r",
        "checkpoint_saved",
        7,
        "local",
        2,
        1,
        "h",
    )
    assert abs((datetime.now(timezone.utc) - datetime.fromisoformat(line["timestamp"])).total_seconds()) < 60


def test_fields_never_hide_who_wrote_the_line(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    events = writer(JsonlSink(path))
    events.emit("x", timestamp="fake", job_name="fake", rank=99, reason="r")
    events.close()
    (line,) = lines(path)
    assert line["job_name"] == "r" and line["rank"] == 1 and line["timestamp"] != "fake" and line["reason"] == "r"


@settings(deadline=None, database=None, max_examples=60)
@given(
    st.dictionaries(
        st.text(),
        st.one_of(
            st.text(),
            st.floats(),
            st.integers(),
            st.lists(st.text()),
            st.builds(object),
            st.binary(),
            st.sets(st.integers()),
        ),
        max_size=4,
    )
)
def test_any_field_gives_one_line_of_json(fields: dict[str, Any]) -> None:
    event = Event(kind="x", time=0.0, monotonic_s=0.0, run="r\n\u2028", attempt=1, rank=0, host="h", fields=fields)
    text = event.to_json()
    assert "\n" not in text and json.loads(text)["event_type"] == "x"


@pytest.mark.parametrize("fields", [{"a": {(1, 2): 3}}, {"a": {object(): 1}}], ids=["tuple key", "object key"])
def test_fields_json_cannot_say_are_dropped_and_do_not_raise(
    tmp_path: Path, fields: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "e.jsonl"
    sink = JsonlSink(path)
    events = writer(sink)
    events.emit("bad", **fields)
    events.emit("good")
    events.close()
    assert [line["event_type"] for line in lines(path)] == ["good"] and sink.dropped == 1


def test_a_circle_in_a_field_does_not_raise(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    events = writer(JsonlSink(tmp_path / "e.jsonl"))
    events.emit("bad", a=loop)
    events.emit("bad", a=deep)
    events.emit("good")
    events.close()
    assert [line["event_type"] for line in lines(tmp_path / "e.jsonl")] == ["good"]
    while deep:  # taken apart by hand: freeing 100,000 levels at once would overflow the stack of some Pythons
        deep = deep[0]


@pytest.mark.parametrize(
    "make", [lambda p: p.mkdir(), lambda p: p.parent.joinpath("file").write_text("") and None], ids=["a folder", "fine"]
)
def test_a_log_that_cannot_be_written_is_said_once(
    tmp_path: Path, make: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "e.jsonl"
    make(path)
    sink = JsonlSink(path)
    events = writer(sink)
    for _ in range(5):
        events.emit("x")
    events.close()
    if path.is_dir():
        assert sink.dropped == 5
        assert len([entry for entry in caplog.records if "cannot be written" in entry.getMessage()]) == 1
    else:
        assert len(lines(path)) == 5


def test_a_full_disk_does_not_raise(caplog: pytest.LogCaptureFixture) -> None:
    sink = JsonlSink("/dev/full")
    events = writer(sink)
    for _ in range(3):
        events.emit("x")
    events.close()
    assert (
        sink.dropped == 3 and len([entry for entry in caplog.records if "cannot be written" in entry.getMessage()]) == 1
    )


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    path.write_text('{"event_type":"whole"}\n{"event_ty')
    events = writer(JsonlSink(path))
    events.emit("next")
    events.emit("after")
    events.close()
    found = path.read_text().splitlines()
    assert found[1] == '{"event_ty' and [json.loads(line)["event_type"] for line in found[2:]] == ["next", "after"]


def test_lines_of_many_threads_and_writers_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    writers = [writer(JsonlSink(path)) for _ in range(3)]
    threads = [
        threading.Thread(target=lambda w=w, n=n: [w.emit("x", n=n, i=i, pad="y" * 3000) for i in range(50)])
        for n, w in enumerate(writers)
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in writers:
        one.close()
    assert len(lines(path)) == 300


def test_a_broken_sink_does_not_keep_the_others_from_hearing(caplog: pytest.LogCaptureFixture) -> None:
    good = Collect()
    events = writer(Broken(), good, NullSink())
    events.emit("x", step=1)
    events.close()
    assert [event.kind for event in good.events] == ["x"] and "Broken" in caplog.text


def test_after_close_nothing_is_written_and_nothing_raised(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    events = writer(JsonlSink(path))
    events.emit("x")
    events.close()
    events.close()
    events.emit("y")
    assert [line["event_type"] for line in lines(path)] == ["x"]


def test_a_killed_process_loses_at_most_what_it_wrote_in_the_last_moment(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    script = (
        "import os, signal, sys, time\n"
        "from resiliency.events import EventWriter, JsonlSink\n"
        "w = EventWriter(run='r', attempt=1, rank=0, host='h', sinks=(JsonlSink(sys.argv[1]),))\n"
        "for i in range(100): w.emit('x', i=i)\n"
        "time.sleep(0.5)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(resiliency.__file__).parents[1])}
    assert (
        subprocess.run([sys.executable, "-c", script, str(path)], env=env, timeout=30, check=False).returncode
        == -signal.SIGKILL
    )
    assert [line["i"] for line in lines(path)] == list(range(100))


def test_a_copy_has_a_descriptor_of_its_own(tmp_path: Path) -> None:
    """The end of a copy would close the file of the other, which would then write into whatever is opened next."""
    sink = JsonlSink(tmp_path / "log")
    log = writer(sink)
    log.emit("first")
    other = copy.deepcopy(log)
    other.emit("of the copy")
    del other
    with open(tmp_path / "of-a-user", "w+") as mine:
        log.emit("last")
        assert mine.read() == ""
    assert [line["event_type"] for line in lines(tmp_path / "log")] == ["first", "of the copy", "last"]
    log.close()


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for n in range(10):
        events = writer(JsonlSink(tmp_path / f"{n}.jsonl"))
        events.emit("x")
        events.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_names_of_events_are_told_apart() -> None:
    kinds = [value for name, value in vars(EventKind).items() if name.isupper()]
    assert len(kinds) == len(set(kinds))


class Slow(Collect):
    """Waits in each emit until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()
        self.closed = False

    def emit(self, event: Event) -> None:
        self.go.wait(10)
        super().emit(event)

    def close(self) -> None:
        self.closed = True


def test_the_background_sink_never_makes_the_emitter_wait_and_keeps_the_order() -> None:
    slow = Slow()
    events = writer(BackgroundSink(slow))
    began = time.monotonic()
    for step in range(50):
        events.emit("x", step=step)
    assert time.monotonic() - began < 1 and slow.events == []
    slow.go.set()
    events.close()
    assert [event.step for event in slow.events] == list(range(50)) and slow.closed


def test_the_background_sink_ends_in_time_when_the_disk_hangs() -> None:
    slow = Slow()
    events = writer(BackgroundSink(slow, drain_s=0.2))
    events.emit("x")
    began = time.monotonic()
    events.close()
    assert time.monotonic() - began < 3
    slow.go.set()


def test_draining_returns_when_the_events_so_far_are_written() -> None:
    slow = Slow()
    events = writer(Collect(), BackgroundSink(slow))
    events.drain()
    for step in range(3):
        events.emit("x", step=step)
    threading.Timer(0.1, slow.go.set).start()
    events.drain()
    assert [event.step for event in slow.events] == [0, 1, 2] and not slow.closed
    events.emit("x", step=3)
    events.close()
    events.drain()
    assert [event.step for event in slow.events] == [0, 1, 2, 3]


def test_the_background_sink_lives_through_a_broken_one() -> None:
    class Once(Collect):
        def emit(self, event: Event) -> None:
            if event.kind == "bad":
                raise RuntimeError("sink")
            super().emit(event)

    good = Once()
    events = writer(BackgroundSink(good))
    events.emit("bad")
    events.emit("good")
    events.close()
    assert [event.kind for event in good.events] == ["good"]


def test_a_background_sink_that_was_never_used_has_no_thread() -> None:
    events = writer(BackgroundSink(Collect()))
    events.close()
    events.emit("late")
    assert "resiliency-events" not in [thread.name for thread in threading.enumerate()]
