"""Heartbeats in a folder: one file a rank, the page that it writes, for whoever watches ranks on this host.

The folder is on a file system in memory (``/dev/shm``, an ``emptyDir`` of medium ``Memory``): a store to a page of a
disk may wait for the journal, and on a full disk some file systems answer it with SIGBUS. A file is whole before it has
its name, and is never cut. It stays when its rank has ended, and says then what the rank did last.

Reading needs no torch and nothing of the rank: not its GIL, and not that it runs.
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
from resiliency.launch.heartbeat_page import PAGE_BYTES, WORDS_BYTES, Page, PageWriter
from resiliency.settings import environment

__all__ = ["HeartbeatFile", "RankHeartbeat", "read_heartbeats"]

_FILE = re.compile(r"rank-(\d+)\.heartbeat")
#: ``f_type`` of tmpfs and ramfs in statfs(2). (What storage knows of file systems is in a room of the same line.)
_IN_MEMORY = (0x01021994, 0x858458F6)
_libc = ctypes.CDLL(None)


@dataclass(frozen=True, kw_only=True)
class RankHeartbeat:
    """A rank, as its file shows it at one look.

    Attributes:
        rank: global rank.
        pid: of its process, in the process's own container.
        host: of the job, as :class:`~resiliency.settings.Environment` names it.
        run: of the job.
        began: seconds since the epoch, when the process began this attempt.
        page: what it has written.
        quiet_s: seconds since its last sign of life, since it began where it has given none.
        state: "running"; "stopped" by a signal; "ended": there is no such process any more; "earlier attempt": it
            ended, and another rank in the folder is of a later attempt; "unknown": the file is of another host or of
            another start of this one, or the process is in another container.
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
    """The page of this process in a folder; replaces what an earlier process has left for this rank.

    Raises:
        ConfigError: the folder is not in memory.
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
            "boot": _boot(),
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
            # Written, not cut to size: a full file system refuses it now, instead of ending the process at a store.
            os.write(fd, (bytes(WORDS_BYTES) + text).ljust(PAGE_BYTES, b"\0"))
            os.fchmod(fd, 0o444)  # a shell that redirects into it would cut it
            super().__init__(mmap.mmap(fd, PAGE_BYTES))
            os.rename(partial, self.path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(partial)
            raise
        finally:
            os.close(fd)


def read_heartbeats(folder: str | os.PathLike[str]) -> list[RankHeartbeat]:
    """All ranks that have a file in a folder, by rank. Thread: any. Blocks: no.

    A file that is no heartbeat is left out. To be called on the host of the ranks.

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
    """None or one."""
    if not _FILE.fullmatch(path.name):
        return
    try:
        with open(path, "rb", opener=_open_no_link) as file:
            if os.fstat(file.fileno()).st_size != PAGE_BYTES:
                return
            with mmap.mmap(file.fileno(), PAGE_BYTES, access=mmap.ACCESS_READ) as mapping:
                about = json.loads(mapping[WORDS_BYTES:].rstrip(b"\0"))
                page = Page.read(mapping)
        same_clock = about["boot"] == _boot()
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
        return  # replaced just now, or no heartbeat of ours


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
    """Fields of /proc/PID/stat from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _process_started(pid: int) -> int:
    """Clock ticks since the boot: with the number of a process, that process and no other."""
    fields = _stat(pid)
    return int(fields[19]) if fields is not None else 0


def _boot() -> str:
    """Of this start of this host: monotonic time is that of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def _in_memory(path: str) -> bool:
    buffer = (ctypes.c_long * 64)()  # struct statfs begins with f_type; it is shorter than this everywhere
    return _libc.statfs(os.fsencode(path), buffer) == 0 and int(buffer[0]) in _IN_MEMORY
