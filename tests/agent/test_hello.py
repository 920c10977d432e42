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
from resiliency.agent.messages import Committed, Durable, Hello, Welcome
from resiliency.agent.protocol import Framer, pack
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
