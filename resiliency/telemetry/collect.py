"""Folds a stream of events, in any order and of any quality, into :class:`RunFacts`. Pure: no files, no clock.

Lines of one rank normally come in order; a late, duplicate or torn line changes the result by no more than that line.
The attempt number decides which attempt a line belongs to. Within one number a rank whose step number goes back while
its clock goes forward begins a new segment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from math import isfinite
from typing import Any

from resiliency.events import Event, EventKind
from resiliency.telemetry.facts import Mark, RunFacts, Segment, parse_stamp
from resiliency.telemetry.plain_text import plain
from resiliency.telemetry.stepstats import StepLine, StepStats

__all__ = ["Collector"]

#: Key of a segment that is still open: attempt number (None when the log has none) and rank or node.
_Key = tuple[int | None, int]
#: An event that is held back, with its kind and time.
_Held = tuple[Mapping[str, Any], str, float]

_MARKED = frozenset(
    {
        EventKind.LAUNCHER_STARTED,
        EventKind.RANKS_STARTED,
        EventKind.LAUNCHER_ENDED,
        EventKind.WORKER_LOST,
        EventKind.HOST_LOST,
        EventKind.AGENT_LOST,
        EventKind.RESTART_REQUESTED,
        EventKind.WORLD_RESIZED,
        EventKind.HANG_DETECTED,
        EventKind.HOST_SWAPPED,
        EventKind.PLAN_ENDED,
        EventKind.OBSERVED,
        EventKind.PREEMPTION_NOTICE,
        EventKind.CHECKPOINT_FAILED,
        EventKind.CHECKPOINT_CORRUPT,
        EventKind.CHECKPOINT_REPAIRED,
    }
)
#: Stalls of a rank, which belong to no tier.
_STALLS = frozenset({EventKind.CHECKPOINT_STARTED, EventKind.CHECKPOINT_FENCED})
#: Events that may show that the segment before them has ended, each with the attribute of a segment that gets its time.
_BEGINNINGS = {
    EventKind.JOB_STARTED: "started",
    EventKind.RESTORE_STARTED: "restore",
    EventKind.CHECKPOINT_LOADED: "loaded",
    EventKind.TRAIN_STARTED: "train",
}
#: Fields that name the rank an event is about; its ``rank`` is the one that wrote it.
_SUBJECT = ("worker", "worker_rank", "lost_rank", "global_rank")
MAX_SECONDS = 1e9
MAX_CLOCKS = 65_536
#: A doubted line follows another one when its number is higher by no more than this (and the steps that it covers).
NEXT_STEPS = 64
#: Once a leap of some steps between two lines is confirmed, leaps of this many times as many are not doubted.
MOST_PACES = 64
#: Seconds by which a stall may seem to begin before the end of the last step, because that step's line came late.
LONGEST_OVERLAP_S = 1.0
#: The last events that were read, this many or more and no steps, are known when they are read again.
MOST_SEEN = 1 << 17
#: Characters of the name of a span.
MOST_NAME = 80
#: Files of a rank's output, and characters of their paths.
MOST_LOGS, MOST_PATH = 4, 1024
#: Longest start that is believed, in seconds: a launcher that ran for longer before was not starting this attempt.
LONGEST_START_S = 86_400.0
#: Longest time from the start of our launcher to its first line, in seconds: all it does before is to import itself.
LONGEST_IMPORT_S = 600.0
#: Most hosts, other than its first one, that a rank may have moved to under one attempt number.
MOST_MOVES = 8


def _number(value: object) -> float | None:
    """A finite number, also if given as text; None for anything else."""
    if type(value) is float:
        return value if isfinite(value) else None
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, (int, str)):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            return None
        return number if isfinite(number) else None
    return None


def _count(value: object) -> int | None:
    """An integer >= 0 (also ``40.0``, as the older library exports it); None for anything else."""
    if type(value) is int:
        return value if 0 <= value <= 2**62 else None
    number = _number(value)
    if number is None or number < 0 or number > 2**62 or number != int(number):
        return None
    return int(number)


def _seconds(value: object) -> float:
    """A duration; 0 when it is missing, negative or too large."""
    if value is None:
        return 0.0
    if type(value) is float and 0.0 < value < MAX_SECONDS:
        return value
    number = _number(value)
    return number if number is not None and 0.0 < number < MAX_SECONDS else 0.0


def _since(record: Mapping[str, Any], key: str) -> float:
    """Seconds since a part of this start began; 0 when the event does not tell, or tells more than is believed."""
    seconds = _seconds(record.get(key))
    return seconds if seconds < LONGEST_START_S else 0.0


def _name(value: object) -> str:
    """The name of a span as a report shows it."""
    return str(value or "unnamed")[:MOST_NAME]


def _monotonic(value: object) -> float | None:
    """Seconds since the boot of a host; None when they are missing, negative or too many."""
    number = value if type(value) is float else _number(value)
    return number if number is not None and 0.0 <= number < MAX_SECONDS else None


def _are_plain(values: Iterable[object]) -> bool:
    """True when :func:`plain` would change none of the values; False also for lists and dicts, without a look into
    them. One loop with few calls, because it runs for each event."""
    for value in values:
        kind = type(value)
        if kind is int or kind is float:
            continue
        if not value.isprintable() if isinstance(value, str) else isinstance(value, (list, dict)):
            return False
    return True


def _plain(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: plain(value) for key, value in record.items()}


class Collector:
    """Sorts events into runs. Thread: one.

    ``add`` takes one event of any kind; ``segment_for_step`` and ``add_step`` take steps that the reader has parsed.
    """

    def __init__(self) -> None:
        self.runs: dict[str, RunFacts] = {}
        #: Grows when a segment is opened or its steps begin anew; the reader then drops its own cache of segments.
        self.generation = 0
        #: Open segments by run.
        self._open: dict[str, dict[_Key, Segment]] = {}
        self._open_nodes: dict[str, dict[_Key, Segment]] = {}
        #: By run: the hosts of its ranks.
        self._hosts: defaultdict[str, set[str]] = defaultdict(set)
        #: By run, attempt and rank: hosts other than that of the rank's first line, each with the event from there that
        #: waits for a second one; None once the second one has come.
        self._moved: dict[tuple[str, int | None, int], dict[str, _Held | None]] = {}
        #: Hashes of the last events, in two sets, of which the older one is forgotten when the newer one is full.
        self._seen: set[int] = set()
        self._seen_before: set[int] = set()
        self._handlers: dict[str, Callable[[RunFacts, Segment, float, Mapping[str, Any]], None]] = {
            EventKind.JOB_STARTED: self._job_started,
            EventKind.RESTORE_STARTED: self._restore_started,
            EventKind.CHECKPOINT_LOADED: self._loaded,
            EventKind.TRAIN_STARTED: self._train_started,
            EventKind.TRAIN_ENDED: self._train_ended,
            EventKind.JOB_TERMINATED: self._job_terminated,
            EventKind.PROCESS_ENDED: self._process_ended,
            EventKind.SPAN_STARTED: self._span_started,
            EventKind.SPAN_ENDED: self._span_ended,
            EventKind.CHECKPOINT_STARTED: self._stalled,
            EventKind.CHECKPOINT_FENCED: self._stalled,
        }

    def run(self, name: str) -> RunFacts:
        kept = self.runs.get(name)
        if kept is None:
            kept = self.runs[name] = RunFacts(name)
            self._open[name] = {}
            self._open_nodes[name] = {}
        return kept

    # -- any event -----------------------------------------------------------------------------------------------

    def add(self, record: Event | Mapping[str, Any], *, drop_copies: bool = False, is_plain: bool = False) -> None:
        """Takes one event. Never raises on its content: unusable events are counted in ``quality``.

        Args:
            record: an :class:`Event`, or the object of one JSON line.
            drop_copies: leave out an event that says the same as an earlier one, in whatever order or form: log
                shippers and exports deliver at least once.
            is_plain: True when :func:`plain` is known to change nothing in it.
        """
        if isinstance(record, Event):
            record = {
                **record.fields,
                "timestamp": record.time,
                "monotonic_s": record.monotonic_s,
                "job_name": record.run,
                "event_type": record.kind,
                "attempt": record.attempt,
                "rank": record.rank,
                "host": record.host,
                "step": record.step,
            }
        if not is_plain and not _are_plain(record.values()):
            record = _plain(record)
        kind = record.get("event_type")
        name = record.get("job_name")
        if not isinstance(name, str) or not name:
            name = "default"
        run = self.runs.get(name) or self.run(name)
        run.events += 1
        if not isinstance(kind, str):
            run.quality["bad_values"] += 1
            return
        attempt = _count(record.get("attempt"))
        if attempt is None and "attempt" in record:
            run.quality["bad_values"] += 1  # taken as None, it would be an attempt of its own
            return
        stamp = record.get("timestamp", record.get("time"))
        time = parse_stamp(stamp)
        if time is None:
            run.quality["bad_times"] += 1
            return
        if kind == EventKind.STEP:
            self._parse_step(run, record, time, attempt)
            return
        if drop_copies and self._was_seen(hash(_content(record))):
            run.quality["duplicates"] += 1
            return
        if isinstance(stamp, str) and "+" not in stamp and stamp[-1:].isdigit() and "-" not in stamp[11:]:
            run.quality["stamps_without_zone"] += 1
        run.kinds[kind] += 1
        self._take(run, record, kind, time, attempt)

    def _was_seen(self, key: int) -> bool:
        """True when an event with this hash was read before; otherwise remembers it."""
        if key in self._seen or key in self._seen_before:
            return True
        self._seen.add(key)
        if len(self._seen) >= MOST_SEEN:
            self._seen, self._seen_before = set(), self._seen
        return False

    def _take(self, run: RunFacts, record: Mapping[str, Any], kind: str, time: float, attempt: int | None) -> None:
        """Takes one event that is no step."""
        rank = _count(record.get("rank"))
        mono = _monotonic(record.get("monotonic_s"))
        host = str(record.get("host") or "")
        owner: Segment | None = None
        handler = self._handlers.get(kind)
        known = self._open[run.name].get((attempt, rank)) if rank is not None else None
        if known is not None and host and known.host and host != known.host:
            if handler is not None and self._is_held(run, known, kind, time, mono, host, record):
                return
            if self._moved.get((run.name, attempt, known.lane), {}).get(host, ()) is not None:
                known = None  # the event is of another process
        if handler is not None:
            if known is not None and known.host and kind not in _BEGINNINGS:
                segment: Segment | None = known  # what _segment returns, without the call: this runs for each save
            else:
                segment = self._segment(run, kind, time, mono, attempt, rank, _count(record.get("node_rank")), host)
            if segment is not None:
                owner = segment
                time = segment.hear(time, mono)
                segment.saw(time)
                handler(run, segment, time, record)
        if owner is None and known is not None:
            owner = known
            time = known.hear(time, mono)
        elif owner is None and mono is not None and host:
            clock = run.others.get((host, attempt))
            if clock is None and len(run.others) < MAX_CLOCKS:
                clock = run.others[host, attempt] = Segment(attempt=attempt, lane=-1, host=host, serial=-1)
            if clock is not None:
                clock.boot = str(record.get("boot") or clock.boot)[:MOST_NAME]
                owner = clock
                time = clock.hear(time, mono)
        if owner is not None:
            owner.wrote(time)
        else:
            run.saw_alone(time)
        run.saw(time)
        if kind not in _STALLS:
            self._job_level(run, kind, time, rank, attempt, host, record, owner)

    # -- segments ------------------------------------------------------------------------------------------------

    def _segment(
        self,
        run: RunFacts,
        kind: str,
        time: float,
        mono: float | None,
        attempt: int | None,
        rank: int | None,
        node: int | None,
        host: str,
    ) -> Segment | None:
        """The open segment of this rank (or node), or a new one when the event shows that the old one has ended. None
        when the event names neither."""
        if rank is not None:
            table, store, lane = self._open[run.name], run.segments, rank
        elif node is not None and kind in (EventKind.JOB_STARTED, EventKind.JOB_TERMINATED):
            table, store, lane = self._open_nodes[run.name], run.nodes, node
            host = host or f"node-{node}"
        else:
            return None
        key = (attempt, lane)
        segment = table.get(key)
        if segment is None or (
            kind in _BEGINNINGS
            and self._is_over(segment, kind, segment.guess(time, mono))
            and not segment.lacks(_BEGINNINGS[kind], mono)
        ):
            rollback = segment is not None and kind in (EventKind.RESTORE_STARTED, EventKind.CHECKPOINT_LOADED)
            segment = self._new(run, table, store, key, host)
            segment.rollback = rollback
        elif host and not segment.host:
            segment.host = host
        return segment

    def _is_held(
        self,
        run: RunFacts,
        segment: Segment,
        kind: str,
        time: float,
        mono: float | None,
        host: str,
        record: Mapping[str, Any],
    ) -> bool:
        """True when this line is held back. A rank's line that comes from a host of other ranks waits for a second one
        from there, because either the rank was moved or this one line has the wrong rank or host."""
        is_over = kind in _BEGINNINGS and self._is_over(segment, kind, segment.guess(time, mono))
        key = (segment.attempt, segment.lane)
        hosts = self._moved.setdefault((run.name, *key), {})
        if not is_over and host not in hosts and len(hosts) < MOST_MOVES and host in self._hosts[run.name]:
            hosts[host] = (record, kind, time)
            run.lines_held += 1
            return True
        first = hosts.get(host)
        if first is not None:
            hosts[host] = None
            run.lines_held -= 1
            if segment.lines <= 1 and not is_over:  # the segment's only line may be the wrong one
                self._new(run, self._open[run.name], run.segments, key, host)
            self._take(run, *first, segment.attempt)
        return False

    def _new(self, run: RunFacts, table: dict[_Key, Segment], store: list[Segment], key: _Key, host: str) -> Segment:
        segment = Segment(attempt=key[0], lane=key[1], host=host, serial=len(store))
        table[key] = segment
        if store is run.segments:
            self._hosts[run.name].add(host)
        store.append(segment)
        self.generation += 1
        return segment

    @staticmethod
    def _is_over(segment: Segment, kind: str, time: float) -> bool:
        if kind == EventKind.JOB_STARTED:
            began = segment.steps.high >= 0 or segment.terminated is not None or segment.train is not None
            if segment.attempt is None:
                # The older library logs no attempt numbers: each start is a new attempt.
                began = began or segment.started is not None
            end = segment.end
            return began and end is not None and time > end
        if kind in (EventKind.RESTORE_STARTED, EventKind.CHECKPOINT_LOADED):
            last = segment.last_step_time()
            return last is not None and time > last
        if kind == EventKind.TRAIN_STARTED:
            return segment.train_ended is not None and time > segment.train_ended
        return False

    # -- steps ---------------------------------------------------------------------------------------------------

    def segment_for_step(self, run: RunFacts, attempt: int | None, rank: int, host: str) -> Segment:
        table = self._open[run.name]
        segment = table.get((attempt, rank))
        if segment is None:
            segment = self._new(run, table, run.segments, (attempt, rank), host)
        return segment

    def add_step(
        self,
        run: RunFacts,
        segment: Segment,
        step: int,
        count: int,
        step_s: float,
        data_s: float,
        stall_s: float,
        eval_s: float,
        busy_s: float,
        in_flight: bool,
        max_s: float,
        stamp: bytes | float,
        mono: float | None,
        loop_s: float = 0.0,
    ) -> None:
        """Adds one step line. A step number that was seen before is a copy, or shows that the rank went back and began
        a new segment."""
        stats = segment.steps
        line = (step, count, step_s, data_s, stall_s, eval_s, busy_s, in_flight, max_s, stamp, mono, loop_s)
        if step > stats.most and step - count != stats.high:
            if not self._is_confirmed(run, segment, line):
                return
            stats = segment.steps
        elif step <= stats.high:
            is_late = stats.missing(step)
            later = _later(stamp, mono, stats.last_stamp, stats.last_mono)
            if not later and not is_late:
                run.quality["duplicates"] += 1
                return
            if later and (not is_late or step <= stats.low):
                if not self._is_confirmed(run, segment, line):
                    return
                segment = self._open[run.name][segment.attempt, segment.lane]
                stats = segment.steps
            else:
                run.quality["late_lines"] += 1
        stats.add(step, count, step_s, data_s, stall_s, eval_s, busy_s, in_flight, max_s, stamp, mono, loop_s)

    def _is_confirmed(self, run: RunFacts, segment: Segment, line: StepLine) -> bool:
        """True when the doubted line before confirms ``line``, whose step number leaps, or goes back as the clock goes
        on.

        A first such line only waits for the next one (False), because one wrong number must not end a segment. On True
        the line that waited has been added, to a new segment if the rank went back, and the caller adds ``line``.
        """
        stats = segment.steps
        waited, stats.waits = stats.waits, line
        if waited is None or not _follows(line, waited, stats):
            run.quality["steps_set_aside"] += 1
            return False
        stats.waits = None
        run.quality["steps_set_aside"] -= 1
        stats.leap = max(stats.leap, MOST_PACES * (line[0] - waited[0]))
        near = line[0] <= waited[0] + NEXT_STEPS + line[1]
        if near and len(stats.head) == 1 and not stats.clean and not stats.flight:
            run.quality["steps_set_aside"] += 1  # the segment's first line was wrong
            segment.steps = StepStats()
            self.generation += 1
        elif line[0] <= stats.high:
            segment = self._new(run, self._open[run.name], run.segments, (segment.attempt, segment.lane), segment.host)
            segment.rollback = True
        segment.steps.add(*waited)
        if not run.quality["steps_set_aside"]:
            del run.quality["steps_set_aside"]
        return True

    def _parse_step(self, run: RunFacts, record: Mapping[str, Any], time: float, attempt: int | None) -> None:
        rank, step = _count(record.get("rank")), _count(record.get("step"))
        count = _count(record.get("count")) or 1
        if rank is None or step is None:
            run.quality["bad_values"] += 1
            return
        count = min(count, max(step, 1))
        segment = self.segment_for_step(run, attempt, rank, str(record.get("host") or ""))
        step_s = _seconds(record.get("step_s"))
        self.add_step(
            run,
            segment,
            step,
            count,
            step_s,
            _seconds(record.get("data_wait_s")),
            _seconds(record.get("stall_s")),
            _seconds(record.get("eval_s")),
            _seconds(record.get("busy_s")),
            record.get("save_in_flight") is True,
            _seconds(record.get("step_max_s")) or step_s / count,
            time,
            _monotonic(record.get("monotonic_s")),
            _seconds(record.get("loop_s")),
        )

    # -- one handler per kind --------------------------------------------------------------------------------------

    def _job_started(self, run: RunFacts, segment: Segment, time: float, record: Mapping[str, Any]) -> None:
        if segment.started is not None:
            run.quality["duplicates"] += 1
        if segment.started is None or time < segment.started:
            segment.put("started", time)
        if since := _since(record, "since_process_s"):
            segment.put("process", time - since)
        if since := _since(record, "since_callback_s"):
            segment.put("callback", time - since)
            if record.get("imports_s") is not None:
                segment.imports_s = _seconds(record.get("imports_s"))
        if since := _since(record, "since_group_s"):
            segment.put("group", time - since)
            segment.put("grouped", min(time, time - since + _seconds(record.get("group_s"))))
        if since := _since(record, "opening_s"):
            segment.put("opening", time - since)
        if (workload := record.get("workload")) and isinstance(workload, str) and len(run.workloads) < MOST_LOGS:
            run.workloads.add(workload)
        logs = record.get("logs")
        if isinstance(logs, list):
            segment.logs = tuple(str(path)[:MOST_PATH] for path in logs[:MOST_LOGS])
        segment.device = str(record.get("device") or segment.device)[:32]
        segment.boot = str(record.get("boot") or segment.boot)[:MOST_NAME]
        if since := _since(record, "since_launcher_s"):
            segment.put("launched", time - since)
        segment.world = _count(record.get("world_size")) or segment.world

    def _restore_started(self, run: RunFacts, segment: Segment, time: float, record: Mapping[str, Any]) -> None:
        if segment.restore is None or time < segment.restore:
            segment.put("restore", time)

    def _loaded(self, run: RunFacts, segment: Segment, time: float, record: Mapping[str, Any]) -> None:
        step = _count(record.get("step"))
        if segment.loaded is None or time >= segment.loaded:
            segment.put("loaded", time)
            segment.loaded_step = step if step is not None else segment.loaded_step
            segment.loaded_s = _seconds(record.get("duration_s")) or segment.loaded_s
            segment.loaded_from = str(record.get("source") or record.get("tier") or segment.loaded_from)

    def _train_started(self, run: RunFacts, segment: Segment, time: float, record: Mapping[str, Any]) -> None:
        if segment.train is None or time < segment.train:
            segment.put("train", time)
        if segment.steps.high < 0:
            segment.steps.begins(time, _monotonic(record.get("monotonic_s")))
        step = _count(record.get("step"))
        segment.train_step = step if step is not None else segment.train_step
        world = _count(record.get("world_size")) or segment.world
        if segment.world is not None and world != segment.world:
            segment.world_before = segment.world
        segment.world = world

    def _train_ended(self, run: RunFacts, segment: Segment, time: float, record: Mapping[str, Any]) -> None:
        if segment.train_ended is None or time > segment.train_ended:
            segment.put("train_ended", time)

    def _job_terminated(self, run: RunFacts, segment: Segment, time: float, record: Mapping[str, Any]) -> None:
        if segment.terminated is None or time > segment.terminated:
            segment.put("terminated", time)
        # The first reason counts: an engine that is closed afterwards only follows from it.
        segment.reason = segment.reason or str(record.get("reason") or "")

    def _process_ended(self, run: RunFacts, segment: Segment, time: float, record: Mapping[str, Any]) -> None:
        """Does nothing: only the event's time counts, and the segment has seen that already."""

    def _span_started(self, run: RunFacts, segment: Segment, time: float, record: Mapping[str, Any]) -> None:
        segment.span_began(_name(record.get("span")), time)

    def _span_ended(self, run: RunFacts, segment: Segment, time: float, record: Mapping[str, Any]) -> None:
        segment.span_ended(_name(record.get("span")), time, _seconds(record.get("span_s")))

    def _stalled(self, run: RunFacts, segment: Segment, time: float, record: Mapping[str, Any]) -> None:
        stall = _seconds(record.get("stall_s"))
        if stall > LONGEST_OVERLAP_S:
            before = segment.last_step_time() or segment.train
            if before is not None and 0.0 <= time - before < stall - LONGEST_OVERLAP_S:
                run.too_long += 1
                return  # longer than the time since the step before
        if record.get("event_type") == EventKind.CHECKPOINT_STARTED:
            segment.saves += 1
        if stall > 0.0:
            segment.stall_s += stall
            if record.get("event_type") == EventKind.CHECKPOINT_STARTED:
                segment.stall_between_s += stall
            segment.stalled(time, stall)

    def _job_level(
        self,
        run: RunFacts,
        kind: str,
        time: float,
        rank: int | None,
        attempt: int | None,
        host: str,
        record: Mapping[str, Any],
        owner: Segment | None,
    ) -> None:
        """Events about the run as a whole, whichever process wrote them."""
        step = _count(record.get("step"))
        if kind == EventKind.LAUNCHER_STARTED and (since := _seconds(record.get("since_process_s"))):
            if since < LONGEST_IMPORT_S:
                time -= since
            else:
                run.starts_forgotten += 1
        if kind in _MARKED or (kind == EventKind.PROCESS_ENDED and rank is None):
            subject = next((n for n in (_count(record.get(key)) for key in _SUBJECT) if n is not None), None)
            about = str(record.get("lost_host") or record.get("node") or host)
            fields = {k: v for k, v in record.items() if k not in _COMMON and isinstance(v, (str, int, float, bool))}
            who = subject if subject is not None else rank
            told = owner.told_now(time) if owner is not None else None
            run.mark(Mark(time, kind, who, about, attempt, step, rank is None, fields, told, owner))
        if kind == EventKind.USER_SCHEDULED:
            run.scheduled = time if run.scheduled is None else min(time, run.scheduled)
        elif kind == EventKind.USER_TERMINATED:
            run.terminated = time if run.terminated is None else max(time, run.terminated)
        elif kind.startswith("checkpoint_"):
            _checkpoint(run, kind, time, step, f"{rank}@{host}", record)


def _content(record: Mapping[str, Any]) -> Hashable:
    """What an event says, whatever the order of its keys, and whether a number is written as 40 or 40.0."""
    try:
        return frozenset(record.items())
    except TypeError:  # it holds a list
        flat = ((key, str(value) if isinstance(value, (list, dict)) else value) for key, value in record.items())
        return frozenset(flat)


_COMMON = frozenset(
    {"timestamp", "job_name", "event_type", "v", "monotonic_s", "attempt", "rank", "host", "step", "time"}
)


def _follows(line: StepLine, waited: StepLine, stats: StepStats) -> bool:
    """True when ``line`` goes on from ``waited``, both of them doubted, and no other line came in between: so logs a
    process, each step or every hundredth, whose step number has leapt or gone back."""
    if not waited[0] < line[0] or not _later(waited[9], waited[10], stats.last_stamp, stats.last_mono):
        return False
    return line[0] <= max(waited[0] + NEXT_STEPS + line[1], 2 * waited[0] - stats.high, stats.high)


def _later(
    stamp: bytes | float, mono: bytes | float | None, last_stamp: bytes | float, last_mono: bytes | float | None
) -> bool:
    """True when the first time is after the last one: by the monotonic clock if both have it, else by the stamps."""
    if mono is not None and last_mono is not None:
        return float(mono) > float(last_mono)
    time, last = parse_stamp(stamp), parse_stamp(last_stamp)
    return time is not None and last is not None and time > last


def _checkpoint(
    run: RunFacts, kind: str, time: float, step: int | None, emitter: str, record: Mapping[str, Any]
) -> None:
    """Counts one checkpoint event under its tier."""
    tier = run.tier(str(record.get("source") or record.get("tier") or "unnamed"))
    if kind == EventKind.CHECKPOINT_SAVED:
        tier.saved[emitter if len(tier.saved) < 4096 else ""] += 1
        tier.bytes += _count(record.get("bytes")) or 0
        if step is not None:
            if step > tier.last_step:
                tier.last_step = step
            run.saved(time, step)
            if run.max_saved_step is None or step > run.max_saved_step:
                run.max_saved_step = step
    elif kind == EventKind.CHECKPOINT_LOADED:
        tier.loaded[emitter if len(tier.loaded) < 4096 else ""] += 1
        seconds = _seconds(record.get("duration_s"))
        if seconds > 0.0:
            tier.restore_s += seconds
            tier.restore_n += 1
        if step is not None:
            if len(run.loads) < 4096:
                run.loads.append((time, step))
            run.min_loaded_step = step if run.min_loaded_step is None else min(run.min_loaded_step, step)
    elif kind == EventKind.CHECKPOINT_DURABLE:
        tier.durable[emitter if len(tier.durable) < 4096 else ""] += 1
        seconds = _seconds(record.get("duration_s"))
        if seconds > 0.0:
            tier.durable_n += 1
            tier.durable_s += seconds
            tier.durable_max_s = max(tier.durable_max_s, seconds)
    elif kind == EventKind.CHECKPOINT_FAILED:
        tier.failed += 1
    elif kind == EventKind.CHECKPOINT_SKIPPED:
        tier.skipped += 1
    elif kind == EventKind.CHECKPOINT_CORRUPT:
        tier.corrupt += 1
    elif kind == EventKind.CHECKPOINT_REPAIRED:
        tier.repaired += 1
    elif kind == EventKind.CHECKPOINT_DELETED:
        tier.deleted += 1
