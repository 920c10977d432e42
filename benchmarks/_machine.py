"""Facts about the machine and the versions, which a reader needs to judge a table."""

from __future__ import annotations

import os
import platform
import tempfile
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["cores", "filesystem", "folder_on_disk", "machine_facts"]

_PACKAGES = ("torch", "lightning", "torch-checkpointing", "torchsnapshot", "dlrover", "resiliency")
_IN_MEMORY = ("tmpfs", "ramfs")


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def filesystem(folder: Path) -> str:
    """Type of the file system that holds ``folder``, such as "ext4"; "unknown" where the kernel does not say."""
    path = str(folder.resolve())
    best, kind = "", "unknown"
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return kind
    for line in lines:
        _, mount, found, *_ = line.split()
        mount = mount.replace("\\040", " ")
        if (path == mount or path.startswith(mount.rstrip("/") + "/")) and len(mount) >= len(best):
            best, kind = mount, found
    return kind


def folder_on_disk() -> Path:
    """The first of the temporary folder, ``/var/tmp`` and the current one that is on a disk and can be written."""
    candidates = [Path(tempfile.gettempdir()), Path("/var/tmp"), Path.cwd()]
    for candidate in candidates:
        if candidate.is_dir() and os.access(candidate, os.W_OK) and filesystem(candidate) not in _IN_MEMORY:
            return candidate
    raise SystemExit(f"none of {', '.join(map(str, candidates))} is on a disk; pass one with --dir")


def machine_facts(folder: Path) -> dict[str, Any]:
    """Everything a reader needs to judge the figures."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "cores": cores(),
        "memory_gib": round(memory / 2**30, 1),
        "filesystem": filesystem(folder),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
        "versions": {name: _version(name) for name in _PACKAGES},
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        if name == "resiliency":
            import resiliency

            return f"{resiliency.__version__} (not installed)"
        return "not installed"
