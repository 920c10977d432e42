"""Trainers that are killed while a child of theirs lives on, agents that are stopped, and working directories that hold
the wrong files. Real processes."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from resiliency.agent import client as client_module
from resiliency.agent import server
from resiliency.agent._command import AGENT_WORD, agent_command
from resiliency.agent.client import AgentClient
from resiliency.agent.config import AgentConfig
from resiliency.agent.messages import Bye, Committed, Recorded
from resiliency.agent.protocol import config_to_json
from resiliency.errors import AgentError
from resiliency.events import EventWriter
from resiliency.storage.stage import Stage
from tests.agent.sealing import config_for, sealed
from tests.processes import wait_ended


@pytest.fixture
def config(tmp_path: Path) -> AgentConfig:
    return config_for(tmp_path / "local")


def next_attempt(config: AgentConfig) -> AgentConfig:
    return dataclasses.replace(config, attempt=config.attempt + 1, token="ffffff")


def client_of(config: AgentConfig, *, embedded: bool = False) -> AgentClient:
    events = EventWriter(run=config.run, attempt=config.attempt, rank=0, host="n", sinks=())
    return AgentClient(config, 0, events, embedded=embedded)


def agents_of(config: AgentConfig) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if AGENT_WORD in words and any(config.local.address in word for word in words):
            found.append(process)
    return found


@pytest.fixture(autouse=True)
def no_agent_stays(config: AgentConfig) -> Iterator[None]:
    yield
    left = agents_of(config)
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=5)


#: A trainer that connects, forks a child which knows nothing of checkpoints, and waits to be killed.
TRAINER = """
import os, sys, signal
from resiliency.agent.client import AgentClient
from resiliency.agent.protocol import config_from_json
from resiliency.events import EventWriter
config = config_from_json(sys.argv[1])
client = AgentClient(config, 0, EventWriter(run=config.run, attempt=1, rank=0, host="n", sinks=()), embedded=sys.argv[2] == "embedded")
client.open()
child = os.fork()
if child == 0:
    signal.pause()
print(child, flush=True)
signal.pause()
"""


#: A trainer that says that it goes, and goes.
LEAVER = (
    TRAINER.partition("child = ")[0].replace("sys.argv[2]", "'process'")
    + """
from resiliency.agent.messages import Bye
client.send(Bye(finished=True))
os._exit(0)
"""
)


def killed_trainer(config: AgentConfig, agent: str) -> int:
    """A trainer that was killed; returns the pid of the child that it left."""
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, config_to_json(config), agent], stdout=subprocess.PIPE, start_new_session=True
    )
    assert trainer.stdout is not None
    try:
        child = int(trainer.stdout.readline())
    finally:
        trainer.kill()
        trainer.wait(10)
        trainer.stdout.close()
    return child


def test_the_agent_tells_which_rank_was_lost_and_nothing_of_one_that_went(config: AgentConfig, tmp_path: Path) -> None:
    config = dataclasses.replace(config, events=str(tmp_path / "agent.jsonl"))

    def lost() -> list[dict[str, object]]:
        lines = [json.loads(line) for line in (tmp_path / "agent.jsonl").read_text().splitlines()]
        return [line for line in lines if line["event_type"] == "worker_lost"]

    child = killed_trainer(config, "process")
    try:
        client = client_of(next_attempt(config))
        client.open()  # the agent serves the next attempt when it has let the last one go
        (line,) = lost()
        assert (line["worker"], line["attempt"], line["rank"], line["host"]) == (0, config.attempt, -1, config.node)
        client.send(Bye(finished=True))
        client.close()
        subprocess.run([sys.executable, "-c", LEAVER, config_to_json(next_attempt(config))], check=True, timeout=30)
        assert wait_ended(agents_of(config), timeout_s=10) == []
        assert lost() == [line]
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("agent", ["process", "embedded"])
def test_a_child_of_a_killed_trainer_does_not_delay_the_restart(config: AgentConfig, agent: str) -> None:
    """It has the trainer's sockets open, and may live for hours."""
    child = killed_trainer(config, agent)
    try:
        later = next_attempt(config)
        client = client_of(later, embedded=agent == "embedded")
        began = time.monotonic()
        client.open()
        took = time.monotonic() - began
        try:
            assert psutil.Process(child).status() != psutil.STATUS_ZOMBIE, "the child is gone: nothing was tested"
            assert took < 10, f"the restart was delayed by {took:.0f} s"
            client.send(sealed(later))
            assert client.flush(Stage.COMMITTED, timeout_s=20)
            assert {Recorded, Committed} <= {type(message) for message in client.poll()}
        finally:
            client.close()
    finally:
        os.kill(child, signal.SIGKILL)


def test_an_agent_ends_when_its_trainer_was_killed_though_a_child_has_the_socket(config: AgentConfig) -> None:
    child = killed_trainer(config, "process")
    try:
        assert not wait_ended(agents_of(config), timeout_s=15) and psutil.pid_exists(child)
    finally:
        os.kill(child, signal.SIGKILL)


def test_what_a_killed_trainer_sent_last_is_still_committed(config: AgentConfig, tmp_path: Path) -> None:
    """The agent is stopped while the seal arrives and the trainer dies: the bytes in the socket are read first."""
    script = TRAINER.replace(
        "client.open()\n",
        "client.open()\nfrom resiliency.agent.protocol import Framer\n(seal,) = Framer().feed(sys.argv[3].encode())\n"
        "import psutil\n[agent] = [p for p in psutil.Process().children() if 'resiliency.agent' in p.cmdline()]\n"
        "agent.suspend()\nclient.send(seal)\nprint(agent.pid, flush=True)\n",
    )
    from resiliency.agent.protocol import pack

    seal = pack(sealed(config)).decode()
    trainer = subprocess.Popen(
        [sys.executable, "-c", script, config_to_json(config), "process", seal],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert trainer.stdout is not None
    agent, child = (int(trainer.stdout.readline()) for _ in range(2))
    try:
        trainer.kill()
        trainer.wait(10)
        trainer.stdout.close()
        process = psutil.Process(agent)
        process.resume()
        assert not wait_ended([process], timeout_s=15)
        assert list(Path(config.local.address).rglob("manifest.json")), "the last save of the trainer is lost"
    finally:
        os.kill(child, signal.SIGKILL)


def test_another_live_job_is_still_refused(config: AgentConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_OLD_CLIENTS_S", 0.3)
    first = client_of(config, embedded=True)
    first.open()
    try:
        second = client_of(next_attempt(config), embedded=True)
        with pytest.raises(AgentError, match="another job .* is still using"):
            second.open()
        second.close()
        first.send(sealed(config))
        assert first.flush(Stage.COMMITTED, timeout_s=20)
        assert Committed in {type(message) for message in first.poll()}, "the refused job ended the running one"
    finally:
        first.close()


# ---- a silent agent


def test_a_silent_agent_is_replaced_at_the_restart_and_this_is_said(
    config: AgentConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that a signal has stopped; of two ranks that find it silent one kills it, and both go on."""
    monkeypatch.setattr(client_module, "_HELLO_TIMEOUT_S", 0.5)
    old = client_of(config)
    old.open()
    (agent,) = agents_of(config)
    agent.suspend()
    old.close(timeout_s=0.1)
    later = dataclasses.replace(next_attempt(config), drain_s=0.0)
    runs = client_module.Peer.runs

    def killed_by_another(peer: client_module.Peer, word: str) -> bool:
        assert runs(peer, word) and peer.kill() and peer.wait_gone(10)
        patched.undo()
        return runs(peer, word)

    new = client_of(later)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(client_module.Peer, "runs", killed_by_another)
        new.open()
    try:
        said = [
            entry.getMessage() for entry in caplog.records if "did not answer, and was killed" in entry.getMessage()
        ]
        assert len(said) == 1 and str(agent.pid) in said[0]
        assert agent.pid not in [process.pid for process in agents_of(config)]
        new.send(sealed(later))
        assert new.flush(Stage.COMMITTED, timeout_s=20)
    finally:
        new.close()


# ---- the working directory


@pytest.mark.parametrize("where", ["working directory", "sys.path"])
def test_files_of_the_user_named_like_standard_modules_do_not_keep_the_agent_from_starting(
    config: AgentConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    for name in ("json", "socket", "logging", "threading", "dataclasses", "typing"):
        (mine / f"{name}.py").write_text("raise SystemExit('the user\\'s file was imported')\n")
    if where == "working directory":
        monkeypatch.chdir(mine)
        monkeypatch.syspath_prepend("")
    else:
        monkeypatch.syspath_prepend(str(mine))
    rank = client_of(config)
    rank.open()
    try:
        rank.send(sealed(config))
        assert rank.flush(Stage.COMMITTED, timeout_s=20)
    finally:
        rank.close()


def test_the_agent_imports_the_package_that_its_trainer_imported(config: AgentConfig, tmp_path: Path) -> None:
    """From a checkout that only the trainer's sys.path has, with another copy of that name before it."""
    import resiliency

    decoy = tmp_path / "decoy" / "resiliency"
    decoy.mkdir(parents=True)
    (decoy / "__init__.py").write_text("raise SystemExit('another copy was imported')\n")
    script = (
        "import json, sys\n"
        f"sys.path.insert(0, {str(Path(resiliency.__file__).parents[1])!r})\n"
        "import resiliency\n"
        f"sys.path.insert(0, {str(decoy.parent)!r})\n"
        "from resiliency.agent._command import agent_command\n"
        "from resiliency.agent.protocol import config_from_json\n"
        "print(json.dumps(agent_command(config_from_json(sys.argv[1]), 9)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, config_to_json(config)], capture_output=True, check=True, timeout=60
    )
    command = json.loads(done.stdout)
    probe = command[2].split("from resiliency")[0] + "import resiliency; print(resiliency.__file__)"
    found = subprocess.run([command[0], "-c", probe, *command[3:]], capture_output=True, check=True, timeout=60)
    assert found.stdout.decode().strip() == resiliency.__file__
    assert AGENT_WORD in agent_command(config, 9)
