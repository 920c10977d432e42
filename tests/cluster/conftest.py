"""One Kubernetes control plane for all tests of a run, in whichever worker of pytest-xdist they are."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.client import Cluster
from tests.cluster.control_plane import READY, RUNNING, USERS, ControlPlane
from tests.cluster.rig import Rig
from tests.cluster.tools import REPOSITORY, ToolsMissing, find_tools


@pytest.fixture(scope="session")
def tools() -> Path:
    """The folder of the programs; where there are none, the test is skipped."""
    try:
        return find_tools()
    except ToolsMissing as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def control_plane(tools: Path) -> Iterator[Cluster]:
    """Of all workers; the first one that asks starts it, in about ten seconds, and it ends after the last one.

    Nothing may stop its processes: that is for a test with ``own_control_plane``.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", uuid.uuid4().hex)
    with _started(Path(tempfile.gettempdir(), f"resiliency-kubernetes-{run}")) as cluster:
        yield cluster


@pytest.fixture
def own_control_plane(tools: Path, tmp_path: Path) -> Iterator[ControlPlane]:
    """Of this test alone, which may stop its API server; ten seconds."""
    with ControlPlane(tmp_path / "control-plane") as made:
        yield made


@pytest.fixture
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    """Namespaces and nodes of one test, in its own control plane if it has one, else in that of all."""
    if os.geteuid() != 0:
        pytest.skip("pods that are processes need root, to have namespaces of their own")
    own = "own_control_plane" in request.fixturenames
    made = Rig(request.getfixturevalue("own_control_plane" if own else "control_plane"), tmp_path)
    yield made
    made.close()


@contextlib.contextmanager
def _started(folder: Path) -> Iterator[Cluster]:
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        with open(folder / USERS, "a+") as users, open(folder / "start", "w") as starting:
            fcntl.lockf(starting, fcntl.LOCK_EX)
            fcntl.lockf(users, fcntl.LOCK_SH)  # waits while a control plane ends that had no users any more
            if os.fstat(users.fileno()).st_nlink == 0:
                continue  # it took the folder along
            if not (folder / READY).exists():
                _start_keeper(folder)
            fcntl.lockf(starting, fcntl.LOCK_UN)
            yield Cluster(folder / RUNNING)
            return


def _start_keeper(folder: Path) -> None:
    """Returns when the control plane is ready. Its keeper is nobody's child: it outlives the worker that began it."""
    command = ["setsid", "--fork", sys.executable, "-m", "tests.cluster.control_plane", str(folder)]
    said = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
    if not (folder / READY).exists():
        raise RuntimeError(f"the control plane did not start:\n{said}")
