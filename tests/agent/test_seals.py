"""What a rank says of its files: checked before it is believed, put together from the ranks of a host, and kept apart
between hosts with folders of their own."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resiliency.agent.config import AgentConfig, TierSpec
from resiliency.agent.core import HostAgent
from resiliency.agent.messages import Committed, Complete, Failed, GiveUp, Notice, Recorded, Seal, SealedFile
from resiliency.errors import AgentError
from resiliency.events import EventWriter
from resiliency.storage.blocks import Blocks, block_digest
from resiliency.storage.catalog import scan
from resiliency.storage.manifest import BlockShare, record_file
from resiliency.storage.stage import Stage
from resiliency.storage.tiers.local import LocalTier
from tests.agent.sealing import config_for, manifest_of, seal_of, sealed, shard_path, step_of, write_shard

Start = Callable[..., tuple[HostAgent, list[tuple[int, Notice]]]]


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return tmp_path / "local"


@pytest.fixture
def start() -> Iterator[Start]:
    running: list[HostAgent] = []

    def start(config: AgentConfig, **values: Any) -> tuple[HostAgent, list[tuple[int, Notice]]]:
        heard: list[tuple[int, Notice]] = []
        events = EventWriter(run=config.run, attempt=1, rank=-1, host=config.node, sinks=())
        agent = HostAgent(config, lambda rank, message: heard.append((rank, message)), events, **values)
        running.append(agent)
        agent.start()
        return agent, heard

    yield start
    for agent in running:
        agent.close()


def settle(*agents: HostAgent) -> None:
    for _ in range(2):  # what one has committed is seen by the others
        for agent in agents:
            assert agent.wait(Stage.DURABLE, timeout_s=20)


# ---- checked before it is believed


def change(seal: Seal, **values: Any) -> Seal:
    """The seal with other values for its last file."""
    return dataclasses.replace(seal, files=(*seal.files[:-1], dataclasses.replace(seal.files[-1], **values)))


SHARE = BlockShare(first=0, digests=("0" * 16,))

REFUSED: dict[str, Callable[[Seal], Seal]] = {
    "no file": lambda seal: dataclasses.replace(seal, files=()),
    "another rank's shard": lambda seal: change(seal, shard=2),
    "a shard that does not exist": lambda seal: change(seal, shard=-1),
    "shard 0 of a sharded step": lambda seal: dataclasses.replace(
        seal, files=(dataclasses.replace(seal.files[0], shard=0), *seal.files)
    ),
    "shard 0 only, of another rank": lambda seal: dataclasses.replace(change(seal, shard=0), replicated=True),
    "its shard twice": lambda seal: dataclasses.replace(seal, files=seal.files * 2, replicated=True),
    "digests that are missing": lambda seal: change(seal, digests=seal.files[0].digests[:-1]),
    "a digest too many": lambda seal: change(seal, digests=(*seal.files[0].digests, "0" * 16)),
    "a digest that is none": lambda seal: change(seal, digests=("0" * 15 + "g", *seal.files[0].digests[1:])),
    "a block without a digest": lambda seal: change(seal, digests=("", *seal.files[0].digests[1:])),
    "sections that are not ascending": lambda seal: change(seal, sections=(9, 3)),
    "a section behind the end": lambda seal: change(seal, sections=(seal.files[0].nbytes + 1,)),
    "blocks of no bytes": lambda seal: change(seal, block_bytes=0),
    "a negative size": lambda seal: change(seal, nbytes=-1),
    "a share of a sharded step": lambda seal: dataclasses.replace(seal, share=SHARE),
    "a share before the first block": lambda seal: dataclasses.replace(
        seal, replicated=True, share=dataclasses.replace(SHARE, first=-1)
    ),
    "a share with a digest that is none": lambda seal: dataclasses.replace(
        seal, replicated=True, share=dataclasses.replace(SHARE, digests=("",))
    ),
}


@pytest.mark.parametrize("how", REFUSED)
def test_a_seal_that_cannot_be_is_refused_and_nothing_is_written(local: Path, start: Start, how: str) -> None:
    agent, _ = start(config_for(local, world_size=3, local_ranks=(0, 1, 2)))
    seal = REFUSED[how](sealed(agent.config, 1, shard=1))
    with pytest.raises(AgentError, match="rank 1 sealed|rank 1 sent"):
        agent.handle(1, seal)
    settle(agent)
    assert not list(local.rglob("*.json"))


@pytest.mark.parametrize(
    "how",
    ["of another step", "of another rank", "outside the folder", "a link", "another name of it", "replaced", "cut"],
)
def test_a_file_that_is_not_in_its_place_or_was_changed_fails_the_save(
    local: Path, tmp_path: Path, start: Start, how: str
) -> None:
    config = config_for(local, world_size=2, local_ranks=(0, 1))
    agent, heard = start(config)
    seal = sealed(config, 1)
    path = shard_path(config, 1)
    if how in ("of another step", "of another rank"):
        seal = change(seal, **vars(sealed(config, *((2, 0) if how == "of another step" else (1, 1))).files[0]))
        seal = change(seal, shard=0)
    elif how in ("outside the folder", "a link"):
        path.rename(tmp_path / "elsewhere.ckpt")
        if how == "a link":
            path.symlink_to(tmp_path / "elsewhere.ckpt")
        else:
            seal = change(seal, path=str(tmp_path / "elsewhere.ckpt"))
    elif how == "another name of it":
        os.link(path, tmp_path / "elsewhere.ckpt")
        seal = change(seal, path=str(tmp_path / "elsewhere.ckpt"))
    elif how == "replaced":
        (local / "other").write_bytes(path.read_bytes())
        (local / "other").rename(path)
    else:
        with open(path, "r+b") as file:
            file.truncate(10)
    agent.handle(0, seal)
    settle(agent)
    ((_, said),) = heard
    assert isinstance(said, Failed) and "gone or was changed" in said.reason
    assert not list(local.rglob("*.json"))


# ---- the ranks of one host write one file


def parts(config: AgentConfig, step: int, *, writers: int, **values: Any) -> list[Seal]:
    """What each rank of a host says of a replicated step: they wrote shard 0 together, a run of blocks each."""
    whole = write_shard(config, step, 0, replicated=True, block_bytes=128, pad=2000)
    count = len(whole.digests)
    seals = []
    for index, rank in enumerate(config.local_ranks[:writers]):
        start, end = count * index // writers, count * (index + 1) // writers
        share, inode = None, 0
        files: list[SealedFile] = []
        if index == 0:
            own = tuple(digest if start <= at < end else "" for at, digest in enumerate(whole.digests))
            files.append(dataclasses.replace(whole, digests=own))
        else:
            share, inode = BlockShare(first=start, digests=whole.digests[start:end]), whole.inode
        if rank:
            files.append(write_shard(config, step, rank, replicated=True))
        seals.append(seal_of(config, step, *files, share=share, share_inode=inode, replicated=True, **values))
    return seals


def whole_digests(config: AgentConfig, step: int) -> tuple[str, ...]:
    """The digests of shard 0 as it is on disk."""
    data = shard_path(config, step).read_bytes()
    blocks = Blocks(len(data), 128)
    return tuple(block_digest(data[slice(*blocks.bounds(at))]) for at in range(blocks.count))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_one_agent_puts_the_shares_of_its_ranks_together(local: Path, start: Start, order: tuple[int, ...]) -> None:
    config = config_for(local, world_size=3, local_ranks=(0, 1, 2))
    agent, heard = start(config)
    seals = parts(config, 1, writers=3, names=("a.ckpt",))
    for rank in order:
        assert manifest_of(config, 1) is None
        agent.handle(rank, seals[rank])
        settle(agent)
    manifest = manifest_of(config, 1)
    assert manifest is not None
    assert tuple(manifest["shards"][0]["digests"]) == whole_digests(config, 1)
    assert {rank for rank, message in heard if isinstance(message, Committed)} == {0, 1, 2}
    assert (local / "a.ckpt").samefile(shard_path(config, 1))


def test_a_share_that_never_comes_leaves_the_step_unfinished(local: Path, start: Start) -> None:
    config = config_for(local, world_size=3, local_ranks=(0, 1, 2))
    agent, _ = start(config)
    seals = parts(config, 1, writers=3)
    agent.handle(0, seals[0])
    agent.handle(1, seals[1])
    # The third rank has its own shard, but wrote nothing of shard 0.
    agent.handle(2, dataclasses.replace(seals[2], share=None))
    settle(agent)
    assert manifest_of(config, 1) is None
    (listing,) = scan(LocalTier(local), config.run)
    assert not listing.committed and listing.manifest is None


def test_ranks_that_wrote_into_two_files_of_one_path_commit_nothing(local: Path, start: Start) -> None:
    config = config_for(local, world_size=2, local_ranks=(0, 1))
    agent, heard = start(config)
    first, second = parts(config, 1, writers=2)
    agent.handle(0, first)
    agent.handle(1, dataclasses.replace(second, share_inode=second.share_inode + 1))
    settle(agent)
    assert manifest_of(config, 1) is None
    assert [rank for rank, message in heard if isinstance(message, Failed)] == [1, 0], (
        "the rank whose file it is, and the one that waits for the commit"
    )


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_step_is_not_committed_when_its_folder_was_exchanged_between_two_records(
    local: Path, start: Start, order: tuple[int, int]
) -> None:
    """As when the folder is moved away, or something is mounted over it: the second rank makes it anew."""
    config = config_for(local, world_size=2, local_ranks=(0, 1))
    agent, heard = start(config)
    agent.handle(order[0], parts(config, 1, writers=2)[order[0]])
    settle(agent)
    local.rename(local.with_name("away"))
    agent.handle(order[1], parts(config, 1, writers=2)[order[1]])
    settle(agent)
    assert manifest_of(config, 1) is None
    assert any(isinstance(message, Failed) for _, message in heard)


# ---- two hosts with a folder of their own


@pytest.fixture
def hosts(tmp_path: Path) -> list[AgentConfig]:
    return private_hosts(tmp_path)


def private_hosts(tmp_path: Path, *, keep: int | None = 3, each: int = 1) -> list[AgentConfig]:
    """Two hosts with ``each`` ranks, and a remote tier."""
    return [
        config_for(
            tmp_path / node,
            node=node,
            world_size=2 * each,
            local_ranks=tuple(range(each * index, each * (index + 1))),
            shared=False,
            local=TierSpec(address=str(tmp_path / node), name="local", keep=keep),
            remotes=(TierSpec(address=str(tmp_path / "remote"), name="store"),),
        )
        for index, node in enumerate(("a", "b"))
    ]


def test_a_host_commits_its_part_when_every_rank_has_recorded_and_not_before(
    hosts: list[AgentConfig], start: Start
) -> None:
    """Host b has a file of every shard: its own, and its copy of shard 0. That is not the whole step."""
    (a, heard_a), (b, heard_b) = (start(config) for config in hosts)
    b.handle(1, parts(b.config, 1, writers=1)[0])
    settle(a, b)
    assert [type(message) for _, message in heard_b] == [Recorded], "committed before rank 0 had recorded anything"
    a.handle(0, parts(a.config, 1, writers=1)[0])
    settle(a, b)
    assert [type(message) for _, message in heard_a] == [Recorded]
    for agent, heard in ((a, heard_a), (b, heard_b)):
        agent.handle(agent.config.local_ranks[0], Complete(id=step_of(agent.config, 1)))
        settle(agent)
        assert Committed in [type(message) for _, message in heard]
        assert manifest_of(agent.config, 1) is None, "no folder has the whole step"


def test_only_the_host_of_rank_0_sends_shard_0(hosts: list[AgentConfig], start: Start, tmp_path: Path) -> None:
    agents = [start(config)[0] for config in hosts]
    for agent in reversed(agents):  # the host with the copy first
        (seal,) = parts(agent.config, 1, writers=1, tiers=("store",), names=("a.ckpt",))
        agent.handle(agent.config.local_ranks[0], seal)
        settle(agent)
        agent.handle(agent.config.local_ranks[0], Complete(id=seal.id))
        settle(agent)
        sent = {path.name for path in (tmp_path / "remote").rglob("shard-*.shard")}
        if agent.config.node == "b":
            assert sent == {"shard-00001.shard"}, "the copy of shard 0 was sent"
    (listing,) = scan(LocalTier(tmp_path / "remote"), "run")
    assert listing.committed and listing.manifest is not None
    assert [shard.node for shard in listing.manifest.shards] == ["a", "b"]
    assert (tmp_path / "remote" / "a.ckpt").read_bytes() == shard_path(hosts[0], 1).read_bytes()
    for config in hosts:  # each host has the name too, of its own copy
        assert Path(config.local.address, "a.ckpt").samefile(shard_path(config, 1))


@pytest.mark.parametrize("node", [0, 1])
def test_a_deleted_step_is_gone_from_each_host_with_its_copy_of_shard_0(
    tmp_path: Path, start: Start, node: int
) -> None:
    config = private_hosts(tmp_path, keep=1)[node]
    agent, _ = start(config)
    rank = config.local_ranks[0]
    for step in (1, 2, 3):
        (seal,) = parts(
            config, step, writers=1, **({"names": ("a.ckpt",)} if step == 1 else {"supersedes": ("a.ckpt",)})
        )
        agent.handle(rank, seal)
        agent.handle(rank, Complete(id=seal.id))
        settle(agent)
    steps = Path(config.local.address, ".resiliency", "run", "steps")
    assert [path.name for path in steps.iterdir()] == [step_of(config, 3).dirname]
    assert not Path(config.local.address, "a.ckpt").exists()


# ---- given up


def reasons(heard: list[tuple[int, Notice]], rank: int) -> list[str]:
    return [said.reason for to, said in heard if to == rank and isinstance(said, Failed)]


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("order", ["seal first", "seal last"])
def test_a_step_of_which_a_rank_gives_its_part_up_fails_for_the_others_and_leaves_no_file(
    local: Path, start: Start, order: str
) -> None:
    config = config_for(local, world_size=2, local_ranks=(0, 1))
    agent, heard = start(config)
    steps = [
        lambda: agent.handle(0, sealed(config)),
        lambda: agent.handle(1, GiveUp(id=step_of(config, 1), reason="X")),
    ]
    for step in steps if order == "seal first" else reversed(steps):
        step()
        settle(agent)
    agent.handle(1, GiveUp(id=step_of(config, 1), reason="X"))  # said again, to a new agent
    settle(agent)
    assert reasons(heard, 0) == ["rank 1: X"] and reasons(heard, 1) == []
    assert (0, Recorded(id=step_of(config, 1))) in heard, "the next save may begin"
    assert not shard_path(config, 1).parent.exists()
    for rank in (0, 1):
        agent.handle(rank, sealed(config, 2, rank))
    settle(agent)
    assert manifest_of(config, 2) is not None


def test_a_part_that_cannot_be_recorded_takes_the_step_with_it(
    local: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(local, world_size=2, local_ranks=(0, 1))
    agent, heard = start(config)
    agent.handle(0, sealed(config))
    settle(agent)

    monkeypatch.setattr(LocalTier, "put_bytes", full)
    agent.handle(1, sealed(config, 1, 1))
    settle(agent)
    assert len(reasons(heard, 0)) == len(reasons(heard, 1)) == 1
    assert not shard_path(config, 1).parent.exists()


def test_a_step_that_may_be_committed_stays_whatever_is_said_of_it(
    local: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(local, world_size=2, local_ranks=(0, 1))
    agent, heard = start(config)
    for rank in (0, 1):
        agent.handle(rank, sealed(config, 1, rank))
    settle(agent)
    agent.close()
    shard_path(config, 1).with_name("manifest.json").unlink()  # killed before, and another host's agent may write it
    again, heard = start(dataclasses.replace(config, local_ranks=(1,)))
    again._steps._steps.clear()
    monkeypatch.setattr(LocalTier, "put_bytes", full)
    again.handle(1, sealed(config, 1, 1))
    again.handle(1, GiveUp(id=step_of(config, 1), reason="X"))
    settle(again)
    assert len(reasons(heard, 1)) == 1
    files = {file for rank in (0, 1) for file in (record_file(rank), shard_path(config, 1, rank).name)}
    assert {path.name for path in shard_path(config, 1).parent.iterdir()} >= files


@pytest.mark.parametrize("gone", ["step=1.ckpt", "manifest.json"])
def test_what_an_agent_that_was_killed_owes_a_step_of_several_hosts_the_next_one_gives(
    local: Path, start: Start, gone: str
) -> None:
    """Killed between manifest and names: nobody else would ever give them."""
    configs = [config_for(local, world_size=2, local_ranks=(rank,), node=f"n{rank}") for rank in (0, 1)]
    agents = [start(config)[0] for config in configs]
    for rank in (0, 1):
        agents[rank].handle(rank, sealed(configs[rank], 1, rank, names=("step=1.ckpt",)))
        settle(*agents)
    name, manifest = local / "step=1.ckpt", shard_path(configs[0], 1).with_name("manifest.json")
    assert name.exists() and manifest.exists()
    agents[1].close()
    missing = name if gone == name.name else manifest
    shutil.rmtree(name)
    if missing is manifest:
        manifest.unlink()
    settle(start(configs[1])[0])
    assert name.exists() and manifest.exists()


def test_a_step_that_was_given_up_waits_for_the_rank_that_is_behind(local: Path, start: Start) -> None:
    """It was deleted while that rank wrote to it, and what that rank had written stayed."""
    config = config_for(local, world_size=2, local_ranks=(0, 1))
    agent, heard = start(config)
    agent.handle(0, sealed(config))
    agent.handle(0, GiveUp(id=step_of(config, 2), reason="X"))
    agent.handle(0, sealed(config, 3))
    late = sealed(config, 2, 1)  # already being written
    agent.handle(1, sealed(config, 1, 1))
    settle(agent)
    assert shard_path(config, 2, 1).exists()
    agent.handle(1, late)
    settle(agent)
    assert reasons(heard, 1) == ["rank 0: X"]
    assert not shard_path(config, 2).parent.exists()
    agent.handle(1, sealed(config, 3, 1))
    settle(agent)
    assert manifest_of(config, 1) is not None and manifest_of(config, 3) is not None
