"""Hosts with networks of their own on one machine: who reaches whom, and what is left."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from resiliency.errors import ConfigError
from resiliency.testing.hosts import local_network
from resiliency.testing.hosts.local_network import Cable, LocalNetwork
from tests.networks import has_route_to, network_of, processes_in

#: For the kernel to remove what nobody has any more.
GONE_S = 10.0


@pytest.fixture
def network() -> Iterator[LocalNetwork]:
    made = LocalNetwork(2)
    yield made
    made.close()


def listening(network: LocalNetwork, number: int) -> socket.socket:
    with network.inside(number):
        made = socket.socket()
    made.bind((network.address_of(number), 0))
    made.listen()
    return made


def connected(network: LocalNetwork, number: int, to: socket.socket) -> tuple[socket.socket, socket.socket]:
    with network.inside(number):
        made = socket.socket()
    made.settimeout(5)
    made.connect(to.getsockname())
    accepted, _ = to.accept()
    accepted.settimeout(0.3)
    return made, accepted


@pytest.mark.namespaces
def test_hosts_reach_each_other_and_one_whose_cable_is_pulled_itself_alone(network: LocalNetwork) -> None:
    with listening(network, 0) as listener:
        one, other = connected(network, 1, listener)
        own, others_own = connected(network, 0, listener)
        cable = Cable.inherited(f"{os.dup(network.fds[0])}:{network.cable_of(0).link}")  # as a monitor has it
        with one, other, own, others_own:
            cable.pull()
            one.sendall(b"1")
            own.sendall(b"2")
            assert others_own.recv(1) == b"2"
            with pytest.raises(TimeoutError):
                other.recv(1)
            cable.plug_in()
            cable.close()
            other.settimeout(10)
            assert other.recv(1) == b"1"  # what was connected is so still


@pytest.mark.namespaces
def test_a_host_reaches_the_machine_and_has_no_way_to_other_machines(network: LocalNetwork) -> None:
    with socket.socket() as listener:
        listener.bind((network.address, 0))
        listener.listen()
        one, other = connected(network, 0, listener)
        one.close()
        other.close()
    with network.inside(0), socket.socket() as out, pytest.raises(OSError, match="Network is unreachable"):
        out.connect(("192.0.2.1", 1))
    assert network_of(os.getpid()) == os.stat("/proc/thread-self/ns/net").st_ino  # this thread is back


@pytest.mark.namespaces
def test_nothing_is_left_of_a_network_that_is_closed(network: LocalNetwork) -> None:
    assert has_route_to(f"{network.address.rpartition('.')[0]}.0")
    network.close()
    assert not has_route_to(f"{network.address.rpartition('.')[0]}.0")
    network.close()


@pytest.mark.namespaces
def test_nothing_is_left_of_a_network_whose_maker_was_killed() -> None:
    code = """if True:
        import subprocess, sys, time
        from resiliency.testing.hosts.local_network import LocalNetwork
        network = LocalNetwork(1)
        with network.inside(0):
            subprocess.Popen(["cat"])
        print(network.address, flush=True)
        time.sleep(600)
    """
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as maker:
        assert maker.stdout is not None
        first = maker.stdout.readline().decode().strip().rpartition(".")[0]
        (child,) = (int(pid) for pid in Path(f"/proc/{maker.pid}/task/{maker.pid}/children").read_text().split())
        host = network_of(child)
        assert has_route_to(f"{first}.0") and host != network_of(os.getpid())
        maker.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + GONE_S
    while has_route_to(f"{first}.0") or processes_in({host}):  # the child reads the end of its input
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_who_may_not_make_one_is_told_what_to_do() -> None:
    code = """if True:
        import os
        from resiliency.testing.hosts.local_network import LocalNetwork
        os.setuid(65534)
        try:
            LocalNetwork(1)
        except Exception as error:
            print(type(error).__name__, error)
    """
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.startswith("ConfigError --network-namespaces: this user may make no network namespaces; run it as root")


def test_a_network_that_the_machine_has_a_route_to_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = [ipaddress.IPv4Network("198.18.0.0/16"), ipaddress.IPv4Network("198.19.0.0/17")]
    monkeypatch.setattr(local_network, "_routes", lambda: taken)
    for _ in range(20):
        assert local_network._free_network().subnet_of(ipaddress.IPv4Network("198.19.128.0/17"))
    taken.append(ipaddress.IPv4Network("198.16.0.0/12"))
    with pytest.raises(ConfigError, match="routes to all of"):
        local_network._free_network()


def test_words_that_are_no_cable_are_refused() -> None:
    for text in ("", "x:host0", "9999:host0"):
        with pytest.raises(ConfigError, match="only resiliency run passes this"):
            Cable.inherited(text)
    with pytest.raises(ConfigError, match="room for 240 hosts, not 241"):
        LocalNetwork(241)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_network, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install pyroute2"):
        LocalNetwork(1)
