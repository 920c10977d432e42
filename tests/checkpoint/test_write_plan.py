"""A caller's own plan is written as it says, or refused on every rank."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from resiliency.checkpoint.coordinator import Coordinator, StoreCoordinator
from resiliency.checkpoint.write_plan import WriteChunk, WritePlan
from resiliency.errors import ConfigError
from resiliency.inspection.by_path import locate
from resiliency.inspection.contents import entries, read_contents
from resiliency.inspection.export import export
from resiliency.storage.stage import Stage
from resiliency.testing.checkpoints import differences, make_checkpointer, run_ranks

WHOLE = torch.arange(90 * 40, dtype=torch.float32).view(90, 40)


def rows(rank: int, ranks: int = 2, *, add: float = 0) -> WriteChunk:
    """One rank's part of WHOLE, every rank's of another size."""
    first, last = (90 * rank) // (ranks + 1), 90 if rank == ranks - 1 else (90 * (rank + 1)) // (ranks + 1)
    return WriteChunk(key="model/table", tensor=WHOLE[first:last] + add, offsets=(first, 0), shape=(90, 40))


def write(directory: Path, make: Any, *steps: int, ranks: int = 2, **options: Any) -> list[Any]:
    def work(rank: int, coordinator: Coordinator) -> Any:
        with make_checkpointer(directory, coordinator) as checkpointer:
            for step in steps or (1,):
                ticket = checkpointer.save(step, make(rank, step), per_rank={"rank": rank}, **options)
                assert ticket is not None
                checkpointer.fence()
                ticket.wait(Stage.DURABLE)
            return checkpointer.load()

    return run_ranks(ranks, work)


def plan(rank: int, step: int) -> WritePlan:
    whole = [WriteChunk(key="bias!", tensor=torch.full((3,), float(step)))] if rank == 1 else []
    return WritePlan(chunks=[rows(rank, add=step), *whole], objects={"epoch": step, "!": [b"x", (rank, 2)]})


@pytest.mark.parametrize("lazy", [False, True, lambda tensor: tensor.dim() == 2 and len(tensor) > 10])
def test_a_plan_made_by_hand_is_read_back_as_a_flat_dict(tmp_path: Path, lazy: Any) -> None:
    for rank, restored in enumerate(write(tmp_path, plan, 1, 2, lazy=lazy)):
        assert restored.per_rank == {"rank": rank} and restored.step == 2
        wanted = {"model/table": WHOLE + 2, "bias!": torch.full((3,), 2.0), "epoch": 2, "!": [b"x", (0, 2)]}
        assert differences(restored.state, wanted) == []


def test_every_rank_writes_the_boxes_it_offered(tmp_path: Path) -> None:
    write(tmp_path, plan)
    located = locate(str(tmp_path))
    assert located is not None and located.listing.manifest is not None
    for rank, record in enumerate(located.listing.manifest.shards):
        chunks = [placed.chunk for placed in read_contents(located.tier, located.run, record).chunks]
        boxes = {(chunk.key, chunk.offsets, chunk.sizes) for chunk in chunks}
        assert boxes == {(c.key, c.box.offsets, c.box.sizes) for c in plan(rank, 1).chunks}


def test_a_state_tree_of_the_same_keys_can_be_filled_from_it(tmp_path: Path) -> None:
    write(tmp_path, plan)
    into = {"model": {"table": torch.zeros(90, 40, dtype=torch.float64)}, "bias!": torch.zeros(3)}
    with make_checkpointer(tmp_path) as checkpointer:
        checkpointer.load(into=into)
    assert torch.equal(into["model"]["table"], (WHOLE + 1).double()) and into["bias!"].tolist() == [1, 1, 1]


def test_commands_list_and_export_it(tmp_path: Path) -> None:
    made = WritePlan(chunks=[WriteChunk(key="w", tensor=WHOLE)], objects={"epoch": 1})
    write(tmp_path / "c", lambda rank, step: made, ranks=1)
    located = locate(str(tmp_path / "c"))
    assert located is not None and located.listing.manifest is not None
    record = located.listing.manifest.shards[0]
    tree = read_contents(located.tier, located.run, record).tree
    assert [(entry.path, entry.tensors, entry.text) for entry in entries(tree)] == [
        ("w", 1, "tensor"),
        ("epoch", 0, "1"),
    ]
    export(str(tmp_path / "c"), tmp_path / "out.ckpt")
    assert torch.equal(torch.load(tmp_path / "out.ckpt")["w"], WHOLE)


def test_a_box_that_several_ranks_offer_is_written_by_one(tmp_path: Path) -> None:
    same = {"a": torch.randn(3000), "b": torch.randn(3000)}
    (one, other) = write(
        tmp_path, lambda rank, step: WritePlan(chunks=[WriteChunk(key=k, tensor=t) for k, t in same.items()])
    )
    assert differences(one.state, same) == [] and differences(other.state, same) == []
    sizes = [path.stat().st_size for path in tmp_path.glob(".resiliency/*/steps/*/*.distcp")]
    assert len(sizes) == 2 and max(sizes) < 2 * 12_000, "both ranks wrote both"


@pytest.mark.parametrize("wrong", ["hole", "overlap", "shape", "dtype"])
def test_what_does_not_make_a_whole_is_refused_on_every_rank(tmp_path: Path, wrong: str) -> None:
    second = {
        "hole": WriteChunk(key="w", tensor=torch.zeros(4, 2), offsets=(6, 0), shape=(10, 2)),
        "overlap": WriteChunk(key="w", tensor=torch.zeros(6, 2), offsets=(4, 0), shape=(10, 2)),
        "shape": WriteChunk(key="w", tensor=torch.zeros(5, 2), offsets=(5, 0), shape=(11, 2)),
        "dtype": WriteChunk(key="w", tensor=torch.zeros(5, 2).int(), offsets=(5, 0), shape=(10, 2)),
    }[wrong]

    def work(rank: int, coordinator: Coordinator) -> None:
        first = WriteChunk(key="w", tensor=torch.zeros(5, 2), shape=(10, 2))
        with make_checkpointer(tmp_path, coordinator) as checkpointer:
            with pytest.raises(ConfigError, match="make a whole|'w'"):
                checkpointer.save(1, WritePlan(chunks=[(first, second)[rank]]))
            ticket = checkpointer.save(2, plan(rank, 2))  # nobody is left waiting
            assert ticket is not None
            ticket.wait(Stage.DURABLE)

    run_ranks(2, work)


def test_boxes_are_sent_once_and_again_when_they_change_on_any_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 alone cuts its part otherwise at step 3. What rank 1 remembers does not keep it from taking part."""
    sent: list[tuple[int, int]] = []
    step_now = [0, 0]
    real = StoreCoordinator.ask_first

    def ask_first(self: StoreCoordinator, topic: str, *args: Any, **further: Any) -> Any:
        if topic.endswith("boxes"):
            sent.append((step_now[self.rank], self.rank))
        return real(self, topic, *args, **further)

    monkeypatch.setattr(StoreCoordinator, "ask_first", ask_first)
    live = [torch.zeros(2000), torch.zeros(2000)]

    def make(rank: int, step: int) -> WritePlan:
        step_now[rank] = step
        live[rank] += 1
        at = 2000 * rank
        cut = (0, 500, 2000) if step >= 3 and rank == 0 else (0, 2000)
        chunks = [
            WriteChunk(key="w", tensor=live[rank][first:last], offsets=(at + first,), shape=(4000,))
            for first, last in zip(cut, cut[1:], strict=False)
        ]
        return WritePlan(chunks=chunks, objects={"notes": "x" * 100_000 * (step // 2)})  # needs more room at 2 and 4

    for restored in write(tmp_path, make, 1, 2, 3, 4):
        assert torch.equal(restored.state["w"], torch.full((4000,), 4.0)) and len(restored.state["notes"]) == 200_000
    assert sorted(sent) == [(1, 0), (1, 1), (3, 0), (3, 1)]


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("no pickle of this")


@pytest.mark.parametrize(
    ("wrong", "odd"),
    # The objects of rank 0 are stored, so only its names can be those of tensors.
    [*itertools.product(["per_rank", "object", "freed"], [0, 1]), ("name of another rank's tensor", 0)],
)
def test_what_one_rank_cannot_store_is_refused_by_all_and_nobody_waits(tmp_path: Path, wrong: str, odd: int) -> None:
    def work(rank: int, coordinator: Coordinator) -> str:
        with make_checkpointer(tmp_path, coordinator) as checkpointer:
            tensor = WHOLE[:5].clone()
            chunks = [WriteChunk(key=f"w{rank}", tensor=tensor)]
            objects = {"epoch": Unpicklable() if wrong == "object" and rank == odd else 1}
            if wrong.startswith("name") and rank == odd:
                objects["w1"] = 2
            given = WritePlan(chunks=chunks, objects=objects)
            if wrong == "freed" and rank == odd:
                tensor.untyped_storage().resize_(0)
            per_rank = Unpicklable() if wrong == "per_rank" and rank == odd else rank
            with pytest.raises(ConfigError) as caught:
                checkpointer.save(1, given, per_rank=per_rank)
            ticket = checkpointer.save(2, plan(rank, 2))
            assert ticket is not None
            ticket.wait(Stage.DURABLE)
            return str(caught.value)

    said = run_ranks(2, work)
    assert said[0] == said[1] and (wrong.startswith("name") or f"(rank {odd})" in said[0])


def test_a_save_that_one_rank_leaves_out_is_left_out_by_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would wait for minutes. Here rank 1's agent has not recorded the step before."""

    def work(rank: int, coordinator: Coordinator) -> list[bool]:
        with make_checkpointer(tmp_path, coordinator) as checkpointer:
            first = checkpointer.save(1, plan(rank, 1))
            assert first is not None
            if rank == 1:
                monkeypatch.setattr(checkpointer, "_wait_for_previous", lambda parts: "step 1 is not recorded yet")
            second = checkpointer.save(2, plan(rank, 2))
            if rank == 1:
                monkeypatch.undo()
            third = checkpointer.save(3, plan(rank, 3))
            assert third is not None
            third.wait(Stage.DURABLE)
            assert checkpointer.skipped == 1
            return [second is None]

    assert run_ranks(2, work) == [[True], [True]]


def test_a_plan_that_looks_like_a_state_saved_before_is_exchanged_nevertheless(tmp_path: Path) -> None:
    """Of a replicated state nobody tells the others; boxes that are alike on this rank prove nothing of theirs."""
    whole = torch.arange(3000.0)

    def make(rank: int, step: int) -> Any:
        if step == 1:
            return {"w": whole}
        rows = slice(0, 1000) if rank else slice(1000, 3000)
        chunk = WriteChunk(key="w", tensor=whole[rows], offsets=(rows.start,), shape=(3000,))
        return WritePlan(chunks=[chunk])

    for restored in write(tmp_path, make, 1, 2):
        assert restored.step == 2 and torch.equal(restored.state["w"], whole)


def test_late_changes_of_a_lazy_chunk_wait_for_the_fence(tmp_path: Path) -> None:
    asked: list[int] = []
    big, small = torch.ones(5000), torch.ones(2)

    def lazy(tensor: torch.Tensor) -> bool:
        asked.append(len(tensor))
        return True

    with make_checkpointer(tmp_path) as checkpointer:
        ticket = checkpointer.save(
            1, WritePlan(chunks=[WriteChunk(key="big", tensor=big), WriteChunk(key="small", tensor=small)]), lazy=lazy
        )
        assert ticket is not None
        small.fill_(7)  # copied before save returned
        checkpointer.fence()
        big.fill_(7)
        ticket.wait(Stage.DURABLE)
        restored = checkpointer.load()
    assert restored is not None and asked == [5000]
    assert restored.state["big"].unique().tolist() == restored.state["small"].unique().tolist() == [1.0]


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: WriteChunk(key="w", tensor=WHOLE, offsets=(1, 0), shape=(90, 40)), "not within"),
        (lambda: WriteChunk(key="w", tensor=WHOLE, offsets=(0,)), "not within"),
        (lambda: WriteChunk(key="w", tensor=WHOLE, shape=(90, 40, 1)), "not within"),
        (lambda: WriteChunk(key="w", tensor=WHOLE, offsets=(-1, 0), shape=(200, 40)), "not within"),
        (lambda: WriteChunk(key="", tensor=WHOLE), "not within"),
        (lambda: WriteChunk(key="w", tensor=torch.empty(3, device="meta")), "meta"),
        (lambda: WriteChunk(key="w", tensor=torch.eye(3).to_sparse()), "to_dense"),
        (lambda: WritePlan(chunks=[WriteChunk(key="w", tensor=WHOLE)] * 2), "each box once"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_plans_that_make_no_sense_are_refused_where_they_are_made(make: Any, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        make()


@pytest.mark.parametrize(
    ("objects", "word"), [({"w": 1}, "'w' has the key"), ({"x": [torch.ones(1)]}, "'x' holds a tensor")]
)
def test_objects_that_are_tensors_or_named_like_one_are_refused(
    tmp_path: Path, objects: dict[str, Any], word: str
) -> None:
    with make_checkpointer(tmp_path) as checkpointer, pytest.raises(ConfigError, match=word):
        checkpointer.save(1, WritePlan(chunks=[WriteChunk(key="w", tensor=WHOLE)], objects=objects))


def test_what_is_replicated_is_no_question_of_a_plan(tmp_path: Path) -> None:
    with make_checkpointer(tmp_path) as checkpointer, pytest.raises(ConfigError, match="replicated="):
        checkpointer.save(1, plan(0, 1), replicated=lambda tensor: True)
