"""Chooses the part of a run's time to account for: from one moment to another, without excluded stretches. Pure.

Kept stretches are in whole microseconds, so that they sum exactly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from resiliency.errors import ConfigError
from resiliency.goodput.lanes import LaneInterval, us

__all__ = ["ALL_TIME", "Moment", "Span", "Windows", "clip", "kept_windows", "parse_moment", "parse_span"]

#: ``[start, end)`` in microseconds.
Span = tuple[int, int]

_PARTS = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")


@dataclass(frozen=True)
class Moment:
    """A time, or an offset in seconds from the start of the run (negative: back from its end)."""

    seconds: float
    is_offset: bool = False

    def at(self, start: float, end: float) -> float:
        """The moment in UTC seconds, in a run from ``start`` to ``end``."""
        if not self.is_offset:
            return self.seconds
        return end + self.seconds if self.from_end else start + self.seconds

    @property
    def from_end(self) -> bool:
        """True when it is an offset back from the end; -0 is the end itself."""
        return self.is_offset and math.copysign(1.0, self.seconds) < 0


@dataclass(frozen=True, kw_only=True)
class Windows:
    """The time to account for: all of it, except before ``since``, after ``until`` and in ``exclude``."""

    since: Moment | None = None
    until: Moment | None = None
    exclude: tuple[tuple[Moment, Moment], ...] = ()
    #: The run goes on, so that an excluded stretch that ends before it begins is no error when its end is counted back
    #: from the end of the run: it may come in order later.
    is_running: bool = False

    def __bool__(self) -> bool:
        return self.since is not None or self.until is not None or bool(self.exclude)


ALL_TIME = Windows()


def parse_moment(text: str) -> Moment:
    """An ISO time (UTC without a zone) or an offset: ``90``, ``90s``, ``1h30m``, ``2d``, ``-30m`` (before the end).

    Raises:
        ValueError: ``text`` is neither.
    """
    words = text.strip()
    sign = -1.0 if words.startswith("-") else 1.0
    found = _PARTS.fullmatch(words[1:] if words[:1] in ("+", "-") else words)
    if found and any(found.groups()):
        days, hours, minutes, seconds = (float(part or 0.0) for part in found.groups())
        return Moment(sign * (days * 86400 + hours * 3600 + minutes * 60 + seconds), is_offset=True)
    try:
        moment = datetime.fromisoformat(words.replace("Z", "+00:00"))
    except ValueError:
        raise ValueError(
            f"{text!r} is neither an ISO time like 2026-01-31T12:00:00Z nor an offset like 90s, 1h30m or -30m"
        ) from None
    return Moment((moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)).timestamp())


def parse_span(text: str) -> tuple[Moment, Moment]:
    """``A..B``, each as in :func:`parse_moment`; without A from the start, without B to the end.

    Raises:
        ValueError: ``text`` has another form, or ends before it begins.
    """
    first, dots, last = text.partition("..")
    if not dots:
        raise ValueError(f"{text!r} is no stretch of time; write A..B, for example 1h..1h30m")
    begin = parse_moment(first) if first.strip() else Moment(0.0, is_offset=True)
    end = parse_moment(last) if last.strip() else Moment(float("inf"))
    # Moments of different kinds can only be put in order once the run is known.
    if (begin.is_offset, begin.from_end) == (end.is_offset, end.from_end) and begin.seconds > end.seconds:
        raise ValueError(f"{text!r} ends before it begins; write the earlier moment first")
    return begin, end


def _utc(time: float) -> str:
    try:
        return datetime.fromtimestamp(time, timezone.utc).isoformat(sep=" ", timespec="seconds")
    except (OverflowError, ValueError, OSError):
        return f"{time:g}"


def kept_windows(windows: Windows, start: float, end: float) -> tuple[Span, ...]:
    """The stretches that are accounted for, in order, of a run from ``start`` to ``end`` (UTC seconds).

    Raises:
        ConfigError: a stretch to be left out ends before it begins.
    """
    kept: list[Span] = [(us(start), us(end))]

    def drop(first: float, last: float) -> None:
        low = us(min(max(first, start), end))
        high = us(min(max(last, start), end))
        if low < high:
            kept[:] = [part for a, b in kept for part in ((a, min(b, low)), (max(a, high), b)) if part[0] < part[1]]

    if windows.since is not None:
        drop(start, windows.since.at(start, end))
    if windows.until is not None:
        drop(windows.until.at(start, end), end)
    for first, last in windows.exclude:
        low, high = first.at(start, end), last.at(start, end)
        # parse_span has checked the order of two moments of the same kind.
        may_fit = (first.is_offset, first.from_end) == (last.is_offset, last.from_end)
        may_fit = may_fit or (windows.is_running and last.from_end)
        if low > high and not may_fit and math.isfinite(high):
            raise ConfigError(
                f"--exclude: of this run, the stretch from {_utc(low)} ends before it begins, at {_utc(high)};"
                " write the earlier moment first"
            )
        drop(low, high)
    return tuple(kept)


def clip(intervals: Iterable[LaneInterval], kept: Sequence[Span]) -> tuple[LaneInterval, ...]:
    """The parts of ``intervals`` that lie in the kept stretches."""
    found: list[LaneInterval] = []
    place = 0
    for interval in intervals:
        while place < len(kept) and kept[place][1] <= interval.start_us:
            place += 1
        at = place
        while at < len(kept) and kept[at][0] < interval.end_us:
            found.extend(interval.within(*kept[at]))
            at += 1
    return tuple(found)
