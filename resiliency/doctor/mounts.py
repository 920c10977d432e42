"""Finds the file system that a folder lies on, and its properties."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Mount", "mount_of", "parse_mounts"]

#: Kinds of file systems that several hosts may mount.
_NETWORK = re.compile(
    r"(nfs\d?|cifs|smb3|lustre|gpfs|beegfs|ceph|glusterfs|afs|ocfs2|gfs2|9p|virtiofs|weka\w*|fuse\..+)"
)
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A mount. ``kind`` is the kernel's name of the file system; "" when it is unknown."""

    point: str
    kind: str
    options: frozenset[str] = frozenset()

    @property
    def is_ramdisk(self) -> bool:
        return self.kind in ("tmpfs", "ramfs", "hugetlbfs")

    @property
    def is_network(self) -> bool:
        """Whether other hosts may see it too. FUSE counts, because it is mostly a bucket or a network volume, and does
        not say."""
        return _NETWORK.fullmatch(self.kind) is not None

    @property
    def copies_on_write(self) -> bool:
        return self.kind in ("btrfs", "bcachefs", "zfs", "nilfs2", "f2fs")


def mount_of(path: str) -> Mount:
    """The mount that a path lies on; its kind is "" where the kernel does not tell."""
    try:
        text = Path("/proc/self/mountinfo").read_text()
    except OSError:
        text = ""
    return parse_mounts(text, os.path.realpath(path))


def parse_mounts(mountinfo: str, path: str) -> Mount:
    """Finds the mount of a path in a list of mounts. Of several mounts at one point the last counts. Pure.

    Args:
        mountinfo: text of ``/proc/self/mountinfo``, see proc(5).
        path: absolute, without symbolic links.
    """
    found = Mount(point="/", kind="")
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, more = before.split(), after.split()
        if len(fields) < 6 or len(more) < 3:
            continue
        point = _ESCAPED.sub(lambda octal: chr(int(octal[1], 8)), fields[4])
        if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= len(found.point):
            found = Mount(point=point, kind=more[0], options=frozenset(f"{fields[5]},{more[2]}".split(",")))
    return found
