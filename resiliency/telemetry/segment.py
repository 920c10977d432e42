"""What is kept of one rank in one attempt, with its times by two clocks, one of which may be wrong in a line. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from resiliency.telemetry.stepstats import StepStats
from resiliency.telemetry.utc_stamps import parse_stamp

__all__ = ["Segment", "Told"]

#: A clock that moved by more than this against the monotonic one was set; smaller differences are drift.
CLOCK_JUMP_S = 0.5
#: A stamp that differs by more than this from what the rest of a process's log tells is wrong.
WRONG_S = 5.0
_MOST_BASES = 16
MAX_SPANS = 256
MAX_SPAN_NAMES = 32


class Told(NamedTuple):
    """The two times of an event as its line tells them, and its place among the events of its process."""

    time: float
    mono: float | None
    #: Highest step read before it, and its number among the events.
    place: tuple[int, float]
    #: What was added to its time: it tells of something that was so long ago.
    since: float = 0.0


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
    "earliest",
    "latest",
)


def _count(vote: Sequence[float]) -> float:
    return vote[1]


def _vote(votes: list[list[float]], base: float, count: float = 1.0) -> None:
    """One more for those that are near ``base``."""
    for known in votes:
        if abs(known[0] - base) <= WRONG_S:
            known[1] += count
            return
    if len(votes) < _MOST_BASES:
        votes.append([base, count])


def _misses(time: float, limits: tuple[float | None, float | None]) -> float:
    """Seconds by which it lies outside; a second is none."""
    low, high = limits
    return max(0.0, (low if low is not None else time) - time - 1.0) + max(
        0.0, time - (high if high is not None else time) - 1.0
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
        #: What it told of that at first, where it told something else later.
        self.world_before: int | None = None
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
        #: Of all its events, also those that tell nothing of the rank.
        self.earliest: float | None = None
        self.latest: float | None = None
        #: Events whose clock does not agree with the rest.
        self.jumps = 0
        #: Those of them that are alone with what they tell.
        self.alone = 0
        #: It is one line that names a rank or an attempt that never was.
        self.aside = False
        #: So is the size of the job that it tells.
        self.size_aside = False
        self._base: float | None = None
        #: What events tell of when the host's other clock began: [UTC seconds, events]; those that agree are one.
        self._bases: list[list[float]] = []
        self._told: dict[str, Told] = {}
        self._stalls_told: list[Told] = []
        #: Events that say that the clock was set by less than what is wrong.
        self._small_jumps = 0
        self._now = Told(0.0, None, (-1, 0.0))
        self._straight = 0.0
        #: When processes with the same clocks lived.
        self._around: tuple[float, float] | None = None

    def hear(self, time: float, mono: float | None) -> float:
        """An event of this process has these two times, one of which may be wrong. Returns what is thought of them so
        far."""
        self._now = now = Told(time, mono, (self.steps.high, self._now.place[1] + 1.0))
        if mono is not None:
            bases, base = self._bases, time - mono
            if len(bases) == 1 and abs(bases[0][0] - base) <= CLOCK_JUMP_S:  # nearly always
                bases[0][1] += 1.0
                self._base = bases[0][0]
                self._straight = time
                return time
            _vote(bases, base)
            self._base = max(bases, key=_count)[0]
            self._small_jumps += CLOCK_JUMP_S < abs(base - self._base) <= WRONG_S
        self._straight = time = self.resolve(now)
        return time

    def guess(self, time: float, mono: float | None) -> float:
        """When an event that is not yet heard was, by what is known so far."""
        return self.resolve(Told(time, mono, (self.steps.high, self._now.place[1] + 1.0)))

    def told_now(self, time: float) -> Told:
        """What the event that was heard last tells of ``time``, which follows from its own."""
        return self._now if time == self._straight else self._now._replace(since=time - self._straight)

    def put(self, name: str, time: float) -> None:
        """Sets a time, one of ``_TIMES``, that follows from the event that was heard last."""
        setattr(self, name, time)
        self._told[name] = self.told_now(time)

    def resolve(self, told: Told) -> float:
        """UTC seconds by the clock that most events of the process have; a line that is alone with what it tells has
        one wrong clock, and its neighbours tell which."""
        time, mono = told.time, told.mono
        if mono is None or self._base is None:
            return time + told.since
        straight = self._base + mono
        if abs(straight - time) <= CLOCK_JUMP_S:
            return time + told.since
        if self._votes(time - mono) > 1:
            return straight + told.since  # people's clock was set
        low, high = limits = self._limits(told.place)
        misses = _misses(time, limits) - _misses(straight, limits)
        if misses == 0.0 and (low is None) != (high is None):
            near = low if low is not None else high or 0.0
            misses = abs(time - near) - abs(straight - near)
        return (time if misses < 0.0 else straight) + told.since

    def _limits(self, place: tuple[int, float]) -> tuple[float | None, float | None]:
        """Between which moments an event of this place lies, of those that are sure."""
        low: float | None = None
        high: float | None = None
        known = [*self._told.values(), *self._stalls_told, *self._steps_told(witnesses=True)]
        for told in known:
            if told.place == place or not self._is_sure(told):
                continue
            time = told.time if told.mono is None or self._base is None else self._base + told.mono
            if told.place < place:
                low = time if low is None else max(low, time)
            else:
                high = time if high is None else min(high, time)
        if self._around is not None:
            low = self._around[0] if low is None else low
            high = self._around[1] if high is None else high
        return low, high

    @property
    def lines(self) -> int:
        """How many lines it was made of; of steps, the first ones are counted."""
        return int(self._now.place[1]) + len(self.steps.head)

    @property
    def began(self) -> float | None:
        """Time of its earliest event, whatever that says of what was before."""
        return min(
            (time for time in (self.started, self.first, self.first_step_start()) if time is not None), default=None
        )

    def moments(self) -> list[float]:
        """When its named events, its first step and its last were, in order; each event once."""
        events = {told.place: self.resolve(told._replace(since=0.0)) for told in self._told.values()}
        return sorted([*events.values(), *(self.resolve(told) for told in self._steps_told())])

    def forget(self, time: float) -> bool:
        """Takes out the event of this time; False when it is none, but a step."""
        gone = {told.place for told in self._told.values() if self.resolve(told._replace(since=0.0)) == time}
        if not gone:
            return False
        for name in [name for name, told in self._told.items() if told.place in gone]:
            self.drop(name)
        left = [self.resolve(told) for told in self._told.values() if told.since == 0.0]
        if left:
            for name, value in (
                ("first", min(left)),
                ("earliest", min(left)),
                ("last", max(left)),
                ("latest", max(left)),
            ):
                if getattr(self, name) is None:
                    setattr(self, name, value)
        return True

    def drop(self, name: str) -> None:
        """Forgets one of its times."""
        setattr(self, name, None)
        self._told.pop(name, None)

    def lacks(self, name: str, mono: float | None) -> bool:
        """It has no such time yet, and an event of this moment, by the clock that nobody sets, was before the steps
        that it already has: lines in the order of a clock that was set back."""
        first = self.steps.first_step
        if getattr(self, name) is not None or mono is None or first is None or first[1] is None:
            return False
        return mono <= float(first[1])

    def _is_sure(self, told: Told) -> bool:
        if told.mono is None or self._base is None:
            return self._base is None
        base = told.time - told.mono
        return abs(base - self._base) <= WRONG_S or self._votes(base) > 1

    def _steps_told(self, *, witnesses: bool = False) -> list[Told]:
        """The first step and the last one; with ``witnesses``, two more of the last ones."""
        steps = self.steps
        found: list[Told] = []
        if steps.high < 0:
            return found
        pairs = [(steps.last_stamp, steps.last_mono, (steps.high, 0.0))]
        if steps.first_step is not None and steps.first_step[:2] != (steps.last_stamp, steps.last_mono):  # two lines
            pairs.append((steps.first_step[0], steps.first_step[1], (-1, float("inf"))))
        if witnesses:
            known = {(stamp, mono) for stamp, mono, _ in pairs}
            pairs.extend((one[0], one[1], (one[2], 0.0)) for one in steps.opened if one and one[:2] not in known)
        for stamp, mono, place in pairs:
            time = parse_stamp(stamp)
            if time is not None and mono is not None:
                found.append(Told(time, float(mono), place))
        return found

    def settle(
        self,
        others: Sequence[Segment] = (),
        life: tuple[float, float] | None = None,
        boot: Sequence[Segment] = (),
    ) -> bool:
        """Sets the times aright by what most events tell of the clocks. Idempotent.

        Args:
            others: processes of the same host and attempt, which have the same clocks.
            life: when the ranks of the job lived, or between which other attempts; decides where nothing else does.
            boot: processes of the same boot of its host, whose other clock is the same.

        Returns:
            Whether a time moved.
        """
        if not self._bases:
            if self._base is None and self.steps.high >= 0 and (found := self._steps_told()):
                self._base = found[-1].time - (found[-1].mono or 0.0)
            return False
        self.jumps = self._small_jumps
        own = [list(one) for one in self._bases]
        for told in self._steps_told():
            _vote(own, told.time - (told.mono or 0.0))
        shared = self._shared_base(others) if self.lane < 0 else None
        if len(own) == 1 and own[0][1] > 1 and self._base == own[0][0] and shared is None:
            return False  # nearly always: all lines agree
        before = [getattr(self, name) for name in _TIMES]
        old = self._base
        counts = {id(one): one[1] + (self._steps_between(one[0]) if len(own) > 1 else 0.0) for one in own}
        own.sort(key=lambda one: -counts[id(one)])
        best = own[0]
        heard = [one for one in others if one is not self and one._base is not None]
        if heard and (counts[id(best)] < 2 or (len(own) > 1 and counts[id(own[1])] == counts[id(best)])):
            theirs = [list(one) for one in own]
            for one in heard:
                _vote(theirs, one._base or 0.0, one.heard)
            most = max(count for _, count in theirs)
            if sum(count == most for _, count in theirs) > 1:  # one word against another
                for one in boot:
                    if one is not self and one._base is not None and one not in others:
                        _vote(theirs, one._base, one.heard)
            best = max(theirs, key=_count)
        elif life is not None and counts[id(best)] < 2 and len(own) == 1 and boot:
            best = self._by_boot(best, life, [one for one in boot if one is not self and one._base is not None])
        elif life is not None and len(own) > 1 and counts[id(own[1])] == counts[id(best)]:
            tied = [one for one in own if counts[id(one)] == counts[id(best)]]
            monos = [told.mono for told in self._told.values() if told.mono is not None]
            best = min(tied, key=lambda one: sum(_misses(one[0] + mono, life) for mono in monos))
        self._base = best[0] if shared is None else shared
        around = [(one.first, one.end, one) for one in others if one is not self]
        # By the clock of this one: people's clock may have been set between two of them, the other one was not.
        lives = [
            (first + ahead, end + ahead)
            for first, end, one in around
            if first is not None and end is not None
            for ahead in [self._base - one._base if one._base is not None else 0.0]
        ]
        self._around = (min(one[0] for one in lives), max(one[1] for one in lives)) if lives else life
        wrong = sum(count for base, count in self._bases if abs(base - self._base) > WRONG_S)
        self.jumps = self._small_jumps + int(wrong)
        self.alone = len(self.bases_alone())
        for name, told in self._told.items():
            if getattr(self, name) is not None:
                setattr(self, name, self.resolve(told))
        self.stalls = [
            (self.resolve(told), seconds) for told, (_, seconds) in zip(self._stalls_told, self.stalls, strict=True)
        ]
        delta = self._base - (old if old is not None else self._base)
        if abs(delta) > CLOCK_JUMP_S:
            self.spans = [(name, time + delta, seconds) for name, time, seconds in self.spans]
        now = [getattr(self, name) for name in _TIMES]
        return any(
            a is not None and b is not None and abs(a - b) > CLOCK_JUMP_S for a, b in zip(before, now, strict=True)
        )

    def _by_boot(self, own: list[float], life: tuple[float, float], boot: Sequence[Segment]) -> list[float]:
        """What others of the boot say of the clock, where none of them says what this one line does."""
        if not boot or any(abs(base - own[0]) <= WRONG_S for one in boot for base in one.all_bases()):
            return own
        votes: list[list[float]] = []
        for one in boot:
            _vote(votes, one._base or 0.0, one.heard)
        most = max(votes, key=_count)
        monos = [told.mono for told in self._told.values() if told.mono is not None]
        fits = (not sum(_misses(base + mono, life) for mono in monos) for base in (own[0], most[0]))
        return own if all(fits) else most  # a clock that was set, or that is wrong by so little

    def _shared_base(self, others: Sequence[Segment]) -> float | None:
        """Of a launcher whose clock was set while its ranks lived, the base by which their times are told: one of them
        tells of the clock before, too. Else what it started, and they, would be apart by as much."""
        heard = [one for one in others if one is not self and one._base is not None]
        if not heard:
            return None
        mine, theirs = self.all_bases(), [one.all_bases() for one in heard]
        votes: list[list[float]] = []
        for one, told in zip(heard, theirs, strict=True):
            if len(told) > 1 and any(abs(a - b) <= CLOCK_JUMP_S for a in told for b in mine):
                _vote(votes, one._base or 0.0, one.heard)
        return max(votes, key=_count)[0] if votes else None

    def _steps_between(self, base: float) -> float:
        """Stamps of steps that lie where this base says that the steps were."""
        first, last = self.steps.first_step, self.steps.last_mono
        if first is None or first[1] is None or last is None or first[:2] == (self.steps.last_stamp, last):
            return 0.0
        low, high = base + float(first[1]) - first[2] - WRONG_S, base + float(last) + WRONG_S
        stamps = (parse_stamp(window.last_stamp) for window in self.steps.windows.values())
        return float(sum(1 for stamp in stamps if stamp is not None and low <= stamp <= high))

    def _votes(self, base: float) -> float:
        """Lines that agree with it."""
        votes = sum(count for known, count in self._bases if abs(known - base) <= WRONG_S)
        for told in self._steps_told(witnesses=True):
            votes += abs(told.time - (told.mono or 0.0) - base) <= WRONG_S
        return votes

    def bases_alone(self) -> list[float]:
        """What one event tells of the clocks and no other one of this process."""
        best = self._base
        return (
            []
            if best is None
            else [base for base, _ in self._bases if abs(base - best) > WRONG_S and self._votes(base) < 2]
        )

    def _step_bases(self) -> list[float]:
        return [told.time - (told.mono or 0.0) for told in self._steps_told()]

    @property
    def base(self) -> float | None:
        """When the clock that nobody sets began, in UTC seconds by the clock of this segment; None: it tells none."""
        if self._base is not None:
            return self._base
        found = self._step_bases()
        return found[0] if found else None

    def has_clocks_of(self, other: Segment) -> bool:
        """An event of the one may be of the other: they are of one host, and their clocks tell the same distance."""
        if self.host != other.host:
            return False
        mine, theirs = self.all_bases(), other.all_bases()
        return not mine or not theirs or any(abs(one - two) <= WRONG_S for one in mine for two in theirs)

    def all_bases(self) -> list[float]:
        """One for each time that people's clock was set, and what the steps tell."""
        bases = [base for base, _ in self._bases]
        return bases if self.base is None else [*bases, self.base]

    @property
    def was_set(self) -> bool:
        """Whether the clock was set between its first step and its last, or before both."""
        bases = self._step_bases()
        if not bases:
            return False
        before = bases[0] if self._base is None else self._base
        return max(bases) - min(bases) > CLOCK_JUMP_S or abs(bases[0] - before) > WRONG_S

    @property
    def heard(self) -> float:
        """How many events speak for its base."""
        return self._bases[0][1] + self.steps.n if self._bases else self.steps.n

    def keep(self, within: Callable[[float], bool]) -> int:
        """Forgets the times for which ``within`` is False; how many those were."""
        gone = [name for name in _TIMES if (time := getattr(self, name)) is not None and not within(time)]
        for name in gone:
            setattr(self, name, None)
            self._told.pop(name, None)
        before = len(self.stalls)
        left_told = [told for told, (time, _) in zip(self._stalls_told, self.stalls, strict=True) if within(time)]
        self.stalls = [(time, seconds) for time, seconds in self.stalls if within(time)]
        self._stalls_told = left_told
        self.spans = [one for one in self.spans if within(one[1])]
        if gone:
            left = [time for name in _TIMES if (time := getattr(self, name)) is not None]
            self.first, self.last = min(left, default=None), max(left, default=None)
        return len(gone) + before - len(self.stalls)

    def saw(self, time: float) -> None:
        """The event that was heard last, of this time, is of the rank itself."""
        if self.first is None or time < self.first:
            self.first, self._told["first"] = time, self._now
        if self.last is None or time > self.last:
            self.last, self._told["last"] = time, self._now

    def wrote(self, time: float) -> None:
        """The event that was heard last, of this time, was written by this process."""
        if self.earliest is None or time < self.earliest:
            self.earliest, self._told["earliest"] = time, self._now
        if self.latest is None or time > self.latest:
            self.latest, self._told["latest"] = time, self._now

    def stalled(self, time: float, seconds: float) -> None:
        self.stalls.append((time, seconds))
        self._stalls_told.append(self.told_now(time))
        if len(self.stalls) > 16:
            del self.stalls[0], self._stalls_told[0]

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
        return self._step_time(self.steps.last_stamp, self.steps.last_mono, (self.steps.high, 0.0))

    def first_step_start(self) -> float | None:
        """When the first step that was logged began; None without steps."""
        first = self.steps.first_step
        if first is None:
            return None
        time = self._step_time(first[0], first[1], (-1, float("inf")))
        return None if time is None else time - first[2]

    def _step_time(self, stamp: bytes | float, mono: bytes | float | None, place: tuple[int, float]) -> float | None:
        time, clock = parse_stamp(stamp), None if mono is None else float(mono)
        if time is not None:
            return self.resolve(Told(time, clock, place))
        return self._base + clock if self._base is not None and clock is not None else None

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
