"""A rank's flush waits for the parts of the other ranks, also where one agent serves them all."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from resiliency.agent import uploader
from resiliency.checkpoint import checkpointer as module
from resiliency.checkpoint.checkpointer import CheckpointerOptions
from resiliency.checkpoint.coordinator import Coordinator
from resiliency.checkpoint.options import LocalTierOptions, RemoteTierOptions
from resiliency.errors import CorruptShard
from resiliency.storage.stage import Stage
from resiliency.testing.checkpoints import make_checkpointer, make_state, run_ranks

SOON = timedelta(seconds=20)


def hosts(layout: str, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    if layout != "one host":
        monkeypatch.setenv("RESILIENCY_NODE", f"host{rank}")


@pytest.mark.parametrize("stage", [Stage.COMMITTED, Stage.DURABLE])
@pytest.mark.parametrize("layout", ["one host", "two hosts", "two hosts, one folder"])
def test_a_flush_returns_when_the_last_rank_has_saved_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, stage: Stage
) -> None:
    starting, recorded = threading.Lock(), threading.Event()

    def work(rank: int, coordinator: Coordinator) -> None:
        folder = tmp_path / (f"local{rank}" if layout == "two hosts" else "local")
        with starting:
            hosts(layout, monkeypatch, rank)
            checkpointer = make_checkpointer(
                LocalTierOptions(directory=str(folder), shared=layout.endswith("one folder")), coordinator
            )
        with checkpointer:
            if rank == 1:
                assert recorded.wait(20)
            ticket = checkpointer.save(1, make_state(1), names=["last.ckpt"])
            assert ticket is not None
            if rank == 0:
                ticket.wait(Stage.RECORDED, timeout=SOON)
                threading.Timer(0.3, recorded.set).start()
            assert checkpointer.flush(stage, timeout=SOON)
            assert ticket.has_reached(stage) and recorded.is_set()
            assert (folder / "last.ckpt").exists()

    run_ranks(2, work, timeout_s=60)


def test_a_flush_says_that_the_other_ranks_part_did_not_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_OTHERS_S", 0.3)
    done = threading.Event()

    def work(rank: int, coordinator: Coordinator) -> None:
        with make_checkpointer(
            tmp_path / "local", coordinator, options=CheckpointerOptions(drain_timeout=timedelta(seconds=5))
        ) as checkpointer:
            if rank == 0:
                assert checkpointer.save(1, make_state(1), names=["last.ckpt"]) is not None
                assert checkpointer.flush(Stage.RECORDED, timeout=SOON)
                assert not checkpointer.flush(Stage.COMMITTED, timeout=SOON)
                done.set()
            assert done.wait(20)

    run_ranks(2, work, timeout_s=60)
    assert not (tmp_path / "local" / "last.ckpt").exists()


def test_what_one_flush_has_waited_for_the_next_does_not_wait_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a fit waits for COMMITTED, then for DURABLE, and then closes."""
    monkeypatch.setattr(module, "_OTHERS_S", 3.0)
    done = threading.Event()

    def work(rank: int, coordinator: Coordinator) -> None:
        checkpointer = make_checkpointer(
            tmp_path / "local", coordinator, options=CheckpointerOptions(drain_timeout=timedelta(seconds=5))
        )
        checkpointer.open()
        if rank == 1:
            assert done.wait(20)
            checkpointer.close()
            return
        assert checkpointer.save(1, make_state(1), names=["last.ckpt"]) is not None
        began = time.monotonic()
        assert not checkpointer.flush(Stage.COMMITTED, timeout=SOON)
        first = time.monotonic()
        assert not checkpointer.flush(Stage.DURABLE, timeout=SOON)
        assert not checkpointer.flush(Stage.COMMITTED, timeout=SOON)
        checkpointer.close(timeout=SOON)
        done.set()
        assert time.monotonic() - first < (first - began) / 2

    run_ranks(2, work, timeout_s=60)


def test_a_flush_waits_for_the_other_ranks_part_of_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although it has waited in vain for that of the save before."""
    monkeypatch.setattr(module, "_OTHERS_S", 0.3)
    given_up = threading.Event()

    def work(rank: int, coordinator: Coordinator) -> None:
        with make_checkpointer(tmp_path / "local", coordinator) as checkpointer:
            if rank == 1:
                assert given_up.wait(20)
                checkpointer._parts().saves.next_id(1)  # a save that this rank does not take part in
                assert checkpointer.save(2, make_state(2), names=["last.ckpt"]) is not None
                assert checkpointer.flush(Stage.COMMITTED, timeout=SOON)
                return
            assert checkpointer.save(1, make_state(1), names=["last.ckpt"]) is not None
            assert not checkpointer.flush(Stage.COMMITTED, timeout=SOON)
            monkeypatch.setattr(module, "_OTHERS_S", 20.0)
            assert checkpointer._awaited
            checkpointer._awaited = dict.fromkeys(checkpointer._awaited, 0.0)  # that was long ago
            ticket = checkpointer.save(2, make_state(2), names=["last.ckpt"])
            threading.Timer(0.5, given_up.set).start()
            assert checkpointer.flush(Stage.COMMITTED, timeout=SOON)
            assert ticket is not None and ticket.has_reached(Stage.COMMITTED)

    run_ranks(2, work, timeout_s=60)


def test_a_flush_does_not_wait_for_a_part_that_is_given_up(tmp_path: Path) -> None:
    saved = threading.Event()

    def work(rank: int, coordinator: Coordinator) -> None:
        with make_checkpointer(tmp_path / "local", coordinator) as checkpointer:
            if rank == 0:
                first = checkpointer.save(1, make_state(1), names=["last.ckpt"])
                assert first is not None
                first.wait(Stage.RECORDED, timeout=SOON)
                saved.set()
                assert checkpointer.flush(Stage.COMMITTED, timeout=SOON)
                assert first.failed is not None
            else:
                assert saved.wait(20)
                checkpointer._parts().saves.skip(checkpointer._parts().saves.next_id(1), "this rank had no room")

    run_ranks(2, work, timeout_s=60)


def test_a_rank_that_fails_does_not_wait_long_for_ranks_that_may_be_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_OTHERS_S", 300.0)
    done = threading.Event()

    def work(rank: int, coordinator: Coordinator) -> None:
        with make_checkpointer(
            tmp_path / "local", coordinator, options=CheckpointerOptions(drain_timeout=timedelta(seconds=5))
        ) as checkpointer:
            if rank:
                assert done.wait(60)
                return
            assert checkpointer.save(1, make_state(1), names=["last.ckpt"]) is not None
            assert checkpointer.flush(Stage.RECORDED, timeout=SOON)
            checkpointer.close(reason="exception")
            done.set()

    run_ranks(2, work, timeout_s=90)


def test_a_flush_does_not_wait_for_parts_that_it_could_not_hear_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job's store is gone with rank 0, so that nobody can say whether the other hosts have recorded the step."""
    monkeypatch.setattr(module, "_OTHERS_S", 300.0)
    starting = threading.Lock()

    def work(rank: int, coordinator: Coordinator) -> None:
        with starting:
            hosts("two hosts", monkeypatch, rank)
            checkpointer = make_checkpointer(tmp_path / f"local{rank}", coordinator)
        with checkpointer:
            if rank == 1:
                monkeypatch.setattr(coordinator, "count", gone)
                assert checkpointer.save(1, make_state(1), names=["last.ckpt"]) is not None
                assert checkpointer.flush(Stage.COMMITTED, timeout=SOON)

    def gone(key: str, amount: int) -> int:
        raise RuntimeError("Connection reset by peer")

    run_ranks(2, work, timeout_s=60)


def test_a_flush_does_not_wait_for_an_upload_that_was_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> bool:
        raise CorruptShard("a block of it changed", path="shard")

    monkeypatch.setattr(uploader, "send_step", refuse)
    monkeypatch.setattr(module, "_OTHERS_S", 300.0)
    store = RemoteTierOptions(address=str(tmp_path / "store"), name="store")
    with make_checkpointer(tmp_path / "local", remotes=[store]) as checkpointer:
        ticket = checkpointer.save(1, make_state(1))
        assert ticket is not None
        assert checkpointer.flush(Stage.DURABLE, timeout=timedelta(seconds=100))
        assert ticket.given_up == {"store": "a block of it changed"}
