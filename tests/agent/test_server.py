"""Who is let in, who is refused and why, and when the agent ends. The server runs on a thread of this process."""

from __future__ import annotations

import dataclasses
import errno
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resiliency.agent import server, uploader
from resiliency.agent.client import AgentClient
from resiliency.agent.config import AgentConfig, TierSpec
from resiliency.agent.messages import Bye, Complete, Hello, Message, Recorded, Refused, Welcome
from resiliency.agent.protocol import PROTOCOL_VERSION, Framer, pack
from resiliency.agent.server import AgentServer
from resiliency.errors import AgentError
from resiliency.events import EventWriter
from resiliency.storage.manifest import MANIFEST
from resiliency.storage.stage import Stage
from resiliency.storage.step_id import StepId
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.tier_doubles import SlowTier
from tests.agent.sealing import config_for, sealed


@pytest.fixture
def config(tmp_path: Path) -> AgentConfig:
    return config_for(tmp_path / "local", world_size=2, local_ranks=(0, 1))


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[AgentConfig], threading.Thread]]:
    monkeypatch.setattr(server, "_OLD_CLIENTS_S", 0.3)
    monkeypatch.setattr(server, "_FIRST_CLIENT_S", 5.0)
    running: list[threading.Thread] = []

    def start(config: AgentConfig) -> threading.Thread:
        thread = threading.Thread(target=AgentServer(config).run, name="resiliency-test-server", daemon=True)
        thread.start()
        running.append(thread)
        return thread

    yield start
    for thread in running:
        thread.join(15)
        assert not thread.is_alive(), "the agent did not end by itself"


def client_of(config: AgentConfig, rank: int = 0) -> AgentClient:
    return AgentClient(config, rank, EventWriter(run=config.run, attempt=1, rank=rank, host="n", sinks=()))


def dial(config: AgentConfig) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(10)
    try:
        connection.connect(config.address)
    except OSError:
        connection.close()
        raise
    return connection


def hello(config: AgentConfig, rank: int = 0, version: int = PROTOCOL_VERSION) -> bytes:
    return pack(Hello(version=version, rank=rank, config=config))


def answer(connection: socket.socket) -> Message | None:
    """The next message; None when the other side closed."""
    framer = Framer()
    while data := connection.recv(1 << 16):
        for message in framer.feed(data):
            return message
    return None


def test_each_rank_is_welcomed_and_the_agent_ends_after_the_last(
    config: AgentConfig, serve: Callable[[AgentConfig], threading.Thread]
) -> None:
    thread = serve(config)
    with dial(config) as first, dial(config) as second:
        first.sendall(hello(config, 0))
        second.sendall(hello(config, 1))
        assert isinstance(answer(first), Welcome) and isinstance(answer(second), Welcome)
        first.close()
        thread.join(0.3)
        assert thread.is_alive(), "it ended while a rank was there"
    thread.join(10)
    assert not thread.is_alive()
    with pytest.raises(ConnectionRefusedError):
        dial(config)


def test_the_end_does_not_wait_for_the_death_of_ranks_that_have_said_bye(
    config: AgentConfig, serve: Callable[[AgentConfig], threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their processes go on after the fit, which waits for the end of the agent."""
    monkeypatch.setattr(server, "_DEATH_S", 600.0)
    thread = serve(config)
    connections = [dial(config), dial(config)]
    for rank, connection in enumerate(connections):
        connection.sendall(hello(config, rank))
        assert isinstance(answer(connection), Welcome)
    for connection in connections:
        connection.sendall(pack(Bye()))
        connection.close()
    thread.join(15)
    assert not thread.is_alive()


def test_an_agent_that_no_rank_connects_to_ends(config: AgentConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_FIRST_CLIENT_S", 0.2)
    alone = AgentServer(config)
    began = time.monotonic()
    alone.run()
    assert time.monotonic() - began < 5
    server._shut(alone._listener)  # the process would have ended here


def test_one_agent_for_each_directory(config: AgentConfig, serve: Callable[[AgentConfig], threading.Thread]) -> None:
    serve(config)
    with pytest.raises(OSError) as caught:
        AgentServer(config)
    assert caught.value.errno == errno.EADDRINUSE
    with dial(config) as connection:
        connection.sendall(hello(config))
        assert answer(connection) is not None


def test_another_job_on_the_same_directory_is_refused_with_advice(
    config: AgentConfig, serve: Callable[[AgentConfig], threading.Thread]
) -> None:
    serve(config)
    mine = client_of(config)
    mine.open()
    try:
        theirs = client_of(dataclasses.replace(config, attempt=2, token="ffffff"))
        began = time.monotonic()
        with pytest.raises(AgentError) as caught:
            theirs.open()
        assert time.monotonic() - began < 5
        for word in (config.local.address, "'run'", "attempt 1", "RESILIENCY_RUN"):
            assert word in str(caught.value)
        theirs.close()
        # The job that was first has noticed nothing.
        mine.send(sealed(config))
        assert mine.flush(Stage.COMMITTED, timeout_s=5)
        assert [type(message) for message in mine.poll()] == [Recorded]
    finally:
        mine.close()


def test_the_next_attempt_waits_for_the_one_before_to_leave(
    config: AgentConfig, serve: Callable[[AgentConfig], threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_OLD_CLIENTS_S", 10.0)
    serve(config)
    old = client_of(config)
    old.open()
    threading.Timer(0.3, old.close).start()
    later = dataclasses.replace(config, attempt=2, token="ffffff")
    new = client_of(later)
    new.open()
    try:
        new.send(sealed(later))
        assert new.flush(Stage.COMMITTED, timeout_s=5)
        assert [type(message) for message in new.poll()] == [Recorded]
    finally:
        new.close()


def test_a_new_attempt_joins_an_agent_that_is_still_sending(
    config: AgentConfig,
    serve: Callable[[AgentConfig], threading.Thread],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from datetime import timedelta

    free = threading.Event()
    store = LocalTier(tmp_path / "remote", name="store")
    # The upload that waits is cut off; the next one does not wait.
    remote = SlowTier(store, delay=timedelta(seconds=30), pause=lambda s: not free.is_set() and free.wait(s))
    monkeypatch.setattr(uploader, "open_tier", lambda *_, **__: remote)
    config = dataclasses.replace(
        config, world_size=1, local_ranks=(0,), remotes=(TierSpec(address=str(tmp_path / "remote"), name="store"),)
    )
    thread = serve(config)
    old = client_of(config)
    old.open()
    old.send(sealed(config, tiers=("store",)))
    assert old.flush(Stage.DURABLE, tier="local", timeout_s=5)
    old.close()
    thread.join(0.2)
    assert thread.is_alive(), "it ended without waiting for the upload"
    threading.Timer(0.3, free.set).start()  # the upload is cut off by the change, and resumed
    later = dataclasses.replace(config, attempt=2, token="ffffff")
    new = client_of(later)
    new.open()
    try:
        assert new.flush(Stage.DURABLE, tier="store", timeout_s=10)
        assert [info for info in store.list("") if info.key.endswith(MANIFEST)]
    finally:
        new.close()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0" * 100,
        b"\n",
        b"[]\n",
        b'{"type":"Seal"}\n',
        b'{"type":"Hello"}\n',
        b'{"type":"Bye"}\n',
        b'{"type":"Welcome","pid":1}\n',
        b'{"type":"Hello","version":%d,"rank":0,"config":{}}\n' % PROTOCOL_VERSION,
        b'{"type":"Hello","version":%d,"rank":0,"config":5}\n' % PROTOCOL_VERSION,
        b'{"type":"Hello","version":%d,"rank":"x","config":[]}\n' % PROTOCOL_VERSION,
        b'{"type":"Hello","version":%d,"rank":0,"config":{"local_ranks":[0],"local":{},"remotes":[]}}\n'
        % PROTOCOL_VERSION,
    ],
)
def test_garbage_on_the_socket_harms_nobody(
    config: AgentConfig, serve: Callable[[AgentConfig], threading.Thread], data: bytes
) -> None:
    serve(config)
    rank = client_of(config)
    rank.open()
    try:
        with dial(config) as connection:
            connection.sendall(data)
            if not data.endswith(b"\n"):
                connection.shutdown(socket.SHUT_WR)
            said = answer(connection)
            assert said is None or (isinstance(said, Refused) and answer(connection) is None), "it went on talking"
        rank.send(sealed(config))
        assert rank.flush(Stage.COMMITTED, timeout_s=5)
    finally:
        rank.close()


@pytest.mark.parametrize(
    "message",
    [
        b'{"type":"Seal"}\n',
        b'{"type":"Seal","id":"x"}\n',
        b'{"type":"Delete","names":[["a"]],"after":null}\n',
        b'{"type":"Delete","names":3,"after":1}\n',
        b'{"type":"Flush"}\n',
        b'{"type":"Complete"}\n',
        pack(Recorded(id=StepId(1, 1, "0a0b0c"))),
        pack(Complete(id=StepId(1, 1, "ffffff"))),
    ],
    ids=str,
)
def test_a_malformed_message_of_one_rank_does_not_harm_another(
    config: AgentConfig, serve: Callable[[AgentConfig], threading.Thread], message: bytes
) -> None:
    serve(config)
    good = client_of(config, 1)
    good.open()
    try:
        with dial(config) as bad:
            bad.sendall(hello(config, 0))
            assert isinstance(answer(bad), Welcome)
            bad.sendall(message)
            assert answer(bad) is None, "the connection stayed open"
            good.send(sealed(config, shard=1))
            # Until its record is there, however long that takes here; a lost agent would be another's answer.
            assert good.wait_message(60) and [type(said) for said in good.poll()] == [Recorded]
            assert not good._losses
    finally:
        good.close()


def test_another_version_of_the_protocol_is_refused(
    config: AgentConfig, serve: Callable[[AgentConfig], threading.Thread]
) -> None:
    serve(config)
    with dial(config) as connection:
        connection.sendall(hello(config, version=99))
        said = answer(connection)
        assert isinstance(said, Refused) and "99" in said.reason
    with dial(config) as connection:
        connection.sendall(hello(config))
        answer(connection)


def test_another_user_is_refused(config: AgentConfig, serve: Callable[[AgentConfig], threading.Thread]) -> None:
    serve(config)
    script = (
        "import os, socket, sys\n"
        "os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX); s.settimeout(10); s.connect(bytes.fromhex(sys.argv[1]))\n"
        "try:\n"
        "    s.sendall(sys.argv[2].encode() + b'\\n'); said = s.recv(100)\n"
        "except (BrokenPipeError, ConnectionResetError):\n"
        "    said = b''\n"
        "sys.exit(0 if said == b'' else 7)\n"
    )
    arguments = [config.address.encode().hex(), hello(config).decode().strip()]
    done = subprocess.run(
        [sys.executable, "-S", "-c", script, *arguments], timeout=30, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    with dial(config) as connection:
        connection.sendall(hello(config))
        assert isinstance(answer(connection), Welcome)


def test_a_local_tier_that_cannot_be_read_is_told(
    config: AgentConfig, serve: Callable[[AgentConfig], threading.Thread], tmp_path: Path
) -> None:
    steps = tmp_path / "local" / ".resiliency" / "run"
    steps.mkdir(parents=True)
    (steps / "steps").symlink_to("steps")  # a link to itself: ELOOP
    serve(config)
    with dial(config) as connection:
        connection.sendall(hello(config))
        said = answer(connection)
        assert said is not None
        if isinstance(said, Refused):
            assert str(tmp_path) in said.reason
    # The server still lives and lets go of the socket when asked properly.
    (steps / "steps").unlink()
    with dial(config) as connection:
        connection.sendall(hello(config))
        assert isinstance(answer(connection), Welcome)


def test_a_rank_that_comes_again_replaces_itself(
    config: AgentConfig, serve: Callable[[AgentConfig], threading.Thread]
) -> None:
    """Its old connection may be noticed as broken only later; that must not take the new one down."""
    serve(config)
    with dial(config) as old:
        old.sendall(hello(config))
        answer(old)
        with dial(config) as new:
            new.sendall(hello(config))
            assert isinstance(answer(new), Welcome)
            old.close()
            new.sendall(pack(sealed(config)))
            assert answer(new) == Recorded(id=StepId(1, config.attempt, config.token))


OLDER_HELLO = b'{"t": "hello", "v": 2, "rank": 0, "config": "{}"}\n'


def test_a_trainer_of_an_older_version_is_refused_with_the_reason(
    config: AgentConfig, serve: Callable[[AgentConfig], threading.Thread]
) -> None:
    serve(config)
    with dial(config) as connection:
        connection.sendall(OLDER_HELLO)
        said = answer(connection)
        assert isinstance(said, Refused) and "not a message of the agent protocol" in said.reason
    with dial(config) as connection:
        connection.sendall(hello(config))
        assert isinstance(answer(connection), Welcome)


def test_a_trainer_does_not_work_beside_an_agent_of_another_version(config: AgentConfig) -> None:
    """It closes every connection after Hello. Two jobs in one folder would be the result."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(config.address)
    listener.listen()

    def close_all() -> None:
        while True:
            try:
                listener.accept()[0].close()
            except OSError:
                return

    thread = threading.Thread(target=close_all, daemon=True)
    thread.start()
    rank = client_of(config)
    try:
        with pytest.raises(AgentError, match="a job with another version of this library is using it"):
            rank.open()
    finally:
        rank.close()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def test_a_second_hello_ends_the_connection(
    config: AgentConfig, serve: Callable[[AgentConfig], threading.Thread]
) -> None:
    thread = serve(config)
    with dial(config) as connection:
        connection.sendall(hello(config, 0))
        assert isinstance(answer(connection), Welcome)
        connection.sendall(hello(config, 1))
        assert answer(connection) is None
    thread.join(10)
    assert not thread.is_alive(), "a rank that never came is waited for"
