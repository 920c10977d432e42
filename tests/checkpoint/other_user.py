"""Runs scripts as other users, in processes with a deadline: root may read and write everything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from contextlib import suppress
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

#: The interpreter starts once for all tests of a file, and becomes a user in a forked child for each script. It reads
#: lines of JSON, and prints one for each script of a user, and "done".
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

def requests():
    for line in sys.stdin:
        folder, group, jobs = json.loads(line)
        yield from ((folder, group, *job) for job in jobs)
        print("done", flush=True)

for folder, group, user, umask, script in requests():
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


class OtherUsers:
    """The interpreter that becomes other users. Used by one thread."""

    def __init__(self, scratch: Path) -> None:
        self._errors = scratch / "errors.log"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                ["unshare", "--mount", "sh", "-c", _OPEN_THE_WAY, sys.executable, _RUN],
                env={
                    "PATH": os.environ["PATH"],
                    "PYTHONPATH": str(Path(resiliency.__file__).parents[1]),
                    "HOME": "/nonexistent",
                    "SCRATCH": str(scratch),
                    "BLOCKED": _blocked(sys.base_prefix),
                    "PREFIX": sys.base_prefix,
                },
                cwd="/",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def run(self, folder: Path, *jobs: tuple[int | None, int, str], timeout_s: float = 150.0) -> list[dict[str, Any]]:
        """Runs scripts one after the other, each as (user, umask, text); user None: as root, without a result.

        A script saves in ``folder`` and sets ``result``, which is returned with its warnings. Fails the test when one
        raises or all take too long; those after it fail too.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        scripts = [(user, umask, textwrap.dedent(text)) for user, umask, text in jobs]
        # Whatever happens the lines end.
        deadline = threading.Timer(timeout_s, self._kill)
        deadline.start()
        lines: list[str] = []
        try:
            self._process.stdin.write(json.dumps([str(folder), GROUP, scripts]) + "\n")
            self._process.stdin.flush()
            for line in self._process.stdout:
                if line == "done\n":
                    return [json.loads(line) for line in lines]
                lines.append(line)
        except BrokenPipeError:  # ended by an earlier failure
            pass
        finally:
            deadline.cancel()
            deadline.join()
        raise AssertionError(f"it has ended:\n{''.join(lines)[-2000:]}\n{self._errors.read_text()[-4000:]}")

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # with the child that runs a script

    def end(self) -> None:
        self._kill()
        self._process.wait(10)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


@pytest.fixture(scope="module")
def other_users() -> Iterator[OtherUsers]:
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory(dir="/tmp") as scratch:
        users = OtherUsers(Path(scratch))
        try:
            yield users
        finally:
            users.end()


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
