"""What is kept of one process: a rank in one attempt, or the launchers and agents of a host. Pure.

The wall clock (UTC) may be set while a process runs; the monotonic clock counts from the boot of the host, and nobody
sets it. So the times of a process are ``offset`` + monotonic time, where the offset is the UTC time of second 0 of that
clock, as the process's first line tells it. The account later gives all processes of one boot the same offset.
"""

from __future__ import annotations

import copy

from resiliency.telemetry.stepstats import StepStats, Window
from resiliency.telemetry.utc_stamps import parse_stamp

__all__ = ["Segment"]

#: A wall clock that moved by more than this against the monotonic one was set; smaller differences are drift.
CLOCK_JUMP_S = 0.5
#: Seconds by which a line may seem to lie outside the life of its process.
LIFE_TOLERANCE_S = 1.0
MAX_OFFSETS = 16
MAX_STALLS = 16
MAX_SPANS = 256
MAX_SPAN_NAMES = 32

#: Attributes of a segment that are times, in UTC seconds.
_TIMES = (
    "started process callback group grouped opening launched restore loaded train train_ended terminated ended first"
    " last earliest latest"
).split()


class Segment:
    """One rank from the start of its process (or of a roll-back) to its last event. Times are UTC seconds."""

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
        #: When its interpreter ended.
        self.ended: float | None = None
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
        #: Number of its events that are no steps, and of those that only a process that has started can write.
        self.events = 0
        self.acts = 0
        #: UTC seconds of second 0 of its monotonic clock; None while no line has told both times.
        self.offset: float | None = None
        #: All offsets that its events have told, each with the number of events: several when its clock was set.
        self.offsets: list[list[float]] = []
        #: Seconds by which its times were moved since they were read.
        self.moved_s = 0.0

    # -- its clock -----------------------------------------------------------------------------------------------

    def hear(self, time: float, mono: float | None) -> float:
        """Takes the wall time and the monotonic time of an event of this process. Returns its time."""
        self.events += 1
        if mono is None:
            return time
        offset = time - mono
        if self.offset is None:
            self.offset = offset
        for known in self.offsets:
            if abs(known[0] - offset) <= CLOCK_JUMP_S:
                known[1] += 1.0
                break
        else:
            if len(self.offsets) < MAX_OFFSETS:
                self.offsets.append([offset, 1.0])
        return self.offset + mono

    def time_of(self, stamp: bytes | float, mono: bytes | float | None) -> float | None:
        """Time of a line of this process; None when it tells none."""
        if mono is not None and self.offset is not None:
            return self.offset + float(mono)
        time = parse_stamp(stamp)
        return None if time is None else time + self.moved_s

    def window_end(self, window: Window) -> float | None:
        """When the last step of a window of ``steps`` ended."""
        return self.time_of(window.last_stamp, window.last_mono)

    def samples(self) -> list[tuple[float, float]]:
        """Offsets that its lines tell, each with the number of lines. The last step speaks for all steps."""
        found = [(offset, count) for offset, count in self.offsets]
        steps = self.steps
        time = parse_stamp(steps.last_stamp) if steps.last_mono is not None else None
        if time is not None and steps.last_mono is not None:
            found.append((time - float(steps.last_mono), float(steps.n)))
        return found

    def moved(self, seconds: float) -> Segment:
        """A copy whose times are ``seconds`` later; itself for 0."""
        if not seconds:
            return self
        other = copy.copy(self)
        for name in _TIMES:
            time = getattr(self, name)
            if time is not None:
                setattr(other, name, time + seconds)
        other.stalls = [(time + seconds, length) for time, length in self.stalls]
        other.spans = [(name, time + seconds, length) for name, time, length in self.spans]
        other.offset = None if self.offset is None else self.offset + seconds
        other.moved_s += seconds
        return other

    def lived_at(self, time: float) -> bool:
        """False when ``time`` lies before the start of its process or after its end, as far as the log tells them."""
        begins = (self.process, self.callback, self.group, self.opening, self.started)
        begin = min((one for one in begins if one is not None), default=time)
        end = self.ended if self.ended is not None else time
        return begin - LIFE_TOLERANCE_S <= time <= end + LIFE_TOLERANCE_S

    # -- what it tells -------------------------------------------------------------------------------------------

    def saw(self, time: float) -> None:
        """Notes that an event of this time is about the rank itself."""
        if self.first is None or time < self.first:
            self.first = time
        if self.last is None or time > self.last:
            self.last = time

    def wrote(self, time: float) -> None:
        """Notes that an event of this time was written by this process."""
        if self.earliest is None or time < self.earliest:
            self.earliest = time
        if self.latest is None or time > self.latest:
            self.latest = time

    def stalled(self, time: float, seconds: float) -> None:
        self.stalls.append((time, seconds))
        if len(self.stalls) > MAX_STALLS:
            del self.stalls[0]

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

    # -- what follows from it ------------------------------------------------------------------------------------

    def last_step_time(self) -> float | None:
        """When the last step ended; None without steps."""
        return self.time_of(self.steps.last_stamp, self.steps.last_mono) if self.steps.high >= 0 else None

    def first_step_start(self) -> float | None:
        """When the first step that was logged began; None without steps."""
        if self.steps.first_step is None:
            return None
        stamp, mono, seconds = self.steps.first_step
        time = self.time_of(stamp, mono)
        return None if time is None else time - seconds

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
