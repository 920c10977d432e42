"""The connection of a launcher to the monitor of its host, in one process."""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from resiliency.launch.monitor_link import MonitorLink
from resiliency.runtime.channel import receive, send
from resiliency.runtime.messages.launcher import Lost, Pages, Saved, Stacks, Waiting, of_launcher


@pytest.fixture
def name() -> str:
    return f"resiliency-test-{os.getpid()}-{secrets.token_hex(4)}"


@pytest.fixture
def link(name: str) -> Iterator[MonitorLink]:
    made = MonitorLink(name)
    yield made
    made.close()


def _listen(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0" + name)
    listener.listen()
    return listener


def _serve_until_connected(link: MonitorLink) -> None:
    deadline = time.monotonic() + 10
    while not link.is_connected:
        link.serve()
        assert time.monotonic() < deadline
        select.select(link.fds(), [], [], link.seconds_to_look(1.0))


def _heard(connection: socket.socket) -> list[Any]:
    connection.setblocking(False)
    found = []
    try:
        while (received := receive(connection)) is not None:
            found.append(of_launcher(received[0]))
    except BlockingIOError:
        pass
    return found


def test_what_stands_is_said_again_and_what_was_told_is_not(link: MonitorLink, name: str) -> None:
    link.stand("a", Waiting(generation=1))
    link.stand("b", Lost(generation=1, rank=2))
    link.tell(Saved(problem="to nobody"))
    for _ in range(2):
        with _listen(name) as listener:
            _serve_until_connected(link)
            with listener.accept()[0] as connection:
                link.stand("a", Waiting(generation=2))
                link.tell(Saved())
                said = _heard(connection)
        assert Lost(generation=1, rank=2) in said and said[-2:] == [Waiting(generation=2), Saved()]
        link.serve()
        assert not link.is_connected
    link.take_back("b")
    with _listen(name) as listener:
        _serve_until_connected(link)
        with listener.accept()[0] as connection:
            assert _heard(connection) == [Waiting(generation=2)]


def test_a_monitor_that_does_not_read_blocks_nothing_and_misses_nothing_that_stands(
    link: MonitorLink, name: str
) -> None:
    with _listen(name) as listener:
        _serve_until_connected(link)
        with listener.accept()[0] as connection:
            for generation in range(5000):  # more than a socket holds
                link.tell(Pages(generation=generation))
            link.stand("lost", Lost(generation=1, rank=0))
            assert link.is_connected
            before = _heard(connection)
            assert len(before) < 5000 and Lost(generation=1, rank=0) not in before
            deadline = time.monotonic() + 10
            while not (said := _heard(connection)):
                assert time.monotonic() < deadline
                time.sleep(link.seconds_to_look(1.0))
                link.serve()
            assert said == [Lost(generation=1, rank=0)]


def test_tries_to_connect_come_less_and_less_often_and_are_said_once(
    link: MonitorLink, caplog: pytest.LogCaptureFixture
) -> None:
    pauses = []
    with caplog.at_level(logging.WARNING, logger="resiliency"):
        for _ in range(8):
            link._retry_at_s = 0.0
            link.serve()
            pauses.append(link.seconds_to_look(60.0))
    assert pauses[0] < 0.06 and 0.4 < pauses[-1] <= 1.0
    assert len(caplog.records) == 1 and "ranks go on" in caplog.text


def test_descriptors_that_come_with_a_message_are_closed(link: MonitorLink, name: str) -> None:
    with _listen(name) as listener:
        _serve_until_connected(link)
        with listener.accept()[0] as connection:
            before = set(os.listdir("/proc/self/fd"))
            for _ in range(3):
                send(connection, {"kind": "stacks"}, [0, 1])
                socket.send_fds(connection, [b"m"], [connection.fileno(), 0])  # a text that cannot be read
            assert link.serve() == [Stacks()] * 3
            assert set(os.listdir("/proc/self/fd")) <= before
