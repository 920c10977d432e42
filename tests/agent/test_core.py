"""The agent's order of work: commit, make durable, and only then delete; and what it never deletes."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from resiliency import faultpoints
from resiliency.agent import commit
from resiliency.agent.core import HostAgent
from resiliency.agent.messages import Complete, Failed, Recorded
from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.coordinator import Coordinator
from resiliency.checkpoint.options import LocalTierOptions, RemoteTierOptions
from resiliency.errors import AgentError
from resiliency.events import EventWriter
from resiliency.storage import deletion
from resiliency.storage.manifest import META_DIR
from resiliency.storage.stage import Stage
from resiliency.storage.step_id import StepId
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.checkpoints import (
    RUN,
    differences,
    flip_bits,
    make_checkpointer,
    make_state,
    run_ranks,
    step_dirs,
)
from resiliency.testing.tier_doubles import Fault, FaultyTier, RecordingTier
from tests.agent.sealing import config_for, sealed, shard_path
from tests.patience import PATIENCE

SOON = timedelta(seconds=20)


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faultpoints.arm("")


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return tmp_path / "local"


def keeping(local: Path, keep: int | None, **further: Any) -> Checkpointer:
    coordinator = further.pop("coordinator", None)
    remotes = further.pop("remotes", ())
    run = further.pop("run", RUN)
    return make_checkpointer(
        LocalTierOptions(directory=str(local), keep=keep, **further), coordinator, remotes=remotes, run=run
    )


def save(checkpointer: Checkpointer, *steps: int, stage: Stage = Stage.DURABLE, **further: Any) -> None:
    for step in steps:
        ticket = checkpointer.save(step, make_state(step), **further)
        assert ticket is not None, checkpointer.poll()
        ticket.wait(stage, timeout=SOON)


def settle(checkpointer: Checkpointer) -> None:
    """Until the agent has nothing left to do, deletions included."""
    assert checkpointer.flush(Stage.DURABLE, timeout=SOON)
    assert checkpointer.flush(Stage.DURABLE, tier="local", timeout=SOON)


def wait_until(condition: Callable[[], bool], seconds: float = 15.0) -> bool:
    """Waits for what another thread does."""
    deadline, pause = time.monotonic() + PATIENCE * seconds, threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(0.02)
    return True


def numbers(tier: Path, run: str = RUN) -> list[int]:
    """Step numbers with a manifest."""
    return [step.step for step, folder in step_dirs(tier, run).items() if (folder / "manifest.json").exists()]


def restored(local: Path, **further: Any) -> int | None:
    checkpointer = keeping(local, None, **further)
    try:
        got = checkpointer.load()
        if got is not None:
            assert differences(got.state, make_state(got.step)) == []
        return None if got is None else got.step
    finally:
        checkpointer.close(flush=False)


# ---- save before delete, on the local tier


def test_only_the_newest_steps_are_kept(local: Path) -> None:
    with keeping(local, 2) as checkpointer:
        save(checkpointer, 1, 2, 3, 4, 5)
        settle(checkpointer)
        assert numbers(local) == [4, 5]
    assert restored(local) == 5


def test_nothing_is_deleted_before_the_fsync_of_the_newer_step(local: Path) -> None:
    with keeping(local, 1) as checkpointer:
        save(checkpointer, 1)
        faultpoints.arm("agent.fsync:delay=0.5")
        save(checkpointer, 2, stage=Stage.COMMITTED)
        assert numbers(local) == [1, 2], "step 1 went before step 2 was durable"
        settle(checkpointer)
        assert numbers(local) == [2]


def test_nothing_is_deleted_when_the_fsync_fails(local: Path) -> None:
    with keeping(local, 1) as checkpointer:
        save(checkpointer, 1)
        faultpoints.arm("agent.fsync:error@*")
        save(checkpointer, 2, 3, stage=Stage.COMMITTED)
        checkpointer.delete("anything.ckpt")
        settle(checkpointer)
        assert numbers(local) == [1, 2, 3]
        faultpoints.arm("")
        save(checkpointer, 4)
        settle(checkpointer)
        assert 1 not in numbers(local) and 4 in numbers(local)


def test_what_somebody_has_moved_away_replaces_nothing(local: Path, tmp_path: Path) -> None:
    with keeping(local, 1) as checkpointer:
        save(checkpointer, 1, names=("1.ckpt",))
        save(checkpointer, 2, names=("2.ckpt",))
        (away,) = (folder for step, folder in step_dirs(local, RUN).items() if step.step == 2)
        away.rename(tmp_path / "away")
        checkpointer.delete("1.ckpt")
        settle(checkpointer)
        assert numbers(local) == [1], "the last step that is there was deleted for one that is gone"
        save(checkpointer, 3, names=("3.ckpt",))
        settle(checkpointer)
        assert numbers(local) == [3]
    assert restored(local) == 3


def test_what_an_attempt_before_could_not_sync_is_not_taken_for_durable(local: Path) -> None:
    """Its agent committed a step and died before the fsync: the older step, which is safe, must outlive that fsync."""
    with keeping(local, 1) as checkpointer:
        save(checkpointer, 1)
        faultpoints.arm("agent.fsync:error@*")
        save(checkpointer, 2, stage=Stage.COMMITTED)
        settle(checkpointer)
    with keeping(local, 1) as checkpointer:
        save(checkpointer, 3, stage=Stage.COMMITTED)
        settle(checkpointer)
        assert numbers(local) == [1, 2, 3]
    faultpoints.arm("")
    with keeping(local, 1) as checkpointer:
        settle(checkpointer)
        assert numbers(local) == [1, 2, 3], "deleted before the ranks could read what they resume from"
        save(checkpointer, 4)
        settle(checkpointer)
        assert numbers(local) == [4]


def test_the_new_step_is_fsynced_before_the_first_deletion(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shard, record and manifest of the new step, then their folder, and only then the first file of the old step."""
    seen: list[tuple[str, str]] = []
    for name in ("fsync_file", "fsync_dir"):
        real = getattr(commit, name)
        monkeypatch.setattr(commit, name, lambda path, name=name, real=real: (seen.append((name, path)), real(path))[1])
    delete = LocalTier.delete
    monkeypatch.setattr(LocalTier, "delete", lambda self, key: (seen.append(("delete", key)), delete(self, key))[1])
    with keeping(local, 1) as checkpointer:
        save(checkpointer, 1)
        settle(checkpointer)
        seen.clear()
        save(checkpointer, 2)
        settle(checkpointer)
    (new,) = step_dirs(local).values()
    first = next(i for i, (verb, _) in enumerate(seen) if verb == "delete")
    synced = [os.path.relpath(path, local) for verb, path in seen[:first]]
    inside = os.path.relpath(new, local)
    assert {f"{inside}/{name}" for name in ("manifest.json", "shard-00000.json", "shard-00000.shard")} <= set(synced)
    assert synced.index(inside) > synced.index(f"{inside}/manifest.json"), (
        "the folder is synced last, or the names are not safe"
    )
    assert seen[first][1].endswith("manifest.json"), "the manifest goes first, so that what is half deleted is no step"


def test_a_step_is_deleted_manifest_first_then_records_then_shards(
    local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[str] = []
    real = faultpoints.hit
    monkeypatch.setattr(deletion, "hit", lambda name, **further: (passed.append(name), real(name, **further))[1])
    with keeping(local, 1) as checkpointer:
        save(checkpointer, 1, 2)
        settle(checkpointer)
    assert [name for name in passed if "prune" in name] == [
        "agent.prune.manifest",
        "agent.prune.record",
        "agent.prune.shard",
    ]


@pytest.mark.parametrize("point", ["agent.prune.manifest", "agent.prune.record", "agent.prune.shard"])
def test_a_deletion_that_fails_halfway_is_done_later(local: Path, point: str) -> None:
    with keeping(local, 1) as checkpointer:
        save(checkpointer, 1)
        faultpoints.arm(f"{point}:error")
        save(checkpointer, 2)
        settle(checkpointer)
        assert 2 in numbers(local)
        save(checkpointer, 3)
        settle(checkpointer)
        assert [step.step for step in step_dirs(local)] == [3], "what was left half deleted stays for ever"


def test_another_runs_files_are_never_touched(local: Path) -> None:
    with keeping(local, 1, run="one") as checkpointer:
        save(checkpointer, 100, names=["a.ckpt"])
        save(checkpointer, 101, names=["b.ckpt"])
    before = {path: path.read_bytes() for path in (local / META_DIR / "one").rglob("*") if path.is_file()}
    with keeping(local, 1, run="two") as checkpointer:
        save(checkpointer, *range(200, 206))
        checkpointer.delete("a.ckpt", "b.ckpt")
        save(checkpointer, 206, names=["c.ckpt"], supersedes=["a.ckpt"])
        settle(checkpointer)
    after = {path: path.read_bytes() for path in (local / META_DIR / "one").rglob("*") if path.is_file()}
    assert before == after
    assert (local / "a.ckpt").exists() and (local / "b.ckpt").exists(), "name files of another run were deleted"
    assert restored(local, run="one") == 101


def test_files_of_users_are_never_touched(local: Path) -> None:
    local.mkdir()
    mine = [local / "notes.txt", local / "old.ckpt", local / META_DIR / RUN / "steps" / "README"]
    for path in mine:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    with keeping(local, 1) as checkpointer:
        save(checkpointer, 1, 2, 3)
        checkpointer.delete("notes.txt", "old.ckpt")
        save(checkpointer, 4)
        settle(checkpointer)
    assert all(path.read_text() == "mine" for path in mine)


# ---- the last restorable step


def test_a_damaged_newest_step_does_not_cost_the_steps_saved_after_the_fallback(local: Path) -> None:
    """Step 30 is damaged, the job falls back to step 20 and saves 21: retention must not keep 30 and delete 21."""
    with keeping(local, 3) as checkpointer:
        save(checkpointer, 10, 20, 30)
    (bad,) = [folder for step, folder in step_dirs(local).items() if step.step == 30]
    flip_bits(bad / "shard-00000.shard", [(-5, -1)])
    with keeping(local, 1) as checkpointer:
        got = checkpointer.load()
        assert got is not None and got.step == 20
        save(checkpointer, 21)
        settle(checkpointer)
    assert restored(local) == 21, f"left on disk: {numbers(local)}"


def test_steps_of_a_run_started_again_from_an_older_step_are_kept(local: Path) -> None:
    """The user goes back to step 10 on purpose; what is saved from there on must live, and names must follow it."""
    with keeping(local, 3) as checkpointer:
        save(checkpointer, 10, 20, 30, names=[])
    (older,) = [step for step in step_dirs(local) if step.step == 10]
    with keeping(local, 1) as checkpointer:
        got = checkpointer.load(step=older)
        assert got is not None and got.step == 10
        save(checkpointer, 11, names=["last.ckpt"])
        settle(checkpointer)
        assert 11 in numbers(local)


def test_two_embedded_agents_leave_each_others_unfinished_step_alone(local: Path) -> None:
    """Ranks on their own agents, out of order: a step half recorded is no leftover."""

    def first(rank: int, coordinator: Coordinator) -> None:
        with keeping(local, None, coordinator=coordinator) as checkpointer:
            save(checkpointer, 30, stage=Stage.COMMITTED)

    def second(rank: int, coordinator: Coordinator) -> list[str]:
        with keeping(local, None, coordinator=coordinator) as checkpointer:
            if rank == 1:
                faultpoints.arm("agent.record.write:delay=0.5,rank=1")
            coordinator.all_gather("armed", b"", timeout=SOON)
            ticket = checkpointer.save(20, make_state(20))
            assert ticket is not None
            checkpointer.delete("nothing.ckpt")  # makes the agent look for what may go
            ticket.wait(Stage.COMMITTED, timeout=SOON)
            return []

    run_ranks(2, first)
    run_ranks(2, second)
    assert 20 in numbers(local)


# ---- names


def test_a_name_holds_its_step_until_it_is_deleted(local: Path) -> None:
    with keeping(local, 1) as checkpointer:
        save(checkpointer, 1, names=["best.ckpt"])
        save(checkpointer, 2, 3, 4)
        settle(checkpointer)
        assert numbers(local) == [1, 4]
        checkpointer.delete("best.ckpt")
        save(checkpointer, 5)
        settle(checkpointer)
        assert numbers(local) == [5] and not (local / "best.ckpt").exists()


def test_a_name_that_moves_on_lets_its_step_go(local: Path) -> None:
    with keeping(local, 1) as checkpointer:
        save(checkpointer, 1, names=["last.ckpt"])
        save(checkpointer, 2, names=["last.ckpt"])
        save(checkpointer, 3, names=["last.ckpt", "epoch.ckpt"])
        settle(checkpointer)
        assert numbers(local) == [3]
        assert torch.load(local / "last.ckpt")["loops"]["step"] == 3


def test_superseded_names_go_with_the_commit_of_the_newer_step(local: Path) -> None:
    with keeping(local, 1) as checkpointer:
        save(checkpointer, 1, names=["a.ckpt", "b.ckpt"])
        faultpoints.arm("agent.fsync:delay=0.5")
        save(checkpointer, 2, names=["c.ckpt"], supersedes=["a.ckpt"], stage=Stage.COMMITTED)
        assert (local / "a.ckpt").exists(), "deleted before the newer step was durable"
        settle(checkpointer)
        assert numbers(local) == [1, 2], "b.ckpt still means step 1"
        assert not (local / "a.ckpt").exists(), "a superseded name can still be loaded"
        assert (local / "b.ckpt").exists()


def test_a_deletion_right_after_a_restart_takes_the_older_step(local: Path) -> None:
    """No save has been made by this process yet; the newest step on disk is the one that must be safe, and is."""
    with keeping(local, 1) as checkpointer:
        save(checkpointer, 1, names=["a.ckpt"])
        save(checkpointer, 2, names=["b.ckpt"])
    with keeping(local, 1) as checkpointer:
        checkpointer.load()
        checkpointer.delete("a.ckpt")
        settle(checkpointer)
        assert numbers(local) == [2]


def test_a_deletion_while_the_step_is_still_being_sent_is_not_forgotten(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from resiliency.agent import uploader

    free = threading.Event()
    remote = LocalTier(tmp_path / "remote", name="object_store")
    real = remote.put_file
    monkeypatch.setattr(remote, "put_file", lambda key, path, **further: (free.wait(20), real(key, path, **further))[1])
    monkeypatch.setattr(uploader, "open_tier", lambda *_, **__: remote)
    checkpointer = keeping(local, 1, remotes=[RemoteTierOptions(address=remote.root)])
    try:
        save(checkpointer, 1, names=["a.ckpt"])
        save(checkpointer, 2, names=["b.ckpt"])
        checkpointer.delete("a.ckpt")
        assert checkpointer.flush(Stage.DURABLE, tier="local", timeout=SOON)
        free.set()
        settle(checkpointer)
        assert numbers(local) == [2], "step 1 lost its name while it was pinned, and stays for ever"
    finally:
        free.set()
        checkpointer.close(timeout=timedelta(seconds=5))


def test_deleting_the_newest_keeps_it(local: Path) -> None:
    with keeping(local, 1) as checkpointer:
        save(checkpointer, 1, names=["a.ckpt"])
        checkpointer.delete("a.ckpt")
        settle(checkpointer)
    assert restored(local) == 1


# ---- repeated and odd steps


def test_the_same_step_saved_twice_is_two_steps(local: Path) -> None:
    with keeping(local, 5) as checkpointer:
        save(checkpointer, 7)
        ticket = checkpointer.save(7, make_state(7), info={"second": True})
        assert ticket is not None and ticket.id.serial == 1
        ticket.wait(Stage.DURABLE, timeout=SOON)
        settle(checkpointer)
        assert len(step_dirs(local)) == 2, "the second overwrote the first in place"
        got = checkpointer.load()
        assert got is not None and got.step == 7 and got.info["second"] is True


def test_step_zero_is_saved_and_loaded(local: Path) -> None:
    with keeping(local, 1) as checkpointer:
        save(checkpointer, 0)
        got = checkpointer.load()
        assert got is not None and got.step == 0


def test_the_same_step_in_the_next_attempt_is_another_step(local: Path) -> None:
    for _ in range(3):
        with keeping(local, None) as checkpointer:
            save(checkpointer, 5)
    assert [step.attempt for step in step_dirs(local)] == [1, 2, 3]
    assert restored(local) == 5


def test_a_step_with_many_names_is_kept_until_all_are_deleted(local: Path) -> None:
    names = [f"folder-{n % 3}/metric={n / 7:.3f}.ckpt" for n in range(60)]
    with keeping(local, 1) as checkpointer:
        save(checkpointer, 1, names=names)
        save(checkpointer, 2)
        settle(checkpointer)
        assert numbers(local) == [1, 2]
        assert all((local / name).exists() for name in names)
        checkpointer.delete(*names)
        save(checkpointer, 3)
        settle(checkpointer)
        assert numbers(local) == [3] and not any((local / name).exists() for name in names)


# ---- remote tiers


def test_the_remote_tier_deletes_only_after_the_newer_manifest(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from resiliency.agent import uploader

    tier = RecordingTier(LocalTier(tmp_path / "remote", name="object_store"))
    monkeypatch.setattr(uploader, "open_tier", lambda *_, **__: tier)
    with keeping(local, 1, remotes=[RemoteTierOptions(address=tier.root, keep=1)]) as checkpointer:
        for step in (1, 2, 3):
            save(checkpointer, step)
            settle(checkpointer)
    assert numbers(tmp_path / "remote") == [3]
    calls = [
        (call.verb, call.key.split("/")[-2].split("-")[0].lstrip("0"), call.key.split("/")[-1])
        for call in tier.calls()
        if "steps/" in call.key and call.verb in ("put_bytes", "put_file", "delete")
    ]  # noqa: E501
    for older, newer in (("1", "2"), ("2", "3")):
        written = calls.index(("put_bytes", newer, "manifest.json"))
        deleted = [i for i, call in enumerate(calls) if call[0] == "delete" and call[1] == older]
        assert deleted and min(deleted) > written
        assert calls[min(deleted)][2] == "manifest.json"
    for step in ("1", "2", "3"):
        puts = [name for verb, at, name in calls if at == step and verb.startswith("put")]
        assert puts == ["shard-00000.shard", "shard-00000.json", "manifest.json"], "the manifest comes last"


@pytest.mark.parametrize("slow", [0, 1])
def test_the_remote_tier_is_pruned_whichever_rank_is_last(local: Path, tmp_path: Path, slow: int) -> None:
    """Two agents send their parts; the one that writes the manifest need not be that of rank 0."""
    remote = tmp_path / "remote"
    faultpoints.arm(f"agent.upload.shard:delay=0.15@*,rank={slow}")

    def work(rank: int, coordinator: Coordinator) -> None:
        with keeping(
            local, 1, coordinator=coordinator, remotes=[RemoteTierOptions(address=str(remote), keep=1)]
        ) as checkpointer:
            for step in (1, 2, 3, 4):
                save(checkpointer, step, stage=Stage.COMMITTED)
            settle(checkpointer)
            coordinator.all_gather("sent", b"", timeout=SOON)
            save(checkpointer, 5, stage=Stage.COMMITTED)
            settle(checkpointer)

    run_ranks(2, work)
    assert 5 in numbers(remote)
    assert len(numbers(remote)) <= 2, f"steps {numbers(remote)} stay on the remote tier although keep=1"


def test_deleted_names_go_from_the_remote_tier_too(local: Path, tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    with keeping(local, 1, remotes=[RemoteTierOptions(address=str(remote), keep=1)]) as checkpointer:
        save(checkpointer, 1, names=["a.ckpt"])
        save(checkpointer, 2, names=["b.ckpt"])
        settle(checkpointer)
        checkpointer.delete("a.ckpt")
        settle(checkpointer)
        save(checkpointer, 3, names=["c.ckpt"])
        settle(checkpointer)
        assert numbers(local) == [2, 3]
        assert numbers(remote) == [2, 3] and not (remote / "a.ckpt").exists()


def test_a_remote_tier_that_is_down_does_not_fill_the_local_one(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step that waits for the tier is kept; on a ramdisk the host's memory would be full some day."""
    from resiliency.agent import uploader

    tier = FaultyTier(LocalTier(tmp_path / "remote", name="object_store"))
    tier.fail("put_file", Fault.BUSY, times=10**9)
    monkeypatch.setattr(uploader, "open_tier", lambda *_, **__: tier)
    checkpointer = keeping(local, 1, remotes=[RemoteTierOptions(address=tier.root)])
    try:
        for step in range(1, 13):
            ticket = checkpointer.save(step, make_state(step))
            assert ticket is not None
            assert checkpointer.flush(Stage.DURABLE, tier="local", timeout=SOON)
        assert wait_until(lambda: len(numbers(local)) <= 3), f"steps {numbers(local)} stay although keep=1"
        assert 12 in numbers(local)
        began = time.monotonic()
        assert not checkpointer.flush(Stage.DURABLE, timeout=timedelta(seconds=0.5))
        assert time.monotonic() - began < 3, "the flush waited more than once"
    finally:
        began = time.monotonic()
        checkpointer.close(flush=False)
    assert time.monotonic() - began < 10


def test_a_step_of_a_failed_interval_is_made_up_for(local: Path, tmp_path: Path) -> None:
    """The first save of a block of steps fails; the next one of the same block must go to the store instead."""
    from resiliency.storage.interval import Interval

    remote = tmp_path / "remote"
    with keeping(
        local, 3, remotes=[RemoteTierOptions(address=str(remote), interval=Interval(steps=10))]
    ) as checkpointer:
        save(checkpointer, 1)
        faultpoints.arm("agent.record.write:full")
        ticket = checkpointer.save(10, make_state(10))
        assert ticket is not None
        settle(checkpointer)
        assert any(outcome.failed for outcome in checkpointer.poll())
        save(checkpointer, 11)
        settle(checkpointer)
        assert numbers(remote) == [11]


# ---- resources


def test_no_file_descriptor_thread_or_file_is_lost_over_many_saves(local: Path, tmp_path: Path) -> None:
    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count(str(local))

    with keeping(local, 2, remotes=[RemoteTierOptions(address=str(tmp_path / "remote"), keep=2)]) as checkpointer:
        save(checkpointer, *range(1, 11), names=["last.ckpt"])
        settle(checkpointer)
        before, threads = count(), threading.active_count()
        files = sum(1 for _ in local.rglob("*"))
        save(checkpointer, *range(11, 61), names=["last.ckpt"])
        settle(checkpointer)
        after = count()
        assert after[0] <= before[0] + 2 and after[1] <= before[1] + 2, (
            f"descriptors, mappings: {before} became {after}"
        )
        # One that answers a flush may still be ending.
        assert wait_until(lambda: threading.active_count() <= threads)
        assert sum(1 for _ in local.rglob("*")) <= files + 2
    assert str(local) not in Path("/proc/self/maps").read_text(), "mappings outlive the checkpointer"


# ---- the agent by itself


def agent_for(local: Path, events: list[Any], **values: Any) -> HostAgent:
    return HostAgent(
        config_for(local, **values),
        lambda rank, message: events.append((rank, message)),
        EventWriter(run=RUN, attempt=1, rank=-1, host="n", sinks=()),
    )


def test_a_seal_sent_twice_commits_once(local: Path) -> None:
    """After an agent's death the trainer repeats what was not acknowledged; the successor may have done it already."""
    heard: list[Any] = []
    said = sealed(config_for(local))
    for _ in range(2):
        agent = agent_for(local, heard)
        agent.start()
        agent.handle(0, said)
        assert agent.wait(Stage.DURABLE, timeout_s=5)
        agent.close()
    assert numbers(local) == [1]
    assert not any(isinstance(message, Failed) for _, message in heard)
    assert len([1 for _, message in heard if isinstance(message, Recorded)]) == 2, (
        "the second trainer would wait for ever"
    )


@pytest.mark.parametrize("other", [StepId(1, 2, "0a0b0c"), StepId(1, 1, "ffffff")], ids=str)
def test_a_save_of_another_start_of_the_job_is_refused(local: Path, other: StepId) -> None:
    said = dataclasses.replace(sealed(config_for(local)), id=other)
    agent = agent_for(local, [])
    agent.start()
    try:
        with pytest.raises(AgentError, match="serves attempt 1"):
            agent.handle(0, said)
        with pytest.raises(AgentError, match="serves attempt 1"):
            agent.handle(0, Complete(id=other))
        assert (
            agent.wait(Stage.DURABLE, timeout_s=5)
            and numbers(local) == []
            and shard_path(config_for(local), 1).exists()
        )
    finally:
        agent.close()
        agent.close()


def test_a_file_that_is_not_there_is_a_failed_save(local: Path) -> None:
    heard: list[Any] = []
    agent = agent_for(local, heard)
    agent.start()
    try:
        said = sealed(config_for(local))
        shard_path(config_for(local), 1).unlink()
        agent.handle(0, said)
        assert agent.wait(Stage.DURABLE, timeout_s=5)
        assert isinstance(heard[0][1], Failed) and str(local) in heard[0][1].reason
    finally:
        agent.close()


@pytest.mark.parametrize("first", ["the one that fails", "the one that waits"])
def test_what_fails_on_one_rank_the_other_does_not_wait_for(local: Path, first: str) -> None:
    heard: list[Any] = []
    config = config_for(local, world_size=2, local_ranks=(0, 1))
    seals = [sealed(config, shard=rank) for rank in (0, 1)]
    shard_path(config, 1, 0).unlink()
    agent = agent_for(local, heard, world_size=2, local_ranks=(0, 1))
    agent.start()
    try:
        for rank in (0, 1) if first == "the one that fails" else (1, 0):
            agent.handle(rank, seals[rank])
            assert agent.wait(Stage.DURABLE, timeout_s=5)
        reasons = {rank: message.reason for rank, message in heard if isinstance(message, Failed)}
        assert set(reasons) == {0, 1} and "gone or was changed" in reasons[0]
        assert reasons[1] == f"rank 0: {reasons[0]}"
        recorded = [rank for rank, message in heard if isinstance(message, Recorded)]
        assert recorded == [1], "its own part is there; before this it must not be taken for failed"
        order = [type(message) for rank, message in heard if rank == 1]
        assert order == [Recorded, Failed]
    finally:
        agent.close()


@pytest.mark.parametrize("how", ["another file", "another size"])
def test_a_file_that_is_not_the_sealed_one_is_a_failed_save(local: Path, how: str) -> None:
    heard: list[Any] = []
    said = sealed(config_for(local))
    path = shard_path(config_for(local), 1)
    if how == "another file":
        (local / "other").write_bytes(path.read_bytes())
        (local / "other").rename(path)
    else:
        path.write_bytes(path.read_bytes()[:-1])
    agent = agent_for(local, heard)
    agent.start()
    try:
        agent.handle(0, said)
        assert agent.wait(Stage.DURABLE, timeout_s=5)
        assert isinstance(heard[0][1], Failed) and "gone or was changed" in heard[0][1].reason
        assert numbers(local) == [] and path.exists()
    finally:
        agent.close()


def test_a_wrong_number_of_digests_is_refused(local: Path) -> None:
    agent = agent_for(local, [])
    said = sealed(config_for(local))
    (file,) = said.files
    try:
        with pytest.raises(AgentError, match=f"1 digests for {file.nbytes} bytes in {len(file.digests)} blocks"):
            agent.handle(0, dataclasses.replace(said, files=(dataclasses.replace(file, digests=("0" * 16,)),)))
    finally:
        agent.close()
