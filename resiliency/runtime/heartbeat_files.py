"""Heartbeat files: in a folder, one file per rank with its heartbeat page, for watchers on the same host.

The folder must be on a file system in memory (``/dev/shm``, an ``emptyDir`` of medium ``Memory``): on a disk a store to
the page may wait for the journal, and on a full disk some file systems answer it with SIGBUS. A file gets its name only
when it is complete, and is never truncated. It stays after its rank has ended, and then shows what the rank did last.

Reading needs neither torch nor the rank's cooperation: the rank may hold its GIL, or be stopped.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from resiliency.errors import ConfigError
from resiliency.events import boot_id
from resiliency.runtime.heartbeat_page import PAGE_BYTES, WORDS_BYTES, Page, PageWriter
from resiliency.settings import environment

__all__ = ["HeartbeatFile", "RankHeartbeat", "read_heartbeats"]

_FILE = re.compile(r"rank-(\d+)\.heartbeat")
#: ``f_type`` of tmpfs and ramfs in statfs(2). Repeated here, because the packages launch and storage are in one layer
#: and may not import each other.
_IN_MEMORY = (0x01021994, 0x858458F6)
_libc = ctypes.CDLL(None)


@dataclass(frozen=True, kw_only=True)
class RankHeartbeat:
    """What one look found in a rank's heartbeat file.

    Attributes:
        rank: global rank.
        pid: process id, as the process's own container numbers it.
        host: the rank's host, as :class:`~resiliency.settings.Environment` names it.
        run: the job's run id.
        began: seconds since the epoch (UTC) when the process began this attempt.
        page: its heartbeat page.
        quiet_s: seconds since its last sign of life, or since it began when there was none.
        state: "running"; "stopped": by a signal; "ended": the process is gone; "earlier attempt": it has ended, and
            another file in the folder is from a later attempt; "unknown": the file comes from another host, another
            boot of this host, or another container.
    """

    rank: int
    pid: int
    host: str
    run: str
    began: float
    page: Page
    quiet_s: float
    state: str


class HeartbeatFile(PageWriter):
    """The heartbeat page of this process as a file in a folder; replaces an earlier process's file of this rank.

    Raises:
        ConfigError: the folder is not on a file system in memory.
        OSError: the folder or the file cannot be made.
    """

    def __init__(self, folder: str) -> None:
        settings = environment()
        os.makedirs(folder, exist_ok=True)
        if not _in_memory(folder):
            raise ConfigError(
                f"heartbeats cannot be in {folder}, which is on a disk: a step would wait for it; use a folder in"
                " memory, as /dev/shm/heartbeats, or an emptyDir of medium Memory"
            )
        about = {
            "rank": settings.rank,
            "pid": os.getpid(),
            "process_started": _process_started(os.getpid()),
            "host": settings.node,
            "run": settings.run,
            "began": time.time(),
            "began_monotonic": time.monotonic(),
            "boot": boot_id(),
            "pid_namespace": _pid_namespace(),
        }
        text = json.dumps(about).encode()
        if len(text) > PAGE_BYTES - WORDS_BYTES:
            raise OSError(errno.ENAMETOOLONG, "names of host and run are too long for a heartbeat", folder)
        self.folder, self.rank = folder, settings.rank
        self.path = os.path.join(folder, f"rank-{settings.rank:05d}.heartbeat")
        partial = f"{self.path}.{os.getpid()}"
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            # Written, not extended by truncate: a full file system then fails here, not with SIGBUS at a later store.
            os.write(fd, (bytes(WORDS_BYTES) + text).ljust(PAGE_BYTES, b"\0"))
            os.fchmod(fd, 0o444)  # a shell that redirects into a writable file would truncate it
            super().__init__(mmap.mmap(fd, PAGE_BYTES))
            os.rename(partial, self.path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(partial)
            raise
        finally:
            os.close(fd)


def read_heartbeats(folder: str | os.PathLike[str]) -> list[RankHeartbeat]:
    """The heartbeats of all ranks that have a file in the folder, sorted by rank. Thread: any. Blocks: no.

    Files that are not heartbeats are skipped. Call it on the host of the ranks.

    Raises:
        OSError: the folder cannot be listed.
    """
    found = [one for path in sorted(Path(folder).iterdir()) for one in _read(path)]
    newest = max((one.page.attempt for one in found), default=0)
    return sorted((_judged(one, newest) for one in found), key=lambda one: one.rank)


def _judged(one: RankHeartbeat, newest: int) -> RankHeartbeat:
    if one.state != "ended" or one.page.attempt >= newest:
        return one
    return replace(one, state="earlier attempt")


def _read(path: Path) -> Iterator[RankHeartbeat]:
    """Yields the heartbeat of a file, or nothing when the file is not one."""
    if not _FILE.fullmatch(path.name):
        return
    try:
        with open(path, "rb", opener=_open_no_link) as file:
            if os.fstat(file.fileno()).st_size != PAGE_BYTES:
                return
            with mmap.mmap(file.fileno(), PAGE_BYTES, access=mmap.ACCESS_READ) as mapping:
                about = json.loads(mapping[WORDS_BYTES:].rstrip(b"\0"))
                page = Page.read(mapping)
        same_clock = about["boot"] == boot_id()
        since = page.last_s or about["began_monotonic"]
        yield RankHeartbeat(
            rank=int(about["rank"]),
            pid=int(about["pid"]),
            host=str(about["host"]),
            run=str(about["run"]),
            began=float(about["began"]),
            page=page,
            quiet_s=max(0.0, time.monotonic() - since if same_clock else time.time() - about["began"]),
            state=_state(about) if same_clock else "unknown",
        )
    except (OSError, ValueError, KeyError, TypeError):
        return  # being replaced, or not a heartbeat file


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _state(about: dict[str, object]) -> str:
    if about["pid_namespace"] != _pid_namespace():
        return "unknown"
    pid = int(str(about["pid"]))
    fields = _stat(pid)
    if fields is None or fields[0] in "ZX" or int(fields[19]) != about["process_started"]:
        return "ended"
    return "stopped" if fields[0] in "Tt" else "running"


def _stat(pid: int) -> list[str] | None:
    """The fields of ``/proc/PID/stat`` from the state on; None: there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _process_started(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0: it is gone. With the process id this identifies the
    process, because ids are reused."""
    fields = _stat(pid)
    return int(fields[19]) if fields is not None else 0


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def _in_memory(path: str) -> bool:
    buffer = (ctypes.c_long * 64)()  # struct statfs begins with f_type, and fits into this buffer on every platform
    return _libc.statfs(os.fsencode(path), buffer) == 0 and int(buffer[0]) in _IN_MEMORY
