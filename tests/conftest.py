"""For every test: no leftovers; and tests this machine cannot run are counted aloud, never dropped in silence.

A test fails when it leaves behind a thread (non-daemon, or a daemon of ours by its name), a child process, a changed
environment variable or a file of ours in /dev/shm. What it left is cleared, so that the next test is judged fairly.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import shutil
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

import tests.entry_points  # noqa: F401  before anything imports Lightning
from tests.agent_forks import VARIABLE, AgentForks
from tests.patience import PATIENCE
from tests.processes import child_pids

if TYPE_CHECKING:
    from resiliency.testing.zygote import Zygote

# Must be set before anything imports gcsfs (Lightning does): it probes buckets in a way no emulator answers, for a minute each.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
# Likewise: where there are no credentials, it asks for a quarter of a minute whether this is a machine of Google's.
os.environ.setdefault("NO_GCE_CHECK", "true")

#: How long leftovers may take to go by themselves, in seconds.
GRACE_S = 3.0
#: Set inside the process by torch, Lightning or pytest and not by us; put back, but no reason to fail.
FOREIGN_ENV = (
    "CUBLAS_WORKSPACE_CONFIG",
    "KINETO_LOG_LEVEL",
    "KMP_",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NCCL_",
    "NODE_RANK",
    "OMP_",
    "PL_",
    "PYTEST_",
    "PYTORCH_",
    "TORCH_",
    "TORCHINDUCTOR_",
    "TRITON_",
    "WORLD_SIZE",
)
#: Helpers of Python and of test tools that live as long as the session.
SESSION_HELPERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
SHM = Path("/dev/shm")
SHM_PREFIX = "resiliency"

#: Seconds after which the stacks of a kill test are written.
KILL_STACKS_S = 880.0

NOT_RUN = pytest.StashKey[dict[str, int]]()
STDERR = pytest.StashKey[int]()


# ---- tests that need what this machine does not have


#: Devices of drivers that can run CUDA: of NVIDIA, of NVIDIA below Windows, of AMD.
_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


def _has_cuda() -> bool:
    if not any(map(os.path.exists, _GPU_DRIVERS)):
        return False  # without seconds for an import of torch
    import torch

    return torch.cuda.is_available()


def find_chromium() -> str | None:
    """Path of a Chromium, None when there is none."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def can_mount() -> bool:
    """True where tests can make file systems of the kinds that they need, and mount them."""
    try:
        known = Path("/proc/filesystems").read_text().split()
    except OSError:
        return False
    tools = all(shutil.which(f"mkfs.{kind}") and kind in known for kind in ("btrfs", "ext4", "xfs"))
    return os.geteuid() == 0 and tools and os.path.exists("/dev/loop-control")


def can_make_namespaces() -> bool:
    """True where hosts on one machine can have networks of their own."""
    from resiliency.errors import ConfigError
    from resiliency.testing.hosts.local_network import LocalNetwork

    try:
        LocalNetwork(1).close()
    except ConfigError:
        return False
    return True


#: Of the virtual environment with real NeMo, which `make nemo-setup` makes.
NEMO_PYTHON = Path(__file__).parents[1] / ".venv-nemo" / "bin" / "python"

#: Markers whose tests must run; they fail where they cannot. CI names those of which it knows how to get what they need.
REQUIRED = os.environ.get("RESILIENCY_TESTS_REQUIRE", "").split(",")
NEEDS = {
    "gpu": ("CUDA", _has_cuda),
    "browser": ("Chromium", lambda: find_chromium() is not None),
    "nemo": ("NeMo (`make nemo-setup`, `make test-nemo`)", NEMO_PYTHON.with_name(".setup-done").exists),
    "namespaces": ("root, and a kernel with network namespaces, veth pairs and bridges", can_make_namespaces),
    "mounts": ("root, loop devices, btrfs-progs and xfsprogs", can_mount),
}


def pytest_configure(config: pytest.Config) -> None:
    config.stash[NOT_RUN] = {}
    config.stash[STDERR] = os.dup(2)  # while tests run pytest puts a file in its place
    gc.disable()  # while torch and Lightning are imported: nothing of them is garbage


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[STDERR])


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported is not looked at again by each collection in a test
    gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With ``-m kill``, files without such tests are not imported: that would take as long as some of the tests."""
    if config.option.markexpr != "kill" or collection_path.suffix != ".py":
        return None
    return True if b"mark.kill" not in collection_path.read_bytes() else None


@pytest.hookimpl(trylast=True)  # after -m and -k have made their choice, so that only chosen tests are counted
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for marker, (_, present) in NEEDS.items():
        marked = [item for item in items if item.get_closest_marker(marker)]
        if marked and marker not in REQUIRED and not present():
            config.stash[NOT_RUN][marker] = len(marked)
            config.hook.pytest_deselected(items=marked)
            items[:] = [item for item in items if item not in marked]
    for item in items if PATIENCE != 1 else ():
        limit = item.get_closest_marker("timeout")
        seconds = float(limit.args[0] if limit is not None else config.getini("timeout") or 0)
        if seconds:
            item.add_marker(pytest.mark.timeout(PATIENCE * seconds), append=False)
    items[:] = _long_ones_first(items, workers=int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def _long_ones_first(items: list[pytest.Item], *, workers: int) -> list[pytest.Item]:
    """The order in which each worker begins with its part of the kill tests, then of the long ones, and else as it was.

    ``--dist worksteal`` gives each worker a piece of the list, and later moves tests from the ends of the pieces.
    """
    kill: list[pytest.Item] = []
    long: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        group = kill if item.get_closest_marker("kill") else long if item.get_closest_marker("long") else others
        group.append(item)
    ordered: list[pytest.Item] = []
    for left in range(workers, 0, -1):  # workers that have no piece yet
        piece = (len(kill) + len(long) + len(others)) // left
        for group in (kill, long, others):
            taken = min(piece, len(group) if group is others else _whole_files(group, at_least=-(-len(group) // left)))
            ordered += group[:taken]
            del group[:taken]
            piece -= taken
    return ordered


def _whole_files(items: list[pytest.Item], *, at_least: int) -> int:
    """How many items to take so that no file is cut in two, whose fixtures would be made twice."""
    count = min(at_least, len(items))
    while 0 < count < len(items) and items[count].path == items[count - 1].path:
        count += 1
    return count


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Kill tests may take longer until the stacks of all threads are written than ``faulthandler_timeout``."""
    if item.get_closest_marker("kill"):
        faulthandler.dump_traceback_later(KILL_STACKS_S, file=item.config.stash[STDERR])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test logged about a name that is not UTF-8 cannot be sent to the process that prints it."""
    report = yield
    report.sections = [(title, text.encode(errors="backslashreplace").decode()) for title, text in report.sections]
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)  # set in the workers of pytest-xdist
    if output is not None:
        output["not_run"] = session.config.stash[NOT_RUN]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    counts = getattr(node, "workeroutput", {}).get("not_run", {})
    node.config.stash[NOT_RUN].update(counts)  # every worker collects everything: the counts are equal


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for marker, count in sorted(config.stash[NOT_RUN].items()):
        plural = ("s", "", "were") if count != 1 else ("", "s", "was")
        text = "{count} {marker} test{0} need{1} {what} and {2} not run"
        terminalreporter.write_line(
            text.format(*plural, count=count, marker=marker, what=NEEDS[marker][0]), yellow=True
        )


# ---- leftovers


def _threads() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if not t.daemon or t.name.startswith("resiliency-")}


def _children() -> set[psutil.Process]:
    found = set()
    for pid in [*child_pids("self"), *(pid for forks in _forks for pid in child_pids(str(forks.pid)))]:
        try:
            child = psutil.Process(pid)
            if not any(helper in " ".join(child.cmdline()) for helper in SESSION_HELPERS):
                found.add(child)
        except psutil.NoSuchProcess:
            continue
    return found


def _shm() -> set[Path]:
    return {path for path in SHM.glob(f"{SHM_PREFIX}*") if _is_ours(path)} if SHM.is_dir() else set()


def _is_ours(path: Path) -> bool:
    """False for files of the other workers of pytest-xdist, which cannot be told from leftovers while they run."""
    return "PYTEST_XDIST_WORKER" not in os.environ or _named_after_this_worker(path)


def _named_after_this_worker(path: Path) -> bool:
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    return worker is not None and worker in path.name


def _changed_env(before: dict[str, str]) -> dict[str, str]:
    now = dict(os.environ)
    return {
        name: "set" if name not in before else "removed" if name not in now else "changed"
        for name in before.keys() | now.keys()
        if before.get(name) != now.get(name) and not name.startswith("PYTEST_")
    }


def _restore_env(before: dict[str, str], changed: dict[str, str]) -> None:
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    """Fails the test that leaks; see the top of this file."""
    env, threads, children, shm = dict(os.environ), _threads(), _children(), _shm()
    yield
    leaks = []

    changed = _changed_env(env)
    _restore_env(env, changed)
    ours = {name: how for name, how in changed.items() if not name.startswith(FOREIGN_ENV)}
    leaks += [f"environment variable {name} {how}" for name, how in sorted(ours.items())]

    deadline = time.monotonic() + GRACE_S
    for thread in _threads() - threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    leaks += [f"thread {thread.name!r} is still running" for thread in _threads() - threads]

    left = _children() - children
    if left:
        _, alive = psutil.wait_procs(left, timeout=max(0.0, deadline - time.monotonic()))
        for child in alive:
            with child.oneshot():
                leaks.append(f"child process {child.pid} is still there: {' '.join(_cmdline(child))[:200]}")
            child.kill()
        psutil.wait_procs(alive, timeout=GRACE_S)

    for path in sorted(_shm() - shm):
        leaks.append(f"{path} is still there")
        if _named_after_this_worker(path):  # else it may be of a job of the user's
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    if leaks:
        pytest.fail("the test left behind:\n  " + "\n  ".join(leaks), pytrace=False)


def _cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline() or [process.name()]
    except psutil.NoSuchProcess:
        return ["(just ended)"]


# ---- what costs seconds to start and is shared


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    from tests.zygote import make_zygote  # only here: few tests need torch before they begin

    with make_zygote(tmp_path_factory.mktemp("zygote") / "log") as made:
        yield made


#: Whose children are looked after as if they were of this process.
_forks: list[AgentForks] = []


@pytest.fixture(scope="session", autouse=True)
def agent_forks() -> Iterator[None]:
    made = AgentForks()
    _forks.append(made)
    os.environ[VARIABLE] = made.address
    yield
    del os.environ[VARIABLE]
    _forks.remove(made)
    made.close()


@pytest.fixture
def started_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents of this test are interpreters of their own, as a user's are; see :mod:`tests.agent_forks`."""
    monkeypatch.delenv(VARIABLE)
