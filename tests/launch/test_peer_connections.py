"""Which connections of a process are shut down so that gloo's waits end, on sockets watched as gloo watches its own."""

from __future__ import annotations

import os
import resource
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from resiliency.launch import peer_connections
from resiliency.launch.peer_connections import PeerConnections


class Loop:
    """A thread with the name of gloo's event loop, that waits for sockets and does nothing with them."""

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self._wake, self._end = socket.socketpair()
        self.epoll.register(self._end, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        deadline = time.monotonic() + 10
        while not any(peer_connections._loops().values()):  # it does not wait yet
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def _run(self) -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("gloo_tcp_loop")
        while self._end.fileno() not in [fd for fd, _ in self.epoll.poll()]:
            continue

    def close(self) -> None:
        self._wake.send(b"x")
        self._thread.join(10)
        for one in (self.epoll, self._wake, self._end):
            one.close()


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.close()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        made.settimeout(0.2)
        yield made


def accepted(listener: socket.socket) -> list[int]:
    """The numbers of pairs that somebody connected for."""
    numbers = []
    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            return numbers
        with connection:
            numbers.append(struct.unpack("=q", connection.recv(8))[0])
            assert connection.recv(1) == b"", "it does not hang up"


@pytest.mark.parametrize("pairs", [0, 3])
def test_a_group_that_forms_is_hung_up_on_and_one_that_stands_is_not(
    pairs: int, loop: Loop, listener: socket.socket
) -> None:
    loop.epoll.register(listener, select.EPOLLPRI)  # an event that never comes
    PeerConnections().shut_down(None, pairs=pairs)
    assert accepted(listener) == list(range(pairs))


def test_connections_of_gloo_are_shut_down_and_those_of_others_are_not(loop: Loop, listener: socket.socket) -> None:
    with (
        socket.create_connection(listener.getsockname()) as of_gloo,
        listener.accept()[0] as peer_of_gloo,
        socket.create_connection(listener.getsockname()) as of_others,
        listener.accept()[0] as peer_of_others,
    ):
        connections = PeerConnections()
        connections.shut_down(None, pairs=3)
        assert connections.closed, "gloo has none yet"
        loop.epoll.register(of_gloo, select.EPOLLPRI)
        assert connections.shut_down(None, pairs=3) == 1
        assert not connections.closed, "its loop has not seen the end yet"
        loop.epoll.modify(of_gloo, select.EPOLLIN | select.EPOLLONESHOT)
        deadline = time.monotonic() + 10
        while not connections.closed:  # until the event has come; then no other one is waited for
            assert time.monotonic() < deadline
            connections.shut_down(None, pairs=0)
        loop.epoll.modify(of_gloo, select.EPOLLPRI)
        of_gloo.settimeout(10)
        assert of_gloo.recv(1) == b""
        # Gloo waits for good for what it could not write.
        of_gloo.sendall(b"x")
        peer_of_gloo.settimeout(10)
        assert peer_of_gloo.recv(1) == b"x"
        of_others.sendall(b"x")
        assert peer_of_others.recv(1) == b"x"
    assert accepted(listener) == [], "nobody but gloo's listener is connected to"


def test_without_a_thread_that_is_known_as_gloos_no_connection_is_known_to_be_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_connections, "_LOOP", "another name")  # older torch does not name it
    connections = PeerConnections()
    connections.shut_down(None, pairs=0)
    assert not connections.closed


def test_a_connection_of_others_that_takes_the_number_of_one_that_gloo_closes_meanwhile_is_left_alone(
    loop: Loop, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = peer_connections._watched
    with (
        socket.create_connection(listener.getsockname()) as of_gloo,
        listener.accept()[0],
        socket.create_connection(listener.getsockname()) as of_others,
        listener.accept()[0] as peer_of_others,
    ):
        loop.epoll.register(of_gloo, select.EPOLLPRI)

        def closed_meanwhile(epoll: int) -> dict[tuple[int, int], bool]:
            found = watched(epoll)
            os.dup2(of_others.fileno(), of_gloo.fileno())
            return found

        monkeypatch.setattr(peer_connections, "_watched", closed_meanwhile)
        assert PeerConnections().shut_down(None, pairs=0) == 0
        peer_of_others.sendall(b"x")
        assert of_others.recv(1) == b"x"


def test_a_process_without_a_free_file_descriptor_shuts_down_nothing_and_takes_nothing_for_closed(
    loop: Loop, listener: socket.socket
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_connection(listener.getsockname()) as of_gloo, listener.accept()[0]:
        loop.epoll.register(of_gloo, select.EPOLLPRI)
        connections = PeerConnections()
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            assert connections.shut_down(None, pairs=0) == 0
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert not connections.closed


def test_a_loop_that_runs_at_that_moment_is_remembered_and_one_that_was_never_seen_to_wait_is_not_known(
    loop: Loop, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    connections, waiting = PeerConnections(), peer_connections._loops()
    connections.shut_down(None, pairs=0)
    monkeypatch.setattr(peer_connections, "_loops", lambda: dict.fromkeys(waiting))
    connections.shut_down(None, pairs=0)
    assert connections.closed, "it watches nothing"
    with socket.create_connection(listener.getsockname()) as of_gloo, listener.accept()[0]:
        loop.epoll.register(of_gloo, select.EPOLLPRI)
        assert connections.shut_down(None, pairs=0) == 1
        assert not connections.closed
        unknown = PeerConnections()
        assert unknown.shut_down(None, pairs=0) == 0
        assert not unknown.closed, "it may have connections"


def test_a_connection_to_a_store_is_shut_down_when_it_is_no_longer_new(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, now = listener.getsockname()[1], [100.0]
    monkeypatch.setattr(peer_connections, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with socket.create_connection(listener.getsockname()), listener.accept()[0] as store:
        connections = PeerConnections()
        assert connections.shut_down(port, pairs=0) == 0
        now[0] += 0.2
        assert connections.shut_down(port, pairs=0) == 0
        now[0] += 0.2
        assert connections.shut_down(port + 1, pairs=0) == 0, "of another port"
        assert connections.shut_down(port, pairs=0) == 1
        store.settimeout(10)
        assert store.recv(1) == b""
