"""Folds a stream of events, in any order and of any quality, into :class:`RunFacts`. Pure: no files, no clock.

Lines of one rank normally come in order; a late, duplicate or torn line changes the result by no more than that line.
The attempt number decides which attempt a line belongs to. Within one number a rank whose step number goes back while
its clock goes forward begins a new segment. A line that does not fit the schema, or that lies outside the life of its
process, is refused and counted, because none of our writers can have written it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from math import isfinite
from typing import Any

from resiliency.events import Event, EventKind
from resiliency.telemetry.facts import Mark, RunFacts, Segment, parse_stamp
from resiliency.telemetry.plain_text import plain
from resiliency.telemetry.segment import LIFE_TOLERANCE_S
from resiliency.telemetry.stepstats import StepLine

__all__ = ["Collector"]

#: Key of a segment that is still open: attempt number (None when the log has none), rank or node, and host; "" is for
#: the latest one on any host.
_Key = tuple[int | None, int, str]

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
        EventKind.CHECKPOINT_PASSED_OVER,
        EventKind.CHECKPOINT_NAME_REFUSED,
    }
)
#: Stalls of a rank, which belong to no tier.
_STALLS = frozenset({EventKind.CHECKPOINT_STARTED, EventKind.CHECKPOINT_FENCED})
#: Events that may show that the segment before them has ended.
_BEGINNINGS = frozenset(
    {EventKind.JOB_STARTED, EventKind.RESTORE_STARTED, EventKind.CHECKPOINT_LOADED, EventKind.TRAIN_STARTED}
)
#: Events that may carry a time from before the start of their process is logged: spans are kept until there is a log.
_EARLY = frozenset({EventKind.JOB_STARTED, EventKind.SPAN_STARTED, EventKind.SPAN_ENDED})
#: Fields that name the rank an event is about; its ``rank`` is the one that wrote it.
_SUBJECT = ("worker", "worker_rank", "lost_rank", "global_rank")
MAX_SECONDS = 1e9
MAX_OTHERS = 65_536
#: The last events that were read, this many or more and no steps, are known when they are read again.
MOST_SEEN = 1 << 17
#: Any step number is below this.
ANY_STEP = 1 << 62
#: Characters of the name of a span.
MOST_NAME = 80
#: Files of a rank's output, and characters of their paths.
MOST_LOGS, MOST_PATH = 4, 1024
#: A launcher that has run for longer than this many seconds was not starting this attempt.
LONGEST_START_S = 86_400.0


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


def _fits_schema(record: Mapping[str, Any]) -> bool:
    """True when what names the process of an event is what our writers, or the older library's, can have written."""
    if not isinstance(record.get("event_type"), str):
        return False
    if "attempt" in record and _count(record["attempt"]) is None:
        return False  # taken as None, it would be an attempt of its own
    rank = record.get("rank")
    if record["event_type"] == EventKind.STEP:
        return _count(rank) is not None and _count(record.get("step")) is not None
    return rank is None or rank == -1 or _count(rank) is not None  # -1: a launcher, an agent, a supervisor


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
        name = record.get("job_name")
        if not isinstance(name, str) or not name:
            name = "default"
        run = self.runs.get(name) or self.run(name)
        run.events += 1
        stamp = record.get("timestamp", record.get("time"))
        time = parse_stamp(stamp)
        if not _fits_schema(record):
            run.quality["bad_values"] += 1
            return
        if time is None:
            run.quality["bad_times"] += 1
            return
        kind: str = record["event_type"]
        attempt = _count(record.get("attempt"))
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
        handler = self._handlers.get(kind)
        segment = None if rank is None else self._known(run, attempt, rank, host)
        if handler is not None and (segment is None or kind in _BEGINNINGS):
            segment = self._segment(run, kind, time, mono, attempt, rank, record)
        if segment is not None and handler is not None and kind not in _EARLY:
            if mono is not None and not segment.lived_at(segment.time_of(time, mono) or time):
                run.quality["refused_outside_life"] += 1
                return
            segment.acts += 1
        if segment is not None and not segment.host:
            segment.host = host
        owner = segment if segment is not None else _other(run, attempt, host, record)
        time = owner.hear(time, mono if segment is not None or owner.host else None)  # else it may be of any host
        if segment is not None and handler is not None:
            segment.saw(time)
            handler(run, segment, time, record)
        owner.wrote(time)
        if kind not in _STALLS:
            self._job_level(run, kind, time, rank, attempt, host, record, owner)

    # -- segments ------------------------------------------------------------------------------------------------

    def _known(self, run: RunFacts, attempt: int | None, rank: int, host: str) -> Segment | None:
        """The open segment of a rank: that of this host, else the latest one."""
        table = self._open[run.name]
        return table.get((attempt, rank, host)) or table.get((attempt, rank, ""))

    def _segment(
        self,
        run: RunFacts,
        kind: str,
        time: float,
        mono: float | None,
        attempt: int | None,
        rank: int | None,
        record: Mapping[str, Any],
    ) -> Segment | None:
        """The open segment of this rank (or node), or a new one when the event shows that the old one has ended. None
        when the event names neither."""
        node, host = _count(record.get("node_rank")), str(record.get("host") or "")
        if rank is not None:
            table, store, lane = self._open[run.name], run.segments, rank
        elif node is not None and kind in (EventKind.JOB_STARTED, EventKind.JOB_TERMINATED):
            table, store, lane = self._open_nodes[run.name], run.nodes, node
            host = host or f"node-{node}"
        else:
            return None
        segment = table.get((attempt, lane, host)) or table.get((attempt, lane, ""))
        if segment is None:
            return self._new(table, store, attempt, lane, host)
        now = segment.time_of(time, mono) or time
        if kind == EventKind.JOB_STARTED:
            if _is_of_another(segment, record, now) or _is_over(segment, kind, now, time):
                return self._new(table, store, attempt, lane, host)
        elif kind in _BEGINNINGS and _is_over(segment, kind, now, time):
            segment = self._new(table, store, attempt, lane, host, before=segment)
            segment.rollback = kind != EventKind.TRAIN_STARTED
        return segment

    def _new(
        self,
        table: dict[_Key, Segment],
        store: list[Segment],
        attempt: int | None,
        lane: int,
        host: str,
        *,
        before: Segment | None = None,
    ) -> Segment:
        """Opens a segment; ``before`` is the one before it in the same process."""
        segment = Segment(attempt=attempt, lane=lane, host=host, serial=len(store))
        if before is not None:
            segment.host, segment.boot, segment.offset = before.host, before.boot, before.offset
        table[attempt, lane, host] = table[attempt, lane, ""] = segment
        store.append(segment)
        self.generation += 1
        return segment

    # -- steps ---------------------------------------------------------------------------------------------------

    def segment_for_step(self, run: RunFacts, attempt: int | None, rank: int, host: str) -> Segment:
        segment = self._known(run, attempt, rank, host)
        if segment is None:
            segment = self._new(self._open[run.name], run.segments, attempt, rank, host)
        return segment

    def add_step(self, run: RunFacts, segment: Segment, line: StepLine) -> None:
        """Adds one step line. A step number that was seen before is a copy, or shows that the rank went back and began
        a new segment."""
        step, stamp, mono = line[0], line[9], None if line[10] is None else float(line[10])
        if segment.offset is None and mono is not None:
            segment.offset = (parse_stamp(stamp) or 0.0) - mono
        if mono is not None and not segment.lived_at(segment.time_of(stamp, mono) or 0.0):
            run.quality["refused_outside_life"] += 1
            return
        stats = segment.steps
        if step <= stats.high:
            is_late = stats.missing(step)
            later = _later(stamp, mono, stats.last_stamp, stats.last_mono)
            if not later and not is_late:
                run.quality["duplicates"] += 1
                return
            if later and (not is_late or step <= stats.low):
                table, key = self._open[run.name], (segment.attempt, segment.lane, segment.host)
                segment = self._new(table, run.segments, *key, before=segment)
                segment.rollback = True
                stats = segment.steps
            else:
                run.quality["late_lines"] += 1
        stats.add(*line)
        stats.most = ANY_STEP if segment.ended is None else -1

    def _parse_step(self, run: RunFacts, record: Mapping[str, Any], time: float, attempt: int | None) -> None:
        rank, step = _count(record.get("rank")) or 0, _count(record.get("step")) or 0
        count = min(_count(record.get("count")) or 1, max(step, 1))
        segment = self.segment_for_step(run, attempt, rank, str(record.get("host") or ""))
        names = ("step_s", "data_wait_s", "stall_s", "eval_s", "busy_s", "loop_s")
        step_s, data_s, stall_s, eval_s, busy_s, loop_s = (_seconds(record.get(name)) for name in names)
        in_flight, max_s = record.get("save_in_flight") is True, _seconds(record.get("step_max_s")) or step_s / count
        mono = _monotonic(record.get("monotonic_s"))
        line = (step, count, step_s, data_s, stall_s, eval_s, busy_s, in_flight, max_s, time, mono, loop_s)
        self.add_step(run, segment, line)

    # -- one handler per kind --------------------------------------------------------------------------------------

    def _job_started(self, run: RunFacts, segment: Segment, time: float, record: Mapping[str, Any]) -> None:
        if segment.started is not None:
            run.quality["duplicates"] += 1
        if segment.started is None or time < segment.started:
            segment.started = time
        if since := _seconds(record.get("since_process_s")):
            segment.process = time - since
        if since := _seconds(record.get("since_callback_s")):
            segment.callback = time - since
            if record.get("imports_s") is not None:
                segment.imports_s = _seconds(record.get("imports_s"))
        if since := _seconds(record.get("since_group_s")):
            segment.group = time - since
            segment.grouped = min(time, time - since + _seconds(record.get("group_s")))
        if since := _seconds(record.get("opening_s")):
            segment.opening = time - since
        if (workload := record.get("workload")) and isinstance(workload, str) and len(run.workloads) < MOST_LOGS:
            run.workloads.add(workload)
        logs = record.get("logs")
        if isinstance(logs, list):
            segment.logs = tuple(str(path)[:MOST_PATH] for path in logs[:MOST_LOGS])
        segment.device = str(record.get("device") or segment.device)[:32]
        segment.boot = str(record.get("boot") or segment.boot)[:MOST_NAME]
        if 0.0 < (since := _seconds(record.get("since_launcher_s"))) < LONGEST_START_S:
            segment.launched = time - since
        segment.world = _count(record.get("world_size")) or segment.world

    def _restore_started(self, run: RunFacts, segment: Segment, time: float, record: Mapping[str, Any]) -> None:
        if segment.restore is None or time < segment.restore:
            segment.restore = time

    def _loaded(self, run: RunFacts, segment: Segment, time: float, record: Mapping[str, Any]) -> None:
        step = _count(record.get("step"))
        if segment.loaded is None or time >= segment.loaded:
            segment.loaded = time
            segment.loaded_step = step if step is not None else segment.loaded_step
            segment.loaded_s = _seconds(record.get("duration_s")) or segment.loaded_s
            segment.loaded_from = str(record.get("source") or record.get("tier") or segment.loaded_from)

    def _train_started(self, run: RunFacts, segment: Segment, time: float, record: Mapping[str, Any]) -> None:
        if segment.train is None or time < segment.train:
            segment.train = time
        step = _count(record.get("step"))
        segment.train_step = step if step is not None else segment.train_step
        world = _count(record.get("world_size")) or segment.world
        if segment.world is not None and world != segment.world:
            segment.world_before = segment.world
        segment.world = world

    def _train_ended(self, run: RunFacts, segment: Segment, time: float, record: Mapping[str, Any]) -> None:
        if segment.train_ended is None or time > segment.train_ended:
            segment.train_ended = time

    def _job_terminated(self, run: RunFacts, segment: Segment, time: float, record: Mapping[str, Any]) -> None:
        if segment.terminated is None or time > segment.terminated:
            segment.terminated = time
        # The first reason counts: an engine that is closed afterwards only follows from it.
        segment.reason = segment.reason or str(record.get("reason") or "")

    def _process_ended(self, run: RunFacts, segment: Segment, time: float, record: Mapping[str, Any]) -> None:
        segment.ended = time
        segment.steps.most = -1  # steps after this one are not its own

    def _span_started(self, run: RunFacts, segment: Segment, time: float, record: Mapping[str, Any]) -> None:
        segment.span_began(_name(record.get("span")), time)

    def _span_ended(self, run: RunFacts, segment: Segment, time: float, record: Mapping[str, Any]) -> None:
        segment.span_ended(_name(record.get("span")), time, _seconds(record.get("span_s")))

    def _stalled(self, run: RunFacts, segment: Segment, time: float, record: Mapping[str, Any]) -> None:
        stall = _seconds(record.get("stall_s"))
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
        owner: Segment,
    ) -> None:
        """Events about the run as a whole, whichever process wrote them."""
        step = _count(record.get("step"))
        if kind == EventKind.LAUNCHER_STARTED and (since := _seconds(record.get("since_process_s"))):
            time -= since
        if kind in _MARKED or (kind == EventKind.PROCESS_ENDED and rank is None):
            subject = next((n for n in (_count(record.get(key)) for key in _SUBJECT) if n is not None), None)
            about = str(record.get("lost_host") or record.get("node") or host)
            fields = {k: v for k, v in record.items() if k not in _COMMON and isinstance(v, (str, int, float, bool))}
            who = subject if subject is not None else rank
            run.mark(Mark(time, kind, who, about, attempt, step, fields, owner))
        if kind == EventKind.USER_SCHEDULED:
            run.scheduled = time if run.scheduled is None else min(time, run.scheduled)
        elif kind == EventKind.USER_TERMINATED:
            run.terminated = time if run.terminated is None else max(time, run.terminated)
        elif kind.startswith("checkpoint_"):
            _checkpoint(run, kind, time, step, f"{rank}@{host}", record)


def _other(run: RunFacts, attempt: int | None, host: str, record: Mapping[str, Any]) -> Segment:
    """The processes of a host that are no ranks."""
    key = (host, attempt) if len(run.others) < MAX_OTHERS else ("", None)
    other = run.others.get(key)
    if other is None:
        other = run.others[key] = Segment(attempt=key[1], lane=-1, host=key[0], serial=-1)
    other.boot = str(record.get("boot") or other.boot)[:MOST_NAME]
    return other


def _is_of_another(segment: Segment, record: Mapping[str, Any], time: float) -> bool:
    """True when the process of this ``job_started`` is not that of ``segment``: it runs in another boot (its rank was
    moved, or its host was rebooted), or all that is known of the segment was before it began."""
    if segment.started is None:
        ages = ("since_process_s", "since_callback_s", "since_group_s", "opening_s")
        began = time - max(_seconds(record.get(age)) for age in ages)
        return bool(segment.acts) and segment.end is not None and segment.end < began - LIFE_TOLERANCE_S
    boot = record.get("boot")
    return bool(boot and segment.boot and boot != segment.boot)


def _is_over(segment: Segment, kind: str, time: float, wall: float) -> bool:
    """True when an event of this kind begins a new segment. ``time`` is by the clock of the segment, ``wall`` as its
    line tells it."""
    if kind == EventKind.JOB_STARTED:
        ends = (segment.terminated, segment.train, segment.ended)
        began = segment.steps.high >= 0 or any(one is not None for one in ends)
        if segment.attempt is None:
            # The older library logs no attempt numbers: each start is a new attempt.
            began = began or segment.started is not None
        if segment.started is not None:
            time = max(time, wall)  # the host may have been rebooted, so that its monotonic clock began anew
        end = segment.end
        return began and end is not None and time > end
    if kind == EventKind.TRAIN_STARTED:
        return segment.train_ended is not None and time > segment.train_ended
    last = segment.last_step_time()
    return last is not None and time > last


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
    elif kind == EventKind.CHECKPOINT_LOADED:
        tier.loaded[emitter if len(tier.loaded) < 4096 else ""] += 1
        seconds = _seconds(record.get("duration_s"))
        if seconds > 0.0:
            tier.restore_s += seconds
            tier.restore_n += 1
        if step is not None:
            if len(run.loads) < 4096:
                run.loads.append((time, step))
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
