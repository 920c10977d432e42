"""Peak memory of a contender and of every process it started: ``python -m benchmarks._memory MARK``.

Proportional set size (PSS) is used because it counts a page shared by trainer and writer once; where the kernel
does not report it, resident size without shared pages plus the largest shared part is used. Processes belong to a
contender when their environment carries its mark, so a daemon that left the process group is counted too.

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
        fields = _fields(pid, "smaps_rollup")
        if "Pss" in fields:
            private += fields["Pss"]
            continue
        fields = _fields(pid, "status")
        private += fields.get("RssAnon", 0)
        shared = max(shared, fields.get("RssShmem", 0) + fields.get("RssFile", 0))
    return private + shared


def _fields(pid: int, name: str) -> dict[str, int]:
    try:
        text = (_PROC / str(pid) / name).read_text()
    except OSError:
        return {}
    found = {}
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if value.endswith("kB"):
            found[key] = int(value.split()[0]) * 1024
    return found


def main(mark: str) -> None:
    """Prints "ready" after a first sample, samples until standard input closes and once more, then prints the peak as
    JSON."""
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
