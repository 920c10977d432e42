"""What is kept of one rank in one attempt. Each line tells its time by two clocks, of which one may be wrong. Pure.

The wall clock (UTC) may be set while a job runs; the monotonic clock counts from the boot of the host. The *base* of an
event is its wall time minus its monotonic time: when the monotonic clock began, in UTC seconds. The events of a process
agree on the base unless its wall clock was set or a line is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from resiliency.telemetry.stepstats import StepStats
from resiliency.telemetry.utc_stamps import parse_stamp

__all__ = ["Segment", "Told"]

#: A wall clock that moved by more than this against the monotonic one was set; smaller differences are drift.
CLOCK_JUMP_S = 0.5
#: Bases that differ by no more than this agree. A stamp that is further from what the rest of its log tells is wrong.
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
    #: Seconds to add to its time; negative when it tells of something that was so long ago.
    since: float = 0.0


#: Attributes of a segment that are times, in UTC seconds.
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
    """Adds ``count`` to the votes for the known base that agrees with ``base``, or for a new one."""
    for known in votes:
        if abs(known[0] - base) <= WRONG_S:
            known[1] += count
            return
    if len(votes) < _MOST_BASES:
        votes.append([base, count])


def _misses(time: float, limits: tuple[float | None, float | None]) -> float:
    """Seconds by which ``time`` lies outside ``limits``, beyond a tolerance of one second."""
    low, high = limits
    return max(0.0, (low if low is not None else time) - time - 1.0) + max(
        0.0, time - (high if high is not None else time) - 1.0
    )


class Segment:
    """One rank from the start of its process (or of a roll-back) to its last event.

    Times are UTC seconds by this host's wall clock, corrected where the monotonic clock shows that it was set.
    """

    def __init__(self, *, attempt: int | None, lane: int, host: str, serial: int) -> None:
        self.attempt = attempt
        self.lane = lane
        self.host = host
        self.serial = serial
        self.started: float | None = None
        #: When the attempt began in this process, when the script had made our callback, when the process group was
        #: asked for and when it was ready, and when the checkpointer was asked for.
        self.process: float | None = None
        self.callback: float | None = None
        self.group: float | None = None
        self.grouped: float | None = None
        self.opening: float | None = None
        #: Seconds that imports took between ``process`` and ``callback``; None when no event tells.
        self.imports_s: float | None = None
        #: When the launcher of this process began; None when no event tells.
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
        #: Id of the boot that its monotonic clock counts from; "" when no event tells.
        self.boot = ""
        self.first: float | None = None
        self.last: float | None = None
        self.world: int | None = None
        #: The world size that it told at first, when it told another one later.
        self.world_before: int | None = None
        #: True when it began by going back to an older step in the same process.
        self.rollback = False
        self.steps = StepStats()
        self.stall_s = 0.0
        #: The part of ``stall_s`` between two steps (the eager part of a save), not inside one (a fence).
        self.stall_between_s = 0.0
        self.saves = 0
        #: The latest stalls, (time, seconds): those after the last step belong to the final save.
        self.stalls: list[tuple[float, float]] = []
        #: The first MAX_SPANS spans of the script as (name, begin, seconds); seconds is None for one that has not
        #: ended.
        self.spans: list[tuple[str, float, float | None]] = []
        #: All spans that have ended, by name: their number, and seconds.
        self.span_sums: dict[str, list[float]] = {}
        #: Files that this rank's output goes to.
        self.logs: tuple[str, ...] = ()
        #: First and last time of all that its process wrote, also of events that tell nothing of the rank.
        self.earliest: float | None = None
        self.latest: float | None = None
        #: Number of events whose base does not agree with the rest.
        self.jumps = 0
        #: Number of :meth:`bases_alone`.
        self.alone = 0
        #: True when it is a single line that names a rank or an attempt that never was.
        self.aside = False
        #: True when its world size is one that a single line tells, and wrong.
        self.size_aside = False
        #: The base that its times are told by; None while no event has told one.
        self._base: float | None = None
        #: The bases that its events tell, each as [UTC seconds, events that agree with it].
        self._bases: list[list[float]] = []
        self._told: dict[str, Told] = {}
        self._stalls_told: list[Told] = []
        #: Number of events that show that the wall clock was set, by no more than WRONG_S.
        self._small_jumps = 0
        self._now = Told(0.0, None, (-1, 0.0))
        self._straight = 0.0
        #: First and last time at which processes with the same clocks lived.
        self._around: tuple[float, float] | None = None

    def hear(self, time: float, mono: float | None) -> float:
        """Takes the two times of an event of this process, one of which may be wrong. Returns the event's time in UTC
        seconds, by what is known so far."""
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
        """The time in UTC seconds, by what is known so far, of an event that was not passed to :meth:`hear`."""
        return self.resolve(Told(time, mono, (self.steps.high, self._now.place[1] + 1.0)))

    def told_now(self, time: float) -> Told:
        """The times of the event that was heard last, with ``since`` set so that they resolve to ``time``."""
        return self._now if time == self._straight else self._now._replace(since=time - self._straight)

    def put(self, name: str, time: float) -> None:
        """Sets a time, one of ``_TIMES``, that follows from the event that was heard last."""
        setattr(self, name, time)
        self._told[name] = self.told_now(time)

    def resolve(self, told: Told) -> float:
        """UTC seconds of an event, by the base that most events of the process agree on. When no other event agrees
        with this one's base, one of its two times is wrong, and the events before and after it decide which."""
        time, mono = told.time, told.mono
        if mono is None or self._base is None:
            return time + told.since
        straight = self._base + mono
        if abs(straight - time) <= CLOCK_JUMP_S:
            return time + told.since
        if self._votes(time - mono) > 1:
            return straight + told.since  # other events agree with its base: the wall clock was set
        low, high = limits = self._limits(told.place)
        misses = _misses(time, limits) - _misses(straight, limits)
        if misses == 0.0 and (low is None) != (high is None):
            near = low if low is not None else high or 0.0
            misses = abs(time - near) - abs(straight - near)
        return (time if misses < 0.0 else straight) + told.since

    def _limits(self, place: tuple[int, float]) -> tuple[float | None, float | None]:
        """The latest time before an event of this place and the earliest after it, of events whose times are sure; None
        where there is none."""
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
        """Number of lines it was made of. Of step lines only the first ``HEAD_STEPS`` count."""
        return int(self._now.place[1]) + len(self.steps.head)

    @property
    def began(self) -> float | None:
        """Time of its earliest event; what that event tells of earlier moments does not count. None without events."""
        return min(
            (time for time in (self.started, self.first, self.first_step_start()) if time is not None), default=None
        )

    def moments(self) -> list[float]:
        """Times of its named events (each event once), its first step and its last, in order."""
        events = {told.place: self.resolve(told._replace(since=0.0)) for told in self._told.values()}
        return sorted([*events.values(), *(self.resolve(told) for told in self._steps_told())])

    def forget(self, time: float) -> bool:
        """Takes out the named event of this time. Returns False when there is none: the time is that of a step."""
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
        """True when the time ``name`` is not known yet and an event at ``mono``, by the monotonic clock, was before the
        first step that is known: then the lines come in the order of a wall clock that was set back."""
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
        """Times of the last step and the first one; with ``witnesses``, of up to two more of the last ones."""
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
        """Corrects the times by the base that most events agree on. Idempotent.

        Args:
            others: processes of the same host and attempt, which have the same clocks.
            life: begin and end of the time in which the ranks of the job lived, or of the time between the attempts
                before and after; decides where nothing else does.
            boot: processes of the same boot of its host, which have the same monotonic clock.

        Returns:
            True when a time moved by more than ``CLOCK_JUMP_S``.
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
            if sum(count == most for _, count in theirs) > 1:  # a tie
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
        # By the wall clock of this process: it may have been set between two of them, the monotonic clock was not.
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
        """The base that most processes of the boot agree on, when none of them agrees with ``own`` and the times of
        this process's line fit into ``life`` by at most one of both bases; else ``own``."""
        if not boot or any(abs(base - own[0]) <= WRONG_S for one in boot for base in one.all_bases()):
            return own
        votes: list[list[float]] = []
        for one in boot:
            _vote(votes, one._base or 0.0, one.heard)
        most = max(votes, key=_count)
        monos = [told.mono for told in self._told.values() if told.mono is not None]
        fits = (not sum(_misses(base + mono, life) for mono in monos) for base in (own[0], most[0]))
        return own if all(fits) else most  # both fit: the wall clock was set, or is wrong by little

    def _shared_base(self, others: Sequence[Segment]) -> float | None:
        """For a launcher whose wall clock was set while its ranks lived: the base of those ranks that have events from
        before and after that. Without it the launcher's times and theirs would be apart by the jump. None when no rank
        has both."""
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
        """Number of step windows whose last stamp lies between the first step and the last, as placed by ``base``."""
        first, last = self.steps.first_step, self.steps.last_mono
        if first is None or first[1] is None or last is None or first[:2] == (self.steps.last_stamp, last):
            return 0.0
        low, high = base + float(first[1]) - first[2] - WRONG_S, base + float(last) + WRONG_S
        stamps = (parse_stamp(window.last_stamp) for window in self.steps.windows.values())
        return float(sum(1 for stamp in stamps if stamp is not None and low <= stamp <= high))

    def _votes(self, base: float) -> float:
        """Number of lines that agree with ``base``."""
        votes = sum(count for known, count in self._bases if abs(known - base) <= WRONG_S)
        for told in self._steps_told(witnesses=True):
            votes += abs(told.time - (told.mono or 0.0) - base) <= WRONG_S
        return votes

    def bases_alone(self) -> list[float]:
        """The bases, other than the one of its times, that a single event of this process tells."""
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
        """When its monotonic clock began, in UTC seconds by its wall clock; None when no line tells a monotonic
        time."""
        if self._base is not None:
            return self._base
        found = self._step_bases()
        return found[0] if found else None

    def has_clocks_of(self, other: Segment) -> bool:
        """True when an event of one may belong to the other: both are of one host, and they agree on a base, or one of
        them tells none."""
        if self.host != other.host:
            return False
        mine, theirs = self.all_bases(), other.all_bases()
        return not mine or not theirs or any(abs(one - two) <= WRONG_S for one in mine for two in theirs)

    def all_bases(self) -> list[float]:
        """All bases its events tell, one more for each time that the wall clock was set, and the one its times are told
        by."""
        bases = [base for base, _ in self._bases]
        return bases if self.base is None else [*bases, self.base]

    @property
    def was_set(self) -> bool:
        """True when the wall clock was set between its first step and its last, or between its other events and
        those."""
        bases = self._step_bases()
        if not bases:
            return False
        before = bases[0] if self._base is None else self._base
        return max(bases) - min(bases) > CLOCK_JUMP_S or abs(bases[0] - before) > WRONG_S

    @property
    def heard(self) -> float:
        """Number of events and steps that tell its first base."""
        return self._bases[0][1] + self.steps.n if self._bases else self.steps.n

    def keep(self, within: Callable[[float], bool]) -> int:
        """Forgets the times, stalls and spans for which ``within`` is False. Returns the number of times and stalls."""
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
        """Notes that the event that was heard last, of this time, is about the rank itself."""
        if self.first is None or time < self.first:
            self.first, self._told["first"] = time, self._now
        if self.last is None or time > self.last:
            self.last, self._told["last"] = time, self._now

    def wrote(self, time: float) -> None:
        """Notes that the event that was heard last, of this time, was written by this process."""
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
        """Start of the process where it is known, else time of the earliest event; None without events."""
        times = [t for t in (self.process, self.started, self.first, self.first_step_start()) if t is not None]
        return min(times) if times else None

    @property
    def end(self) -> float | None:
        """Time of the latest event of this segment; None without events."""
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
