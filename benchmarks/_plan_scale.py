"""What planning a save costs the busiest rank, by the number of ranks; for :mod:`benchmarks.scale`.

One rank plans as in a job, with the library's own planner; the tensors are small stand-ins on a simulated mesh. Of a
write plan the busiest rank is rank 0, which gets the messages that all others would send.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from resiliency.checkpoint.rank_messages import WritePlanBoxes
from resiliency.checkpoint.shard_plan import Agree, HostPart, ShardPlanner
from resiliency.checkpoint.write_plan import WriteChunk, WritePlan
from resiliency.runtime.typed_json import encode
from resiliency.state.layouts import Box, MeshLayout, Split
from resiliency.state.leaf_kinds import LeafDescription, register_leaf_kind
from resiliency.storage.shard_file import Chunk

__all__ = ["PlanFigures", "measure_plans", "plan_table"]

COLUMNS, REPLICAS = 8, 2


@dataclass(frozen=True, kw_only=True)
class PlanFigures:
    """One row of the table.

    Attributes:
        first_s, later_s: of the busiest rank: the first save of a structure, and the median of later ones.
        first_messages, later_messages: number of messages that it sends or gets.
        first_nbytes, later_nbytes: bytes of these messages.
    """

    what: str
    ranks: int
    tensors: int
    first_s: float
    later_s: float
    first_messages: int
    later_messages: int
    first_nbytes: int
    later_nbytes: int


@dataclass(frozen=True)
class _Shard:
    """A rank's part of a tensor that HSDP divides by rows."""

    local: Tensor
    layout: MeshLayout

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.layout.ranks) // REPLICAS, COLUMNS


@dataclass(frozen=True)
class _ShardKind:
    rank: int
    name: str = "simulated shard"
    replicated: bool = False

    def takes(self, class_: type) -> bool:
        return class_ is _Shard

    def detach(self, leaf: Any, key: str) -> Any:
        return leaf

    def describe(self, leaf: Any) -> LeafDescription:
        boxes = leaf.layout.boxes(leaf.shape, self.rank)
        return LeafDescription(shape=leaf.shape, dtype=leaf.local.dtype, boxes=boxes, layout=leaf.layout)

    def structure(self, leaf: Any) -> Any:
        return leaf.local.dtype, leaf.shape, leaf.local.device, leaf.layout

    def local(self, leaf: Any, box: Box) -> Tensor:
        found: Tensor = leaf.local
        return found


class _Others:
    """The coordinator of rank 0, which hears all other ranks say what one of them would."""

    def __init__(self, ranks: int, offers: Callable[[int], bytes]) -> None:
        self.rank, self.world_size = 0, ranks
        self._offers = [offers(rank) for rank in range(1, ranks)]
        self.messages = self.nbytes = 0

    def ask_first(
        self, topic: str, data: bytes, decide: Callable[[list[bytes]], list[bytes]], *, timeout: timedelta
    ) -> bytes:
        heads = topic.endswith("head")
        got = [data, *([data] * (self.world_size - 1) if heads else self._offers)]
        answers = decide(got)
        self.messages += 2 * (self.world_size - 1)
        self.nbytes += sum(map(len, got[1:])) + sum(map(len, answers[1:]))
        return answers[0]

    def all_gather(self, topic: str, data: bytes, *, timeout: timedelta) -> list[bytes]:
        raise AssertionError("a save gathers nothing")

    def count(self, topic: str, amount: int) -> int:
        raise AssertionError("a plan counts nothing")


def _measured(what: str, ranks: int, rank: int, tensors: int, state: Any, coordinator: Any, rounds: int) -> PlanFigures:
    planner = ShardPlanner(rank=rank, world_size=ranks, small_nbytes=0)
    agree = Agree(coordinator=coordinator, topic="scale", timeout=timedelta(minutes=1))
    spent: list[float] = []
    sent: list[tuple[int, int]] = []
    for _ in range(1 + rounds):
        gc.collect()
        messages, nbytes, began = coordinator.messages, coordinator.nbytes, time.monotonic()
        planner.plan(state, None, host=HostPart(), agree=agree, lazy=True)
        spent.append(time.monotonic() - began)
        sent.append((coordinator.messages - messages, coordinator.nbytes - nbytes))
    return PlanFigures(
        what=what,
        ranks=ranks,
        tensors=tensors,
        first_s=spent[0],
        later_s=sorted(spent[1:])[rounds // 2],
        first_messages=sent[0][0],
        later_messages=sent[1][0],
        first_nbytes=sent[0][1],
        later_nbytes=sent[1][1],
    )


def _sharded(ranks: int, tensors: int, rounds: int) -> PlanFigures:
    """Tensors that HSDP shards over half of the ranks, and replicates. Several ranks are asked; the slowest counts."""
    found = []
    for rank in sorted({0, ranks // 2, ranks - 1}):
        layout = MeshLayout((REPLICAS, ranks // REPLICAS), tuple(range(ranks)), (None, Split(0)))
        state = {f"layer.{i}.weight": _Shard(torch.zeros(1, COLUMNS), layout) for i in range(tensors)}
        remove = register_leaf_kind(_ShardKind(rank))
        try:
            found.append(_measured("DTensors", ranks, rank, tensors, state, _Others(ranks, lambda _: b""), rounds))
        finally:
            remove()
    return max(found, key=lambda figures: figures.first_s)


def _given(ranks: int, tensors: int, rounds: int) -> PlanFigures:
    """A write plan in which each rank offers a row of each tensor."""
    shape = (ranks, COLUMNS)

    def offer(rank: int) -> bytes:
        boxes = [Chunk(f"layer.{i}.weight", (rank, 0), (1, COLUMNS), "float32", 4, shape) for i in range(tensors)]
        return encode(WritePlanBoxes.of(boxes))

    local = torch.zeros(1, COLUMNS)
    chunks = [WriteChunk(key=f"layer.{i}.weight", tensor=local, shape=shape) for i in range(tensors)]
    return _measured("WritePlan", ranks, 0, tensors, WritePlan(chunks=chunks), _Others(ranks, offer), rounds)


def measure_plans(ranks: Sequence[int], *, tensors: int, write_plans_up_to: int, rounds: int = 5) -> list[PlanFigures]:
    """The rows of the table, small world sizes first."""
    _sharded(REPLICAS, tensors, 1)  # imports and first uses
    rows = [_sharded(count, tensors, rounds) for count in ranks]
    return [*rows, *(_given(count, tensors, rounds) for count in ranks if count <= write_plans_up_to)]


def growth(rows: Sequence[PlanFigures], seconds: Callable[[PlanFigures], float]) -> float:
    """The exponent e of "seconds grow as ranks ** e", between the first row and the last one."""
    first, last = rows[0], rows[-1]
    return math.log(seconds(last) / seconds(first)) / math.log(last.ranks / first.ranks)


def plan_table(rows: Sequence[PlanFigures]) -> Table:
    """The rows, and the exponents of growth."""
    made = Table(title="Planning of one save, the busiest rank", title_justify="left", pad_edge=False)
    made.add_column("state")
    for head in ("ranks", "tensors", "seconds", "later", "messages", "later", "KiB", "later"):
        made.add_column(head, justify="right")
    for what in dict.fromkeys(row.what for row in rows):
        of_kind = [row for row in rows if row.what == what]
        for row in of_kind:
            cells = f"{row.first_s:.3f}", f"{row.later_s:.4f}", str(row.first_messages), str(row.later_messages)
            kib = f"{row.first_nbytes / 1024:.0f}", f"{row.later_nbytes / 1024:.1f}"
            made.add_row(row.what, str(row.ranks), str(row.tensors), *cells, *kib)
        if len(of_kind) > 1:
            exponents = [growth(of_kind, seconds) for seconds in (lambda row: row.first_s, lambda row: row.later_s)]
            made.add_row("", "grows as", "ranks **", *(f"{exponent:.2f}" for exponent in exponents))
    return made
