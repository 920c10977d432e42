"""Puts faults into a job on this host on purpose, to test that a supervisor gets over them.

A fault touches only processes and files of this user, and reports what it did. What it changes for a time (a stopped
rank, a full disk) is undone at its end, also when it is interrupted.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from resiliency.errors import AgentError, ConfigError
from resiliency.monitor.launcher_process import find_launcher
from resiliency.monitor.state import StateFolder
from resiliency.regular_file import open_regular
from resiliency.runtime.channel import receive, send
from resiliency.runtime.heartbeat_files import read_heartbeats
from resiliency.runtime.messages.launcher import Control, Controlled, of_monitor, pack
from resiliency.runtime.peer_credentials import pid_and_user
from resiliency.storage.manifest import MANIFEST, META_DIR
from resiliency.testing.hosts.namespaces import is_own_namespace, within

__all__ = ["FAULTS", "Fault", "Injector", "Target", "moments"]

logger = logging.getLogger(__name__)

FAULTS = ("kill", "stop", "hang", "slow", "xid", "ecc", "partition", "disk-full", "corrupt")
_ANSWER_S = 5.0
#: A slowed rank is stopped and continued once in this many seconds.
_TURN_S = 0.1
_CHUNK = 1 << 20
#: File names that can hold a committed checkpoint, but no log and no manifest: a flipped bit there is what bit rot
#: does.
_CHECKPOINTS = (".ckpt", ".shard", ".pt", ".resiliency", ".distcp", ".safetensors", ".bin")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault and its parameters.

    Attributes:
        kind: one of :data:`FAULTS`.
        rank: global rank that is hit; None: a random one.
        seconds: how long a fault lasts that ends by itself; 0: a stopped rank stays stopped.
        duty: share of the time in which a slowed rank is stopped.
        code: number of the XID.
        device: PCI address of the device, for an XID or ECC errors.
        count: number of ECC errors.
        source: file that the monitor reads XIDs or ECC counters from; "": the monitor is told directly.
        folder: folder whose disk is filled, or below which a checkpoint is corrupted; for the latter also a file.
        most_bytes: most bytes that are written to fill a disk.
    """

    kind: str
    rank: int | None = None
    seconds: float = 0.0
    duty: float = 0.8
    code: int = 79
    device: str = "0000:3b:00"
    count: int = 1
    source: str = ""
    folder: str = ""
    most_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if self.kind not in FAULTS:
            raise ConfigError(f"there is no fault {self.kind!r}; there are {', '.join(FAULTS)}")
        if not 0 < self.duty < 1:
            raise ConfigError(f"--duty {self.duty}: pass a part of the time, above 0 and below 1")
        if self.kind in ("disk-full", "corrupt") and not self.folder:
            raise ConfigError(f"{self.kind} needs --folder")
        if self.kind in ("slow", "partition", "disk-full") and self.seconds <= 0:
            raise ConfigError(f"{self.kind} needs --for, the seconds that it lasts")


@dataclass(frozen=True, kw_only=True)
class Target:
    """How a job is found: the folder of its heartbeats, or the state folder of this host's monitor."""

    heartbeats: str = ""
    state_dir: str = ""
    host: str = ""

    def ranks(self) -> dict[int, int]:
        """Process ids by rank.

        Raises:
            ConfigError: neither heartbeats nor a monitor can be found.
        """
        if self.heartbeats:
            try:
                found = read_heartbeats(self.heartbeats)
            except OSError as error:
                raise ConfigError(f"{self.heartbeats}: {error.strerror}") from error
            return {one.rank: one.pid for one in found if one.state in ("running", "stopped")}
        answer = self.ask(Control(action="ranks"))
        return {int(rank): int(pid) for rank, pid in answer.ranks.items()}

    def ask(self, message: Control) -> Controlled:
        """Sends a message to the monitor of this host, and returns its answer. Blocks: up to 5 s.

        Raises:
            ConfigError: no monitor answers, or it is another user's.
            AgentError: the monitor refuses.
        """
        if not self.state_dir:
            raise ConfigError("pass --state-dir and --host of the monitor, or --heartbeats")
        name = StateFolder(self.state_dir, self.host).socket_name
        with self._socket(name) as end:
            end.settimeout(_ANSWER_S)
            try:
                end.connect("\0" + name)
                _, user = pid_and_user(end)
                if user != os.getuid():
                    raise ConfigError(f"the monitor of {self.state_dir} is of another user")
                send(end, pack(message))
                received = receive(end)
            except OSError as error:
                raise ConfigError(f"no monitor of host {self.host!r} and {self.state_dir} answers: {error}") from error
        if received is None:
            raise AgentError("the monitor does not do that; see its log")
        fields, fds = received
        for fd in fds:
            os.close(fd)
        answer = of_monitor(fields)
        assert isinstance(answer, Controlled)
        if answer.problem:
            raise AgentError(answer.problem)
        return answer

    def _socket(self, name: str) -> socket.socket:
        """A unix socket in the host's network namespace, if the host has its own, because abstract socket names belong
        to a namespace.

        Raises:
            ConfigError: this user may not enter the namespace.
        """
        launcher = find_launcher(name)  # it runs in the namespace of its monitor
        with suppress(FileNotFoundError):  # the launcher ends just now
            fd = -1 if launcher is None else os.open(f"/proc/{launcher.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            try:
                with nullcontext() if fd < 0 or is_own_namespace(fd) else within(fd):
                    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            except PermissionError as error:
                raise ConfigError(
                    f"host {self.host!r} has a network namespace of its own ({error}); run this as root"
                ) from error
            finally:
                if fd >= 0:
                    os.close(fd)
        return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Injector:
    """Puts faults in. Thread: one.

    Args:
        say: called with a line for each thing that was done.
        seed: equal seeds make equal random choices.
        dry_run: nothing is done; ``say`` is told what would be.
    """

    def __init__(self, target: Target, say: Callable[[str], None], *, seed: int = 0, dry_run: bool = False) -> None:
        self._target, self._say, self._dry_run = target, say, dry_run
        self._random = random.Random(seed)
        self._waits = threading.Event()

    def inject(self, fault: Fault) -> None:
        """Puts a fault in. Blocks: as long as the fault lasts.

        Raises:
            ConfigError, AgentError: it could not be put in; the error says why.
        """
        {
            "kill": self._signal,
            "stop": self._signal,
            "hang": self._signal,
            "slow": self._slow,
            "xid": self._xid,
            "ecc": self._ecc,
            "partition": self._partition,
            "disk-full": self._fill,
            "corrupt": self._corrupt,
        }[fault.kind](fault)

    def _tell(self, text: str) -> bool:
        """Tells ``say``. Returns False in a dry run: the fault must not be put in."""
        self._say(f"would {text}" if self._dry_run else text)
        return not self._dry_run

    def _wait(self, seconds: float) -> None:
        self._waits.wait(seconds)

    # -- ranks --------------------------------------------------------------------------------------------------------

    @contextmanager
    def _rank(self, fault: Fault) -> Iterator[tuple[int, int, int]]:
        """Yields the rank, its process id, and a pidfd, which means this process even if the id is used again."""
        ranks = self._target.ranks()
        wanted = sorted(ranks) if fault.rank is None else [fault.rank]
        if not ranks or wanted[0] not in ranks:
            raise ConfigError(f"rank {fault.rank} does not run here" if ranks else "no ranks run here")
        rank = self._random.choice(wanted)
        pid = ranks[rank]
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            raise ConfigError(f"rank {rank}, process {pid}, is gone: {error.strerror}") from error
        try:
            if os.stat(f"/proc/{pid}").st_uid != os.getuid():
                raise ConfigError(f"rank {rank}, process {pid}, is of another user")
            yield rank, pid, pidfd
        except FileNotFoundError:
            raise ConfigError(f"rank {rank}, process {pid}, is gone") from None
        finally:
            os.close(pidfd)

    def _signal(self, fault: Fault) -> None:
        with self._rank(fault) as (rank, pid, pidfd):
            number = {"kill": signal.SIGKILL, "stop": signal.SIGTERM, "hang": signal.SIGSTOP}[fault.kind]
            if not self._tell(f"{fault.kind} rank {rank}: {number.name} to process {pid}"):
                return
            _send(pidfd, number)
            if fault.kind == "hang" and fault.seconds:
                try:
                    self._wait(fault.seconds)
                finally:
                    _send(pidfd, signal.SIGCONT)
                    self._say(f"rank {rank} goes on")

    def _slow(self, fault: Fault) -> None:
        with self._rank(fault) as (rank, pid, pidfd):
            part = f"{fault.duty:.0%} of the next {fault.seconds:g} s"
            if not self._tell(f"slow rank {rank}: process {pid} is stopped for {part}"):
                return
            end_s = time.monotonic() + fault.seconds
            try:
                while time.monotonic() < end_s and _send(pidfd, signal.SIGSTOP):
                    self._wait(_TURN_S * fault.duty)
                    _send(pidfd, signal.SIGCONT)
                    self._wait(_TURN_S * (1 - fault.duty))
            finally:
                _send(pidfd, signal.SIGCONT)

    # -- the host -----------------------------------------------------------------------------------------------------

    def _tell_monitor(self, fault: Fault) -> None:
        """Tells the monitor of a device fault, where it reads none from a file."""
        target = self._target
        if not target.state_dir:
            raise ConfigError(
                f"{fault.kind} needs --state-dir and --host of a monitor that runs, or --source, the file that was"
                f" given to one as --{fault.kind}-source"
            )
        what = f"XID {fault.code}" if fault.kind == "xid" else f"{fault.count} memory errors"
        if self._tell(f"{fault.kind}: the monitor of {target.host} finds {what} of device {fault.device}"):
            target.ask(Control(action=fault.kind, device=fault.device, code=fault.code, count=fault.count))

    def _xid(self, fault: Fault) -> None:
        if not fault.source:
            self._tell_monitor(fault)
            return
        line = f"NVRM: Xid (PCI:{fault.device}): {fault.code}, injected fault"
        if self._tell(f"xid {fault.code} of device {fault.device}, in {fault.source}"):
            with os.fdopen(open_regular(fault.source, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as file:
                file.write(line + "\n")

    def _ecc(self, fault: Fault) -> None:
        if not fault.source:
            self._tell_monitor(fault)
            return
        path = Path(fault.source)
        counts = dict(line.split() for line in path.read_text().splitlines() if line.strip()) if path.exists() else {}
        count = int(counts.get(fault.device, 0)) + fault.count
        if self._tell(f"ecc: device {fault.device} has {count} errors now, in {fault.source}"):
            counts[fault.device] = str(count)
            partial = path.with_name(f"{path.name}.new")
            partial.write_text("".join(f"{device} {number}\n" for device, number in counts.items()))
            partial.replace(path)

    def _partition(self, fault: Fault) -> None:
        if self._tell(f"partition: {self._target.host} is cut off for {fault.seconds:g} s"):
            self._target.ask(Control(action="partition", seconds=fault.seconds))

    def _fill(self, fault: Fault) -> None:
        path = os.path.join(fault.folder, f".resiliency-inject-{os.getpid()}")
        room = f"up to {fault.most_bytes / 2**30:.2f} GB for {fault.seconds:g} s"
        if not self._tell(f"disk-full: {path} grows by {room}"):
            return
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            written = _write_until_full(fd, fault.most_bytes)
            self._say(f"{written / 2**30:.2f} GB written")
            self._wait(fault.seconds)
        finally:
            os.close(fd)
            os.unlink(path)
            self._say(f"{path} is removed")

    def _corrupt(self, fault: Fault) -> None:
        files = _checkpoint_files(fault.folder)
        if not files:
            raise ConfigError(f"there is no checkpoint file of this user below {fault.folder}")
        path = self._random.choice(files)
        fd = open_regular(str(path), os.O_RDWR | os.O_NOFOLLOW)
        try:
            at = self._random.randrange(os.fstat(fd).st_size)
            (before,) = os.pread(fd, 1, at)
            after = before ^ (1 << self._random.randrange(8))
            if self._tell(f"corrupt {path}: byte {at} was {before:#04x}, is {after:#04x}"):
                os.pwrite(fd, bytes([after]), at)
                os.fsync(fd)
        finally:
            os.close(fd)


def moments(*, at_s: float, every_s: float, count: int) -> Iterator[float]:
    """When each fault is due, in seconds from now.

    Args:
        count: number of faults; 0: one, or without end where ``every_s`` is not 0.
    """
    number = 0
    while number < (count or (1 if not every_s else number + 1)):
        yield at_s + number * every_s
        number += 1


def _send(pidfd: int, number: int) -> bool:
    """Sends a signal. Returns False when the process has ended."""
    with suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, number)
        return True
    return False


def _write_until_full(fd: int, most: int) -> int:
    written = 0
    chunk = b"\xa5" * _CHUNK  # not zeros, because a file system may store zeros as a hole
    with suppress(OSError):  # the disk is full
        while written < most:
            written += os.write(fd, chunk[: most - written])
        os.fsync(fd)
    return written


def _checkpoint_files(where: str) -> Sequence[Path]:
    path = Path(where)
    found = [path] if path.is_file() else sorted(path.rglob("*"))
    return [one for one in found if one.suffix in _CHECKPOINTS and _is_own(one) and _is_committed(one)]


def _is_committed(path: Path) -> bool:
    """Whether the file belongs to a committed checkpoint: in a step of this library, its manifest exists. Any other
    file counts as committed."""
    return META_DIR not in path.parts or (path.parent / MANIFEST).exists()


def _is_own(path: Path) -> bool:
    with suppress(OSError):
        status = path.lstat()
        return path.is_file() and not path.is_symlink() and status.st_size > 0 and status.st_uid == os.getuid()
    return False
