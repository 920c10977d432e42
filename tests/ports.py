"""Ports for rendezvous of test jobs, which are listened on seconds after they were chosen."""

from __future__ import annotations

import itertools
import os
import random
import socket
from pathlib import Path

#: Of each worker of pytest-xdist.
PORTS_OF_A_WORKER = 500
LOWEST = 20_000

_turn = itertools.count(random.Random(os.getpid()).randrange(PORTS_OF_A_WORKER))


def free_port() -> int:
    """A port of loopback that nothing listens on and nothing else will take soon.

    The kernel picks the ports of outgoing connections, and those of listeners on port 0, from its own range: a port of
    that range which is free now belongs to another test a second later. These lie below it, in a piece for each worker.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = LOWEST + worker * PORTS_OF_A_WORKER
    if first + PORTS_OF_A_WORKER > ephemeral_ports()[0]:
        raise RuntimeError(f"worker {worker} has no ports: from {ephemeral_ports()[0]} on they are the kernel's")
    for _ in range(PORTS_OF_A_WORKER):
        port = first + next(_turn) % PORTS_OF_A_WORKER
        with socket.socket() as probe:
            # As torch's store does: connections of an earlier test that are in TIME_WAIT are in nobody's way.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"none of the ports {first} to {first + PORTS_OF_A_WORKER - 1} is free")


def ephemeral_ports() -> tuple[int, int]:
    first, last = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    return int(first), int(last)
