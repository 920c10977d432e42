"""Training outlives checkpointing: whatever storage does, a save does not raise, one warning says it, and the next one works."""

from __future__ import annotations

import errno
import json
import logging
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from resiliency import faultpoints
from resiliency.agent import file_pool, uploader
from resiliency.checkpoint import checkpointer as checkpointer_module
from resiliency.checkpoint import save_tracker, shard_writer
from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.coordinator import Coordinator
from resiliency.checkpoint.options import LocalTierOptions, RemoteTierOptions
from resiliency.checkpoint.ticket import Ticket
from resiliency.errors import CorruptShard, ResiliencyError, TierError
from resiliency.storage.interval import Interval
from resiliency.storage.stage import Stage
from resiliency.storage.tiers.base import Tier
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.checkpoints import RUN, differences, make_checkpointer, make_state, run_ranks, step_dirs
from resiliency.testing.tier_doubles import Fault, FaultyTier, SlowTier, Verb

SOON = timedelta(seconds=20)


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faultpoints.arm("")


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return tmp_path / "local"


def events(local: Path, kind: str) -> list[dict[str, Any]]:
    lines = [
        line for log in local.parent.rglob(".resiliency/*/events/*.jsonl") for line in log.read_text().splitlines()
    ]
    return [event for event in map(json.loads, lines) if event["event_type"] == kind]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING]


def saved(checkpointer: Checkpointer, step: int, **further: Any) -> bool:
    """Saves and waits; False when the save was skipped or failed. Whatever happens, it must not raise or hang."""
    began = time.monotonic()
    ticket = checkpointer.save(step, make_state(step), **further)
    if ticket is None:
        return False
    try:
        ticket.wait(Stage.DURABLE if ticket.can_be_durable else Stage.COMMITTED, timeout=SOON)
    except ResiliencyError:
        assert ticket.failed, f"step {step} was neither committed nor failed after {time.monotonic() - began:.0f} s"
        return False
    return True


def loads(directory: Path, **further: Any) -> int | None:
    """The step a fresh start restores, checked bit for bit."""
    checkpointer = make_checkpointer(LocalTierOptions(directory=str(directory)), **further)
    try:
        restored = checkpointer.load()
        if restored is None:
            return None
        assert differences(restored.state, make_state(restored.step)) == []
        return restored.step
    finally:
        checkpointer.close(flush=False)


# ---- the local tier fails while training


@pytest.mark.parametrize("action", ["full", "error"])
@pytest.mark.parametrize(
    "point", ["agent.record.write", "agent.record.write", "agent.manifest.write", "agent.name.write", "agent.fsync"]
)
def test_one_save_fails_and_the_next_works(
    local: Path, caplog: pytest.LogCaptureFixture, point: str, action: str
) -> None:
    with make_checkpointer(local) as checkpointer:
        assert saved(checkpointer, 1, names=["a.ckpt"])
        faultpoints.arm(f"{point}:{action}@*")
        assert not saved(checkpointer, 2, names=["b.ckpt"])
        assert not saved(checkpointer, 3, names=["c.ckpt"])
        told = [outcome for outcome in checkpointer.poll() if outcome.failed]
        assert [outcome.step for outcome in told] == [2, 3] and all(outcome.reason for outcome in told)
        assert len(warnings(caplog)) == 1, "one clear warning, not one for each save"
        faultpoints.arm("")
        assert saved(checkpointer, 4, names=["d.ckpt"])
    assert {event["step"] for event in events(local, "checkpoint_failed")} == {2, 3}
    assert loads(local) == 4
    assert {step.step for step in step_dirs(local)} >= {1, 4}, "a step with a name was lost"


@pytest.mark.parametrize("point", ["agent.record.write", "agent.record.write", "agent.manifest.write"])
def test_what_was_committed_before_the_failure_is_restored_after_it(local: Path, point: str) -> None:
    with make_checkpointer(LocalTierOptions(directory=str(local), keep=1)) as checkpointer:
        assert saved(checkpointer, 1)
        faultpoints.arm(f"{point}:full@*")
        for step in (2, 3, 4):
            assert not saved(checkpointer, step)
    faultpoints.arm("")
    assert loads(local) == 1, "what was said to have failed is there"
    assert {step.step for step in step_dirs(local)} == {1}, "what has failed takes room"


def test_a_full_disk_at_the_manifest_gives_way_to_files_prepared_in_advance(
    local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save is committed: what is missing is small, and files for the next saves are the size of the state."""
    put_bytes = LocalTier.put_bytes
    full = False

    def put(tier: LocalTier, key: str, data: bytes) -> None:
        if full and key.endswith("manifest.json") and list(local.glob(".resiliency/*/files/*")):
            raise TierError("full", retryable=True) from OSError(errno.ENOSPC, "No space left on device")
        put_bytes(tier, key, data)

    monkeypatch.setattr(LocalTier, "put_bytes", put)
    state = {"large": torch.arange(1 << 19)}
    with make_checkpointer(local) as checkpointer:
        checkpointer.warm_up(state)
        assert list(local.glob(".resiliency/*/files/*")), "nothing was prepared"
        for step in (1, 2):
            full = step == 2
            ticket = checkpointer.save(step, state)
            assert ticket is not None
            ticket.wait(Stage.COMMITTED, timeout=SOON)
            assert checkpointer.flush(Stage.DURABLE, timeout=SOON)
    assert not events(local, "checkpoint_failed")


@pytest.mark.parametrize("point", ["save.eager", "save.fill"])
def test_an_error_in_the_middle_of_a_save_does_not_end_checkpointing(local: Path, point: str) -> None:
    """A copy that raises (a lost device, say) is the caller's to see; what follows must work without waiting for it."""
    checkpointer = make_checkpointer(local)
    try:
        assert saved(checkpointer, 1)
        faultpoints.arm(f"{point}:error")
        with pytest.raises(OSError):
            checkpointer.save(2, make_state(2))
        faultpoints.arm("")
        began = time.monotonic()
        assert saved(checkpointer, 3)
        assert checkpointer.flush(Stage.DURABLE, timeout=timedelta(seconds=5)), (
            "the agent still waits for the save that raised"
        )
        assert time.monotonic() - began < 5
    finally:
        checkpointer.close(timeout=timedelta(seconds=1))
    assert loads(local) == 3


def test_a_copy_that_fails_fails_its_save_only(local: Path) -> None:
    with make_checkpointer(local) as checkpointer:
        assert saved(checkpointer, 1)
        faultpoints.arm("save.block:error@*")
        assert not saved(checkpointer, 2)
        assert any("fault injected at save.block" in outcome.reason for outcome in checkpointer.poll())
        faultpoints.arm("")
        assert saved(checkpointer, 3)
        assert checkpointer.flush(timeout=SOON)
    assert loads(local) == 3


def test_who_waits_for_a_save_whose_end_fails_is_told_at_once(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of the file is written after the fence, while the training thread waits for the agent."""
    waits = threading.Event()

    def broken(*_: Any) -> bytes:
        waits.wait(10)
        raise OSError(errno.ENOSPC, "No space left on device")

    with make_checkpointer(local) as checkpointer:
        assert saved(checkpointer, 1)
        real = checkpointer.session.client.wait_message

        def waiting(timeout_s: float) -> bool:
            waits.set()
            return real(timeout_s)

        with monkeypatch.context() as patched:
            patched.setattr(shard_writer, "archive_tail", broken)
            patched.setattr(checkpointer.session.client, "wait_message", waiting)
            ticket = checkpointer.save(2, make_state(2))
            assert ticket is not None
            began = time.monotonic()
            with pytest.raises(ResiliencyError, match="No space left"):
                ticket.wait(timeout=SOON)
            assert time.monotonic() - began < SOON.total_seconds() / 2
        assert saved(checkpointer, 3)


def test_a_warm_up_does_not_wait_for_a_file_that_cannot_be_prepared(
    local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has no room for it now. Jobs of several ranks warm up before they train."""
    real = file_pool.write_zeros

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with make_checkpointer(LocalTierOptions(directory=str(local), keep=1)) as checkpointer:
        monkeypatch.setattr(file_pool, "write_zeros", full)
        began = time.monotonic()
        checkpointer.warm_up(nbytes=2 << 20)
        assert time.monotonic() - began < checkpointer_module._PREPARE_S / 2
        monkeypatch.setattr(file_pool, "write_zeros", real)
        checkpointer.warm_up(nbytes=2 << 20)
        assert list(local.glob(".resiliency/*/files/*.free"))
        assert saved(checkpointer, 1)


def test_prepared_files_removed_behind_our_back(local: Path) -> None:
    """A cleaner takes them: the save makes its own file."""
    with make_checkpointer(LocalTierOptions(directory=str(local), keep=1)) as checkpointer:
        checkpointer.warm_up(nbytes=2 << 20)
        files = list(local.glob(".resiliency/*/files/*.free"))
        assert files, "nothing was prepared"
        for file in files:
            file.unlink()
        assert all([saved(checkpointer, step) for step in (6, 7, 8)])
    assert loads(local) == 8


def test_step_folders_removed_behind_our_back(local: Path) -> None:
    import shutil

    with make_checkpointer(LocalTierOptions(directory=str(local), keep=2)) as checkpointer:
        for step in range(1, 4):
            assert saved(checkpointer, step)
        assert checkpointer.flush(Stage.DURABLE, timeout=SOON)
        shutil.rmtree(local / ".resiliency" / RUN / "steps")
        assert any([saved(checkpointer, step) for step in (4, 5, 6)])
        assert checkpointer.flush(timeout=SOON)
    assert loads(local) == 6


# ---- a disk that is really full or read-only


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True, timeout=20)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount("-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True, timeout=20)


def fill(folder: Path) -> Path:
    """Uses up what is free of the file system; returns the file to delete when there should be room again."""
    filler = folder / "filler"
    with open(filler, "ab", buffering=0) as file, pytest.raises(OSError):
        while True:
            if file.write(b"x" * 4096) < 4096:
                raise OSError
    return filler


def test_saves_fail_on_a_full_disk_and_work_again_after_it(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    with make_checkpointer(LocalTierOptions(directory=str(disk), keep=1)) as checkpointer:
        assert saved(checkpointer, 1)
        filler = fill(disk)
        results = [saved(checkpointer, step) for step in (2, 3, 4)]
        assert not results[0]
        assert 1 <= len([text for text in warnings(caplog) if "No space" in text]) <= 2, warnings(caplog)
        assert any("space" in outcome.reason for outcome in checkpointer.poll())
        filler.unlink()
        assert saved(checkpointer, 5)
        assert saved(checkpointer, 6)
    assert loads(disk) == 6


def test_a_full_disk_loses_nothing_that_was_committed(disk: Path) -> None:
    with make_checkpointer(LocalTierOptions(directory=str(disk), keep=2)) as checkpointer:
        assert saved(checkpointer, 1) and saved(checkpointer, 2)
        fill(disk)
        for step in range(3, 8):
            saved(checkpointer, step)
    restored = loads(disk)
    assert restored is not None and restored >= 2


def _failed(ticket: Ticket) -> bool:
    with pytest.raises(ResiliencyError, match="free space"):
        ticket.wait(timeout=SOON)
    return True


def test_a_disk_full_from_the_start(
    disk: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointer_module, "_PREPARE_S", 0.5)  # all of it is waited for: no file can be prepared
    filler = fill(disk)
    filler.write_bytes(b"x" * (4 * 1024 * 1024 - 64 * 1024))  # room for folders and the attempt file
    with make_checkpointer(LocalTierOptions(directory=str(disk))) as checkpointer:
        state = {"w": torch.zeros(1 << 18)}
        checkpointer.warm_up(state)
        ticket = checkpointer.save(1, state)
        assert ticket is None or _failed(ticket)
        assert [outcome.failed for outcome in checkpointer.poll()] == [True]
        assert any("free space" in text for text in warnings(caplog))
        filler.unlink()
        ticket = checkpointer.save(2, state)
        assert ticket is not None
        ticket.wait(Stage.COMMITTED, timeout=SOON)


def test_state_that_outgrows_the_disk_leaves_no_orphan(disk: Path) -> None:
    """A shard file that could not be made larger must not keep its blocks."""
    with make_checkpointer(LocalTierOptions(directory=str(disk), keep=1)) as checkpointer:
        for step in (1, 2, 3):
            ticket = checkpointer.save(step, {"w": torch.full((1 << 16,), float(step))})
            assert ticket is not None
            ticket.wait(Stage.COMMITTED, timeout=SOON)
        assert checkpointer.flush(timeout=SOON)
        for step in (4, 5, 6):
            ticket = checkpointer.save(step, {"w": torch.zeros(1 << 21)})  # 8 MiB on a disk of 4
            assert ticket is None or _failed(ticket)
        ticket = checkpointer.save(7, {"w": torch.full((1 << 16,), 7.0)})
        assert ticket is not None
        ticket.wait(Stage.COMMITTED, timeout=SOON)
        assert checkpointer.flush(timeout=SOON)
        in_use = sum(path.stat().st_blocks * 512 for path in disk.rglob("*") if path.is_file())
        assert in_use < 1024 * 1024, f"{in_use} bytes for steps of 256 KiB"


def test_saves_fail_while_the_folder_is_read_only_and_work_after_it(
    local: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_checkpointer(LocalTierOptions(directory=str(local), keep=1)) as checkpointer:
        assert saved(checkpointer, 1)
        steps = str(local / ".resiliency" / RUN / "steps")
        mount("--bind", steps, steps)
        try:
            mount("-o", "remount,ro,bind", steps)
            assert [saved(checkpointer, step) for step in (2, 3)] == [False, False]
            assert len(warnings(caplog)) == 1
        finally:
            subprocess.run(["umount", "-l", steps], check=True, capture_output=True, timeout=20)
        assert saved(checkpointer, 4)
    assert loads(local) == 4


@pytest.mark.parametrize("before", ["empty", "has a step"])
def test_read_only_at_the_start_is_said_by_every_rank_at_once(disk: Path, before: str) -> None:
    if before == "has a step":
        with make_checkpointer(disk) as checkpointer:
            assert saved(checkpointer, 1)
    mount("-o", "remount,ro", str(disk))

    def work(rank: int, coordinator: Coordinator) -> str:
        checkpointer = make_checkpointer(disk, coordinator)
        with pytest.raises(TierError) as caught:
            checkpointer.open()
        return str(caught.value)

    began = time.monotonic()
    for text in run_ranks(2, work):
        assert str(disk) in text and "ead-only" in text
    assert time.monotonic() - began < 5, "a rank waited for one that had given up"


# ---- the remote tier


@pytest.fixture
def remote(tmp_path: Path) -> LocalTier:
    return LocalTier(tmp_path / "remote", name="object_store")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tier], None]:
    """Makes the uploader use this tier, and try again at once."""

    def use(tier: Tier) -> None:
        monkeypatch.setattr(uploader, "open_tier", lambda *_, **__: tier)

    monkeypatch.setattr(uploader, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(uploader, "_LONGEST_PAUSE_S", 0.05)
    return use


def with_remote(local: Path, remote: Tier, **further: Any) -> Checkpointer:
    return make_checkpointer(
        LocalTierOptions(directory=str(local), keep=1), remotes=[RemoteTierOptions(address=remote.root, **further)]
    )


@pytest.mark.parametrize("fault", [Fault.BUSY, Fault.FULL, Fault.LOST_ANSWER], ids=lambda fault: fault.name)
@pytest.mark.parametrize("verb", ["put_file", "put_bytes"])
def test_a_store_that_is_down_is_tried_again(
    local: Path,
    remote: LocalTier,
    opened: Callable[[Tier], None],
    caplog: pytest.LogCaptureFixture,
    fault: Fault,
    verb: Verb,
) -> None:
    faulty = FaultyTier(remote)
    faulty.fail(verb, fault, times=5)
    opened(faulty)
    with with_remote(local, remote) as checkpointer:
        assert saved(checkpointer, 1)
        assert saved(checkpointer, 2)
        assert checkpointer.flush(Stage.DURABLE, timeout=SOON)
        assert faulty.tripped(fault) == 5
        told = [outcome for outcome in checkpointer.poll() if outcome.tier == "object_store"]
        assert (told[-1].step, told[-1].stage) == (2, Stage.DURABLE)
        failed = [outcome for outcome in told if outcome.failed]
        # An older step that waits gives way to a newer one, for good.
        tried_again = [outcome for outcome in failed if "is newer" not in outcome.reason]
        assert failed and all(outcome.retrying for outcome in tried_again), "what is tried again was told as final"
    down = [text for text in warnings(caplog) if "is tried again" in text]
    assert len(down) == 1, warnings(caplog)
    assert loads(Path(remote.root)) == 2
    assert any(event["will_retry"] for event in events(local, "checkpoint_failed"))


@pytest.mark.parametrize("fault", [Fault.REFUSED, Fault.CONFLICT], ids=lambda fault: fault.name)
def test_a_store_that_refuses_fails_that_step_and_gets_the_next(
    local: Path, remote: LocalTier, opened: Callable[[Tier], None], caplog: pytest.LogCaptureFixture, fault: Fault
) -> None:
    faulty = FaultyTier(remote)
    faulty.fail("put_file", fault)
    opened(faulty)
    with with_remote(local, remote) as checkpointer:
        assert saved(checkpointer, 1)
        assert checkpointer.flush(Stage.DURABLE, timeout=SOON)
        failed = [outcome for outcome in checkpointer.poll() if outcome.failed]
        assert [(outcome.step, outcome.tier) for outcome in failed] == [(1, "object_store")] and "injected" in failed[
            0
        ].reason
        assert not failed[0].retrying
        assert len(warnings(caplog)) == 1
        assert loads_nothing(remote)
        assert saved(checkpointer, 2)
        assert checkpointer.flush(Stage.DURABLE, timeout=SOON)
    assert loads(Path(remote.root)) == 2
    assert loads(local) == 2


def loads_nothing(tier: Tier) -> bool:
    return not any(info.key.endswith("manifest.json") for info in tier.list(""))


def test_bits_that_rot_on_the_way_are_not_restored(
    local: Path, tmp_path: Path, remote: LocalTier, opened: Callable[[Tier], None]
) -> None:
    faulty = FaultyTier(remote)
    opened(faulty)
    with with_remote(local, remote, keep=None) as checkpointer:
        assert saved(checkpointer, 1)
        assert checkpointer.flush(Stage.DURABLE, timeout=SOON)
        faulty.fail("put_file", Fault.CORRUPT)
        assert saved(checkpointer, 2)
        assert checkpointer.flush(Stage.DURABLE, timeout=SOON)
    assert loads(tmp_path / "new host", remotes=[RemoteTierOptions(address=remote.root)]) == 1


def test_damage_on_the_local_disk_is_not_sent_on(
    local: Path, remote: LocalTier, opened: Callable[[Tier], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = remote.put_file

    def damaged(key: str, path: str, **further: Any) -> None:
        data = bytearray(Path(path).read_bytes())
        data[-10] ^= 1
        Path(path).write_bytes(data)
        real(key, path, **further)

    monkeypatch.setattr(remote, "put_file", damaged)
    opened(remote)
    with with_remote(local, remote) as checkpointer:
        assert saved(checkpointer, 1)
        assert checkpointer.flush(Stage.DURABLE, timeout=SOON)
        assert [outcome.tier for outcome in checkpointer.poll() if outcome.failed] == ["object_store"]
    assert loads_nothing(remote)


def test_a_slow_store_neither_slows_training_nor_fills_the_local_tier(
    local: Path, remote: LocalTier, opened: Callable[[Tier], None], caplog: pytest.LogCaptureFixture
) -> None:
    free = threading.Event()
    opened(SlowTier(remote, delay=timedelta(seconds=60), pause=lambda seconds: free.wait(seconds) and False))
    checkpointer = with_remote(local, remote)
    try:
        began = time.monotonic()
        for step in range(1, 6):
            assert saved(checkpointer, step)
        assert time.monotonic() - began < 10
        assert loads_nothing(remote)
        # The first is being sent, the last waits for it; the others must not fill the local tier meanwhile.
        assert checkpointer.flush(Stage.DURABLE, tier="local", timeout=SOON)
        assert {step.step for step in step_dirs(local)} == {1, 5}
        told = [text for text in warnings(caplog) if "will not be stored on object_store" in text]
        assert len(told) == 1 and "step 2 " in told[0], warnings(caplog)
        given_up = [event for event in events(local, "checkpoint_failed") if event["tier"] == "object_store"]
        assert [(event["step"], event["will_retry"]) for event in given_up] == [(2, False), (3, False), (4, False)]
        free.set()
        assert checkpointer.flush(Stage.DURABLE, timeout=SOON)
        # What is sent may go.
        assert checkpointer.flush(Stage.DURABLE, tier="local", timeout=SOON)
        assert {step.step for step in step_dirs(local)} == {5}
    finally:
        free.set()
        checkpointer.close(timeout=timedelta(seconds=5))
    assert any("3 of 5 saves to object_store were given up" in text for text in warnings(caplog))
    assert loads(Path(remote.root)) == 5


def test_who_waits_for_a_save_that_gave_way_hears_of_it_at_once(
    local: Path, remote: LocalTier, opened: Callable[[Tier], None]
) -> None:
    busy, free = threading.Event(), threading.Event()

    def pause(seconds: float) -> bool:
        busy.set()
        return free.wait(seconds) and False

    opened(SlowTier(remote, delay=timedelta(seconds=60), pause=pause))
    with with_remote(local, remote) as checkpointer:
        tickets = []
        for step in (1, 2, 3):
            tickets.append(checkpointer.save(step, make_state(step)))
            assert tickets[-1] is not None
            tickets[-1].wait(Stage.COMMITTED, timeout=SOON)
            assert busy.wait(SOON.total_seconds())  # with step 1, or that would give way to step 2
        began = time.monotonic()
        with pytest.raises(ResiliencyError, match="will not be durable on object_store: .*step 3 is newer"):
            tickets[1].wait(Stage.DURABLE, tier="object_store", timeout=SOON)
        assert time.monotonic() - began < 10
        tickets[1].wait(Stage.DURABLE, timeout=SOON)  # on the local disk it is
        free.set()
        tickets[2].wait(Stage.DURABLE, tier="object_store", timeout=SOON)


def test_an_upload_cut_off_is_resumed_at_the_next_start(
    local: Path, remote: LocalTier, opened: Callable[[Tier], None]
) -> None:
    faulty = FaultyTier(remote)
    faulty.fail("put_file", Fault.BUSY, times=10**9)
    opened(faulty)
    checkpointer = with_remote(local, remote)
    try:
        assert saved(checkpointer, 1) and saved(checkpointer, 2)
    finally:
        checkpointer.close(flush=False)
    assert loads_nothing(remote)
    opened(remote)
    with with_remote(local, remote):
        pass  # close() waits for uploads
    assert loads(Path(remote.root)) == 2


@pytest.mark.parametrize("later", [1, 2])
def test_an_upload_cut_off_is_resumed_by_a_job_of_another_size(
    local: Path, remote: LocalTier, opened: Callable[[Tier], None], later: int
) -> None:
    def attempt(world_size: int, step: int | None) -> None:
        def work(rank: int, coordinator: Coordinator) -> None:
            checkpointer = make_checkpointer(local, coordinator, remotes=[RemoteTierOptions(address=remote.root)])
            checkpointer.open()
            if step is not None:
                ticket = checkpointer.save(step, make_state(step))
                assert ticket is not None
                ticket.wait(timeout=SOON)
            checkpointer.close(flush=step is None)

        run_ranks(world_size, work)

    faulty = FaultyTier(remote)
    faulty.fail("put_file", Fault.BUSY, times=10**9)
    opened(faulty)
    attempt(2, 1)
    opened(remote)
    attempt(later, None)
    assert loads(Path(remote.root)) == 1


# ---- several ranks


def test_one_rank_fails_and_nobody_waits_for_it_at_the_end(local: Path) -> None:
    """Rank 1 has no room for step 2; step 3 is whole, so rank 0 has nothing left to wait for."""

    def work(rank: int, coordinator: Coordinator) -> tuple[bool, float]:
        checkpointer = make_checkpointer(local, coordinator)
        try:
            for step in (1, 2, 3):
                coordinator.all_gather("step", b"", timeout=SOON)
                if rank == 0:
                    faultpoints.arm("agent.record.write:full@*,rank=1" if step == 2 else "")
                coordinator.all_gather("armed", b"", timeout=SOON)
                ticket = checkpointer.save(step, make_state(step))
                assert ticket is not None
                if step == 2 and rank == 1:
                    with pytest.raises(ResiliencyError, match="fault injected"):
                        ticket.wait(timeout=SOON)
                elif step != 2:
                    ticket.wait(timeout=SOON)
            began = time.monotonic()
            return checkpointer.flush(Stage.DURABLE, timeout=timedelta(seconds=4)), time.monotonic() - began
        finally:
            checkpointer.close(flush=False)

    for done, seconds in run_ranks(2, work):
        assert done and seconds < 3, "flush waited for a step that can never be whole"

    def load(rank: int, coordinator: Coordinator) -> int | None:
        with make_checkpointer(local, coordinator) as checkpointer:
            restored = checkpointer.load()
            return None if restored is None else restored.step

    assert run_ranks(2, load) == [3, 3]


def test_ranks_with_different_tensors_are_told(local: Path) -> None:
    def work(rank: int, coordinator: Coordinator) -> list[str]:
        with make_checkpointer(local, coordinator) as checkpointer:
            ticket = checkpointer.save(1, {"w": torch.zeros(1000 + rank, 2)})
            assert ticket is not None
            checkpointer.flush(timeout=timedelta(seconds=3))
            told = [outcome.reason for outcome in checkpointer.poll() if outcome.failed]
            coordinator.all_gather("told", b"", timeout=SOON)
            ticket = checkpointer.save(2, {"w": torch.zeros(1000, 2)})
            assert ticket is not None
            ticket.wait(timeout=SOON)
            return told

    told = run_ranks(2, work)
    assert any("per_rank" in reason for reasons in told for reason in reasons)

    def load(rank: int, coordinator: Coordinator) -> int | None:
        with make_checkpointer(local, coordinator) as checkpointer:
            restored = checkpointer.load()
            return None if restored is None else restored.step

    assert run_ranks(2, load) == [2, 2]


# ---- restore


def test_no_room_to_repair_is_said_as_what_it_is(tmp_path: Path, disk: Path) -> None:
    """The remote copy is fine; calling it corrupt would send people looking in the wrong place."""
    remote = tmp_path / "remote"
    checkpointer = make_checkpointer(tmp_path / "local", remotes=[RemoteTierOptions(address=str(remote))])
    with checkpointer:
        assert saved(checkpointer, 1)
    fill(disk)
    with open(disk / "filler", "r+b") as file:
        file.truncate(4 * 1024 * 1024 - 16 * 1024)  # room for small files, not for the shard
    state = make_checkpointer(LocalTierOptions(directory=str(disk)), remotes=[RemoteTierOptions(address=str(remote))])
    try:
        with pytest.raises(ResiliencyError) as caught:
            state.load()
        assert "No space" in str(caught.value) and str(disk) in str(caught.value)
        assert not isinstance(caught.value, CorruptShard), "nothing is corrupt"
    finally:
        state.close(flush=False)


def test_a_remote_that_cannot_be_listed_does_not_hide_the_local_step(local: Path, tmp_path: Path) -> None:
    with make_checkpointer(local) as checkpointer:
        assert saved(checkpointer, 1)
    bad = tmp_path / "a file"
    bad.write_text("not a folder")
    checkpointer = make_checkpointer(local)
    checkpointer._remote_tiers.append(FaultyTier(LocalTier(bad, name="object_store")))
    checkpointer._remote_tiers[0].fail("list", Fault.BUSY, times=10)
    try:
        restored = checkpointer.load()
        assert restored is not None and restored.step == 1
    finally:
        checkpointer.close(flush=False)


def test_an_error_after_the_copy_fails_this_save_only(local: Path) -> None:
    """It comes on the copy thread, which must live on."""
    with make_checkpointer(local) as checkpointer:
        assert saved(checkpointer, 1)
        faultpoints.arm("save.sealed:error")
        began = time.monotonic()
        assert not saved(checkpointer, 2)
        assert time.monotonic() - began < SOON.total_seconds() / 2, "who waits for the save was not told that it failed"
        assert saved(checkpointer, 3)
    assert loads(local) == 3


def test_a_save_on_its_way_to_a_slow_store_is_heard_of_after_any_number_of_later_saves(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_tracker, "_TICKETS", 2)
    reached, go_on, send = threading.Event(), threading.Event(), uploader.send_step

    def send_step(*args: Any, **options: Any) -> bool:
        reached.set()
        assert go_on.wait(20)
        return send(*args, **options)

    monkeypatch.setattr(uploader, "send_step", send_step)
    remote = RemoteTierOptions(address=str(tmp_path / "store"), name="store", interval=Interval(steps=100))
    with make_checkpointer(local, remotes=[remote]) as checkpointer:
        tickets = [checkpointer.save(step, make_state(step)) for step in (100,)]
        assert tickets[0] is not None and reached.wait(20)
        for step in range(101, 106):
            tickets.append(checkpointer.save(step, make_state(step)))
            assert tickets[-1] is not None and tickets[-1].tiers == ("local",)
            tickets[-1].wait(Stage.COMMITTED, timeout=SOON)
        go_on.set()
        tickets[0].wait(Stage.DURABLE, tier="store", timeout=SOON)
        for step in (106, 107):  # then it is forgotten as the others are
            ticket = checkpointer.save(step, make_state(step))
            assert ticket is not None
            ticket.wait(Stage.COMMITTED, timeout=SOON)
        assert checkpointer._opened is not None
        assert sorted(step.step for step in checkpointer._opened.saves._tickets) == [106, 107]
