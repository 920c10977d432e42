"""Judges a host's facts: what they mean for a job, and what to do about it. Pure: no input, no output."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from resiliency.doctor.facts import Folder, HostFacts, Remote

__all__ = ["HostFinding", "Verdict", "judge_folder", "judge_host", "judge_ports", "judge_ramdisk", "judge_remote"]

_GIB = 1024**3
_MIB = 1024**2
#: Files of a state's size that must fit in a folder: two that are prepared, and one that is kept or uploaded.
_WORKING_FILES = 3
#: The size of ``/dev/shm`` in a container by default.
_CONTAINER_SHM = 64 * _MIB
_SLOW_NAMES_S = 0.5
_SLOW_FSYNC_S = 0.1
_OPEN_FILES = 1024
#: Variables of this library that may be set, and those that it sets for its own processes.
KNOWN_VARIABLES = frozenset(
    "RESILIENCY_" + name
    for name in (
        "ATTEMPT", "DEVICES", "EVENTS_DIR", "FAULTS", "GENERATION", "HEARTBEAT_DIR", "HOSTS", "HOSTS_OUT", "INCIDENT",
        "JOB", "LAUNCHER", "LAUNCHER_STARTS", "LOCAL_DIR", "NODE", "PLAN", "REASON", "REMEDY", "REPLICAS",
        "REPLICAS_BEFORE", "RUN", "SUPERVISOR", "SUPERVISOR_TOKEN_FILE", "WORKLOAD",
    )
)  # fmt: skip


class Verdict(Enum):
    """How bad a finding is. ``NOTE``: it works, and there is something to know."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    BROKEN = "broken"


@dataclass(frozen=True, kw_only=True)
class HostFinding:
    """A row of the table.

    Attributes:
        check: what was examined.
        found: the result, in words.
        remedy: what to do; "" when there is nothing to do.
    """

    check: str
    verdict: Verdict
    found: str
    remedy: str = ""


def judge_host(host: HostFacts) -> Iterator[HostFinding]:
    """Findings on the interpreter, packages, kernel, limits, clock and names."""
    yield _python(host)
    yield _torch(host)
    yield from _lightning(host)
    yield from _kernel(host)
    yield _cores(host)
    yield _limits(host)
    yield _clock(host)
    yield _names(host)
    yield from _variables(host)
    if host.gpu_driver:
        yield HostFinding(check="GPU driver", verdict=Verdict.OK, found=host.gpu_driver)
    if "nvidia-resiliency-ext" in host.packages:
        found = f"nvidia-resiliency-ext {host.packages['nvidia-resiliency-ext']}: heartbeats can be sent to ft_launcher"
        yield HostFinding(check="NVRx", verdict=Verdict.NOTE, found=found)


def _python(host: HostFacts) -> HostFinding:
    found = ".".join(map(str, host.python))
    if host.python < (3, 10):
        return HostFinding(
            check="Python", verdict=Verdict.BROKEN, found=found, remedy="this library needs Python 3.10 or newer"
        )
    if host.python[:2] == (3, 10) and host.python[2] < 15 or host.python[:2] == (3, 11) and host.python[2] < 10:
        return HostFinding(
            check="Python",
            verdict=Verdict.NOTE,
            found=f"{found}: about one loader worker of ten thousand hangs in fork (CPython gh-112275)",
            remedy='update Python, or pass persistent_workers=True or multiprocessing_context="forkserver" to loaders',
        )
    return HostFinding(check="Python", verdict=Verdict.OK, found=found)


def _torch(host: HostFacts) -> HostFinding:
    found = host.packages.get("torch")
    if found is None:
        return HostFinding(
            check="torch", verdict=Verdict.BROKEN, found="not installed", remedy="install torch 2.6 or newer, then this"
        )
    if _number(found) < (2, 6):
        return HostFinding(
            check="torch", verdict=Verdict.BROKEN, found=found, remedy="this library needs torch 2.6 or newer"
        )
    return HostFinding(check="torch", verdict=Verdict.OK, found=found)


def _lightning(host: HostFacts) -> Iterator[HostFinding]:
    installed = {name: host.packages[name] for name in ("lightning", "pytorch-lightning") if name in host.packages}
    if not installed:
        yield HostFinding(
            check="Lightning",
            verdict=Verdict.WARNING,
            found="not installed: callbacks and plugins cannot be used, the Checkpointer can",
            remedy="pip install lightning",
        )
    for name, version in installed.items():
        yield _lightning_version(name, version)
    if len(installed) == 2:
        yield HostFinding(
            check="Lightning",
            verdict=Verdict.NOTE,
            found="both packages are installed; they share no classes",
            remedy="import the one your Trainer comes from before this library's callbacks",
        )


def _lightning_version(name: str, version: str) -> HostFinding:
    number = _number(version)
    if number < (2, 4):
        return HostFinding(check=name, verdict=Verdict.BROKEN, found=version, remedy="this library needs 2.4 or newer")
    if number in ((2, 6, 2), (2, 6, 3)):
        return HostFinding(
            check=name,
            verdict=Verdict.BROKEN,
            found=f"{version}: this release was compromised on the registry (Lightning #21691)",
            remedy="treat secrets of this machine as known to others, and install 2.6.6 or newer",
        )
    if (2, 6) <= number < (2, 6, 6):
        return HostFinding(
            check=name,
            verdict=Verdict.WARNING,
            found=f"{version}: a checkpoint of others can run code when it is loaded",
            remedy="install 2.6.6 or newer",
        )
    return HostFinding(check=name, verdict=Verdict.OK, found=version)


_NEEDED_FOR = {
    "pidfd": (
        "resiliency run does not see a death at once",
        "Linux 5.3 or newer, and a container that may use pidfd_open",
    ),
    "memfd": ("resiliency run sees no hang", "a container that may use memfd_create"),
    "abstract sockets": (
        "no checkpoint agent: Lightning's own code saves the checkpoints",
        "let the container use AF_UNIX",
    ),
}


def _kernel(host: HostFacts) -> Iterator[HostFinding]:
    found = ".".join(map(str, host.kernel))
    if not host.lacks:
        yield HostFinding(check="kernel", verdict=Verdict.OK, found=f"Linux {found}")
    for name, reason in host.lacks.items():
        effect, remedy = _NEEDED_FOR[name]
        yield HostFinding(
            check="kernel",
            verdict=Verdict.WARNING,
            found=f"Linux {found}: no {name} ({reason}): {effect}",
            remedy=remedy,
        )


def _cores(host: HostFacts) -> HostFinding:
    if host.cores < 2:
        return HostFinding(
            check="cores",
            verdict=Verdict.WARNING,
            found=f"{host.cores:g}: copies and uploads take the time of training",
            remedy="give the container at least 2 cores for each rank",
        )
    return HostFinding(check="cores", verdict=Verdict.OK, found=f"{host.cores:g}")


def _limits(host: HostFacts) -> HostFinding:
    locked = "no limit" if host.locked_bytes is None else _size(host.locked_bytes)
    found = f"{host.open_files} open files, {locked} of locked memory"
    if host.open_files < _OPEN_FILES:
        return HostFinding(
            check="limits", verdict=Verdict.WARNING, found=found, remedy=f"ulimit -n {_OPEN_FILES * 64}, or more"
        )
    if host.gpu_driver and host.locked_bytes is not None and host.locked_bytes < _GIB:
        return HostFinding(
            check="limits",
            verdict=Verdict.NOTE,
            found=found,
            remedy="ulimit -l unlimited, where page-locked memory for copies from the GPU is refused",
        )
    return HostFinding(check="limits", verdict=Verdict.OK, found=found)


def _clock(host: HostFacts) -> HostFinding:
    if host.clock_synchronised is False:
        return HostFinding(
            check="clock",
            verdict=Verdict.WARNING,
            found="not synchronised: the goodput report has to guess how hosts relate",
            remedy="run chrony or systemd-timesyncd on the host",
        )
    said = {True: "synchronised", None: "the kernel does not say whether it is synchronised"}
    return HostFinding(check="clock", verdict=Verdict.OK, found=said[host.clock_synchronised])


def _names(host: HostFacts) -> HostFinding:
    if host.name_seconds >= _SLOW_NAMES_S:
        return HostFinding(
            check="names",
            verdict=Verdict.WARNING,
            found=f"the resolver took {host.name_seconds:.1f} s for 127.0.0.1; torch's store asks at each connection",
            remedy='mend the resolver, or set RES_OPTIONS="timeout:1 attempts:1" for the job',
        )
    return HostFinding(check="names", verdict=Verdict.OK, found=f"127.0.0.1 in {1000 * host.name_seconds:.0f} ms")


def _variables(host: HostFacts) -> Iterator[HostFinding]:
    unknown = [name for name in host.variables if name not in KNOWN_VARIABLES]
    if unknown:
        yield HostFinding(
            check="variables",
            verdict=Verdict.WARNING,
            found=f"{', '.join(unknown)}: nothing reads this",
            remedy=f"misspelt? There are {', '.join(sorted(KNOWN_VARIABLES))}",
        )
    elif host.variables:
        yield HostFinding(check="variables", verdict=Verdict.OK, found=", ".join(host.variables))


def judge_folder(folder: Folder, host: HostFacts, *, state_bytes: int) -> Iterator[HostFinding]:
    """Findings on the folder that checkpoints are written to.

    Args:
        state_bytes: size of the state of this host's ranks; 0: unknown.
    """
    check, kind = f"folder {folder.path}", folder.mount.kind or "unknown file system"
    if folder.problem:
        remedy = "make it, or mount a volume there that this user may write to"
        yield HostFinding(check=check, verdict=Verdict.BROKEN, found=folder.problem, remedy=remedy)
        return
    need = _WORKING_FILES * state_bytes
    found = f"{kind}, {_size(folder.free_bytes)} free"
    if state_bytes and folder.free_bytes < need:
        remedy = f"{_size(need)} are needed for a state of {_size(state_bytes)}: what is kept, and the next two saves"
        yield HostFinding(check=check, verdict=Verdict.BROKEN, found=found, remedy=remedy)
    elif folder.mount.is_ramdisk:
        remedy = "pass a slower tier, too (remotes=, or a folder on a disk): a ramdisk does not survive its machine"
        yield HostFinding(
            check=check, verdict=Verdict.WARNING, found=f"{found}; nothing there is ever durable", remedy=remedy
        )
    else:
        yield HostFinding(check=check, verdict=Verdict.OK, found=f"{found}, {_sharing(folder)}")
    if not folder.hard_links:
        remedy = "use a disk or a ramdisk as the local tier (RESILIENCY_LOCAL_DIR), and this folder as a remote tier"
        yield HostFinding(
            check=check, verdict=Verdict.WARNING, found="no hard links: each name is a copy", remedy=remedy
        )
    if folder.fsync_s is None:
        remedy = "use it as a remote tier, and a disk as the local one"
        yield HostFinding(check=check, verdict=Verdict.WARNING, found="fsync fails: nothing is durable", remedy=remedy)
    elif folder.fsync_s >= _SLOW_FSYNC_S:
        remedy = "saves are durable later; nothing waits for it but the end of a fit"
        found = f"a small fsync takes {1000 * folder.fsync_s:.0f} ms"
        yield HostFinding(check=check, verdict=Verdict.NOTE, found=found, remedy=remedy)
    yield from _pages(folder, host, check)


def _sharing(folder: Folder) -> str:
    if folder.mount.is_network:
        return "which other hosts may see, too"
    return "of this host: with several hosts each gets a whole checkpoint"


def _pages(folder: Folder, host: HostFacts, check: str) -> Iterator[HostFinding]:
    if folder.mount.copies_on_write or folder.mount.kind == "overlay":
        found = (
            f"{folder.mount.kind}: files are written, not mapped, and a save takes a second copy of memory bandwidth"
        )
        yield HostFinding(
            check=check, verdict=Verdict.NOTE, found=found, remedy="XFS or ext4 are faster, where you can choose"
        )
    elif folder.mount.kind == "ext4" and host.kernel < (6, 16):
        found = "ext4 has no huge pages before Linux 6.16: a copy after an fsync takes up to 5 times as long"
        yield HostFinding(check=check, verdict=Verdict.NOTE, found=found, remedy="XFS has them, where you can choose")


def judge_ramdisk(folder: Folder, host: HostFacts, *, state_bytes: int) -> Iterator[HostFinding]:
    """Findings on the ramdisk, where the fastest tier may lie.

    Args:
        state_bytes: size of the state of this host's ranks; 0: unknown.
    """
    check = f"ramdisk {folder.path}"
    if folder.problem or not folder.mount.is_ramdisk:
        found = folder.problem or f"is no ramdisk ({folder.mount.kind or 'unknown file system'})"
        remedy = "no local tier in memory is possible there; pass another folder with --ramdisk"
        yield HostFinding(check=check, verdict=Verdict.NOTE, found=found, remedy=remedy)
        return
    need = _WORKING_FILES * state_bytes
    found = f"{_size(folder.free_bytes)} free of {_size(host.memory_bytes)} of memory"
    if folder.free_bytes <= _CONTAINER_SHM:
        remedy = "start the container with --shm-size, or mount an emptyDir with medium: Memory; loaders need it, too"
        yield HostFinding(check=check, verdict=Verdict.WARNING, found=found, remedy=remedy)
    elif state_bytes and folder.free_bytes < need:
        remedy = (
            f"a local tier there needs {_size(need)} for a state of {_size(state_bytes)}: make it larger, or use a disk"
        )
        yield HostFinding(check=check, verdict=Verdict.WARNING, found=found, remedy=remedy)
    elif state_bytes and host.memory_bytes < need + state_bytes:
        remedy = "files on a ramdisk count as memory of the container: raise its limit, or use a disk"
        yield HostFinding(check=check, verdict=Verdict.WARNING, found=found, remedy=remedy)
    else:
        yield HostFinding(check=check, verdict=Verdict.OK, found=found)


def judge_remote(remote: Remote) -> HostFinding:
    """A finding on a slower tier."""
    check = f"tier {remote.address}"
    if remote.problem:
        remedy = "see the message; docs/tiers.md says what each store needs"
        return HostFinding(check=check, verdict=Verdict.BROKEN, found=remote.problem, remedy=remedy)
    found = f"a small object was written, read and deleted in {remote.seconds:.2f} s"
    return HostFinding(check=check, verdict=Verdict.OK, found=found)


def judge_ports(host: HostFacts, port: int, *, free: bool) -> HostFinding:
    """A finding on the port at which ranks meet (``MASTER_PORT``)."""
    check, (first, last) = f"port {port}", host.ephemeral
    if not free:
        remedy = "end what listens there, or pass another port (--rdzv-endpoint, --master-port)"
        return HostFinding(check=check, verdict=Verdict.BROKEN, found="is taken", remedy=remedy)
    if first <= port <= last:
        remedy = f"use a port below {first}"
        found = "is free now, and the kernel may give it to any connection"
        return HostFinding(check=check, verdict=Verdict.WARNING, found=found, remedy=remedy)
    return HostFinding(check=check, verdict=Verdict.OK, found="is free")


def _number(version: str) -> tuple[int, ...]:
    """The numbers of a release: (2, 13, 0) for 2.13.0+cpu, (2, 6, 6) for 2.6.6.dev1."""
    return tuple(int(part) for part in re.match(r"\d*(\.\d+)*", version)[0].split(".") if part)  # type: ignore[index]


def _size(nbytes: int) -> str:
    return f"{nbytes / _GIB:.1f} GiB" if nbytes >= _GIB else f"{nbytes / _MIB:.0f} MiB"
