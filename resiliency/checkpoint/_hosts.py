"""Finds which ranks share a host: those that can reach the same agent and see the same folder, whatever its name."""

from __future__ import annotations

import os
from collections.abc import Sequence

from resiliency.events import boot_id

__all__ = ["host_names", "place_of"]


def place_of(directory: str) -> str:
    """A text that identifies this host and its folder, because the name may not: two pods on one machine often both
    have the machine's name (``NODE_NAME``), but share neither their agents' sockets nor their folders.

    Raises:
        OSError: the folder does not exist.
    """
    found = os.stat(directory)
    try:
        network = os.stat("/proc/self/ns/net").st_ino  # abstract sockets belong to a network namespace
    except OSError:
        network = 0
    return f"{boot_id()}:{network}:{found.st_dev}:{found.st_ino}"


def host_names(named: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """Gives each host a unique name. Pure.

    Args:
        named: (name, place) of each rank's host.

    Returns:
        The name of each rank's host, by rank. Where hosts share a name, the first in rank order keeps it, and the
        others get a number: "node", "node.2", "node.3".
    """
    taken = {name for name, _ in named}
    names: dict[tuple[str, str], str] = {}
    count: dict[str, int] = {}
    for name, place in named:
        if (name, place) in names:
            continue
        new, number = name, count.get(name, 0) + 1
        while number > 1 and (new := f"{name}.{number}") in taken:
            number += 1
        count[name] = number
        taken.add(new)
        names[name, place] = new
    return tuple(names[pair] for pair in named)
