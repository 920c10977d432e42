"""Finds out whether a job is using a run right now, before ``resiliency ckpt prune`` deletes files. No torch.

Three kinds of evidence, because none covers all cases: the socket of a host agent (this host, this user), the process
ids in the run's event logs (this host), and ranks on other hosts that wrote an event lately, but none about their end.
"""

from __future__ import annotations

import errno
import json
import mmap
import socket
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from resiliency.agent.config import agent_address
from resiliency.events import EventKind
from resiliency.regular_file import opened
from resiliency.settings import environment
from resiliency.storage.manifest import EVENTS_DIR, META_DIR

__all__ = ["Evidence", "evidence_of_use"]

#: Seconds without an event after which a rank counts as ended: every job saves, and so writes an event, more often.
_QUIET_S = 24 * 3600.0
_CONNECT_S = 2.0
_ENDS = (EventKind.JOB_TERMINATED, EventKind.PROCESS_ENDED)


@dataclass(frozen=True)
class Evidence:
    """One sign that a job is using a run.

    Attributes:
        text: what was seen, in words.
        certain: True for a process on this host; False for a rank on another host, which may have been killed since.
    """

    text: str
    certain: bool


def evidence_of_use(
    directory: str, run: str, *, hosts: Collection[str] = (), now: float | None = None
) -> list[Evidence]:
    """Looks for processes that use the run. Blocks: up to 2 s for each host's agent; reads the logs from their ends.

    Args:
        directory: root of the local tier.
        hosts: names of hosts known to have written there; this host's own names are always included.
        now: UTC seconds since the epoch, for tests; None: the current time.
    """
    here = {environment().node, socket.gethostname()}
    found = []
    for host in sorted({*hosts, *here, *_logged_hosts(directory, run)}):
        if _listens(agent_address(directory, run, host)):
            found.append(Evidence(f"its checkpoint agent (host {host}) is running on this host", True))
    return found + _ranks(directory, run, here, time.time() if now is None else now)


def _logged_hosts(directory: str, run: str) -> set[str]:
    """Hosts whose agents left a log: a job may have been given another host name than this shell has."""
    folder_of_run = Path(directory, META_DIR, run)
    return {
        path.stem.removeprefix("agent-")
        for folder in ("logs", EVENTS_DIR)
        for path in folder_of_run.glob(f"{folder}/agent-*")
    }


def _listens(address: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.settimeout(_CONNECT_S)
        try:
            probe.connect(address)
        except OSError as error:
            # Any other error, such as a full connection queue, means that a process listens.
            return error.errno not in (errno.ECONNREFUSED, errno.ENOENT)
    return True


def _ranks(directory: str, run: str, here: Collection[str], now: float) -> list[Evidence]:
    folders = {str(Path(directory, META_DIR, run, EVENTS_DIR)), environment().events_dir or ""} - {""}
    logs = [log for folder in sorted(folders) for log in sorted(Path(folder).glob("rank-*.jsonl"))]
    found = []
    for log in logs:
        start = _last(log, run, only=EventKind.JOB_STARTED)
        last = _last(log, run)
        if start is None or last is None or last["event_type"] in _ENDS:
            continue
        who = f"rank {start['rank']} of attempt {start['attempt']} on {start['host']}"
        if start["host"] in here:
            if _runs(start.get("pid"), _seconds(start)):
                found.append(Evidence(f"{who} (process {start['pid']}) is running", True))
        elif now - _seconds(last) < _QUIET_S:
            found.append(
                Evidence(f"{who} wrote an event {now - _seconds(last):.0f} s ago and has not said that it ended", False)
            )
    return found


def _last(log: Path, run: str, *, only: str | None = None) -> dict[str, Any] | None:
    """The log's last event of the run (of kind ``only``, if given); None: none. Skips torn lines and lines of other
    runs."""
    for line in _backwards(log, b"" if only is None else only.encode()):
        try:
            event = json.loads(line)
            _seconds(event)
            if (
                event["job_name"] == run
                and {"rank", "attempt", "host"} <= event.keys()
                and only in (None, event["event_type"])
            ):
                return dict(event)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    return None


def _backwards(log: Path, word: bytes) -> Iterator[bytes]:
    """Yields the lines that contain ``word``, last line first; reads only as far back as the caller iterates."""
    try:
        with opened(str(log)) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
            end = len(view)
            while end > 0:
                start = view.rfind(b"\n", 0, end - 1) + 1
                if word:
                    hit = view.rfind(word, 0, end)
                    if hit < 0:
                        return
                    start = view.rfind(b"\n", 0, hit) + 1
                    stop = view.find(b"\n", hit)
                    yield view[start : stop if stop >= 0 else len(view)]
                else:
                    yield view[start:end]
                end = start
    except (OSError, ValueError):
        return  # gone, unreadable or empty (mmap refuses an empty file): no evidence


def _seconds(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["timestamp"]).timestamp()


def _runs(pid: object, since: float) -> bool:
    """True when the process of this id is alive and began no later than ``since``, so that the id was not reused."""
    import psutil

    try:
        return isinstance(pid, int) and psutil.Process(pid).create_time() <= since + 1.0
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True
