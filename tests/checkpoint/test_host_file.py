"""The ranks of a host write one stock file together: every split, ranks that disagree, hosts that share a folder or not."""

from __future__ import annotations

import dataclasses
import gc
import json
import shutil
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resiliency.checkpoint import Checkpointer
from resiliency.checkpoint import checkpointer as checkpointer_module
from resiliency.checkpoint import shard_plan as shard_plan_module
from resiliency.checkpoint.coordinator import Coordinator
from resiliency.checkpoint.options import LocalTierOptions, RemoteTierOptions
from resiliency.errors import ConfigError, ResiliencyError
from resiliency.storage.manifest import ShardRecord
from resiliency.storage.stage import Stage
from resiliency.testing.checkpoints import (
    QUICK,
    differences,
    flip_bits,
    make_checkpointer,
    make_state,
    run_ranks,
    step_dirs,
)

SOON = timedelta(seconds=20)
LARGE = QUICK.lazy_bytes // 4  # elements of F32 from which on ranks share a tensor


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 4 KiB, so that small states are divided among the ranks."""
    monkeypatch.setattr(shard_plan_module, "_MIN_BLOCK", 4096)
    monkeypatch.setattr(checkpointer_module, "_OTHERS_S", 2.0)  # how long a rank waits for one that never records


def large(seed: float, elements: int = 3000) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(int(seed)))


@dataclasses.dataclass(frozen=True)
class Job:
    """Ranks as threads, on hosts of ``per_host`` ranks, with one folder for all or one for each host."""

    root: Path
    world_size: int
    per_host: int = 8
    private: bool = False
    remote: bool = False
    keep: int | None = None

    def host(self, rank: int) -> int:
        return rank // self.per_host

    def folder(self, rank: int) -> Path:
        return self.root / (f"host{self.host(rank)}" if self.private else "shared")

    def open(self, rank: int, coordinator: Coordinator, **further: Any) -> Checkpointer:
        remotes = [RemoteTierOptions(address=str(self.root / "remote"))] if self.remote else []
        options = LocalTierOptions(directory=str(self.folder(rank)), keep=self.keep)
        made = make_checkpointer(options, coordinator, remotes=remotes, **further)
        made._environment = dataclasses.replace(made._environment, node=f"node{self.host(rank)}")
        return made

    def run(self, work: Callable[[int, Checkpointer], Any], **further: Any) -> list[Any]:
        def open_and_work(rank: int, coordinator: Coordinator) -> Any:
            with self.open(rank, coordinator, **further) as checkpointer:
                return work(rank, checkpointer)

        return run_ranks(self.world_size, open_and_work)

    def save(self, step: int, state: Callable[[int], Any], **further: Any) -> list[str]:
        """Saves on every rank; returns why it failed on each, "" where it did not."""

        def work(rank: int, checkpointer: Checkpointer) -> str:
            ticket = checkpointer.save(
                step, state(rank), per_rank={"rank": rank, "rng": large(rank)}, names=[f"step={step}.ckpt"], **further
            )
            assert ticket is not None
            checkpointer.fence()
            try:
                ticket.wait(Stage.COMMITTED, timeout=SOON)
            except ResiliencyError as error:
                return str(error)
            return ""

        return self.run(work)

    def check(self, state: Any, *, step: int | None = None, saved_by: int | None = None) -> None:
        """Loads on every rank; all must have the state bit for bit, and each its own part."""
        saved_by = self.world_size if saved_by is None else saved_by

        def work(rank: int, checkpointer: Checkpointer) -> Any:
            return checkpointer.load()

        for rank, restored in enumerate(self.run(work)):
            assert restored is not None and step in (None, restored.step)
            assert differences(restored.state, state) == []
            own = {"rank": rank, "rng": large(rank)} if rank < saved_by else None
            assert differences(restored.per_rank, own) == []


def writers(folder: Path) -> dict[int, int]:
    """Blocks of shard 0 that each rank of a step wrote."""
    found = {}
    for path in folder.glob("shard-*.json"):
        record = ShardRecord.from_dict(json.loads(path.read_text()), where=str(path))
        own = sum(1 for digest in record.digests if digest) if record.rank == 0 else 0
        found[record.rank] = own + (len(record.share.digests) if record.share is not None else 0)
    return found


# ---- one host


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_writes_its_part_of_one_stock_file(tmp_path: Path, world_size: int) -> None:
    state = {"a": large(1), "b": {"c": large(2, 10_000), "small": torch.ones(3)}, "tied": None, "text": "x"}
    state["tied"] = state["a"]
    job = Job(tmp_path, world_size)
    assert job.save(1, lambda rank: state) == [""] * world_size
    assert differences(torch.load(tmp_path / "shared" / "step=1.ckpt"), state) == []
    (folder,) = step_dirs(tmp_path / "shared").values()
    assert sorted(path.name for path in folder.glob("*.shard")) == [f"shard-{n:05d}.shard" for n in range(world_size)]
    assert all(count >= 2 for count in writers(folder).values()), "a rank wrote nothing"
    job.check(state)


shapes = st.lists(st.sampled_from([0, 1, LARGE - 1, LARGE, LARGE + 1, 5000, 20_000]), max_size=6)


@given(sizes=shapes, world_size=st.integers(1, 3), lazy=st.booleans(), chosen=st.booleans(), step=st.integers(0, 9))
@settings(deadline=None, database=None, max_examples=25, suppress_health_check=list(HealthCheck))
def test_any_split_gives_the_state_of_rank_0(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], world_size: int, lazy: bool, chosen: bool, step: int
) -> None:
    """What ranks may differ in (small tensors, objects, what is not replicated) comes from rank 0."""

    def state(rank: int) -> Any:
        made = {f"t{i}": large(i, size) for i, size in enumerate(sizes)}
        made["small"] = torch.full((3,), float(rank))
        made["own"] = torch.full((2000,), float(rank)) if chosen else torch.zeros(2000)
        return {"tensors": made, "rank": rank, "list": [rank] * rank, **({"more": torch.ones(rank)} if rank else {})}

    job = Job(tmp_path_factory.mktemp("split"), world_size)
    chooser = (lambda tensor: tensor.numel() != 2000) if chosen else None
    assert job.save(step, state, lazy=lazy, replicated=chooser) == [""] * world_size
    assert differences(torch.load(job.folder(0) / f"step={step}.ckpt"), state(0)) == []
    job.check(state(0), step=step)


def test_ranks_that_hold_a_dict_in_another_order_do_not_mix_up_tensors(tmp_path: Path) -> None:
    """A dict made from a set has another order in each process."""
    names = [f"layer{i}" for i in range(8)]

    def state(rank: int, container: Any = dict) -> Any:
        order = names if rank == 0 else names[::-1]
        return {
            "model": {name: large(names.index(name)) for name in order},
            "mixed": {name: [large(10 + names.index(name)), name] for name in order},
            "parameters": {name: torch.nn.Parameter(large(20 + names.index(name))) for name in order},
        }

    job = Job(tmp_path, 2)
    assert job.save(1, state) == ["", ""]
    assert differences(torch.load(tmp_path / "shared" / "step=1.ckpt"), state(0)) == []
    job.check(state(0))


DISAGREEMENTS: dict[str, Callable[[int], Any]] = {
    "another name": lambda rank: {f"w{rank}": large(1)},
    "another shape": lambda rank: {"w": large(1).view(*((3000,) if rank else (1000, 3)))},
    "another size": lambda rank: {"w": large(1, 3000 + rank)},
    "another dtype": lambda rank: {"w": large(1).view(torch.int32) if rank else large(1)},
    "one more": lambda rank: {"w": large(1), **({"x": large(2)} if rank else {})},
    "one less": lambda rank: {"w": large(1), **({"x": large(2)} if not rank else {})},
    "tied on one": lambda rank: (lambda w: {"w": w, "x": w if rank else w.clone()})(large(1)),
    "none at all": lambda rank: {} if rank else {"w": large(1)},
}


@pytest.mark.parametrize("which", DISAGREEMENTS)
def test_ranks_that_disagree_about_shared_tensors_are_refused(tmp_path: Path, which: str) -> None:
    job = Job(tmp_path, 2)
    reasons = job.save(1, DISAGREEMENTS[which])
    assert any("different sets of tensors" in reason for reason in reasons), reasons
    assert not (tmp_path / "shared" / "step=1.ckpt").exists()
    assert job.run(lambda rank, checkpointer: checkpointer.load()) == [None, None]
    assert job.save(2, lambda rank: make_state(2)) == ["", ""]
    job.check(make_state(2))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_skips_a_save_leaves_the_step_before(tmp_path: Path, rank: int) -> None:
    """Its part of the file was never written: the step must not count."""
    job = Job(tmp_path, 2)

    def work(mine: int, checkpointer: Checkpointer) -> None:
        assert checkpointer.save(1, make_state(1)) is not None
        assert checkpointer.flush(Stage.COMMITTED, timeout=SOON)
        if mine == rank:
            checkpointer._parts().saves.next_id(2)
        else:
            assert checkpointer.save(2, make_state(2), names=["two.ckpt"]) is not None
            checkpointer.flush(Stage.RECORDED, timeout=SOON)
        restored = checkpointer.load()
        assert restored is not None and restored.step == 1
        ticket = checkpointer.save(3, make_state(3))
        assert ticket is not None
        ticket.wait(timeout=SOON)
        restored = checkpointer.load()
        assert restored is not None and restored.step == 3

    job.run(work)
    assert not (tmp_path / "shared" / "two.ckpt").exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_copy_that_fails_on_one_rank_leaves_the_step_before(tmp_path: Path, rank: int) -> None:
    job = Job(tmp_path, 2)

    def work(mine: int, checkpointer: Checkpointer) -> None:
        assert checkpointer.save(1, make_state(1)) is not None
        assert checkpointer.flush(Stage.COMMITTED, timeout=SOON)
        copier = checkpointer._parts().copier
        start = copier.start
        if mine == rank:
            copier.start = (
                lambda job, done, **further: start(  # type: ignore[method-assign]
                    dataclasses.replace(job, copies=job.copies[:1]), done, **further
                )
            )
        ticket = checkpointer.save(2, {"w": large(1, 200_000)}, lazy=True)
        assert ticket is not None
        checkpointer.fence()
        if mine == rank:
            with pytest.raises(ResiliencyError, match="copy failed"):
                ticket.wait(timeout=SOON)
        restored = checkpointer.load()
        assert restored is not None and restored.step == 1

    job.run(work)


def test_steps_that_grow_shrink_and_change_their_division(tmp_path: Path) -> None:
    """Files prepared for one size are used for another; nothing of an earlier step shows through."""
    job = Job(tmp_path, 2, keep=1)

    def work(rank: int, checkpointer: Checkpointer) -> None:
        for step, size in enumerate([400_000, 1000, 600_000, 100, 0, 350_000, 400_000, 400_000], 1):
            state = {"w": large(step, size), "n": step, "text": "x" * (size // 7)}
            ticket = checkpointer.save(step, state, names=["last.ckpt"])
            assert ticket is not None
            ticket.wait(timeout=SOON)
            restored = checkpointer.load()
            assert restored is not None and differences(restored.state, state) == []
            assert differences(torch.load(tmp_path / "shared" / "last.ckpt"), state) == []
            checkpointer._parts().coordinator.all_gather(f"next {step}", b"", timeout=SOON)

    job.run(work)


# ---- several hosts


def test_hosts_that_share_a_folder_write_one_file_by_the_first_of_them(tmp_path: Path) -> None:
    job = Job(tmp_path, 4, per_host=2)
    state = make_state(1, rows=2000)
    assert job.save(1, lambda rank: state) == [""] * 4
    assert differences(torch.load(tmp_path / "shared" / "step=1.ckpt"), state) == []
    (folder,) = step_dirs(tmp_path / "shared").values()
    wrote = writers(folder)
    assert wrote[0] and wrote[1] and not wrote[2] and not wrote[3]
    job.check(state)


def test_hosts_with_folders_of_their_own_have_a_whole_file_each(tmp_path: Path) -> None:
    job = Job(tmp_path, 4, per_host=2, private=True)
    state = make_state(1, rows=2000)
    assert job.save(1, lambda rank: state) == [""] * 4
    for host in (0, 1):
        assert differences(torch.load(tmp_path / f"host{host}" / "step=1.ckpt"), state) == []
    job.check(state)


@pytest.mark.parametrize("host", [0, 1])
def test_a_damaged_copy_of_one_host_is_replaced_from_the_store(tmp_path: Path, host: int) -> None:
    job = Job(tmp_path, 4, per_host=2, private=True, remote=True)
    state = make_state(1, rows=2000)
    job.save(1, lambda rank: state)
    (folder,) = step_dirs(tmp_path / f"host{host}").values()
    flip_bits(folder / "shard-00000.shard", [(9000, 9001)])
    job.check(state, step=1)


@pytest.mark.parametrize("host", [0, 1])
def test_a_host_that_lost_everything_restores_the_step_of_the_others(tmp_path: Path, host: int) -> None:
    job = Job(tmp_path, 4, per_host=2, private=True, remote=True)
    state = make_state(1, rows=2000)
    job.save(1, lambda rank: state)
    shutil.rmtree(tmp_path / f"host{host}")
    job.check(state, step=1)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 1), (3, 2), (2, 4)])
def test_a_step_is_restored_at_another_world_size(tmp_path: Path, before: int, after: int) -> None:
    state = make_state(1, rows=2000)
    Job(tmp_path, before).save(1, lambda rank: state)
    Job(tmp_path, after).check(state, saved_by=before)
    # And the next save, at the new size, is the newest then.
    assert Job(tmp_path, after).save(2, lambda rank: make_state(2)) == [""] * after
    Job(tmp_path, before).check(make_state(2), step=2, saved_by=after)


def test_a_writer_that_dies_in_the_middle_leaves_no_step(tmp_path: Path) -> None:
    """Rank 1 makes its copies and never says so."""
    job = Job(tmp_path, 2)

    def work(rank: int, checkpointer: Checkpointer) -> None:
        ticket = checkpointer.save(1, make_state(1))
        assert ticket is not None
        ticket.wait(timeout=SOON)
        if rank == 1:
            checkpointer._parts().session.client.send = lambda message: None  # type: ignore[assignment, method-assign]
        assert checkpointer.save(2, make_state(2), names=["two.ckpt"]) is not None
        checkpointer.fence()
        assert checkpointer._parts().copier.wait_idle(10)
        checkpointer.close(flush=False)

    job.run(work)
    assert not (tmp_path / "shared" / "two.ckpt").exists(), "a step without rank 1's part was committed"
    assert [restored and restored.step for restored in job.run(lambda rank, made: made.load())] == [1, 1]


def test_no_tensor_of_an_earlier_save_is_kept_in_memory(tmp_path: Path) -> None:
    """What is kept from save to save must not keep a copy of the model."""
    job = Job(tmp_path, 1)

    def work(rank: int, checkpointer: Checkpointer) -> None:
        for step in (1, 2, 3):
            state = {"w": large(step), "odd": torch.ones(300, 40).t(), "p": torch.nn.Parameter(large(step))}
            alive = [weakref.ref(tensor) for tensor in state.values()]
            ticket = checkpointer.save(step, state, lazy=True)
            assert ticket is not None
            checkpointer.fence()
            ticket.wait(timeout=SOON)
            assert checkpointer._parts().copier.wait_idle(10)
            del state
            gc.collect()
            assert [reference() is None for reference in alive] == [True] * 3

    job.run(work)


@pytest.mark.parametrize("how", ["skipped", "refused"])
def test_of_two_saves_of_one_step_a_rank_that_missed_the_first_has_no_part_in_it(tmp_path: Path, how: str) -> None:
    """Or its part of the second would complete the first: a state, and what a rank has for itself, of two moments."""
    job = Job(tmp_path, 2)

    def work(mine: int, checkpointer: Checkpointer) -> Any:
        late = mine == 1
        if late and how == "skipped":
            checkpointer._parts().saves.next_id(1)
        elif late:
            with pytest.raises(ConfigError):
                checkpointer.save(1, make_state(1), per_rank={"moment": lambda: 1})
        else:
            assert checkpointer.save(1, make_state(1), per_rank={"moment": 1}) is not None
            checkpointer.flush(Stage.RECORDED, timeout=SOON)
        ticket = checkpointer.save(1, make_state(2), per_rank={"moment": 2})
        assert ticket is not None
        ticket.wait(timeout=SOON)
        restored = checkpointer.load()
        assert restored is not None and differences(restored.state, make_state(2)) == []
        return restored.per_rank

    assert job.run(work) == [{"moment": 2}, {"moment": 2}]


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_refuses_no_rank_waits_for_and_nothing_of_it_stays(tmp_path: Path, rank: int) -> None:
    """A rank that refuses every save must not fill the disk with the other ranks' parts."""
    job = Job(tmp_path, 2)
    together = threading.Barrier(2)  # as the steps of a training are

    def work(mine: int, checkpointer: Checkpointer) -> None:
        for step in (1, 2):
            if mine == rank:
                with pytest.raises(ConfigError):
                    checkpointer.save(step, make_state(step), per_rank=lambda: 1)
            else:
                ticket = checkpointer.save(step, make_state(step))
                assert ticket is not None
                with pytest.raises(ResiliencyError, match=f"rank {rank}: .*cannot be stored"):
                    ticket.wait(timeout=SOON)
                checkpointer.flush(Stage.COMMITTED, timeout=SOON)
            together.wait(SOON.total_seconds())

    job.run(work)
    assert step_dirs(tmp_path / "shared") == {}
