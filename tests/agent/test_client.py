"""The trainer's end of the link, with real agent processes that are killed, stopped, or cannot start."""

from __future__ import annotations

import logging
import os
import resource
import signal
import stat
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from resiliency.agent import _start, client, server
from resiliency.checkpoint import checkpointer as checkpointer_module
from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.options import LocalTierOptions
from resiliency.errors import ResiliencyError
from resiliency.storage.names import read_name
from resiliency.storage.stage import Stage
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.checkpoints import QUICK, differences, make_checkpointer, make_state
from tests.patience import PATIENCE

SOON = timedelta(seconds=20)
PROCESS = replace(QUICK, agent="process", drain_timeout=timedelta(seconds=10))


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return tmp_path / "local"


def agents() -> list[psutil.Process]:
    """Agent processes this test started, dead or alive."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if child.status() == psutil.STATUS_ZOMBIE or "resiliency.agent" in child.cmdline():
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


def running() -> list[psutil.Process]:
    return [process for process in agents() if process.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(autouse=True)
def no_agent_stays() -> Iterator[None]:
    yield
    for process in running():
        process.kill()
        process.wait(5)


def until(condition: Callable[[], bool], seconds: float = 15.0) -> bool:
    """Polls a fact of the operating system, which announces nothing."""
    deadline = time.monotonic() + PATIENCE * seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def save(checkpointer: Checkpointer, step: int) -> bool:
    ticket = checkpointer.save(step, make_state(step))
    if ticket is None:
        return False
    ticket.wait(Stage.DURABLE, timeout=SOON)
    return True


def loads(local: Path) -> int | None:
    checkpointer = make_checkpointer(local)
    try:
        restored = checkpointer.load()
        if restored is None:
            return None
        assert differences(restored.state, make_state(restored.step)) == []
        return restored.step
    finally:
        checkpointer.close(flush=False)


def test_agent_lives_as_long_as_the_job_and_no_longer(local: Path) -> None:
    with make_checkpointer(local, options=PROCESS) as checkpointer:
        (agent,) = running()
        assert agent.nice() >= 10 or os.nice(0) > 0, "the agent competes with training"
        assert save(checkpointer, 1)
        assert running() == [agent]
    assert until(lambda: not agents()), "the agent stays, or is a zombie"
    assert loads(local) == 1


def test_a_killed_agent_is_replaced_and_the_save_in_flight_is_committed(
    local: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_checkpointer(local, options=PROCESS) as checkpointer:
        assert save(checkpointer, 1)
        ticket = checkpointer.save(2, make_state(2), lazy=True)
        assert ticket is not None
        (agent,) = running()
        agent.kill()
        ticket.wait(Stage.DURABLE, timeout=SOON)
        assert save(checkpointer, 3)
        assert until(lambda: len(agents()) == 1), "the killed agent is a zombie"
        assert [entry.getMessage() for entry in caplog.records if "is gone; starting another" in entry.getMessage()]
    assert loads(local) == 3
    assert until(lambda: not agents())


def test_an_agent_killed_with_a_sealed_save_does_not_lose_it(local: Path) -> None:
    """Sealed and not yet recorded when the agent dies: the successor gets the seal again."""
    with make_checkpointer(local, options=PROCESS) as checkpointer:
        assert save(checkpointer, 1)
        (agent,) = running()
        agent.suspend()
        ticket = checkpointer.save(2, make_state(2))
        copied = until(lambda: ticket is not None and ticket.stage() is Stage.COPIED)
        agent.kill()  # whatever was found: a stopped agent would be waited for
        assert copied and ticket is not None
        ticket.wait(Stage.DURABLE, timeout=SOON)
    assert loads(local) == 2


def lose_agents(checkpointer: Checkpointer) -> int:
    """Kills agents until no other one is started; returns the last step."""
    lost, step = checkpointer.session.client, 0
    while not lost.is_down and step < 12:
        step += 1
        checkpointer.save(step, make_state(step))
        for agent in running():
            agent.kill()
        assert until(lambda: bool(running()) or lost.is_down)
    assert lost.is_down, "agents are started for ever"
    return step


def test_after_many_lost_agents_saves_are_skipped_until_one_is_started_again(
    local: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_checkpointer(local, options=PROCESS) as checkpointer:
        step = lose_agents(checkpointer)
        for again in (1, 2):
            assert checkpointer.save(step + again, make_state(step)) is None
        assert not running()
        assert len([text for text in caplog.messages if "saves are skipped" in text]) == 1
        assert checkpointer.flush(timeout=SOON), "the end of a fit starts one now"
        assert not checkpointer.session.client.is_down and "saves go on" in caplog.text
        assert save(checkpointer, step + 3)
    assert loads(local) == step + 3
    assert until(lambda: not agents())


def test_an_agent_is_started_again_by_itself(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_MAX_LOSSES", 1)
    with make_checkpointer(local, options=PROCESS) as checkpointer:
        monkeypatch.setattr(client, "_LOSS_WINDOW_S", 6.0)
        step = lose_agents(checkpointer)
        assert until(lambda: not checkpointer.session.client.is_down)
        assert until(lambda: save(checkpointer, step + 1))
    assert loads(local) == step + 1


def test_the_end_of_a_job_whose_agents_die_does_not_wait_for_one(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_checkpointer(local, options=PROCESS) as checkpointer:
        lose_agents(checkpointer)
        monkeypatch.setattr(sys, "executable", "/nonexistent/python")
        assert not checkpointer.flush(timeout=timedelta(minutes=10))
    assert not agents()


def test_two_jobs_with_embedded_agents_are_kept_apart(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_OLD_CLIENTS_S", 0.3)
    with make_checkpointer(local) as first:
        second = make_checkpointer(local)
        with pytest.raises(ResiliencyError, match=f"another job .* is still using {local} as run"):
            second.open()
        second.close()
        assert save(first, 1)
        with make_checkpointer(local, run="another") as other:
            assert save(other, 1)
    with make_checkpointer(local) as third:
        assert save(third, 2)


def test_an_agent_that_never_listens_costs_one_deadline(
    local: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    deaf = tmp_path / "python"
    deaf.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/started\nexec sleep 600\n")
    deaf.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(deaf))
    monkeypatch.setattr(_start, "_START_S", 0.5)
    checkpointer = make_checkpointer(local, options=PROCESS)
    with pytest.raises(ResiliencyError, match="no checkpoint agent can be started"):
        checkpointer.open()
    checkpointer.close()
    started = [int(line) for line in (tmp_path / "started").read_text().split()]
    assert len(started) == 1, "it waited for another one"
    assert not psutil.pid_exists(started[0]), "it was left behind"


@pytest.fixture
def hung_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointer_module, "_HUNG_S", 0.5)


NAMED = replace(PROCESS, previous_save_timeout=timedelta(seconds=0.2))


def save_beside(stopped: psutil.Process, checkpointer: Checkpointer, over: Callable[[], bool]) -> list[bool]:
    """Saves, under names, beside an agent that was stopped, until ``over``. Which of them were taken."""
    taken, longest = [], 0.0
    for step in range(2, 60):
        began = time.monotonic()
        ticket = checkpointer.save(step, make_state(step), names=[f"{step}.ckpt", "last.ckpt"])
        longest = max(longest, time.monotonic() - began)
        taken.append(ticket is not None)
        if over():
            break
    assert over(), "nobody takes over"
    assert longest < 2.5, f"a save blocked training for {longest:.1f} s"
    assert not all(taken), "no save was skipped"
    return taken


def last_name(local: Path) -> int:
    found = read_name(LocalTier(local), "last.ckpt")
    assert found is not None
    return found.id.step


def test_a_stopped_agent_is_ended_and_another_takes_over(
    local: Path, hung_soon: None, caplog: pytest.LogCaptureFixture
) -> None:
    with make_checkpointer(local, options=NAMED) as checkpointer:
        assert save(checkpointer, 1)
        (stopped,) = running()
        stopped.suspend()
        save_beside(stopped, checkpointer, lambda: stopped not in running() and bool(running()))
        said = [
            entry
            for entry in caplog.records
            if "no checkpoint at step" in entry.getMessage() and entry.levelno >= logging.WARNING
        ]
        assert len(said) == 1
        # On a busy machine the last save may still be in flight, for longer than a save waits for it here.
        assert checkpointer.flush(timeout=SOON)
        ticket = checkpointer.save(100, make_state(100), names=["last.ckpt"])
        assert ticket is not None
        ticket.wait(Stage.DURABLE, timeout=SOON)
    assert (loads(local), last_name(local)) == (100, 100)


def test_an_agent_that_cannot_be_ended_takes_no_name_back_when_it_goes_on(
    local: Path, hung_soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another pid namespace, say. What it has not read yet it commits when it goes on: an older step."""
    monkeypatch.setattr(client.Peer, "kill", lambda peer: False)
    checkpointer = make_checkpointer(local, options=NAMED)
    stopped = None
    try:
        assert save(checkpointer, 1)
        (stopped,) = running()
        stopped.suspend()
        save_beside(stopped, checkpointer, lambda: checkpointer.session.client.is_down)
        assert checkpointer.save(99, make_state(99), names=["last.ckpt"]) is None
        stopped.resume()
        assert checkpointer.flush(timeout=SOON)
        ticket = checkpointer.save(100, make_state(100), names=["last.ckpt"])
        assert ticket is not None
        ticket.wait(Stage.DURABLE, timeout=SOON)
        assert last_name(local) == 100
        assert save(checkpointer, 101)
    finally:
        if stopped is not None and stopped.is_running():
            stopped.resume()
        checkpointer.close(timeout=timedelta(seconds=5))
    assert loads(local) == 101


@pytest.mark.parametrize("how", ["ends at once", "never listens", "is missing"])
def test_without_an_agent_that_starts_opening_says_why(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    python = tmp_path / "python"
    if how != "is missing":
        python.write_text("#!/bin/sh\n" + ("exit 1\n" if how == "ends at once" else "exec sleep 60\n"))
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(_start, "_START_S", 0.3)
    checkpointer = make_checkpointer(local, options=PROCESS)
    with pytest.raises(ResiliencyError, match=f"no checkpoint agent can be started for {local}.*agent='embedded'"):
        checkpointer.open()
    checkpointer.close()
    assert not agents()
    with make_checkpointer(local) as embedded:
        assert save(embedded, 1)


def test_two_runs_in_one_directory_have_an_agent_each(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert server._OLD_CLIENTS_S <= 30, "the second job waits too long for its refusal"
    with (
        make_checkpointer(local, options=PROCESS, run="one") as one,
        make_checkpointer(local, options=PROCESS, run="two") as two,
    ):
        assert save(one, 1) and save(two, 2)
        assert len(running()) == 2
    assert until(lambda: not agents())


def test_no_descriptor_thread_or_process_is_lost(local: Path) -> None:
    import threading

    def count() -> tuple[int, int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(agents())

    with make_checkpointer(local, options=PROCESS):
        pass
    assert until(lambda: not agents())
    before = count()
    for step in range(1, 4):
        with make_checkpointer(LocalTierOptions(directory=str(local), keep=1), options=PROCESS) as checkpointer:
            assert save(checkpointer, step)
            if step == 2:
                running()[0].send_signal(signal.SIGKILL)
                assert save(checkpointer, 10 * step)
        assert until(lambda: not agents())
    assert count() == before
    assert loads(local) == 3, "what the last attempt saved is the newest, whatever its number"


def test_closing_twice_and_without_opening_does_nothing(local: Path) -> None:
    checkpointer = make_checkpointer(local, options=PROCESS)
    checkpointer.close()
    checkpointer.close()
    assert not agents()


def test_a_process_with_many_open_files_gets_an_agent(local: Path) -> None:
    """Descriptors from 1024 on are more than select() takes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    many = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with make_checkpointer(local, options=PROCESS) as checkpointer:
            assert save(checkpointer, 1)
    finally:
        for fd in many:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_fails_in_the_agent_is_said_by_the_trainer_once(local: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The agent's own log is where nobody looks."""
    with make_checkpointer(local, options=PROCESS) as checkpointer:
        assert save(checkpointer, 1)
        for name in ("2.ckpt", "3.ckpt"):
            (local / name / "full").mkdir(parents=True)
            ticket = checkpointer.save(int(name[0]), make_state(2), names=[name])
            assert ticket is not None
            ticket.wait(timeout=SOON)
        said = [text for text in caplog.messages if "was not given the name" in text]
        assert len(said) == 2 and "'2.ckpt'" in said[0] and "'3.ckpt'" in said[1]
        assert save(checkpointer, 4)
