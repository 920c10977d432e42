"""Collects facts about a host, each once. They are judged in :mod:`resiliency.doctor.rules`."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from resiliency.doctor.mounts import Mount, mount_of

__all__ = ["Folder", "HostFacts", "Remote", "examine_folder", "examine_host", "examine_remote"]

Value = TypeVar("Value")

#: Return value of adjtimex(2) when the clock is not synchronised.
_TIME_ERROR = 5
_TIMEX_BYTES = 512  # more than the size of struct timex
_PACKAGES = (
    "torch",
    "lightning",
    "pytorch-lightning",
    "gcsfs",
    "tensorboard",
    "jinja2",
    "prometheus-client",
    "nvidia-resiliency-ext",
    "nemo-toolkit",
)
_CGROUP_MEMORY = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_CGROUP_CPU = "/sys/fs/cgroup/cpu.max"
#: How often a small file is synced; the median time counts.
_FSYNCS = 5


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder as this process finds it.

    Attributes:
        problem: why nothing can be written there; "" when it can.
        hard_links: whether a file can get a second name.
        fsync_s: seconds until a small file is durable; None when fsync fails.
    """

    path: str
    mount: Mount
    free_bytes: int
    problem: str = ""
    hard_links: bool = True
    fsync_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Remote:
    """An object store or another tier, tried with a small object.

    Attributes:
        problem: why it cannot be used; "" when it can.
        seconds: time for writing, reading and deleting the object.
    """

    address: str
    problem: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """This machine, or this container.

    Attributes:
        packages: distribution -> version, of those that matter here and are installed.
        cores: number that this process may use: by the cgroup's quota or by affinity, whichever is less.
        memory_bytes: of the machine or of its cgroup, whichever is less.
        open_files: most files that a process may have open.
        locked_bytes: most memory that a process may lock; None: no limit.
        lacks: what the kernel or the container refuses -> why.
        name_seconds: time that the resolver takes for this machine's loopback addresses.
        ephemeral: first and last port that the kernel gives to connections.
        clock_synchronised: None when unknown.
        gpu_driver: version line of NVIDIA's kernel driver; "" without one.
        variables: names of this library's variables in the environment.
    """

    python: tuple[int, int, int]
    kernel: tuple[int, int]
    packages: dict[str, str]
    cores: float
    memory_bytes: int
    open_files: int
    locked_bytes: int | None
    lacks: dict[str, str]
    name_seconds: float
    ephemeral: tuple[int, int]
    clock_synchronised: bool | None
    gpu_driver: str
    variables: tuple[str, ...]


def examine_host(variables: dict[str, str]) -> HostFacts:
    """Asks the kernel, the resolver and the installed packages. Blocks: as long as the resolver takes.

    Args:
        variables: of the environment.
    """
    open_files, locked = resource.getrlimit(resource.RLIMIT_NOFILE)[0], resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return HostFacts(
        python=(sys.version_info.major, sys.version_info.minor, sys.version_info.micro),
        kernel=_kernel(),
        packages=_versions(),
        cores=_cores(),
        memory_bytes=_memory(),
        open_files=open_files,
        locked_bytes=None if locked == resource.RLIM_INFINITY else locked,
        lacks=_lacks(),
        name_seconds=_name_seconds(),
        ephemeral=_ephemeral(),
        clock_synchronised=_clock_synchronised(),
        gpu_driver=_first_line("/proc/driver/nvidia/version"),
        variables=tuple(sorted(name for name in variables if name.startswith("RESILIENCY_"))),
    )


def examine_folder(path: str) -> Folder:
    """Writes, links and removes small files in the folder, or in the nearest existing folder above it.

    Blocks: for some fsyncs of a small file.
    """
    place = os.path.abspath(path)
    while not os.path.isdir(place) and os.path.dirname(place) != place and not os.path.lexists(place):
        place = os.path.dirname(place)
    mount = mount_of(place)
    try:
        free = shutil.disk_usage(place).free
        with tempfile.TemporaryDirectory(prefix=".resiliency-doctor-", dir=place) as folder:
            probe = Path(folder, "probe")
            probe.write_bytes(b"x")
            links = _works(lambda: os.link(probe, Path(folder, "second")))
            seconds = _fsync_seconds(probe)
    except OSError as error:
        return Folder(
            path=path, mount=mount, free_bytes=0, problem=f"{error.strerror or error}: {error.filename or place}"
        )
    return Folder(path=path, mount=mount, free_bytes=free, hard_links=links, fsync_s=seconds)


def examine_remote(address: str) -> Remote:
    """Writes, reads and deletes a small object, and removes the folders that it has made for it.

    Blocks: up to the tier's own deadlines, about a minute.
    """
    from resiliency.errors import ResiliencyError
    from resiliency.storage.tiers import open_tier
    from resiliency.storage.tiers._address import local_path

    key = f".resiliency-doctor/{socket.gethostname()}-{os.getpid()}"
    start = time.monotonic()
    made: list[str] = []
    try:
        folder = local_path(address)
        made = [] if folder is None else _missing(os.path.dirname(os.path.join(folder, key)))
        tier = open_tier(address)
        tier.put_bytes(key, b"resiliency doctor")
        if tier.read(key) != b"resiliency doctor":
            return Remote(address=address, problem="what was written reads differently")
        tier.delete(key)
    except (ResiliencyError, OSError, ImportError) as error:
        return Remote(address=address, problem=str(error))
    finally:
        for one in made:
            _works(functools.partial(os.rmdir, one))
    return Remote(address=address, seconds=time.monotonic() - start)


def _missing(folder: str) -> list[str]:
    """The missing folders of this path, the deepest first."""
    found = []
    while folder and not os.path.lexists(folder):
        found.append(folder)
        folder = os.path.dirname(folder)
    return found


def _works(action: Callable[[], object]) -> bool:
    try:
        action()
    except OSError:
        return False
    return True


def _fsync_seconds(path: Path) -> float | None:
    taken = []
    with path.open("r+b", buffering=0) as file:
        for number in range(_FSYNCS):
            file.write(bytes([number]) * 4096)
            start = time.monotonic()
            try:
                os.fsync(file.fileno())
            except OSError:
                return None
            taken.append(time.monotonic() - start)
    return sorted(taken)[_FSYNCS // 2]


def _kernel() -> tuple[int, int]:
    numbers = [*platform.release().replace("-", ".").split("."), "0", "0"]
    return int(numbers[0]), int("".join(filter(str.isdigit, numbers[1])) or 0)


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _cores() -> float:
    cores = float(len(os.sched_getaffinity(0)))
    quota, _, period = _first_line(_CGROUP_CPU).partition(" ")
    return min(cores, int(quota) / int(period)) if quota.isdigit() and period.isdigit() else cores


def _memory() -> int:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [int(line) for line in map(_first_line, _CGROUP_MEMORY) if line.isdigit()]
    return min([total, *limits])


def _first_line(path: str) -> str:
    try:
        return (Path(path).read_text().splitlines() or [""])[0].strip()
    except OSError:
        return ""


def _lacks() -> dict[str, str]:
    """Tries what the launcher and the agent need of the kernel. Returns what is refused -> why."""
    tries: dict[str, Callable[[], object]] = {
        "pidfd": lambda: os.close(os.pidfd_open(os.getpid())),
        "memfd": lambda: os.close(os.memfd_create("resiliency-doctor")),
        "abstract sockets": _listen_abstract,
    }
    lacks = {}
    for name, action in tries.items():
        try:
            action()
        except OSError as error:
            lacks[name] = error.strerror or str(error)
    return lacks


def _listen_abstract() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as one:
        one.bind(f"\0resiliency-doctor-{os.getpid()}")


def _name_seconds() -> float:
    """Seconds that the resolver takes for the addresses that torch's store looks up at each connection."""
    start = time.monotonic()
    for address in ("127.0.0.1", "::ffff:127.0.0.1"):
        with suppress(OSError):
            socket.getnameinfo((address, 1), 0)
    return time.monotonic() - start


def _ephemeral() -> tuple[int, int]:
    first, _, last = _first_line("/proc/sys/net/ipv4/ip_local_port_range").replace("\t", " ").partition(" ")
    return (int(first), int(last)) if first.strip().isdigit() and last.strip().isdigit() else (32768, 60999)


def _clock_synchronised() -> bool | None:
    state = _attempt(lambda: int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))), -1)
    return None if state < 0 else state != _TIME_ERROR


def _attempt(action: Callable[[], Value], otherwise: Value) -> Value:
    try:
        return action()
    except (OSError, AttributeError):
        return otherwise
