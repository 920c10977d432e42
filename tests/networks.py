"""Networks of hosts on this machine, as they are seen from outside."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

__all__ = ["has_route_to", "network_of", "processes_in"]


def network_of(pid: int) -> int:
    """The network namespace of a process."""
    return os.stat(f"/proc/{pid}/ns/net").st_ino


def processes_in(namespaces: Collection[int]) -> list[int]:
    """Processes in any of these network namespaces."""
    found = []
    for entry in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # it has ended, or is another user's
            if network_of(int(entry)) in namespaces:
                found.append(int(entry))
    return found


def has_route_to(network: str) -> bool:
    """Whether this machine has one of its own, by which a link is known that belongs to it."""
    rows = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    return int.from_bytes(socket.inet_aton(network), "little") in {int(row[1], 16) for row in rows}
