"""When a job on one host has ended, its folder goes and the checkpoints stay; what must stay is there for the next."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from resiliency.agent import core
from resiliency.agent.client import AgentClient
from resiliency.checkpoint.options import LocalTierOptions, RemoteTierOptions
from resiliency.events import Event, JsonlSink
from resiliency.storage.manifest import META_DIR
from resiliency.storage.stage import Stage
from resiliency.testing.checkpoints import QUICK, RUN, differences, make_checkpointer, make_lightning_state


def only_files(directory: Path) -> LocalTierOptions:
    return LocalTierOptions(directory=str(directory), only_files=True)


def save(checkpointer: Any, step: int) -> None:
    ticket = checkpointer.save(step, make_lightning_state(step), names=[f"step={step}.ckpt"])
    assert ticket is not None
    ticket.wait(Stage.DURABLE if ticket.can_be_durable else Stage.COMMITTED)


def resumes_from(directory: Path) -> int | None:
    with make_checkpointer(only_files(directory)) as checkpointer:
        restored = checkpointer.load()
        assert restored is None or differences(restored.state, make_lightning_state(restored.step)) == []
        return None if restored is None else restored.step


@pytest.mark.parametrize("agent", ["embedded", "process"])
def test_the_folder_is_there_while_the_job_runs_and_goes_at_its_end(tmp_path: Path, agent: Any) -> None:
    with make_checkpointer(only_files(tmp_path), options=dataclasses.replace(QUICK, agent=agent)) as checkpointer:
        save(checkpointer, 1)
        save(checkpointer, 2)
        assert sorted(os.listdir(tmp_path)) == [META_DIR, "step=1.ckpt", "step=2.ckpt"]
    assert sorted(os.listdir(tmp_path)) == ["step=1.ckpt", "step=2.ckpt"]
    assert resumes_from(tmp_path) == 2


def test_a_job_with_another_tier_keeps_it(tmp_path: Path) -> None:
    remotes = [RemoteTierOptions(address=str(tmp_path / "far"))]
    with make_checkpointer(only_files(tmp_path / "near"), remotes=remotes) as checkpointer:
        save(checkpointer, 1)
    assert sorted(os.listdir(tmp_path / "near")) == [META_DIR, "step=1.ckpt"]


def test_it_stays_while_the_newest_step_is_nowhere_else(tmp_path: Path) -> None:
    with make_checkpointer(only_files(tmp_path)) as checkpointer:
        save(checkpointer, 1)
        save(checkpointer, 2)
        (tmp_path / "step=2.ckpt").unlink()
    assert sorted(os.listdir(tmp_path)) == [META_DIR, "step=1.ckpt"]
    assert not list((tmp_path / META_DIR / RUN).glob("staging-*"))
    assert resumes_from(tmp_path) == 2


def test_the_end_of_the_job_after_a_killed_one_tidies_up(tmp_path: Path) -> None:
    checkpointer = make_checkpointer(only_files(tmp_path))
    save(checkpointer, 1)
    checkpointer._parts().session.client.send = lambda message: None  # type: ignore[method-assign]  # no Bye
    checkpointer.close()
    assert sorted(os.listdir(tmp_path)) == [META_DIR, "step=1.ckpt"]
    assert resumes_from(tmp_path) == 1
    assert os.listdir(tmp_path) == ["step=1.ckpt"]


def test_of_two_jobs_in_a_directory_each_takes_its_own_away(tmp_path: Path) -> None:
    with make_checkpointer(only_files(tmp_path), run="other") as other:
        save(other, 1)
        with make_checkpointer(only_files(tmp_path)) as checkpointer:
            save(checkpointer, 5)
        assert sorted(os.listdir(tmp_path / META_DIR)) == [".gitignore", "other"]
        save(other, 2)
    assert sorted(os.listdir(tmp_path)) == ["step=1.ckpt", "step=2.ckpt", "step=5.ckpt"]


@pytest.mark.parametrize("goes_on", [False, True])
def test_nothing_but_files_stays_when_the_directory_was_deleted_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, goes_on: bool
) -> None:
    real, deleted = core.fsync_step, threading.Event()

    def late(*arguments: Any) -> None:
        if not deleted.is_set():
            shutil.rmtree(tmp_path / "c")
            deleted.set()
        real(*arguments)

    monkeypatch.setattr(core, "fsync_step", late)
    with make_checkpointer(only_files(tmp_path / "c")) as checkpointer:
        checkpointer.save(1, make_lightning_state(1), names=["step=1.ckpt"])
        assert deleted.wait(20)
        if goes_on:
            save(checkpointer, 2)
    assert not (tmp_path / "c").exists() if not goes_on else os.listdir(tmp_path / "c") == ["step=2.ckpt"]
    assert "could not be removed" not in caplog.text


def test_it_stays_when_a_step_could_not_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an I/O error the next fsync would succeed although nothing was written."""
    failed = threading.Event()

    def fails(*_: Any) -> None:
        failed.set()
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(tmp_path))

    monkeypatch.setattr(core, "fsync_step", fails)
    with make_checkpointer(only_files(tmp_path)) as checkpointer:
        checkpointer.save(1, make_lightning_state(1), names=["a.ckpt"])
        assert failed.wait(20)
    assert sorted(os.listdir(tmp_path)) == [META_DIR, "a.ckpt"]


def test_an_event_that_is_written_late_does_not_make_the_folder_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that writes the log may be late on a busy machine."""
    ended, write, close = threading.Event(), JsonlSink.emit, AgentClient.close

    def late(self: JsonlSink, event: Event) -> None:
        if threading.current_thread().name == "resiliency-events":
            ended.wait(0.5)
        write(self, event)

    def ends(self: AgentClient, **further: Any) -> None:
        close(self, **further)
        ended.set()

    monkeypatch.setattr(JsonlSink, "emit", late)
    monkeypatch.setattr(AgentClient, "close", ends)
    assert resumes_from(tmp_path) is None
    assert ended.is_set() and os.listdir(tmp_path) == []
