"""Peak memory of a contender and of every process it started: ``python -m benchmarks._memory MARK``.

Proportional set size (PSS) is used because it counts a page shared by trainer and writer once. Pages of programs and
libraries are not counted, because other programs that map them come and go, and each changes the share of all (two that
import torch take 49 MiB off a third one's). Where the kernel does not report PSS, private memory plus the largest
shared part is used. Processes belong to a contender when their environment carries its mark, so a daemon that left the
process group is counted too.

It runs in its own process (reading page tables takes time) and only during saves that are not timed.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["MARK", "marked", "total"]

MARK = "RESILIENCY_BENCH_MARK"
_PROC = Path("/proc")
_INTERVAL_S = 0.03


def marked(mark: str) -> Iterator[int]:
    """Yields the ids of the living processes whose environment carries ``mark``."""
    wanted = f"{MARK}={mark}".encode()
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)
        except OSError:  # it has ended, or may not be read
            continue


def total(pids: Iterable[int]) -> int:
    """Bytes of memory the processes hold together; one that ends meanwhile counts as 0."""
    private = shared = 0
    for pid in pids:
        try:
            maps = (_PROC / str(pid) / "smaps").read_text()
        except OSError:  # it has ended
            continue
        if "\nPss:" in maps:
            private += proportional(maps)
            continue
        fields = _status(pid)
        private += fields.get("RssAnon", 0)
        shared = max(shared, fields.get("RssShmem", 0))
    return private + shared


def proportional(maps: str) -> int:
    """PSS in bytes without the pages of programs and libraries, which are the files that are mapped privately. Pure.

    Args:
        maps: text of ``/proc/PID/smaps``.
    """
    found, of_program = 0, False
    for line in maps.splitlines():
        key, _, value = line.partition(" ")
        if not key.endswith(":"):  # START-END MODE OFFSET DEVICE INODE [PATH]
            mode, _, _, inode, *_ = value.split(maxsplit=4)
            of_program = mode.endswith("p") and inode != "0"
        elif key == ("Anonymous:" if of_program else "Pss:"):  # a library's variables belong to the process
            found += _bytes(value)
    return found


def _bytes(value: str) -> int:
    return int(value.split()[0]) * 1024


def _status(pid: int) -> dict[str, int]:
    try:
        text = (_PROC / str(pid) / "status").read_text()
    except OSError:
        return {}
    fields = (line.partition(":") for line in text.splitlines())
    return {key: _bytes(value) for key, _, value in fields if value.endswith("kB")}


def main(mark: str) -> None:
    """Prints "ready" after the first sample, goes on until standard input closes, takes one last sample and prints the
    peak in bytes as JSON."""
    peak = 0
    over = False
    for sample in itertools.count():
        peak = max(peak, total(pid for pid in marked(mark) if pid != os.getpid()))
        if over:
            break
        if sample == 0:
            sys.stdout.write("ready\n")
            sys.stdout.flush()
        over = bool(select.select([sys.stdin], [], [], _INTERVAL_S)[0])
    json.dump({"peak": peak}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
