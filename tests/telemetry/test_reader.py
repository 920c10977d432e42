"""The quick ways of the reader read what the slow ones do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from resiliency.events import Event, EventKind
from resiliency.telemetry.collect import Collector
from resiliency.telemetry.facts import RunFacts
from resiliency.telemetry.reader import _PART_BYTES, LogReader
from resiliency.telemetry.utc_stamps import parse_stamp

START = 1_760_000_000.0


def line(kind: str, number: int, *, step: int | None = None, rank: int = 0, **fields: Any) -> bytes:
    """The event of this number, half a second after the one before."""
    time = START + 0.5 * number
    event = Event(
        kind=kind,
        time=time,
        monotonic_s=100.0 + 0.5 * number,
        run="job",
        attempt=0,
        rank=rank,
        host="h",
        step=step,
        fields=fields,
    )
    return event.to_json().encode()


def step(number: int, **fields: Any) -> bytes:
    times = {"step_s": 0.5, "data_wait_s": 0.125, "stall_s": 0.0, "save_in_flight": number % 2 == 1}
    return line(EventKind.STEP, number, step=number, **times, **fields)


def read(*lines: bytes) -> tuple[LogReader, RunFacts]:
    reader = LogReader()
    reader._block(b"".join(one + b"\n" for one in lines))
    (run,) = reader.collector.runs.values()
    return reader, run


def test_each_line_of_a_block_of_many_parts_is_read_once_and_in_its_place() -> None:
    lines = [step(number) for number in range(1, 1001)]
    lines.insert(500, b"")
    lines.insert(600, b'{"event_type":"cut')
    lines.insert(700, line(EventKind.WORKER_LOST, 700, rank=-1, reason="x" * 2 * _PART_BYTES))
    assert sum(map(len, lines)) > 4 * _PART_BYTES
    reader, run = read(*lines)
    (segment,) = run.segments
    total = segment.steps.total()
    assert (reader.lines, reader.torn_lines, run.events) == (1003, 1, 1001)
    assert (total.n, total.flight_n, segment.steps.gaps) == (1000, 500, [])
    assert (total.step_s, total.data_s, total.loop_s) == (500.0, 125.0, 0.0)


def test_a_line_of_more_steps_than_there_were_is_taken_for_what_there_can_be() -> None:
    """It goes the slow way, from its place in the block."""
    lines = [step(number) for number in range(1, 21)]
    lines[4] = step(5, busy_s=0.25, eval_s=0.0, loop_s=0.0625, count=7, step_max_s=0.5)
    lines[9] = step(10, busy_s=0.25, eval_s=0.0, loop_s=0.0625, count=0, step_max_s=0.5)
    collector = Collector()
    for one in lines:
        collector.add(json.loads(one))
    (slow,) = collector.runs["job"].segments
    reader, run = read(*lines)
    (segment,) = run.segments
    assert (reader.lines, run.events, reader.torn_lines) == (20, 20, 0)
    quick, wanted = segment.steps.total(), slow.steps.total()
    for name in ("n", "step_s", "busy_s", "loop_s", "flight_n", "max_s"):
        assert getattr(quick, name) == getattr(wanted, name), name
    assert segment.steps.low == slow.steps.low == 0


@pytest.mark.parametrize("odd", [b"\x7f", b"\\u007f", b"\\u0007", b"\\u202e", b"\\ud800", "\u202e".encode()])
def test_what_is_not_fit_to_be_shown_is_found_however_it_is_written(odd: bytes) -> None:
    lost = line(EventKind.WORKER_LOST, 1, rank=-1, reason="here")
    _, run = read(lost.replace(b"here", b"a%bb" % odd))
    assert run.marks[0].fields["reason"] == "a\ufffdb"


def test_a_line_holds_one_event_with_spaces_around_it_or_a_mark_before_it() -> None:
    saved = [line(EventKind.CHECKPOINT_SAVED, number, step=number, tier="local") for number in range(5)]
    reader, run = read(
        b" " + saved[0] + b"\t\r",
        b"\xef\xbb\xbf" + saved[1],
        b"\xef\xbb\xbf \t" + saved[2],
        saved[3] + b" " + saved[3],
        saved[4] + b"x",
    )
    assert (run.events, reader.torn_lines) == (3, 2)


def test_a_save_that_is_read_late_does_not_take_the_newest_ones_place() -> None:
    saved = [line(EventKind.CHECKPOINT_SAVED, number, step=number, tier="local") for number in (5, 9, 7)]
    _, run = read(*saved)
    assert run.tiers["local"].last_step == 9


def test_a_save_that_began_tells_the_host_of_its_rank_and_nothing_of_a_tier() -> None:
    first = json.loads(line(EventKind.TRAIN_STARTED, 1))
    del first["host"]
    _, run = read(json.dumps(first).encode(), line(EventKind.CHECKPOINT_STARTED, 2, step=1, stall_s=0.1))
    assert [segment.host for segment in run.segments] == ["h"]
    assert not run.tiers


@pytest.mark.parametrize(
    ("stamp", "seconds"),
    [
        ("2025-10-09T08:53:20.000000+00:00", START),
        (b"2025-10-09T08:53:20.000000+00:00", START),
        (" 2025-10-09T08:53:20Z\n", START),
        ("2025-10-09T08:53:20", START),
        ("2025-10-09T10:53:20.5+02:00", START + 0.5),
        (START, START),
        (True, None),
        ("soon", None),
        (10**400, None),
        (-1, None),
    ],
)
def test_a_stamp_is_read_in_any_form(stamp: Any, seconds: float | None) -> None:
    assert parse_stamp(stamp) == seconds
