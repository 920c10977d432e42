"""The file systems of a container: those of this machine, but for what is mounted over them."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tests.cluster.kubelet_api import Json
from tests.cluster.tools import REPOSITORY

if TYPE_CHECKING:
    from tests.cluster.process_pod import Pod

__all__ = ["mounts"]

#: Where a pod has file systems of its own, so that the machine keeps what it has there.
HIDDEN = "/run", "/pod", "/etc/resiliency", "/var/lib/resiliency"


def mounts(pod: Pod, container: Json) -> Iterator[str]:
    """Lines of a shell script that makes them, in new namespaces of mounts and of the host's name."""
    yield f"echo {shlex.quote(pod.hostname)} > /proc/sys/kernel/hostname"
    yield f"mount --bind {pod.hosts} /etc/hosts"
    found = [(os.path.realpath(mount["mountPath"]), mount) for mount in container.get("volumeMounts", ())]
    for hidden in HIDDEN:
        if any(_below(path, hidden) for path, _ in found):
            yield f"mkdir -p {hidden}; mount -t tmpfs pod {hidden}"
    # Last those that hide what this machine has there: /tmp may be one, below which the sources of all others are.
    for path, mount in sorted(found, key=lambda each: not any(_below(each[0], hidden) for hidden in HIDDEN)):
        source = shlex.quote(str(pod.volumes[mount["name"]] / mount.get("subPath", "")))
        if any(_below(path, hidden) for hidden in HIDDEN):
            yield f"mkdir -p {os.path.dirname(path)}; [ -f {source} ] && touch {path} || mkdir -p {source} {path}"
        elif not os.path.exists(path):
            yield f"echo 'no mount point {path} on this machine: take one below {' or '.join(HIDDEN)}'; exit 128"
        for kept in sorted({str(REPOSITORY), sys.prefix, str(pod.folder)}):
            if _below(kept, path):
                there = f"{source}/{os.path.relpath(kept, path)}"
                yield f"mkdir -p {there}; mount --bind {kept} {there}"
        yield f"mount --rbind {source} {path}"
    yield f"cd {shlex.quote(container.get('workingDir', '/'))}"


def _below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")
