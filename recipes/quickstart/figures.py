"""What the demo reports, computed from the event log and the list of kills. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from recipes.quickstart.chaos import Shot, Victim
from recipes.quickstart.follow import Record

__all__ = ["Figures", "Recovery", "figures_of"]


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What one kill of ranks cost.

    Attributes:
        duration_s: from the kill to the end of the first step after it.
        redone: steps that were done before the kill and had to be done again.
    """

    duration_s: float
    redone: int


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One run in numbers.

    Attributes:
        saves: steps committed.
        save_bytes: bytes of one checkpoint, all ranks together.
        stall_s: per save, time the slowest rank was held up (eager copy and fence together).
        stall_share: all stalls over all step time, of the slowest rank.
        in_save: kills that came while a save was begun and not committed.
        recoveries: one for each kill of ranks.
        restores: checkpoints loaded, counted once for all ranks.
        restored_bytes: bytes loaded, all ranks and restores together.
    """

    saves: int
    save_bytes: int
    stall_s: tuple[float, ...]
    stall_share: float
    in_save: int
    recoveries: tuple[Recovery, ...]
    restores: int
    restored_bytes: int

    @property
    def median_stall_s(self) -> float:
        return median(self.stall_s) if self.stall_s else 0.0


def figures_of(records: Sequence[Record], shots: Sequence[Shot] = ()) -> Figures:
    """Numbers of one run from its event records (any order) and its kills."""
    started: dict[tuple[int, int], dict[int, Record]] = defaultdict(dict)  # (attempt, step) -> rank -> record
    stalls: dict[tuple[int, int], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    committed: dict[tuple[int, int], float] = {}
    step_s: dict[int, float] = defaultdict(float)
    stall_s: dict[int, float] = defaultdict(float)
    restored: set[int] = set()
    restored_bytes = 0
    for record in sorted(records, key=lambda record: record["monotonic_s"]):
        kind, rank = record["event_type"], record["rank"]
        save = (record["attempt"], record.get("step", 0))
        if kind == "checkpoint_started":
            started[save][rank] = record
        if kind in ("checkpoint_started", "checkpoint_fenced"):
            stalls[save][rank] += record["stall_s"]
            stall_s[rank] += record["stall_s"]
        elif kind == "checkpoint_saved":
            committed.setdefault(save, record["monotonic_s"])
        elif kind == "step":
            step_s[rank] += record["step_s"]
        elif kind == "checkpoint_loaded":
            restored.add(record["attempt"])
            restored_bytes += record.get("bytes", 0)
    full = max(({rank: r["bytes"] for rank, r in ranks.items()} for ranks in started.values()), key=len, default={})
    return Figures(
        saves=len(committed),
        save_bytes=sum(full.values()),
        stall_s=tuple(max(ranks.values()) for ranks in stalls.values()),
        stall_share=max((stall_s[rank] / total for rank, total in step_s.items() if total), default=0.0),
        in_save=sum(_lands_in_save(shot, started, committed) for shot in shots),
        recoveries=tuple(_recovery(shot, records) for shot in shots if shot.kill.victim is not Victim.AGENT),
        restores=len(restored),
        restored_bytes=restored_bytes,
    )


def _lands_in_save(
    shot: Shot, started: dict[tuple[int, int], dict[int, Record]], committed: dict[tuple[int, int], float]
) -> bool:
    for save, ranks in started.items():
        begun = min(record["monotonic_s"] for record in ranks.values())
        if save[0] == shot.attempt and begun <= shot.time_s <= committed.get(save, float("inf")):
            return True
    return False


def _recovery(shot: Shot, records: Sequence[Record]) -> Recovery:
    before = [r["step"] for r in records if r["event_type"] == "step" and r["attempt"] == shot.attempt]
    later = [r for r in records if r["event_type"] == "step" and r["attempt"] > shot.attempt]
    if not later:
        raise ValueError(f"training did not go on after the kill at step {shot.step} in attempt {shot.attempt}")
    first = min(later, key=lambda record: record["monotonic_s"])
    return Recovery(
        duration_s=first["monotonic_s"] - shot.time_s,
        redone=max(before, default=0) - (first["step"] - 1),
    )
