"""Each host has a folder of its own, which shows only that host's part of a step: what an agent knows of a step when the
agent before it was killed, or the job was started again."""

from __future__ import annotations

import dataclasses
import shutil
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resiliency import faultpoints
from resiliency.agent import commit
from resiliency.agent import heard as heard_module
from resiliency.agent.config import AgentConfig, TierSpec
from resiliency.agent.core import HostAgent
from resiliency.agent.heard import HeardNotices
from resiliency.agent.messages import Committed, Complete, Durable, Failed, Heard, Notice, Rescan, Seal, TierSave
from resiliency.callbacks.checkpointing.earlier import newest_step
from resiliency.checkpoint.checkpointer import CheckpointerOptions
from resiliency.checkpoint.coordinator import Coordinator
from resiliency.checkpoint.options import LocalTierOptions
from resiliency.storage.manifest import rank_of_shard
from resiliency.storage.stage import Stage
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.checkpoints import make_checkpointer, make_state, run_ranks
from tests.agent.sealing import config_for, seal_of, shard_path, step_of, write_shard
from tests.agent.test_names_of_a_killed_agent import settle, step_at
from tests.tidying import drop_folders

SOON = timedelta(seconds=20)

Start = Callable[..., tuple[HostAgent, list[Notice]]]


def host(folder: Path, rank: int, *, store: Path | None = None, **values: object) -> AgentConfig:
    """One of two hosts with a rank each."""
    remotes = () if store is None else (TierSpec(address=str(store), name="store", keep=None),)
    return config_for(
        folder, node=f"host{rank}", world_size=2, local_ranks=(rank,), shared=False, remotes=remotes, **values
    )


def save(agent: HostAgent, step: int, *names: str, complete: bool = True, tiers: tuple[str, ...] = ()) -> None:
    """This host's part of a replicated step: its own copy of shard 0, and its rank's shard."""
    (rank,) = agent.config.local_ranks
    files = [write_shard(agent.config, step, shard, replicated=True) for shard in sorted({0, rank})]
    agent.handle(rank, seal_of(agent.config, step, *files, replicated=True, names=names, tiers=tiers))
    if complete:
        agent.handle(rank, Complete(id=step_of(agent.config, step)))
    settle(agent)


def later(config: AgentConfig, attempt: str) -> AgentConfig:
    return dataclasses.replace(config, attempt=2, token="1a1b1c") if attempt == "the next attempt" else config


def steps_of(config: AgentConfig) -> list[int]:
    folder = shard_path(config, 1).parents[1]
    return sorted(
        int(path.name.partition("-")[0])
        for path in folder.iterdir()
        if any(rank_of_shard(file.name) is not None for file in path.iterdir())
    )


def mark(config: AgentConfig, step: int) -> Path:
    return shard_path(config, step).with_name("committed.json")


def of_step(heard: list[Notice], config: AgentConfig, step: int, tier: str = "local") -> list[type]:
    return [
        type(message)
        for message in heard
        if getattr(message, "id", None) == step_of(config, step) and getattr(message, "tier", tier) == tier
    ]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("attempt", ["the same attempt", "the next attempt"])
def test_named_steps_outlive_the_agent_that_committed_them(
    tmp_path: Path, start: Start, attempt: str, rank: int
) -> None:
    config = host(tmp_path / "local", rank)
    first, _ = start(config)
    for step in (1, 2):
        save(first, step, f"{step}.ckpt")
    agent, _ = start(later(config, attempt))
    settle(agent)
    save(agent, 3, "3.ckpt")
    assert steps_of(config) == [1, 2, 3]
    assert [step_at(tmp_path / "local" / f"{step}.ckpt") for step in (1, 2, 3)] == [1, 2, 3]


def test_a_step_without_a_name_is_still_deleted_with_its_mark(tmp_path: Path, start: Start) -> None:
    config = host(tmp_path / "local", 0)
    config = dataclasses.replace(config, local=dataclasses.replace(config.local, keep=1))
    first, _ = start(config)
    save(first, 1)
    assert mark(config, 1).exists()
    agent, _ = start(config)
    save(agent, 2)
    assert steps_of(config) == [2] and not mark(config, 1).parent.exists()


def test_two_hosts_keep_their_named_steps_over_a_restart_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting = threading.Lock()  # RESILIENCY_NODE is read when a checkpointer is opened

    def work(rank: int, coordinator: Coordinator) -> list[int]:
        for steps in ((1, 2), (3,)):
            with starting:
                monkeypatch.setenv("RESILIENCY_NODE", f"host{rank}")
                options = LocalTierOptions(directory=str(tmp_path / f"local{rank}"), shared=False)
                checkpointer = make_checkpointer(options, coordinator)
            with checkpointer:
                loaded = checkpointer.load()
                assert (loaded and loaded.id.step) == (None if steps == (1, 2) else 2)
                for step in steps:
                    ticket = checkpointer.save(step, make_state(step), names=[f"{step}.ckpt"])
                    assert ticket is not None
                    ticket.wait(Stage.DURABLE, timeout=SOON)
                assert checkpointer.flush(Stage.DURABLE, timeout=SOON)
                found = [step.step for step, _ in checkpointer.steps()]
        return found

    assert run_ranks(2, work, timeout_s=90) == [[3, 2, 1], [3, 2, 1]]


def test_records_of_all_ranks_in_one_hosts_folder_are_no_commit(tmp_path: Path, start: Start) -> None:
    """Host 1 has a copy of shard 0 and shard 1: all that a step of two ranks has. Host 0 may not have saved it."""
    config = host(tmp_path / "local", 1)
    first, _ = start(config)
    save(first, 1, "1.ckpt", complete=False)
    agent, heard = start(config)
    agent.announce(1)
    settle(agent)
    assert of_step(heard, config, 1) == []
    assert step_at(tmp_path / "local" / "1.ckpt") is None
    agent.handle(1, Complete(id=step_of(config, 1)))
    settle(agent)
    assert of_step(heard, config, 1) == [Committed, Durable]
    assert step_at(tmp_path / "local" / "1.ckpt") == 1


def test_a_job_that_goes_on_with_one_host_gives_no_names_again(tmp_path: Path, start: Start) -> None:
    """Host 1 has all records; the user has deleted the name."""
    config = host(tmp_path / "local", 1)
    first, _ = start(config)
    save(first, 1, "1.ckpt")
    (tmp_path / "local" / "1.ckpt").unlink()
    agent, _ = start(config_for(tmp_path / "local", attempt=2, token="1a1b1c"))
    settle(agent)
    assert shard_path(config, 1).with_name("manifest.json").exists()
    assert not (tmp_path / "local" / "1.ckpt").exists()


def test_a_hosts_part_of_a_step_is_not_left_to_its_file_alone(tmp_path: Path, start: Start) -> None:
    """A later fit on this host alone leaves only checkpoint files; this one has not all that belongs to the step."""
    config = host(tmp_path / "local", 0)
    first, _ = start(config)
    save(first, 1, "1.ckpt")
    assert "its other shards on other hosts" in drop_folders(LocalTier(tmp_path / "local"), config.run)
    mark(config, 1).unlink()
    assert drop_folders(LocalTier(tmp_path / "local"), config.run) == "" and not shard_path(config, 1).exists()


def test_what_an_earlier_training_of_several_hosts_has_left_is_named(tmp_path: Path, start: Start) -> None:
    config = host(tmp_path / "local", 0)
    first, _ = start(config)
    save(first, 1, "1.ckpt")
    save(first, 2, "2.ckpt", complete=False)
    trainer: Any = SimpleNamespace(is_global_zero=True)
    places: Any = SimpleNamespace(
        local=SimpleNamespace(directory=str(tmp_path / "local")), remotes=(), key=SimpleNamespace(run=config.run)
    )
    assert newest_step(trainer, places) == step_of(config, 1)


@pytest.mark.kill
@pytest.mark.parametrize("point", ["agent.manifest.write", "agent.name.write", "agent.committed"])
def test_an_agent_killed_in_a_commit_does_not_keep_it_from_its_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    faultpoints.arm("")  # this process has none, whatever its variables say
    monkeypatch.setenv("RESILIENCY_FAULTS", f"{point}:kill@1")
    starting = threading.Lock()
    together = threading.Barrier(2)

    def work(rank: int, coordinator: Coordinator) -> None:
        with starting:
            monkeypatch.setenv("RESILIENCY_NODE", f"host{rank}")
            options = CheckpointerOptions(agent="process", drain_timeout=timedelta(seconds=10))
            local = LocalTierOptions(directory=str(tmp_path / f"local{rank}"), shared=False)
            checkpointer = make_checkpointer(local, coordinator, options=options)
        with checkpointer:
            together.wait(20)
            monkeypatch.delenv("RESILIENCY_FAULTS", raising=False)  # only the first agents are killed
            together.wait(20)
            for step in (1, 2):
                ticket = checkpointer.save(step, make_state(step), names=[f"{step}.ckpt"])
                assert ticket is not None
                ticket.wait(Stage.DURABLE, timeout=SOON)
                assert step_at(tmp_path / f"local{rank}" / f"{step}.ckpt") == step
            together.wait(20)
            assert [step.step for step, _ in checkpointer.steps()] == [2, 1]

    run_ranks(2, work, timeout_s=90)


@pytest.mark.parametrize(
    ("attempt", "told", "given"),
    [("the same attempt", False, True), ("the same attempt", True, False), ("the next attempt", False, False)],
)
def test_the_names_of_a_hosts_part_are_finished(
    tmp_path: Path, start: Start, attempt: str, told: bool, given: bool
) -> None:
    """Not where a rank was told of the commit, or may have been in an earlier attempt: there somebody has deleted them."""
    config = host(tmp_path / "local", 0)
    first, _ = start(config)
    save(first, 1, "1.ckpt")
    (tmp_path / "local" / "1.ckpt").unlink()
    newest = (TierSave(tier="local", id=step_of(config, 1)),) if told else ()
    agent, _ = start(later(config, attempt), heard=Heard(newest=newest))
    settle(agent)
    assert (step_at(tmp_path / "local" / "1.ckpt") == 1) is given


def test_the_step_that_was_loaded_is_kept_though_its_agent_was_killed_before_the_mark(
    tmp_path: Path, start: Start
) -> None:
    config = host(tmp_path / "local", 0)
    first, _ = start(config)
    save(first, 1, "1.ckpt")
    mark(config, 1).unlink()
    again = later(config, "the next attempt")
    agent, _ = start(again)
    agent.handle(0, Rescan(loaded=step_of(config, 1), line=1))
    settle(agent)
    assert mark(config, 1).exists()
    for step in (2, 3):
        save(agent, step, f"{step}.ckpt")
    assert steps_of(config) == [1, 2, 3]


def test_the_step_that_was_loaded_is_sent_though_its_agent_was_killed_before_the_mark(
    tmp_path: Path, start: Start
) -> None:
    config = host(tmp_path / "a", 0)
    first, _ = start(config)
    save(first, 1, "1.ckpt", tiers=("store",))
    mark(config, 1).unlink()
    agent, _ = start(later(host(tmp_path / "a", 0, store=tmp_path / "store"), "the next attempt"))
    agent.handle(0, Rescan(loaded=step_of(config, 1), line=1))
    settle(agent)
    assert [path.name for path in (tmp_path / "store").rglob("shard-*.json")] == ["shard-00000.json"]


def test_a_step_that_was_never_whole_is_deleted(tmp_path: Path, start: Start) -> None:
    config = host(tmp_path / "local", 1)
    first, _ = start(config)
    save(first, 1, "1.ckpt", complete=False)
    agent, _ = start(config)
    save(agent, 2, "2.ckpt")
    assert steps_of(config) == [2]


def test_the_mark_is_as_durable_as_the_step(tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = commit.fsync_file
    monkeypatch.setattr(commit, "fsync_file", lambda path: (synced.append(Path(path).name), fsync(path))[1])
    agent, _ = start(host(tmp_path / "local", 0))
    save(agent, 1, "1.ckpt")
    assert "committed.json" in synced


# ---- what goes to a store in parts


def test_an_upload_of_a_hosts_part_is_resumed(tmp_path: Path, start: Start) -> None:
    config = host(tmp_path / "local", 0)
    first, _ = start(config)  # as one that was killed before it could send
    save(first, 1, "1.ckpt", tiers=("store",))
    agent, heard = start(host(tmp_path / "local", 0, store=tmp_path / "store"))
    settle(agent)
    assert [path.name for path in (tmp_path / "store").rglob("shard-*.json")] == ["shard-00000.json"]
    other, _ = start(host(tmp_path / "other", 1, store=tmp_path / "store"))
    save(other, 1, "1.ckpt", tiers=("store",))
    wait_for(heard, Durable(id=step_of(config, 1), tier="store"))
    assert step_at(tmp_path / "store" / "1.ckpt") == 1


def wait_for(heard: list[Notice], message: Notice, timeout_s: float = 20) -> None:
    """Until a notice has come that another thread sends."""
    pause = threading.Event()
    for _ in range(int(timeout_s / 0.02)):
        if message in heard:
            return
        pause.wait(0.02)
    raise AssertionError(f"{message} is not in {heard}")


def test_the_next_agent_waits_for_the_steps_of_which_its_host_has_sent_its_part(tmp_path: Path, start: Start) -> None:
    config = host(tmp_path / "b", 1, store=tmp_path / "store")
    first, _ = start(config)
    for step in (1, 2, 3):
        save(first, step, f"{step}.ckpt", tiers=("store",))
    first.close()
    agent, heard = start(config)
    settle(agent)
    assert not [message for message in heard if isinstance(message, Failed)]
    slow, _ = start(host(tmp_path / "a", 0, store=tmp_path / "store"))
    for step in (1, 2, 3):
        save(slow, step, f"{step}.ckpt", tiers=("store",))
        wait_for(heard, Durable(id=step_of(config, step), tier="store"))
    assert not [message for message in heard if isinstance(message, Failed)]


@pytest.mark.parametrize("told", [0, 1, 2])
def test_the_next_agent_tells_of_all_that_was_committed_meanwhile_and_was_not_told(
    tmp_path: Path, start: Start, told: int
) -> None:
    config = host(tmp_path / "b", 1, store=tmp_path / "store")
    first, _ = start(config)
    for step in (1, 2, 3):
        save(first, step, tiers=("store",))
    first.close()
    other, _ = start(host(tmp_path / "a", 0, store=tmp_path / "store"))
    for step in (1, 2, 3):
        save(other, step, tiers=("store",))
    newest = (TierSave(tier="store", id=step_of(config, told)),) if told else ()
    agent, heard = start(config, heard=Heard(newest=newest))
    for step in range(told + 1, 4):
        wait_for(heard, Durable(id=step_of(config, step), tier="store"))
    settle(agent)
    assert not [step for step in range(1, told) if of_step(heard, config, step, "store")]


def test_a_step_is_sent_though_another_host_has_deleted_its_manifest(tmp_path: Path, start: Start) -> None:
    """In a shared folder. Host 1, which has sent its part, keeps fewer steps than host 0 has still to send."""
    host_0 = dataclasses.replace(host(tmp_path / "local", 0), shared=True)
    host_1 = dataclasses.replace(host(tmp_path / "local", 1, store=tmp_path / "store"), shared=True)
    host_1 = dataclasses.replace(host_1, local=dataclasses.replace(host_1.local, keep=1))
    (first, _), (other, _) = start(host_0), start(host_1)
    for step, tiers in ((1, ("store",)), (2, ())):
        for agent in (first, other):
            (rank,) = agent.config.local_ranks
            file = write_shard(agent.config, step, rank)
            agent.handle(rank, seal_of(agent.config, step, file, tiers=tiers))
            settle(agent)
        first.handle(0, Complete(id=step_of(host_0, step)))
        settle(first)
        other.handle(1, Complete(id=step_of(host_1, step)))
        settle(other)
    assert steps_of(host_0) == [1, 2] and not shard_path(host_0, 1).with_name("manifest.json").exists()
    awaited = (TierSave(tier="store", id=step_of(host_0, 1)),)
    agent, heard = start(
        dataclasses.replace(host_0, remotes=host_1.remotes), heard=Heard(newest=(), failed=(), awaited=awaited)
    )
    wait_for(heard, Durable(id=step_of(host_0, 1), tier="store"))
    settle(agent)


@pytest.mark.parametrize("left", ["nothing", "a record"])
def test_the_commit_of_a_step_is_awaited_of_which_this_host_has_nothing_any_more(
    tmp_path: Path, start: Start, left: str
) -> None:
    config = host(tmp_path / "b", 1, store=tmp_path / "store")
    config = dataclasses.replace(config, local=dataclasses.replace(config.local, keep=1))
    first, _ = start(config)
    save(first, 1, tiers=("store",))
    record = shard_path(config, 1).with_name("shard-00001.json")
    data = record.read_bytes()
    save(first, 2)
    assert steps_of(config) == [2]
    first.close()
    if left == "a record":
        record.parent.mkdir()
        record.write_bytes(data)
    agent, heard = start(config, heard=Heard(awaited=(TierSave(tier="store", id=step_of(config, 1)),)))
    settle(agent)
    other, _ = start(host(tmp_path / "a", 0, store=tmp_path / "store"))
    save(other, 1, tiers=("store",))
    wait_for(heard, Durable(id=step_of(config, 1), tier="store"))
    assert not [message for message in heard if isinstance(message, Failed)]


def test_a_wait_for_a_step_that_was_deleted_before_it_was_sent_ends(tmp_path: Path, start: Start) -> None:
    """On the only host nobody else sends it."""
    store = TierSpec(address=str(tmp_path / "store"), name="store", keep=None)
    config = config_for(tmp_path / "local", remotes=(store,))
    agent, heard = start(config, heard=Heard(awaited=(TierSave(tier="store", id=step_of(config, 1)),)))
    settle(agent)
    assert [(message.id, message.reason) for message in heard if isinstance(message, Failed)] == [
        (step_of(config, 1), "its local copy is gone")
    ]


def test_a_step_that_was_sent_and_deleted_here_is_reported_when_its_agent_could_not(
    tmp_path: Path, start: Start
) -> None:
    store = TierSpec(address=str(tmp_path / "store"), name="store", keep=None)
    config = config_for(tmp_path / "local", remotes=(store,))
    first, _ = start(config)
    first.handle(0, seal_of(config, 1, write_shard(config, 1), tiers=("store",)))
    settle(first)
    shutil.rmtree(shard_path(config, 1).parent)
    agent, heard = start(config, heard=Heard(awaited=(TierSave(tier="store", id=step_of(config, 1)),)))
    settle(agent)
    assert of_step(heard, config, 1, "store") == [Durable]


# ---- what a rank tells the next agent


def sealed_for(step: int, *tiers: str) -> Seal:
    return seal_of(CONFIG, step, tiers=tiers)


CONFIG = config_for(Path("local"))
ONE, TWO = step_of(CONFIG, 1), step_of(CONFIG, 2)


def test_a_save_is_awaited_on_each_tier_from_its_commit_until_something_is_heard_of_it() -> None:
    notices = HeardNotices("local")
    notices.seal(sealed_for(1, "near", "far"))
    assert notices.heard() == Heard()
    notices.hear(Committed(id=ONE, tier="local"))
    near, far = TierSave(tier="near", id=ONE), TierSave(tier="far", id=ONE)
    assert set(notices.heard().awaited) == {near, far}
    notices.hear(Failed(id=ONE, tier="far", reason="down", retrying=True))
    assert set(notices.heard().awaited) == {near, far}
    notices.hear(Durable(id=ONE, tier="local"))
    notices.hear(Durable(id=ONE, tier="near"))
    assert notices.heard().awaited == (far,)
    notices.hear(Failed(id=ONE, tier="far", reason="gone"))
    assert notices.heard().awaited == ()
    assert set(notices.heard().newest) == {TierSave(tier="local", id=ONE), near}


def test_of_each_tier_the_newest_save_is_told() -> None:
    notices = HeardNotices("local")
    for step in (TWO, ONE):
        notices.hear(Committed(id=step, tier="local"))
    assert notices.heard().newest == (TierSave(tier="local", id=TWO),)


def test_a_save_that_failed_is_told_and_not_awaited() -> None:
    notices = HeardNotices("local")
    notices.seal(sealed_for(1, "far"))
    notices.hear(Failed(id=ONE, tier="local", reason="no room"))
    notices.hear(Committed(id=TWO, tier="local"))
    notices.hear(Failed(id=TWO, tier="local", reason="fsync failed"))
    assert notices.heard().failed == (ONE,)
    notices.hear(Committed(id=ONE, tier="local"))
    assert notices.heard().awaited == ()


def test_a_rank_remembers_the_newest_saves_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heard_module, "_AWAITED", 64)
    notices = HeardNotices("local")
    for step in range(1, 201):
        notices.seal(sealed_for(step, "far"))
        notices.hear(Committed(id=step_of(CONFIG, step), tier="local"))
    heard = notices.heard().awaited
    assert [save.id.step for save in heard] == list(range(137, 201))
    for step in range(201, 401):
        notices.seal(sealed_for(step, "far"))
    for step in range(201, 401):
        notices.hear(Committed(id=step_of(CONFIG, step), tier="local"))
    assert [save.id.step for save in notices.heard().awaited] == list(range(337, 401))
    for step in range(401, 601):
        notices.seal(sealed_for(step, "far"))
        notices.hear(Failed(id=step_of(CONFIG, step), tier="local", reason="no room"))
    assert len(notices.heard().failed) == 16
    for step in range(601, 666):
        notices.seal(sealed_for(step, "far"))
    notices.hear(Committed(id=step_of(CONFIG, 601), tier="local"))
    assert 601 not in [save.id.step for save in notices.heard().awaited]
