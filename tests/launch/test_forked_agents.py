"""Agents that the launcher forks: they are found, replaced and outlive the launcher as those that a trainer starts."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from resiliency.agent._command import AGENT_WORD
from resiliency.checkpoint import Checkpointer
from resiliency.checkpoint.options import LocalTierOptions
from tests.launch.launching import wait_for
from tests.processes import wait_ended, wait_stopped
from tests.rings import few

pytestmark = pytest.mark.timeout(180)

#: Saves a step when the test asks for it.
SAVING = """
    import os, sys, time
    from datetime import timedelta
    from pathlib import Path
    import torch
    from resiliency.checkpoint import Checkpointer
    from resiliency.checkpoint.options import LocalTierOptions
    from resiliency.storage.stage import Stage

    folder, attempt = Path(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with Checkpointer(LocalTierOptions(directory=str(folder / "checkpoints"))) as checkpointer:
        for step in range(1, 10):
            number = 10 * attempt + step
            ticket = checkpointer.save(number, {"w": torch.full((1000,), number)})
            ticket.wait(Stage.DURABLE, timeout=timedelta(seconds=60))
            (folder / f"saved-{attempt}-{step}~").write_text(str(os.getpid()))
            os.rename(folder / f"saved-{attempt}-{step}~", folder / f"saved-{attempt}-{step}")
            deadline = time.monotonic() + 60
            while not (folder / f"go-{attempt}-{step}").exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            if (folder / f"go-{attempt}-{step}").read_text() == "end":
                break
"""


def let_go(path: Path, word: str) -> None:
    """Whole at once: the rank may look between the moments at which a file is made and written."""
    path.with_suffix(".partial").write_text(word)
    path.with_suffix(".partial").rename(path)


def agents(directory: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if AGENT_WORD in words and any(str(directory) in word for word in words):
            found.append(process)
    return found


def newest(directory: Path) -> int:
    with Checkpointer(LocalTierOptions(directory=str(directory)), rank=0, world_size=1) as checkpointer:
        restored = checkpointer.load()
        assert restored is not None
        assert torch.equal(restored.state["w"], torch.full((1000,), restored.step))
        return restored.step


@pytest.mark.parametrize("standby", few([True, False], [True]))
def test_an_agent_is_forked_where_ranks_are(standby: bool, launch: Any, tmp_path: Path) -> None:
    flags = [] if standby else ["--no-standby"]
    job = launch(SAVING, "--nproc-per-node", 1, *flags, arguments=[tmp_path])
    rank = psutil.Process(int(wait_for(tmp_path / "saved-0-1")))
    (agent,) = agents(tmp_path)
    directory = tmp_path / "checkpoints"
    if standby:
        assert [*filter(None, agent.cmdline())] == [AGENT_WORD, str(directory)] and agent.ppid() == job.pid
    else:
        assert agent.ppid() == rank.pid
    assert os.getsid(agent.pid) == agent.pid and agent.nice() == min(19, psutil.Process().nice() + 10)
    files = {os.path.realpath(f"/proc/{agent.pid}/fd/{number}") for number in (1, 2)}
    assert files == {str(next(directory.glob(".resiliency/default/logs/agent-*.log")))}
    # Nothing of the zygote, the launcher or the rank is held open.
    held = {entry.path for entry in agent.open_files()}
    assert not {path for path in held if str(tmp_path) not in path}
    let_go(tmp_path / "go-0-1", "end")
    assert job.wait() == 0, job.text
    assert not wait_ended([agent], timeout_s=30)
    assert agents(tmp_path) == []
    assert newest(directory) == 1


def test_an_agent_outlives_a_launcher_that_is_killed_and_ends_by_itself(launch: Any, tmp_path: Path) -> None:
    job = launch(SAVING, "--nproc-per-node", 1, arguments=[tmp_path])
    rank = psutil.Process(int(wait_for(tmp_path / "saved-0-1")))
    (agent,) = agents(tmp_path)
    agent.suspend()  # it is to be there still when the others are gone
    wait_stopped(agent.pid)
    os.kill(job.pid, signal.SIGKILL)
    assert not wait_ended([rank], timeout_s=30)
    assert agent.is_running() and agent.status() == psutil.STATUS_STOPPED
    agent.resume()
    assert not wait_ended([agent], timeout_s=60)
    assert newest(tmp_path / "checkpoints") == 1


def test_without_standbys_left_an_agent_is_a_new_interpreter(launch: Any, tmp_path: Path) -> None:
    job = launch(SAVING, "--nproc-per-node", 1, "--max-restarts", 1, arguments=[tmp_path])
    rank = int(wait_for(tmp_path / "saved-0-1"))
    (agent,) = agents(tmp_path)
    others = [process for process in job.descendants() if process.pid not in (rank, agent.pid)]
    for process in others:  # the zygote and its standbys
        process.kill()
    assert not wait_ended(others, timeout_s=10)
    agent.kill()
    let_go(tmp_path / "go-0-1", "on")
    wait_for(tmp_path / "saved-0-2")
    assert len(agents(tmp_path)) == 1
    let_go(tmp_path / "go-0-2", "end")
    assert job.wait() == 0, job.text
    assert newest(tmp_path / "checkpoints") == 2
