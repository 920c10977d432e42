"""Any sequence of events, however absurd, gives buckets that are non-negative and sum to the whole exactly."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from resiliency.errors import ConfigError
from resiliency.events import EventKind
from resiliency.goodput.ledger import Ledger, account
from resiliency.goodput.summary import schema, summarize
from resiliency.goodput.windows import Moment, Windows
from resiliency.telemetry.collect import Collector
from resiliency.telemetry.reader import LogReader

from .json_schema import problems
from .scripted import START
from .test_ledger_truth import crash, scale_down

SCHEMA: dict[str, Any] = json.loads(schema())
RUN: dict[str, Any] = SCHEMA["properties"]["runs"]["items"]

KINDS = sorted(value for name, value in vars(EventKind).items() if name.isupper())

# Few ranks and attempts, so that events meet.
small = st.integers(min_value=0, max_value=2)
seconds = st.one_of(
    st.floats(min_value=0, max_value=50),
    st.sampled_from([0, -1, 1e-9, 1e12, float("nan"), float("inf"), "3", None, True]),
)
times = st.one_of(
    st.floats(min_value=0, max_value=500).map(lambda offset: START + offset),
    st.sampled_from(
        [0, -5.0, 1e300, float("nan"), None, "2025-10-09T08:53:20", "2025-10-09T08:53:20.5+02:00", "soon", START + 1e8]
        + [100.0, START - 25_000, 4_080_000_000.0, "1970-01-01T00:00:07Z", "2099-12-31T23:59:59Z"]
    ),
)


#: Few, because each field that is drawn costs time.
EXTRAS: list[dict[str, Any]] = [
    {},
    {"since_callback_s": 3.0, "imports_s": 2.0, "since_group_s": 2.0, "group_s": 1.0, "opening_s": 0.5},
    {"since_callback_s": -1, "imports_s": 1e12, "since_group_s": 1e-9, "group_s": 1e12, "opening_s": float("nan")},
    {"span": "evaluation", "span_s": 7.0, "logs": ["/tmp/a.log", 3], "workload": "b"},
    {"span": None, "span_s": float("inf"), "logs": "x", "workload": 3},
    {"span": "x" * 200, "span_s": -2.0, "logs": {}},
    {"incident": 1, "plan": 1, "remedy": "hot_swap", "observation": "device_fault", "old": "h0", "new": 3},
    {"incident": "x", "plan": None, "remedy": "", "outcome": "done", "old": None, "lost_host": 5},
]


@st.composite
def records(draw: st.DrawFn) -> dict[str, Any]:
    record: dict[str, Any] = {"event_type": draw(st.sampled_from([*KINDS, "step", "step", "step", "made_up"]))}
    optional: dict[str, st.SearchStrategy[Any]] = {
        "timestamp": times,
        "monotonic_s": st.one_of(st.floats(min_value=0, max_value=600), st.sampled_from([None, -1e9, 1e17, -0.0])),
        "since_process_s": seconds,
        "since_launcher_s": seconds,
        "job_name": st.sampled_from(["a"] * 8 + ["b", "", None, 3]),
        "attempt": st.one_of(small, small, small, st.none(), st.just(-1)),
        "rank": st.one_of(small, small, small, st.sampled_from([-1, 1e18, 2.5, "1"])),
        "node_rank": st.one_of(small.map(float), st.none()),
        "host": st.sampled_from(["h0", "h1", "h2", "", None]),
        "step": st.one_of(st.integers(min_value=0, max_value=60), st.sampled_from([-3, 2**70, 10**12, 1.5, "7", 40.0])),
        "step_s": seconds,
        "data_wait_s": seconds,
        "stall_s": seconds,
        "busy_s": seconds,
        "eval_s": seconds,
        "duration_s": seconds,
        "save_in_flight": st.booleans(),
        "count": st.one_of(st.integers(min_value=1, max_value=20), st.sampled_from([0, -1, 10**9])),
        "step_max_s": seconds,
        "world_size": st.one_of(st.integers(min_value=0, max_value=9), st.just(10**15)),
        "reason": st.sampled_from(["finished", "signal", "exception", "", "else"]),
        "tier": st.sampled_from(["local", "peer", None]),
        "worker": small,
    }
    record.update(draw(st.sampled_from(EXTRAS)))
    for name, strategy in optional.items():
        if draw(st.integers(0, 9)) < 8:
            record[name] = draw(strategy)
    return record


def check(ledger: Ledger) -> None:
    wall = ledger.wall_us
    assert wall >= 0
    assert all(isinstance(amount, int) and amount >= 0 for amount in ledger.wall.values())
    assert all(isinstance(amount, int) and amount >= 0 for amount in ledger.gpu.values())
    assert sum(ledger.wall.values()) == wall
    assert sum(ledger.gpu.values()) == ledger.capacity * wall
    for lane in ledger.lanes:
        cursor = None
        for interval in lane.intervals:
            hole = cursor is not None and any(first == interval.start_us for first, _ in ledger.kept[1:])
            assert cursor is None or interval.start_us == cursor or hole, "no hole but what is left out, no overlap"
            assert cursor is None or interval.start_us >= cursor
            assert interval.length_us > 0
            assert sum(interval.parts.values()) == interval.length_us
            assert all(amount > 0 for amount in interval.parts.values())
            cursor = interval.end_us
        assert sum(interval.length_us for interval in lane.intervals) == wall
    summary = json.loads(json.dumps(summarize(ledger), allow_nan=False))
    assert not list(problems(summary, RUN, SCHEMA))


@settings(max_examples=120, deadline=None)
@given(st.lists(records(), max_size=40))
def test_any_events_in_any_order_give_an_account_that_sums(events: list[dict[str, Any]]) -> None:
    collector = Collector()
    for event in events:
        collector.add(event)
    for run in collector.runs.values():
        check(account(run))


moments = st.one_of(
    st.floats(min_value=-300, max_value=300).map(lambda seconds: Moment(seconds, is_offset=True)),
    st.floats(min_value=0, max_value=500).map(lambda seconds: Moment(START + seconds)),
)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(records(), max_size=20),
    st.one_of(st.none(), moments),
    st.one_of(st.none(), moments),
    st.lists(st.tuples(moments, moments), max_size=3),
    st.sampled_from([None, 1.0, 1e-9]),
)
def test_any_part_of_the_time_gives_an_account_that_sums(
    events: list[dict[str, Any]],
    since: Moment | None,
    until: Moment | None,
    exclude: list[tuple[Moment, Moment]],
    reference: float | None,
) -> None:
    collector = Collector()
    for event in [*events, *({**event, "timestamp": START + 400.0} for event in events[:3])]:
        collector.add(event)
    windows = Windows(since=since, until=until, exclude=tuple(exclude))
    for run in collector.runs.values():
        whole = account(run, reference_step_s=reference)
        try:
            part = account(run, windows=windows, reference_step_s=reference)
        except ConfigError:
            assert any((a.is_offset, a.from_end) != (b.is_offset, b.from_end) for a, b in exclude)
            continue
        check(part)
        assert part.wall_us <= whole.wall_us
        assert all(amount <= whole.gpu[bucket] for bucket, amount in part.gpu.items())


@settings(max_examples=50, deadline=None)
@given(st.lists(records(), max_size=30), st.binary(max_size=80), st.data())
def test_any_lines_cut_anywhere_give_an_account_that_sums(
    events: list[dict[str, Any]], noise: bytes, data: st.DataObject
) -> None:
    text = b"\n".join(json.dumps(event).encode() for event in events)
    cut = data.draw(st.integers(0, len(text)))
    reader = LogReader()
    reader._block(text[:cut] + noise + text[cut:] + b"\n")
    for run in reader.collector.runs.values():
        check(account(run))


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_parts_of_a_real_log_in_any_order_give_an_account_that_sums(data: st.DataObject) -> None:
    job = data.draw(st.sampled_from([crash, scale_down]))()
    events = data.draw(st.permutations(job.events[:: data.draw(st.integers(3, 40))]))
    doubled = data.draw(st.lists(st.sampled_from(job.events), max_size=20))
    collector = Collector()
    for event in [*events, *doubled]:
        collector.add(event)
    check(account(collector.runs["job"]))
