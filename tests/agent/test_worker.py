"""The agent's threads where the system allows no further one: a job is refused with the reason, before any rank relies
on the agent, and no agent is left behind. And signals while the agent is talked to."""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from resiliency.agent import client as client_module
from resiliency.agent import server
from resiliency.agent._worker import Worker
from resiliency.agent.client import AgentClient
from resiliency.agent.config import AgentConfig, TierSpec
from resiliency.agent.core import HostAgent
from resiliency.agent.messages import Bye, Hello, Welcome
from resiliency.agent.protocol import PROTOCOL_VERSION, Framer, pack
from resiliency.agent.server import AgentServer
from resiliency.errors import AgentError
from resiliency.events import EventWriter
from resiliency.storage.stage import Stage
from tests.agent.sealing import config_for, seal_of, write_shard


def refuse_thread(monkeypatch: pytest.MonkeyPatch, refused: str = "") -> list[str]:
    """From now on no thread starts whose name begins so; returns the list to which those names are added."""
    start, names = threading.Thread.start, []

    def start_or_raise(self: threading.Thread) -> None:
        if self.name.startswith(refused):
            names.append(self.name)
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", start_or_raise)
    return names


@pytest.fixture
def config(tmp_path: Path) -> AgentConfig:
    return config_for(tmp_path / "local", remotes=(TierSpec(address=str(tmp_path / "store"), name="store", keep=2),))


@pytest.fixture
def agent(config: AgentConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Thread]:
    """An agent that would wait for ten minutes for its first rank, on a thread of this process."""
    monkeypatch.setattr(server, "_FIRST_CLIENT_S", 600.0)
    thread = threading.Thread(target=AgentServer(config).run, name="test-agent", daemon=True)
    thread.start()
    yield thread
    thread.join(15)
    assert not thread.is_alive(), "the agent did not end by itself"


def client_of(config: AgentConfig, **values: Any) -> AgentClient:
    return AgentClient(config, 0, EventWriter(run=config.run, attempt=1, rank=0, host="n", sinks=()), **values)


def test_a_thread_that_cannot_be_started_is_an_error_of_the_agent_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    worker = Worker("resiliency-agent-commit")
    with monkeypatch.context() as full:
        refuse_thread(full)
        for use in (worker.start, lambda: worker.submit(lambda: done.append("first"))):
            with pytest.raises(AgentError, match="resiliency-agent-commit: can't start new thread.*pids.max"):
                use()
    assert worker.idle
    worker.submit(lambda: done.append("second"))
    assert worker.wait_idle(time.monotonic() + 10) and done == ["second"]
    worker.close()
    worker.start()
    assert not any(thread.name == "resiliency-agent-commit" for thread in threading.enumerate())


@pytest.mark.parametrize("name", ["client", "commit", "sync", "files", "upload-store"])
def test_a_job_is_refused_with_the_reason_and_the_agent_ends(
    name: str, config: AgentConfig, agent: threading.Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = refuse_thread(monkeypatch, f"resiliency-agent-{name}")
    client = client_of(config)
    with pytest.raises(AgentError, match="the checkpoint agent refused: .*can't start new thread.*ulimit -u"):
        client.open()
    assert refused
    client.close()
    agent.join(10)
    assert not agent.is_alive(), "it is still waiting for a rank"


def test_a_refusal_before_the_hello_is_sent_has_its_reason(
    config: AgentConfig, agent: threading.Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the rank would start agents that are refused in the same way."""
    dial = AgentClient._dial

    def slow(self: AgentClient) -> socket.socket | None:
        connection = dial(self)
        agent.join(10)  # it hangs up, and ends
        return connection

    monkeypatch.setattr(AgentClient, "_dial", slow)
    refuse_thread(monkeypatch, "resiliency-agent-client")
    client = client_of(config)
    with pytest.raises(AgentError, match="the checkpoint agent refused: can't start new thread.*ulimit -u"):
        client.open()
    client.close()


def test_an_error_after_the_welcome_disconnects_the_rank(
    config: AgentConfig, agent: threading.Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent took the rank for connected for ever, and did not end."""

    def fail(self: HostAgent, rank: int) -> None:
        raise AgentError("no notice can be sent")

    monkeypatch.setattr(HostAgent, "announce", fail)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(10)
        connection.connect(config.address)
        connection.sendall(pack(Hello(version=PROTOCOL_VERSION, rank=0, config=config)))
        framer, messages = Framer(), []
        while data := connection.recv(1 << 16):
            messages += framer.feed(data)
    assert [type(message) for message in messages] == [Welcome]
    agent.join(10)
    assert not agent.is_alive(), "it waits for a rank that it has hung up on"


def test_a_flush_is_answered_without_a_thread_of_its_own(
    config: AgentConfig, agent: threading.Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = refuse_thread(monkeypatch, "resiliency-agent-flush")
    client = client_of(config)
    client.open()
    client.send(seal_of(config, 3, write_shard(config, 3)))
    assert client.flush(Stage.DURABLE, timeout_s=10)
    assert refused
    client.close()


def test_what_a_signals_handler_raises_while_a_message_is_sent_is_no_loss_of_the_agent(
    config: AgentConfig, agent: threading.Thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def handler(*_: Any) -> None:
        raise TimeoutError("of the handler")

    client = client_of(config)
    client.open()
    before = signal.signal(signal.SIGUSR2, handler)
    try:
        with monkeypatch.context() as interrupted, pytest.raises(TimeoutError, match="of the handler"):
            interrupted.setattr(client_module, "pack", lambda message: signal.raise_signal(signal.SIGUSR2))
            client.send(Bye())
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert client._socket is not None, "it has hung up"
    client.send(seal_of(config, 3, write_shard(config, 3)))
    assert client.flush(Stage.DURABLE, timeout_s=10)
    client.close()
