"""Which ranks are on one host: those that reach one agent and see one folder, whatever they call it."""

from __future__ import annotations

import os
from collections.abc import Sequence

__all__ = ["host_names", "place_of"]


def place_of(directory: str) -> str:
    """Tells this host and its folder from others of the same name: two pods on one machine are often both called by its
    name (``NODE_NAME``), and have neither their agents' sockets nor their folders in common.

    Raises:
        OSError: the folder is not there.
    """
    found = os.stat(directory)
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        network = os.stat("/proc/self/ns/net").st_ino  # abstract sockets are of a network namespace
    except OSError:
        boot, network = "", 0
    return f"{boot}:{network}:{found.st_dev}:{found.st_ino}"


def host_names(named: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    """One name for each host. Pure.

    Args:
        named: (name, place) of each rank's host.

    Returns:
        For each rank its host's name; where a name is used at several places, the first in order of ranks keeps it, and
        the others get a number: "node", "node.2", "node.3".
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
