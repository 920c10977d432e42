"""Ports of test jobs are nobody else's."""

from __future__ import annotations

import socket

import pytest

from tests.ports import PORTS_OF_A_WORKER, ephemeral_ports, free_port


def test_ports_differ_and_the_kernel_gives_them_to_no_connection() -> None:
    ports = [free_port() for _ in range(PORTS_OF_A_WORKER // 2)]
    assert len(set(ports)) == len(ports)
    assert max(ports) < ephemeral_ports()[0]


def test_ports_of_workers_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []
    for worker in ("gw0", "gw1"):
        monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
        given.append({free_port() for _ in range(PORTS_OF_A_WORKER // 2)})
    assert not given[0] & given[1]


def test_a_port_that_is_listened_on_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.ports.LOWEST", 31_000)  # of no worker
    monkeypatch.setattr("tests.ports.PORTS_OF_A_WORKER", 1)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", free_port()))
        listener.listen()
        with pytest.raises(RuntimeError, match=r"none of the ports .* is free"):
            free_port()
