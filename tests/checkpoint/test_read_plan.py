"""Reads a caller planned are made as asked, checked like all others, and asked for anew when a copy is bad."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from resiliency.checkpoint import shard_plan
from resiliency.checkpoint.coordinator import Coordinator
from resiliency.checkpoint.read_plan import Read
from resiliency.errors import ConfigError, CorruptShard
from resiliency.storage.shard_file import Chunk
from resiliency.storage.stage import Stage
from resiliency.testing.checkpoints import make_checkpointer, run_ranks

TABLE = torch.arange(2000 * 6, dtype=torch.float32).view(2000, 6)


def state(step: int) -> dict[str, Any]:
    return {"table": TABLE + step, "other": torch.arange(4000) + step, "epoch": step}


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Steps 1 and 2, written by two ranks, in small blocks."""
    monkeypatch.setattr(shard_plan, "_MIN_BLOCK", 512)

    def work(rank: int, coordinator: Coordinator) -> None:
        with make_checkpointer(tmp_path, coordinator) as checkpointer:
            for step in (1, 2):
                ticket = checkpointer.save(step, state(step), per_rank={"rank": rank, "own": torch.full((9,), rank)})
                assert ticket is not None
                ticket.wait(Stage.DURABLE)

    run_ranks(2, work)
    return tmp_path


def damage(directory: Path, step: int, key: str) -> None:
    """Flips a bit in the middle of the shard file that holds a tensor."""
    for path in directory.glob(f".resiliency/*/steps/{step:010d}-*/shard-00000.shard"):
        data = bytearray(path.read_bytes())
        wanted = state(step)[key].numpy().tobytes()
        assert data.count(wanted) == 1
        data[data.index(wanted) + len(wanted) // 2] ^= 1
        with open(path, "r+b") as file:
            file.write(data)


def column_reads(targets: dict[int, torch.Tensor], stored: Sequence[Chunk]) -> list[Read]:
    """Columns of the table, each into a tensor of its own: boxes that are no run of bytes."""
    return [
        Read("table", chunk.offsets, (0, column), (chunk.sizes[0], 1), target[chunk.offsets[0] :][: chunk.sizes[0]])
        for chunk in stored
        if chunk.key == "table"
        for column, target in targets.items()
    ]


def test_only_what_was_asked_for_is_read_and_into_the_callers_memory(saved: Path) -> None:
    damage(saved, 2, "other")
    targets = {1: torch.zeros(2000, 1), 4: torch.zeros(2000, 1, dtype=torch.float64)}
    head = torch.zeros(3, 6)
    seen: list[Sequence[Chunk]] = []

    def reads(stored: Sequence[Chunk]) -> list[Read]:
        seen.append(stored)
        first = next(chunk for chunk in stored if chunk.key == "table" and chunk.offsets == (0, 0))
        return [*column_reads(targets, stored), Read("table", first.offsets, (2, 0), (3, 6), head)]

    with make_checkpointer(saved) as checkpointer:
        restored = checkpointer.load(reads=reads)
    assert restored is not None and {chunk.key for stored in seen for chunk in stored} == {"table", "other"}
    step = restored.step
    assert step == 2, "damage in what nobody wants was looked at"
    assert torch.equal(targets[1], (TABLE + step)[:, 1:2])
    assert torch.equal(targets[4], (TABLE + step)[:, 4:5].double())
    assert torch.equal(head, (TABLE + step)[2:5])
    assert restored.state["epoch"] == step and restored.state["table"].numel() == 0 == restored.state["other"].numel()
    assert restored.per_rank["rank"] == 0 and torch.equal(restored.per_rank["own"], torch.zeros(9, dtype=torch.int64))


def test_damage_is_found_and_the_reads_are_planned_again_for_the_next_step(saved: Path) -> None:
    damage(saved, 2, "table")
    target, calls = torch.zeros(2000, 1), []

    def reads(stored: Sequence[Chunk]) -> list[Read]:
        calls.append(len(stored))
        return column_reads({0: target}, stored)

    with make_checkpointer(saved) as checkpointer:
        restored = checkpointer.load(reads=reads)
    assert restored is not None and restored.step == 1 and len(calls) == 2
    assert torch.equal(target, (TABLE + 1)[:, :1])


def test_damage_everywhere_is_an_error_and_nothing_is_called_restored(saved: Path) -> None:
    for step in (1, 2):
        damage(saved, step, "table")
    with make_checkpointer(saved) as checkpointer, pytest.raises(CorruptShard, match="do not match their digests"):
        checkpointer.load(reads=lambda stored: column_reads({0: torch.zeros(2000, 1)}, stored))


def fails(stored: Sequence[Chunk]) -> list[Read]:
    raise KeyError("nothing planned")


@pytest.mark.parametrize(
    ("reads", "word"),
    [
        (lambda stored: [Read("no", (0,), (0,), (1,), torch.zeros(1))], "'no'.*no such chunk"),
        (lambda stored: [Read("table", (7, 7), (0, 0), (1, 1), torch.zeros(1, 1))], "no such chunk"),
        (lambda stored: [Read("table", (0, 0), (0, 5), (1, 2), torch.zeros(1, 2))], "not within the chunk"),
        (lambda stored: [Read("table", (0, 0), (-1, 0), (1, 2), torch.zeros(1, 2))], "not within the chunk"),
        (lambda stored: [Read("table", (0, 0), (0,), (1,), torch.zeros(1))], "not within the chunk"),
        (lambda stored: [Read("table", (0, 0), (0, 0), (2, 2), torch.zeros(2, 3))], "destination has shape"),
        (fails, "reads= failed: KeyError"),
    ],
)
def test_reads_that_do_not_fit_are_refused_and_no_rank_waits(saved: Path, reads: Any, word: str) -> None:
    def work(rank: int, coordinator: Coordinator) -> None:
        with make_checkpointer(saved, coordinator) as checkpointer:
            if rank == 0:
                with pytest.raises(ConfigError, match=word):
                    checkpointer.load(reads=reads)
            else:
                checkpointer.load()

    run_ranks(2, work, timeout_s=15)


def test_one_way_to_say_what_to_fill(saved: Path) -> None:
    with make_checkpointer(saved) as checkpointer:
        for ways in ({"into": state(1), "reads": fails}, {"keys": bool, "reads": fails}, {"into": {}, "keys": bool}):
            with pytest.raises(ConfigError, match="pass one of into="):
                checkpointer.load(**ways)
