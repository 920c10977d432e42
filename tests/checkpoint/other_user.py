"""Runs scripts as other users, in processes with a deadline: root may read and write everything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import resiliency

#: Two users without any rights, of one group.
ALICE, BOB, GROUP = 64001, 64002, 64000

#: In a mount namespace of its own: lets other users reach the interpreter where it lies in a folder closed to them.
_OPEN_THE_WAY = """
if [ -n "$BLOCKED" ]; then
    mkdir -p "$SCRATCH/keep" && mount --bind "$PREFIX" "$SCRATCH/keep" &&
    mount -t tmpfs -o mode=755 tmpfs "$BLOCKED" &&
    (umask 022; mkdir -p "$PREFIX") && mount --bind "$SCRATCH/keep" "$PREFIX" || exit 1
fi
exec "$0" -c "$1"
"""

#: The interpreter starts once, and becomes a user in a forked child for each script.
_RUN = """
import json, logging, os, sys, traceback
from datetime import timedelta
import torch
from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.options import CheckpointerOptions, LocalTierOptions
from resiliency.inspection.by_path import load_path, locate
from resiliency.storage.stage import Stage

class Keep(logging.Handler):
    def emit(self, record):
        warnings.append(record.getMessage())

def checkpointer(keep=1, agent="embedded"):
    local = LocalTierOptions(directory=folder, keep=keep)
    return Checkpointer(local, run="run", rank=0, world_size=1, options=CheckpointerOptions(agent=agent))

def save(engine, step, *names):
    ticket = engine.save(step, {"w": torch.full((1000,), float(step))}, names=list(names))
    ticket.wait(Stage.DURABLE, timeout=timedelta(seconds=30))

folder, group, jobs = json.loads(os.environ["JOBS"])
for user, umask, script in jobs:
    if user is None:
        exec(script)  # as root
        continue
    sys.stdout.flush()
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0, f"the script of user {user} failed"
        continue
    status = 1
    try:
        os.setgroups([])
        os.setresgid(group, group, group)
        os.setresuid(user, user, user)
        os.umask(umask)
        warnings, result = [], {}
        logging.getLogger().addHandler(Keep(logging.WARNING))
        exec(script)
        print(json.dumps({**result, "warnings": warnings}), flush=True)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
"""


def run_as(folder: Path, *jobs: tuple[int | None, int, str], timeout_s: float = 150.0) -> list[dict[str, Any]]:
    """Runs scripts one after the other, each as (user, umask, text); user None: as root, without a result.

    A script saves in ``folder`` and sets ``result``, which is returned with its warnings. Fails the test when one raises
    or all take too long.
    """
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    scripts = [(user, umask, textwrap.dedent(text)) for user, umask, text in jobs]
    with tempfile.TemporaryDirectory(dir="/tmp") as scratch:
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", _OPEN_THE_WAY, sys.executable, _RUN],
            env={
                "PATH": os.environ["PATH"],
                "PYTHONPATH": str(Path(resiliency.__file__).parents[1]),
                "HOME": "/nonexistent",
                "SCRATCH": scratch,
                "BLOCKED": _blocked(sys.base_prefix),
                "PREFIX": sys.base_prefix,
                "JOBS": json.dumps([str(folder), GROUP, scripts]),
            },
            cwd="/",
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    assert done.returncode == 0, f"it ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return [json.loads(line) for line in done.stdout.splitlines()]


def _blocked(path: str) -> str:
    """The first folder on the way to ``path`` that other users may not enter, as root's home often is; "" for none."""
    for folder in (*reversed(Path(path).parents), Path(path)):
        if not folder.stat().st_mode & 0o001:
            return str(folder)
    return ""


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A folder that the group may write; what is made in it belongs to the group."""
    with tempfile.TemporaryDirectory(dir="/tmp") as root:
        os.chmod(root, 0o755)
        folder = Path(root, "ckpts")
        folder.mkdir()
        os.chown(folder, ALICE, GROUP)
        os.chmod(folder, 0o2775)
        yield folder
