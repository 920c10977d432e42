"""Joining the shards of a host's ranks: cut off anywhere it loses nothing, and the next agent finishes it."""

from __future__ import annotations

import dataclasses
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resiliency import faultpoints
from resiliency.agent import join
from resiliency.agent._fence import Fence
from resiliency.agent.config import AgentConfig
from resiliency.agent.core import HostAgent
from resiliency.agent.join import join_shards
from resiliency.agent.messages import Bye, Notice, Recorded, Seal, SealedFile
from resiliency.checkpoint.coordinator import Coordinator
from resiliency.checkpoint.options import LocalTierOptions
from resiliency.errors import AgentError
from resiliency.events import EventWriter
from resiliency.storage.catalog import scan
from resiliency.storage.manifest import META_DIR, Manifest
from resiliency.storage.single_files import read_single_file
from resiliency.storage.stage import Stage
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.checkpoints import (
    QUICK,
    RUN,
    differences,
    make_checkpointer,
    make_lightning_state,
    run_ranks,
    save_steps,
    step_dir,
)
from tests.agent.sealing import config_for
from tests.rings import few
from tests.storage.joining import unjoined

RANKS = 2
PROCESS = dataclasses.replace(QUICK, agent="process")


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    faultpoints.arm("")
    yield
    faultpoints.arm("")


def half_committed(folder: Path, step: int = 1) -> AgentConfig:
    """A step of two ranks with all records, but neither manifest nor name, as a killed agent leaves it; and the
    settings of the agent that follows in the same attempt."""
    with unjoined():
        save_steps(folder, step, world_size=RANKS)
    where = step_dir(folder, RUN, step)
    (where / "manifest.json").unlink()
    (folder / f"step={step}.ckpt").unlink()
    (listing,) = [found for found in scan(LocalTier(folder), RUN) if found.id.step == step]
    return config_for(
        folder,
        run=RUN,
        node=listing.records[0].node,
        attempt=listing.id.attempt,
        token=listing.id.token,
        world_size=RANKS,
        local_ranks=tuple(range(RANKS)),
    )


def start(config: AgentConfig, heard: list[tuple[int, Notice]] | None = None) -> HostAgent:
    events = EventWriter(run=config.run, attempt=config.attempt, rank=-1, host=config.node, sinks=())
    agent = HostAgent(config, lambda rank, said: (heard or []).append((rank, said)), events)
    agent.start()
    return agent


def settle(agent: HostAgent) -> None:
    assert agent.wait(Stage.DURABLE, timeout_s=20)
    agent.close()


def manifest(folder: Path) -> Manifest:
    found = scan(LocalTier(folder), RUN)[-1].manifest
    assert found is not None
    return found


def loaded(folder: Path, ranks: int = RANKS) -> list[Any]:
    def work(rank: int, coordinator: Coordinator) -> Any:
        with make_checkpointer(folder, coordinator) as checkpointer:
            return checkpointer.load()

    return run_ranks(ranks, work)


@pytest.mark.parametrize("added", [b"", b"P", b"PK\x03\x04 half an entry" * 20], ids=len)
def test_the_next_agent_finishes_what_a_killed_one_began(tmp_path: Path, added: bytes) -> None:
    config = half_committed(tmp_path)
    with open(step_dir(tmp_path, RUN, 1) / "shard-00000.shard", "ab") as file:
        file.write(added)
    settle(start(config))
    assert read_single_file(str(tmp_path / "step=1.ckpt")) == manifest(tmp_path)
    assert [restored.per_rank["rng"][0] for restored in loaded(tmp_path)] == [0, 1]


@pytest.mark.parametrize("moment", ["before it adds", "after it has added"])
def test_an_agent_that_was_stopped_on_the_way_takes_nothing_back_from_a_later_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """It finds that it is over when it goes on, and the file may not become shorter any more by then."""
    config = half_committed(tmp_path)
    append, later = join._append, []

    def stopped(*args: Any) -> None:
        monkeypatch.setattr(join, "_append", append)
        if moment == "after it has added":
            append(*args)
        later.append(start(dataclasses.replace(config, attempt=config.attempt + 1, token="0a0a0a")))
        settle(later[0])
        if moment == "before it adds":
            append(*args)

    monkeypatch.setattr(join, "_append", stopped)
    settle(start(config))
    assert later
    (listing,) = scan(LocalTier(tmp_path), RUN)
    assert not (listing.committed and listing.faults()), "what the later attempt has committed was cut"
    assert [restored.per_rank["rng"][0] for restored in loaded(tmp_path)] == [0, 1]


def test_an_agent_that_was_stopped_after_its_listing_cuts_nothing_that_a_later_attempt_has_finished(
    tmp_path: Path,
) -> None:
    config = half_committed(tmp_path)
    with open(step_dir(tmp_path, RUN, 1) / "shard-00000.shard", "ab") as file:
        file.write(b"PK\x03\x04 half an entry")
    (listing,) = scan(LocalTier(tmp_path), RUN)
    settle(start(dataclasses.replace(config, attempt=config.attempt + 1, token="0a0a0a")))
    join.cut_back(LocalTier(tmp_path), listing, Fence(config))
    (listing,) = scan(LocalTier(tmp_path), RUN)
    assert listing.committed and not listing.faults()
    assert [restored.per_rank["rng"][0] for restored in loaded(tmp_path)] == [0, 1]


def test_an_agent_cuts_nothing_that_a_later_attempt_may_be_about_to_commit(tmp_path: Path) -> None:
    config = half_committed(tmp_path)
    shard = step_dir(tmp_path, RUN, 1) / "shard-00000.shard"
    with shard.open("ab") as file:
        file.write(b"PK\x03\x04 half an entry")
    before = shard.read_bytes()
    (listing,) = scan(LocalTier(tmp_path), RUN)
    (tmp_path / META_DIR / RUN / "attempt").write_text(str(config.attempt + 1))
    join.cut_back(LocalTier(tmp_path), listing, Fence(config))
    assert shard.read_bytes() == before


def test_an_agent_cuts_nothing_of_a_step_that_another_one_of_its_attempt_has_committed(tmp_path: Path) -> None:
    config = half_committed(tmp_path)
    with open(step_dir(tmp_path, RUN, 1) / "shard-00000.shard", "ab") as file:
        file.write(b"PK\x03\x04 half an entry")
    (listing,) = scan(LocalTier(tmp_path), RUN)
    settle(start(config))
    join.cut_back(LocalTier(tmp_path), listing, Fence(config))
    assert not scan(LocalTier(tmp_path), RUN)[0].faults()


def test_a_forked_child_does_not_keep_the_file_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent in a rank's process, and a loader worker that is forked while the file grows."""
    config = half_committed(tmp_path)
    append, children = join._append, []

    def forks(fd: int, *args: Any) -> None:
        children.append(os.dup(fd))  # what a child has: another descriptor of the same open file
        append(fd, *args)

    monkeypatch.setattr(join, "_append", forks)
    settle(start(config))
    with open(step_dir(tmp_path, RUN, 1) / "shard-00000.shard", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    (child,) = children
    os.close(child)


@pytest.mark.parametrize("point", ["agent.join.write", "agent.join.record"])
@pytest.mark.parametrize("action", ["error", "full"])
def test_a_disk_that_fails_leaves_the_step_as_it_was(tmp_path: Path, point: str, action: str) -> None:
    config = half_committed(tmp_path)
    before = (step_dir(tmp_path, RUN, 1) / "shard-00000.shard").read_bytes()
    faultpoints.arm(f"{point}:{action}@*")
    settle(start(config))
    faultpoints.arm("")
    assert (step_dir(tmp_path, RUN, 1) / "shard-00000.shard").read_bytes() == before
    for rank, restored in enumerate(loaded(tmp_path)):
        assert differences(restored.state, make_lightning_state(1, world_size=RANKS)) == []
        assert restored.per_rank["rng"][0] == rank


def test_a_write_that_fails_halfway_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = half_committed(tmp_path)
    path = step_dir(tmp_path, RUN, 1) / "shard-00000.shard"
    before, write = path.read_bytes(), os.pwrite

    def half(fd: int, data: Any, at: int) -> int:
        if at > len(before):
            raise OSError(28, "No space left on device")
        return write(fd, data[: len(data) // 2], at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", half)
        settle(start(config))
    assert path.read_bytes() == before
    assert (tmp_path / "step=1.ckpt").exists(), "it is committed all the same, in several files"


@pytest.mark.parametrize("what", ["the end of shard 0", "another rank's shard"])
def test_what_is_damaged_is_not_joined_and_found_as_before(tmp_path: Path, what: str) -> None:
    config = half_committed(tmp_path)
    folder = step_dir(tmp_path, RUN, 1)
    path = folder / ("shard-00000.shard" if what == "the end of shard 0" else "shard-00001.shard")
    data = bytearray(path.read_bytes())
    data[-300] ^= 1
    path.write_bytes(data)
    before = (folder / "shard-00000.shard").read_bytes()
    settle(start(config))
    assert (folder / "shard-00000.shard").read_bytes() == before


def test_a_file_that_another_agent_has_committed_is_not_written_into(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, world_size=RANKS)
    before = (tmp_path / "step=1.ckpt").read_bytes()
    step = manifest(tmp_path)
    assert join_shards(LocalTier(tmp_path), step, Fence(config_for(tmp_path, run=RUN, attempt=9))) is step
    assert (tmp_path / "step=1.ckpt").read_bytes() == before


def test_an_agent_of_an_earlier_attempt_adds_nothing(tmp_path: Path) -> None:
    config = half_committed(tmp_path)
    found = manifest(tmp_path)
    (tmp_path / META_DIR / RUN / "attempt").write_text(str(config.attempt + 1))
    before = (step_dir(tmp_path, RUN, 1) / "shard-00000.shard").read_bytes()
    with pytest.raises(AgentError):
        join_shards(LocalTier(tmp_path), found, Fence(config))
    assert (step_dir(tmp_path, RUN, 1) / "shard-00000.shard").read_bytes() == before


def save_with_agents(folder: Path, steps: range, *, ranks: int = RANKS) -> None:
    """Saves steps with an agent process, and closes in order."""

    def work(rank: int, coordinator: Coordinator) -> None:
        options = LocalTierOptions(directory=str(folder), only_files=True)
        with make_checkpointer(options, coordinator, options=PROCESS) as checkpointer:
            for step in steps:
                ticket = checkpointer.save(
                    step,
                    make_lightning_state(step, world_size=ranks),
                    per_rank={"rank": rank},
                    names=[f"step={step}.ckpt"],
                )
                assert ticket is not None
                ticket.wait()
        assert META_DIR not in os.listdir(folder), "a rank has returned before the folder was tidy"

    run_ranks(ranks, work)


def test_after_an_orderly_end_every_rank_finds_only_files(tmp_path: Path) -> None:
    save_with_agents(tmp_path, range(1, 4), ranks=3)
    assert sorted(os.listdir(tmp_path)) == ["step=1.ckpt", "step=2.ckpt", "step=3.ckpt"]
    for rank, restored in enumerate(loaded(tmp_path, 3)):
        assert restored.step == 3 and restored.per_rank == {"rank": rank}


POINTS = [
    *faultpoints.KNOWN[faultpoints.KNOWN.index("agent.record.write") : faultpoints.KNOWN.index("agent.durable")],
    *(point for point in faultpoints.KNOWN if point.startswith("agent.drop.")),
]


@pytest.mark.kill
@pytest.mark.parametrize(
    "point",
    few(POINTS, ["agent.join.write", "agent.join.record", "agent.committed", "agent.fsync", "agent.drop.renamed"]),
)
def test_an_agent_killed_on_the_way_loses_nothing_and_the_next_end_tidies_up(
    tmp_path: Path, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("RESILIENCY_FAULTS", f"{point}:kill@{1 if 'drop' in point else 3}")
        try:
            save_with_agents(tmp_path, range(1, 4))
        except AssertionError as error:
            assert "before the folder was tidy" in str(error)
    assert {f"step={step}.ckpt" for step in (1, 2, 3)} <= set(os.listdir(tmp_path)), "a name was lost"
    for rank, restored in enumerate(loaded(tmp_path)):
        assert differences(restored.state, make_lightning_state(3, world_size=RANKS)) == []
        assert restored.per_rank == {"rank": rank}
    save_with_agents(tmp_path, range(4, 5))
    assert sorted(os.listdir(tmp_path)) == [f"step={step}.ckpt" for step in (1, 2, 3, 4)]


def test_a_seal_that_comes_again_after_the_file_has_grown_is_acknowledged(tmp_path: Path) -> None:
    """An agent was killed after its commit, before it could tell the rank that its record was written."""
    config = half_committed(tmp_path)
    settle(start(config))
    joined = (tmp_path / "step=1.ckpt").read_bytes()
    record = manifest(tmp_path).shards[0]
    heard: list[tuple[int, Notice]] = [(0, Recorded(id=record.id))]
    agent = start(config, heard)
    path = step_dir(tmp_path, RUN, 1) / "shard-00000.shard"
    old = dataclasses.replace(record, nbytes=record.nbytes - 100)
    file = SealedFile(
        shard=0,
        path=str(path),
        inode=path.stat().st_ino,
        nbytes=old.nbytes,
        block_bytes=old.block_bytes,
        sections=old.sections,
        digests=old.digests[: old.blocks.count],
    )
    agent.handle(0, Seal(id=record.id, files=(file,), plan=record.plan, replicated=True, info={}))
    agent.handle(0, Bye())
    settle(agent)
    assert [type(said).__name__ for _, said in heard[1:] if type(said).__name__ in ("Recorded", "Failed")] == [
        "Recorded"
    ]
    assert (tmp_path / "step=1.ckpt").read_bytes() == joined
