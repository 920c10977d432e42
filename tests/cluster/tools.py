"""Finds the programs of a Kubernetes control plane, which are no part of this repository."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

__all__ = ["REPOSITORY", "VARIABLE", "ToolsMissing", "find_tools"]

REPOSITORY = Path(__file__).resolve().parents[2]
#: Names a folder that has the programs.
VARIABLE = "RESILIENCY_TEST_KUBERNETES"
ARCHIVE = REPOSITORY.parent / "shared" / "cluster" / "tools.tar.xz"
PROGRAMS = "etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl", "jobset", "kwok", "helm"


class ToolsMissing(Exception):
    """There is no control plane to be had on this machine; the message says what is missing."""


def find_tools() -> Path:
    """The folder with the programs; unpacks the archive once per machine, which takes five seconds.

    Raises:
        ToolsMissing: neither the folder nor the archive is there, or a program.
    """
    given = os.environ.get(VARIABLE)
    if given is None and not ARCHIVE.exists():
        raise ToolsMissing(f"no Kubernetes: {VARIABLE} is not set, and there is no {ARCHIVE}")
    folder = Path(given) if given is not None else _unpacked()
    missing = [name for name in PROGRAMS if not os.access(folder / name, os.X_OK)]
    missing += [name for name in ("openssl", "setpriv", "setsid", "unshare") if shutil.which(name) is None]
    if not list(folder.glob("jobset-*.tgz")):
        missing.append("the chart jobset-VERSION.tgz")
    if missing:
        raise ToolsMissing(f"no Kubernetes: {folder} and PATH lack {', '.join(missing)}")
    return folder


def _unpacked() -> Path:
    found = ARCHIVE.stat()
    folder = Path(tempfile.gettempdir(), f"resiliency-kubernetes-tools-{found.st_size}-{int(found.st_mtime)}")
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            partial = Path(f"{folder}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            subprocess.run(["tar", "-xJf", ARCHIVE, "-C", partial], check=True)
            partial.rename(folder)
    return folder
