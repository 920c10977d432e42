"""The library's performance targets, each a ratio of two figures of one run. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks._contenders import FLOOR_COPY, FLOOR_WRITE, RESTORE_BASE

__all__ = ["Target", "isolated_targets", "loop_targets"]

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Target:
    """One target and its measurement.

    Attributes:
        where: size and variant it was measured at.
        text: the target in words.
        limit: the ratio to reach.
        measured: the measured ratio; None when a figure is missing.
        at_most: True when smaller is better.
        figures: the two figures of the ratio, as text.
    """

    where: str
    text: str
    limit: float
    measured: float | None
    at_most: bool = True
    figures: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the measured ratio reaches the limit; None when it was not measured."""
        if self.measured is None:
            return None
        return self.measured <= self.limit if self.at_most else self.measured >= self.limit

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "met": self.met}


def isolated_targets(rows: Mapping[str, Row], *, where: str) -> Iterator[Target]:
    """Targets of one size of state. ``rows``: by contender."""
    for name, variant in (("ours-lazy", "lazy"), ("ours-eager", "eager"), ("ours-ramdisk", "ramdisk")):
        if name not in rows:
            continue
        yield from _of_variant(rows, rows[name], where=f"{where}, {variant}", lazy=variant != "eager")


def _of_variant(rows: Mapping[str, Row], own: Row, *, where: str, lazy: bool) -> Iterator[Target]:
    copy = rows.get(FLOOR_COPY, {}).get("stall_s")
    write = rows.get(FLOOR_WRITE, {}).get("durable_s")
    dcp = rows.get(RESTORE_BASE, {}).get("restore_s")

    def ratio(text: str, limit: float, top: float | None, bottom: float | None, *, at_most: bool = True) -> Target:
        known = top is not None and bottom is not None and bottom > 0
        return Target(
            where=where,
            text=text,
            limit=limit,
            measured=top / bottom if known else None,  # type: ignore[operator]
            at_most=at_most,
            figures=f"{_seconds(top)} / {_seconds(bottom)}",
        )

    if lazy:
        yield ratio("safe warm stall beside compute / copy floor", 0.1, own.get("beside_stall_s"), copy)
    yield ratio("safe warm stall with nothing beside / copy floor", 1.0, own.get("stall_s"), copy)
    yield ratio("first save / warm save (stall)", 1.5, own.get("first_stall_s"), own.get("stall_s"))
    yield ratio("committed / copy floor", 1.3, own.get("committed_s"), copy)
    yield ratio("durable / copy, write and fsync floor", 1.25, own.get("durable_s"), write)
    yield ratio("restore: dcp.load / ours", 3.0, dcp, own.get("restore_s"), at_most=False)
    ram = own.get("ram_x_state")
    yield Target(where=where, text="peak RAM above the state, in shards (2 + 15 %)", limit=2.3, measured=ram)


def loop_targets(rows: Mapping[str, Row], roles: Mapping[str, str], *, where: str) -> Iterator[Target]:
    """Targets of the training loop. ``rows`` and ``roles``: by contender."""
    best = best_peer(rows, roles)
    for name, row in rows.items():
        if roles[name] != "ours":
            continue
        lost = row.get("lost_s")
        text, figures, measured = "training seconds lost per save / best peer's", "", None
        if best is not None and lost is not None:
            # a negative loss is noise and counts as 0
            measured = max(lost, 0.0) / rows[best]["lost_s"]
            figures = f"{_seconds(lost)} / {_seconds(rows[best]['lost_s'])} ({best})"
        yield Target(where=f"{where}, {name}", text=text, limit=0.5, measured=measured, figures=figures)
        restores = [one["restore_s"] for peer, one in rows.items() if roles[peer] == "peer" and one.get("restore_s")]
        if restores and row.get("restore_s"):
            best_s, own_s = min(restores), row["restore_s"]
            yield Target(
                where=f"{where}, {name}",
                text="restore: dcp.load / ours",
                limit=2.0,
                measured=best_s / own_s,
                at_most=False,
                figures=f"{_seconds(best_s)} / {_seconds(own_s)}",
            )


def best_peer(rows: Mapping[str, Row], roles: Mapping[str, str]) -> str | None:
    """The peer with the smallest loss; None when none was measured above zero."""
    peers: Sequence[str] = [
        name for name, row in rows.items() if roles[name] == "peer" and (row.get("lost_s") or 0) > 0
    ]
    return min(peers, key=lambda name: rows[name]["lost_s"], default=None)


def _seconds(value: float | None) -> str:
    return "?" if value is None else f"{value:.4f} s"
