"""The first messages of a connection: what comes before, with and right after Welcome, and a close in the midst of them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resiliency.agent.client import AgentClient
from resiliency.agent.config import AgentConfig
from resiliency.agent.messages import Committed, Durable, Hello, Message, Welcome
from resiliency.agent.protocol import PROTOCOL_VERSION, Framer, pack
from resiliency.agent.server import AgentServer
from resiliency.errors import AgentError
from resiliency.events import EventWriter
from tests.agent.sealing import config_for, step_of

WELCOME = pack(Welcome(pid=1))


@pytest.fixture
def config(tmp_path: Path) -> AgentConfig:
    return config_for(tmp_path / "local")


@pytest.fixture
def listener(config: AgentConfig) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as listening:
        listening.settimeout(10)
        listening.bind(config.address)
        listening.listen()
        yield listening


def client_of(config: AgentConfig) -> AgentClient:
    return AgentClient(config, 0, EventWriter(run=config.run, attempt=1, rank=0, host="n", sinks=()))


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def accept(listener: socket.socket) -> socket.socket:
    """The next connection, its Hello read."""
    connection, _ = listener.accept()
    connection.settimeout(10)
    framer = Framer()
    while not any(isinstance(message, Hello) for message in framer.feed(connection.recv(1 << 16))):
        pass
    return connection


def test_no_notice_comes_before_welcome(config: AgentConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that works when a rank connects, because it uploads or another rank saves, sends notices at any time."""
    notice, stop = Committed(id=step_of(config, 1), tier="local"), threading.Event()
    server = AgentServer(config)
    serving = in_thread(server.run)

    def flood() -> None:
        while not stop.is_set():
            server._send(0, notice)

    floods = [in_thread(flood) for _ in range(2)]
    firsts: list[Message] = []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as keeps_the_agent:
            keeps_the_agent.connect(config.address)
            keeps_the_agent.sendall(pack(Hello(version=PROTOCOL_VERSION, rank=1, config=config)))
            keeps_the_agent.recv(1 << 16)
            for _ in range(100):
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                    connection.settimeout(10)
                    connection.connect(config.address)
                    connection.sendall(pack(Hello(version=PROTOCOL_VERSION, rank=0, config=config)))
                    framer = Framer()
                    while not (messages := list(framer.feed(connection.recv(1 << 16)))):
                        pass
                    firsts.append(messages[0])
    finally:
        stop.set()
        for thread in [*floods, serving]:
            thread.join(10)
    assert {type(message) for message in firsts} == {Welcome}


def test_what_comes_with_welcome_is_received(config: AgentConfig, listener: socket.socket) -> None:
    """In the same read, the last message of it cut in two."""
    committed, durable = (kind(id=step_of(config, 1), tier="local") for kind in (Committed, Durable))
    half_read = threading.Event()

    def agent() -> None:
        with accept(listener) as connection:
            data = WELCOME + pack(committed) + pack(durable)
            connection.sendall(data[:-10])
            assert half_read.wait(10)
            connection.sendall(data[-10:])
            connection.recv(1)

    thread, client = in_thread(agent), client_of(config)
    client.open()
    try:
        assert client.wait_message(10)
        assert list(client.poll()) == [committed]
        half_read.set()
        assert client.wait_message(10)
        assert list(client.poll()) == [durable]
        assert not client._losses
    finally:
        client.close()
        thread.join(10)


def test_an_agent_that_does_not_welcome_is_refused(config: AgentConfig, listener: socket.socket) -> None:
    def agent() -> None:
        with accept(listener) as connection:
            connection.sendall(pack(Committed(id=step_of(config, 1), tier="local")))

    thread, client = in_thread(agent), client_of(config)
    with pytest.raises(AgentError, match="answered Hello with Committed"):
        client.open()
    client.close()
    thread.join(10)


def test_closing_while_the_link_is_made_anew_leaves_no_connection(config: AgentConfig, listener: socket.socket) -> None:
    """The agent is lost, and the trainer closes before the next agent has answered."""
    closed_by_trainer, second_hello = threading.Event(), threading.Event()

    def agent() -> None:
        with accept(listener) as connection:
            connection.sendall(WELCOME)
        with accept(listener) as connection:
            second_hello.set()
            deadline = time.monotonic() + 10
            while not client._closing and time.monotonic() < deadline:
                closing.wait(0.01)
            connection.sendall(WELCOME)
            if connection.recv(1) == b"":
                closed_by_trainer.set()

    client, closing = client_of(config), threading.Event()
    thread = in_thread(agent)
    client.open()
    assert second_hello.wait(10)
    client.close()
    thread.join(10)
    assert closed_by_trainer.is_set(), "the agent would serve this connection for ever"
    assert client._thread is not None and not client._thread.is_alive()


def test_an_agent_that_has_ended_welcomes_nobody(config: AgentConfig) -> None:
    """Its last rank has left and the work is done, but the connection of another had been accepted."""
    server = AgentServer(config)
    server._ended = True
    serving = in_thread(server._accept)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(10)
        connection.connect(config.address)
        connection.sendall(pack(Hello(version=PROTOCOL_VERSION, rank=0, config=config)))
        assert connection.recv(1) == b""
    assert server._agent is None
    server._listener.shutdown(socket.SHUT_RDWR)
    serving.join(10)
    server._listener.close()


def test_an_agent_that_ends_is_waited_for_and_is_no_other_job(config: AgentConfig, listener: socket.socket) -> None:
    """It holds the address until its last work is done, and answers no Hello; then comes the next one."""

    def agent() -> None:
        for _ in range(6):
            accept(listener).close()
        with accept(listener) as connection:
            connection.sendall(WELCOME)
            connection.recv(1)

    thread, client = in_thread(agent), client_of(config)
    client.open()
    client.close(timeout_s=10)
    thread.join(10)
    assert not thread.is_alive()
