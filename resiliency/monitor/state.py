"""The state of a host monitor that must survive a kill: one small file, replaced whole, and a lock beside it.

The lock belongs to the open file, so that the kernel frees it when the process has ended in any way, and a launcher
that the process has started does not hold it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import struct
from dataclasses import dataclass, field
from typing import Any

from resiliency.errors import ConfigError
from resiliency.events import boot_id
from resiliency.regular_file import open_regular
from resiliency.runtime.typed_json import from_jsonable, to_jsonable

__all__ = ["AskMemory", "Fault", "Given", "LauncherId", "MonitorState", "Remembered", "StateFolder", "boot_id"]

logger = logging.getLogger(__name__)

#: How many workloads, asks and faults are remembered; the oldest are forgotten.
_MOST_WORKLOADS, _MOST_ASKS, _MOST_FAULTS = 64, 256, 1024


@dataclass(frozen=True, kw_only=True)
class LauncherId:
    """Identifies one process, a launcher or a rank, for ever.

    Attributes:
        started: when it started, in clock ticks since boot.
        boot: id of the boot it runs in.
    """

    pid: int
    started: int
    boot: str


@dataclass(frozen=True, kw_only=True)
class Given:
    """The newest generation of a workload that a launcher of this host was given. Each generation is given once.

    Attributes:
        withdrawn: the launcher was told afterwards to have no ranks.
        node_rank, nodes, replicas: of that place; -1, 0 and 0: an earlier version of the library has not written them
            down.
    """

    workload: str
    generation: int
    launcher: LauncherId
    withdrawn: bool = False
    node_rank: int = -1
    nodes: int = 0
    replicas: int = 0


@dataclass(frozen=True, kw_only=True)
class AskMemory:
    """A step of a plan that must not be carried out twice.

    Attributes:
        problem: the result ("": it was done); None: it was begun, and whether it was done is not known.
    """

    plan: int
    at: int
    generation: int = 0
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of this host that lasts until the host, or the device, is restarted."""

    boot: str
    device: str
    code: str
    device_class: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class Remembered:
    """The content of the file.

    Attributes:
        term: the highest term of a supervisor that was heard.
        launcher: the one that was started last.
        ranks: the processes that it has reported as its ranks.
        given: by workload, the oldest first.
        cursors: how far each watchdog has read, as "name=value".
    """

    term: int = 0
    launcher: LauncherId | None = None
    ranks: tuple[LauncherId, ...] = ()
    given: tuple[Given, ...] = ()
    asks: tuple[AskMemory, ...] = ()
    faults: tuple[Fault, ...] = ()
    cursors: tuple[str, ...] = ()


@dataclass(kw_only=True)
class MonitorState:
    """The same values in memory. Thread: one. Changes are on disk after :meth:`StateFolder.save`."""

    term: int = 0
    launcher: LauncherId | None = None
    ranks: tuple[LauncherId, ...] = ()
    given: dict[str, Given] = field(default_factory=dict)
    asks: dict[tuple[int, int, int], AskMemory] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    cursors: dict[str, str] = field(default_factory=dict)

    def give(self, one: Given) -> None:
        self.given.pop(one.workload, None)
        self.given[one.workload] = one
        _shorten(self.given, _MOST_WORKLOADS)

    def remember_ask(self, one: AskMemory) -> None:
        self.asks.pop((one.plan, one.at, one.generation), None)
        self.asks[one.plan, one.at, one.generation] = one
        _shorten(self.asks, _MOST_ASKS)

    def add_fault(self, one: Fault) -> None:
        """Remembers a fault in place of an earlier one with the same device and code."""
        kept = [known for known in self.faults if (known.device, known.code) != (one.device, one.code)]
        self.faults = [*kept, one][-_MOST_FAULTS:]


class StateFolder:
    """The state folder, its file, and its lock. Thread: one.

    Args:
        path: created when missing; only this user may read it.
        host: a folder serves one host.
    """

    def __init__(self, path: str, host: str) -> None:
        self.path, self.host = os.path.realpath(path), host
        self._lock = -1
        self._problem = ""

    @property
    def socket_name(self) -> str:
        """Name of the abstract unix socket: the same for every monitor of this folder and host, and for no other."""
        key = hashlib.sha256(f"{self.path}\0{self.host}\0{os.getuid()}".encode()).hexdigest()[:24]
        return f"resiliency-monitor-{key}"

    @property
    def problem(self) -> str:
        """Why the last save failed; "" when it succeeded."""
        return self._problem

    def open(self) -> MonitorState:
        """Takes the lock, and reads what the last monitor has stored.

        Raises:
            ConfigError: another monitor has the lock, or the folder cannot be used.
        """
        try:
            os.makedirs(self.path, mode=0o700, exist_ok=True)
            self._lock = open_regular(os.path.join(self.path, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigError(f"the state folder {self.path} cannot be used: {error.strerror}; pass another") from error
        try:
            fcntl.fcntl(self._lock, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        except OSError as error:
            self.close()
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise ConfigError(
                    f"another host monitor of {self.path} runs; one is enough, or pass another --state-dir and --host"
                ) from None
            raise ConfigError(
                f"the state folder {self.path} has no locks: {error.strerror}; pass a local one"
            ) from error
        return self._read()

    def _read(self) -> MonitorState:
        path = self._file
        try:
            with os.fdopen(open_regular(path), "rb") as file:
                found = from_jsonable(Remembered, json.loads(file.read()))
        except FileNotFoundError:
            return MonitorState()
        except (OSError, ValueError, RecursionError) as error:
            aside = f"{path}.bad"
            logger.error(
                "%s cannot be read (%s) and is put aside as %s; a running launcher is searched for among all processes,"
                " and the term of the last supervisor is unknown",
                path,
                error,
                aside,
            )
            os.replace(path, aside)
            return MonitorState()
        here = boot_id()
        return MonitorState(
            term=found.term,
            launcher=found.launcher,
            ranks=found.ranks,
            given={one.workload: one for one in found.given},
            asks={(one.plan, one.at, one.generation): one for one in found.asks},
            faults=[one for one in found.faults if one.boot == here],
            cursors=dict(tuple(text.split("=", 1)) for text in found.cursors if "=" in text),  # type: ignore[misc]
        )

    def save(self, state: MonitorState) -> bool:
        """Writes the state to disk durably. Blocks: for the disk. Returns False, and logs it once, when that failed."""
        text = json.dumps(to_jsonable(_frozen(state)), indent=1).encode()
        partial = f"{self._file}.new"
        try:
            fd = open_regular(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, self._file)
            folder = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            if not self._problem:
                logger.error("the state of this monitor cannot be written to %s: %s", self._file, error)
            self._problem = f"the state folder {self.path} cannot be written: {error.strerror}"
            return False
        self._problem = ""
        return True

    def show_ready(self, ready: bool) -> None:
        """Makes the file ``ready``, or removes it: a probe of the host looks whether it is there."""
        path = os.path.join(self.path, "ready")
        try:
            if ready:
                os.close(open_regular(path, os.O_WRONLY | os.O_CREAT, 0o600))
            elif os.path.lexists(path):
                os.unlink(path)
        except OSError as error:
            logger.warning("%s cannot be %s: %s", path, "made" if ready else "removed", error.strerror)

    @property
    def _file(self) -> str:
        return os.path.join(self.path, "monitor.json")

    def close(self) -> None:
        """Releases the lock. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _frozen(state: MonitorState) -> Remembered:
    return Remembered(
        term=state.term,
        launcher=state.launcher,
        ranks=state.ranks,
        given=tuple(state.given.values()),
        asks=tuple(state.asks.values()),
        faults=tuple(state.faults),
        cursors=tuple(f"{name}={value}" for name, value in state.cursors.items()),
    )


def _shorten(values: dict[Any, Any], most: int) -> None:
    while len(values) > most:
        del values[next(iter(values))]
