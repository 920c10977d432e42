"""Tells from the event log what happens to the hosts: when it is noticed, what is done, when training goes on. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from recipes.quickstart.follow import Record

__all__ = ["Chapter", "Deed", "DeedKind", "Teller", "chapters_of"]

#: Words for each remedy.
DONE = {
    "restart_in_job": "ranks replaced",
    "restart_workload": "all started anew",
    "hot_swap": "hot swap onto",
    "scale_down": "scaled down",
    "scale_up": "scaled up",
}


class DeedKind(Enum):
    """What the demo does to a host."""

    KILL = "is killed"
    RETURN = "returns"


@dataclass(frozen=True, kw_only=True)
class Deed:
    """One thing that the demo has done to a host.

    Attributes:
        time_s: monotonic seconds, by the clock of the event log.
        step, attempt, ranks: of the training at that moment.
    """

    kind: DeedKind
    host: str
    time_s: float
    step: int
    attempt: int
    ranks: int


@dataclass(frozen=True, kw_only=True)
class Chapter:
    """A deed and what came of it. Times are seconds after the deed; None when the log does not show the event.

    Attributes:
        noticed_s: when the supervisor noticed it.
        remedy: the supervisor's name for what it did; "": it did nothing.
        decided_s: when it decided on the remedy.
        host_in: the spare that took the lost host's place; "": none.
        from_step: step of the checkpoint from which training went on; None: none was loaded.
        trains_s: when the first step afterwards was made.
        redone: number of steps that had been made before and were made again.
        meanwhile: number of steps that the old attempt made after the deed.
        ranks: number of ranks afterwards.
    """

    deed: Deed
    noticed_s: float | None = None
    remedy: str = ""
    decided_s: float | None = None
    host_in: str = ""
    from_step: int | None = None
    trains_s: float | None = None
    redone: int = 0
    meanwhile: int = 0
    ranks: int = 0

    @property
    def done(self) -> str:
        """The remedy in words."""
        words = DONE.get(self.remedy, self.remedy or "nothing")
        return f"{words} {self.host_in}" if self.host_in else words


def chapters_of(deeds: Sequence[Deed], records: Iterable[Record]) -> list[Chapter]:
    """One chapter for each deed, from the records between it and the next one. ``records``: in any order."""
    ordered = sorted(records, key=lambda record: record["monotonic_s"])
    ends = [deed.time_s for deed in deeds[1:]] + [float("inf")]
    return [
        _chapter(deed, [one for one in ordered if deed.time_s <= one["monotonic_s"] < end])
        for deed, end in zip(deeds, ends, strict=True)
    ]


def _chapter(deed: Deed, records: Sequence[Record]) -> Chapter:
    chapter = Chapter(deed=deed, ranks=deed.ranks)
    attempt, before, ranks = deed.attempt, deed.step, set[int]()
    for record in records:
        kind, after_s = record["event_type"], record["monotonic_s"] - deed.time_s
        if chapter.noticed_s is None and is_notice(deed, record):
            chapter = replace(chapter, noticed_s=after_s)
        elif kind == "restart_requested" and chapter.noticed_s is not None:
            chapter = replace(chapter, remedy=record["remedy"], decided_s=after_s)
        elif kind == "host_swapped":
            chapter = replace(chapter, host_in=record["new"])
        elif kind == "job_started" and record["attempt"] > deed.attempt:
            if record["attempt"] > attempt:
                attempt, ranks, chapter = record["attempt"], set(), replace(chapter, trains_s=None)
            ranks.add(record["rank"])
        elif kind == "checkpoint_loaded" and record["attempt"] == attempt > deed.attempt:
            chapter = replace(chapter, from_step=record["step"])
        elif kind == "step" and record["attempt"] <= deed.attempt:
            before = max(before, record["step"])
        elif kind == "step" and record["attempt"] == attempt and chapter.trains_s is None:
            chapter = replace(chapter, trains_s=after_s, ranks=len(ranks))
    redone = 0 if chapter.from_step is None else max(0, before - chapter.from_step)
    return replace(chapter, redone=redone, meanwhile=before - deed.step)


def is_notice(deed: Deed, record: Record) -> bool:
    """True when the record says that the supervisor has noticed the deed."""
    if deed.kind is DeedKind.KILL:
        return record["event_type"] == "host_lost" and record.get("lost_host") == deed.host
    return record["event_type"] == "observed" and record.get("observation") == "capacity"


class Teller:
    """Turns each record that is news into a line of text. Thread: one."""

    def __init__(self) -> None:
        self._restored = self._trains = 0
        self._deed: Deed | None = None
        self._noticed = False

    def begin(self, deed: Deed) -> None:
        """Relates all later records to ``deed``."""
        self._deed, self._noticed = deed, False

    def tell(self, records: Iterable[Record]) -> list[tuple[float, str]]:
        """Returns (monotonic seconds, text) for each of the next ``records``, oldest first, that is news."""
        found = []
        for record in records:
            text = self._text(record)
            if text:
                found.append((record["monotonic_s"], text))
        return found

    def _text(self, record: Record) -> str:
        kind, attempt = record["event_type"], record["attempt"]
        if kind == "checkpoint_loaded" and attempt > self._restored:
            self._restored = attempt
            return f"all ranks load the checkpoint of step {record['step']}"
        if kind == "step" and attempt > self._trains:
            self._trains = attempt
            if self._deed is None:
                return "training begins"
            after_s = record["monotonic_s"] - self._deed.time_s
            return f"step {record['step']} is made, {after_s:.1f} s later: training goes on"
        if self._deed is None:
            return ""
        after_s = record["monotonic_s"] - self._deed.time_s
        if not self._noticed and is_notice(self._deed, record):
            self._noticed = True
            if self._deed.kind is DeedKind.KILL:
                return f"{after_s:.1f} s later {record['lost_host']} is taken for lost: {record['reason']}"
            return f"it has started, has passed its check and has stayed: {after_s:.1f} s"
        return _of_supervisor(record)


def _of_supervisor(record: dict[str, Any]) -> str:
    kind = record["event_type"]
    if kind == "restart_requested":
        return f"the supervisor decides: {record['remedy'].replace('_', ' ')}, because {record['reason']}"
    if kind == "host_swapped":
        return f"{record['new']}, a verified spare, takes the place of {record['old']}"
    if kind == "world_resized":
        return f"the job has {record['new']} hosts, and had {record['old']}"
    if kind == "plan_ended" and record["outcome"] == "failed":
        return f"that did not help ({record['reason']}); the next remedy follows"
    return ""
