"""What is kept of an event log: segments (one rank in one attempt), marks, checkpoint counts. Pure.

Its size is bounded by ranks x attempts, not by the number of events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from resiliency.telemetry.stepstats import StepStats

__all__ = ["CheckpointTier", "DaySpan", "Mark", "RunFacts", "Segment", "parse_stamp"]

#: A clock that moved by more than this against the monotonic one was set; smaller differences are drift.
CLOCK_JUMP_S = 0.5
#: A stamp that differs by more than this from what the rest of a process's log tells is wrong.
WRONG_S = 5.0
#: A clock that nobody sets is doubted where it says that an event is farther than this from the one before.
FAR_FROM_LAST_S = 600.0
_MOST_BASES = 16
MAX_MARKS = 20_000
MAX_SPANS = 256
MAX_SPAN_NAMES = 32
MAX_SAVES = 4_096
DAY_S = 86_400.0
MAX_DAYS = 8_192


def parse_stamp(stamp: bytes | str | float | int | None) -> float | None:
    """UTC seconds of an ISO timestamp (UTC if it has no zone) or a number; None when it is neither."""
    if isinstance(stamp, bool) or not isinstance(stamp, (bytes, str, float, int)):
        return None
    if isinstance(stamp, (int, float)):
        try:
            seconds = float(stamp)
        except OverflowError:
            return None
    else:
        text = stamp.decode("ascii", "replace") if isinstance(stamp, bytes) else stamp
        moment = _iso(text.strip())
        if moment is None:
            return None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=timezone.utc)
        try:
            seconds = moment.timestamp()
        except (OverflowError, ValueError):
            return None
    return seconds if 0.0 < seconds < 1e10 else None


def _iso(text: str) -> datetime | None:
    if text.endswith(("Z", "z")):
        text = text[:-1] + "+00:00"
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        pass  # Python 3.10 takes 3 or 6 digits of a second only; others are cut or padded below.
    head, dot, rest = text.partition(".")
    if not dot:
        return None
    digits = len(rest) - len(rest.lstrip("0123456789"))
    try:
        return datetime.fromisoformat(f"{head}.{rest[:digits][:6]:0<6}{rest[digits:]}")
    except ValueError:
        return None


@dataclass(frozen=True)
class Mark:
    """A rare event that a report lists. ``time`` in UTC seconds, ``rank`` is the rank it is about."""

    time: float
    kind: str
    rank: int | None = None
    host: str = ""
    attempt: int | None = None
    step: int | None = None
    #: By the clock of a host, not of a rank.
    hosts_clock: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass
class CheckpointTier:
    """Counts for one tier. ``saved`` counts per emitter, because all ranks or only one may report a step."""

    saved: Counter[str] = field(default_factory=Counter)
    durable: Counter[str] = field(default_factory=Counter)
    loaded: Counter[str] = field(default_factory=Counter)
    failed: int = 0
    skipped: int = 0
    corrupt: int = 0
    repaired: int = 0
    deleted: int = 0
    bytes: int = 0
    durable_s: float = 0.0
    durable_max_s: float = 0.0
    durable_n: int = 0
    restore_s: float = 0.0
    restore_n: int = 0
    last_step: int = -1


#: Of a segment, in UTC seconds.
_TIMES = (
    "started",
    "process",
    "callback",
    "group",
    "grouped",
    "opening",
    "launched",
    "restore",
    "loaded",
    "train",
    "train_ended",
    "terminated",
    "first",
    "last",
)


class Segment:
    """One rank from the start of its process (or of a roll-back) to its last event.

    Times are UTC seconds by this host's clock, corrected where the monotonic clock shows that it was set.
    """

    def __init__(self, *, attempt: int | None, lane: int, host: str, serial: int) -> None:
        self.attempt = attempt
        self.lane = lane
        self.host = host
        self.serial = serial
        self.started: float | None = None
        #: Of the attempt in this process, when the script has made our callback, when the process group was asked for
        #: and there, and when the checkpointer was asked for.
        self.process: float | None = None
        self.callback: float | None = None
        self.group: float | None = None
        self.grouped: float | None = None
        self.opening: float | None = None
        #: What imports took between process and callback, seconds; None: not told.
        self.imports_s: float | None = None
        #: When the launcher of this process began, where the process can tell.
        self.launched: float | None = None
        self.restore: float | None = None
        self.loaded: float | None = None
        self.loaded_step: int | None = None
        self.loaded_s: float | None = None
        self.loaded_from = ""
        self.train: float | None = None
        self.train_step: int | None = None
        self.train_ended: float | None = None
        self.terminated: float | None = None
        self.reason = ""
        self.device = ""
        #: Which start of which machine its monotonic clock counts from; "": not told.
        self.boot = ""
        self.first: float | None = None
        self.last: float | None = None
        self.world: int | None = None
        #: True when it began by going back to an older step in the same process.
        self.rollback = False
        self.steps = StepStats()
        self.stall_s = 0.0
        #: The part of it between two steps (the eager part of a save), not inside one (a fence).
        self.stall_between_s = 0.0
        self.saves = 0
        #: The latest stalls, (time, seconds): those after the last step belong to the final save.
        self.stalls: list[tuple[float, float]] = []
        #: Work that the script named, (name, begin, seconds), None: it had not ended; the first MAX_SPANS of them.
        self.spans: list[tuple[str, float, float | None]] = []
        #: All that have ended, by name: how many, and seconds.
        self.span_sums: dict[str, list[float]] = {}
        #: Where this rank's output goes.
        self.logs: tuple[str, ...] = ()
        self.jumps = 0
        self._base: float | None = None
        self._latest: float | None = None
        #: What events tell of when the host's other clock began: [UTC seconds, events]; those that agree are one.
        self._bases: list[list[float]] = []

    def tell(self, time: float, mono: float | None) -> None:
        """An event of this process has these two times, one of which may be wrong."""
        if mono is None:
            return
        base = time - mono
        for known in self._bases:
            if abs(known[0] - base) <= WRONG_S:
                known[1] += 1
                return
        if len(self._bases) < _MOST_BASES:
            self._bases.append([base, 1])

    def settle(self, others: Sequence[Segment] = ()) -> float:
        """Sets the times aright where the first event, by which they were told, had a wrong clock. Idempotent.

        Args:
            others: processes of the same host and attempt, which have the same clocks.

        Returns:
            By how many seconds its times moved.
        """
        if self._base is None or (len(self._bases) < 2 and self.steps.high < 0 and not others):
            return 0.0
        heard = [[one._base, one._votes(one._base, ())] for one in others if one._base is not None]
        votes = [(self._votes(base, heard), base) for base, _ in [*self._bases, *self._step_bases(), *heard]]
        most, best = max(votes, default=(0.0, self._base))
        own, delta = self._votes(self._base, heard), best - self._base
        if abs(delta) <= WRONG_S or most <= own:
            return 0.0
        self.jumps += max(1, round(own))
        self._base = best
        for name in _TIMES:
            time = getattr(self, name)
            if time is not None:
                setattr(self, name, time + delta)
        self.stalls = [(time + delta, seconds) for time, seconds in self.stalls]
        self.spans = [(name, time + delta, seconds) for name, time, seconds in self.spans]
        return delta

    def _step_bases(self) -> list[list[float]]:
        steps, found = self.steps, []
        pairs = [(steps.last_stamp, steps.last_mono)]
        if steps.first_step is not None:
            pairs.append((steps.first_step[0], steps.first_step[1]))
        for stamp, mono in pairs:
            time = parse_stamp(stamp)
            if time is not None and mono is not None:
                found.append([time - float(mono), 1.0])
        return found

    def _votes(self, base: float, heard: Sequence[list[float]]) -> float:
        """Events that agree with it, and stamps of steps that lie where it says that the steps were."""
        votes = sum(
            count for known, count in [*self._bases, *self._step_bases(), *heard] if abs(known - base) <= WRONG_S
        )
        first, last = self.steps.first_step, self.steps.last_mono
        if first is not None and first[1] is not None and last is not None:
            low, high = base + float(first[1]) - first[2] - WRONG_S, base + float(last) + WRONG_S
            stamps = (parse_stamp(window.last_stamp) for window in self.steps.windows.values())
            votes += sum(1 for stamp in stamps if stamp is not None and low <= stamp <= high)
        return votes

    @property
    def base(self) -> float | None:
        """When the clock that nobody sets began, in UTC seconds by the clock of this segment; None: it tells none."""
        if self._base is not None:
            return self._base
        found = self._step_bases()
        return found[0][0] if found else None

    @property
    def was_set(self) -> bool:
        """Whether the clock was set between its first step and its last."""
        bases = [base for base, _ in self._step_bases()]
        return len(bases) > 1 and abs(bases[0] - bases[-1]) > CLOCK_JUMP_S

    @property
    def heard(self) -> float:
        """How many events speak for its base."""
        return self._bases[0][1] + self.steps.n if self._bases else self.steps.n

    def keep(self, within: Callable[[float], bool]) -> int:
        """Forgets the times for which ``within`` is False; how many those were."""
        gone = [name for name in _TIMES if (time := getattr(self, name)) is not None and not within(time)]
        for name in gone:
            setattr(self, name, None)
        before = len(self.stalls)
        self.stalls = [(time, seconds) for time, seconds in self.stalls if within(time)]
        self.spans = [one for one in self.spans if within(one[1])]
        if gone:
            left = [time for name in _TIMES if (time := getattr(self, name)) is not None]
            self.first, self.last = min(left, default=None), max(left, default=None)
        return len(gone) + before - len(self.stalls)

    def at(self, time: float, mono: float | None) -> float:
        """``time`` without the changes made to the clock since this segment began."""
        if mono is None:
            return time
        base = time - mono
        if self._base is None:
            self._base = base
        elif abs(base - self._base) > CLOCK_JUMP_S:
            time = self._likely(time, self._base + mono)
        self._latest = time
        return time

    def _likely(self, told: float, straight: float) -> float:
        """What people's clock says, or what the other one says: that, unless it alone is far from the event before."""
        if self._latest is None or abs(straight - self._latest) < FAR_FROM_LAST_S:
            return straight
        return told if abs(told - self._latest) < abs(straight - self._latest) / 10 else straight

    def saw(self, time: float) -> None:
        if self.first is None or time < self.first:
            self.first = time
        if self.last is None or time > self.last:
            self.last = time

    def span_began(self, name: str, time: float) -> None:
        if len(self.spans) < MAX_SPANS:
            self.spans.append((name, time, None))

    def span_ended(self, name: str, time: float, seconds: float) -> None:
        sums = self.span_sums.setdefault(name if len(self.span_sums) < MAX_SPAN_NAMES else "other", [0, 0.0])
        sums[0] += 1
        sums[1] += seconds
        for place in range(len(self.spans) - 1, -1, -1):
            if self.spans[place][0] == name and self.spans[place][2] is None:
                self.spans[place] = (name, time - seconds, seconds)
                return
        if len(self.spans) < MAX_SPANS:
            self.spans.append((name, time - seconds, seconds))

    def last_step_time(self) -> float | None:
        """When the last step ended; None without steps."""
        if self.steps.high < 0:
            return None
        time = parse_stamp(self.steps.last_stamp)
        mono = self.steps.last_mono
        return None if time is None else self.at(time, float(mono) if mono is not None else None)

    def first_step_start(self) -> float | None:
        """When the first step that was logged began; None without steps."""
        first = self.steps.first_step
        if first is None:
            return None
        time = parse_stamp(first[0])
        return None if time is None else self.at(time, float(first[1]) if first[1] is not None else None) - first[2]

    @property
    def start(self) -> float | None:
        """Start of the process, where it is known, or time of the earliest event of this segment."""
        times = [t for t in (self.process, self.started, self.first, self.first_step_start()) if t is not None]
        return min(times) if times else None

    @property
    def end(self) -> float | None:
        """Time of the latest event of this segment."""
        times = [t for t in (self.last, self.last_step_time()) if t is not None]
        return max(times) if times else None

    @property
    def position(self) -> int | None:
        """Steps already done when this segment began to train; None when no event tells."""
        if self.steps.high >= 0:
            return self.steps.low
        if self.loaded_step is not None:
            return self.loaded_step
        return self.train_step

    @property
    def finished(self) -> bool:
        """True when it ended because its work was done."""
        return self.reason == "finished" or (not self.reason and self.train_ended is not None)


@dataclass
class DaySpan:
    """The events of one day."""

    first: float
    last: float
    events: int = 0


@dataclass
class RunFacts:
    """Everything kept about one run (one ``job_name``)."""

    name: str
    segments: list[Segment] = field(default_factory=list)
    #: Launchers of the older library log per node and attempt; used when no rank logs.
    nodes: list[Segment] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    tiers: dict[str, CheckpointTier] = field(default_factory=dict)
    #: (time, step) of checkpoints, thinned out evenly when there are very many.
    saves: list[tuple[float, int]] = field(default_factory=list)
    loads: list[tuple[float, int]] = field(default_factory=list)
    #: Of events that no rank wrote, by host and attempt: their clocks.
    others: dict[tuple[str, int | None], Segment] = field(default_factory=dict)
    #: Events by day since 1970.
    days: dict[int, DaySpan] = field(default_factory=dict)
    first: float | None = None
    last: float | None = None
    #: Times of the first and last event that the job itself wrote.
    scheduled: float | None = None
    terminated: float | None = None
    min_loaded_step: int | None = None
    max_saved_step: int | None = None
    events: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    quality: Counter[str] = field(default_factory=Counter)
    gpus_per_rank: int = 1
    #: What a supervisor calls it.
    workloads: set[str] = field(default_factory=set)

    @property
    def device(self) -> str:
        """What its ranks compute on: "cuda", "cpu"; "" when they do not tell, or differ."""
        told = {segment.device for segment in self.segments if segment.device}
        return told.pop() if len(told) == 1 else ""

    def tier(self, name: str) -> CheckpointTier:
        kept = self.tiers.get(name)
        if kept is None:
            if len(self.tiers) >= 64:  # a faulty writer could send an unlimited number of names
                name = "other"
            kept = self.tiers.setdefault(name, CheckpointTier())
        return kept

    def mark(self, mark: Mark) -> None:
        if len(self.marks) < MAX_MARKS:
            self.marks.append(mark)
        else:
            self.quality["marks_dropped"] += 1

    def saw(self, time: float) -> None:
        if self.first is None or time < self.first:
            self.first = time
        if self.last is None or time > self.last:
            self.last = time
        number = int(time // DAY_S)
        day = self.days.get(number)
        if day is None:
            if len(self.days) >= MAX_DAYS:
                return
            day = self.days[number] = DaySpan(time, time)
        day.first, day.last, day.events = min(day.first, time), max(day.last, time), day.events + 1

    def saved(self, time: float, step: int) -> None:
        self.saves.append((time, step))
        if len(self.saves) > MAX_SAVES:
            # Keep the first, the last and every second one, so that the time between saves stays known.
            self.saves = self.saves[:1] + self.saves[1:-1:2] + self.saves[-1:]
