"""The fork server of the tests says where its workers are."""

from __future__ import annotations

import mmap
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from resiliency.errors import Timeout
from resiliency.testing.zygote import Zygote


def wait_with_a_child(*, ready: str) -> None:
    if os.fork() == 0:
        wait_in_the_child(ready)
    signal.pause()


def wait_in_the_child(ready: str) -> None:
    with open(ready, "w"):
        signal.pause()


def test_the_stacks_of_a_worker_that_hangs_and_of_its_children_are_shown(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    with Zygote([], log=str(tmp_path / "log"), path=[str(Path(__file__).parents[2])]) as zygote:
        worker = zygote.start(f"{__name__}:wait_with_a_child", {"ready": str(ready)})
        with pytest.raises(Timeout, match=f"worker {worker.pid} still runs"):
            worker.wait(timeout_s=0.1)
        with open(ready):  # waits for the child to open it
            text = zygote.stacks_of([worker])
        assert worker.wait(timeout_s=10) == -signal.SIGABRT
    assert text.count("Fatal Python error: Aborted") == 2
    assert "in wait_in_the_child" in text


def test_a_worker_that_has_ended_before_it_is_looked_at_is_given_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Zygote([], log=str(tmp_path / "log")) as zygote:
        wait_for = zygote._changed.wait_for

        def wait_too_long(condition: Any, timeout_s: float) -> bool:
            return wait_for(condition, timeout_s) and wait_for(lambda: not zygote._workers, timeout_s)

        monkeypatch.setattr(zygote._changed, "wait_for", wait_too_long)
        assert zygote.start("os:getpid", {}).wait(timeout_s=10) == 0


def huge_pages() -> int:
    """Bytes of this process's own memory that are in huge pages."""
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(rollup.split("AnonHugePages:")[1].split()[0])


def write_huge_pages(*, path: str) -> None:
    Path(path).write_text(str(huge_pages()))


def kernel_collapses() -> bool:
    with mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.write(b"x" * len(memory))
        try:
            memory.madvise(25)  # MADV_COLLAPSE
        except OSError:
            return False
        return True


def test_workers_share_huge_pages_with_the_zygote_where_the_kernel_makes_them_on_demand(tmp_path: Path) -> None:
    """Otherwise each fork copies an entry for every 4 KiB of what was imported."""
    found = tmp_path / "found"
    with Zygote(["torch"], log=str(tmp_path / "log"), path=[str(Path(__file__).parents[2])]) as zygote:
        assert zygote.start(f"{__name__}:write_huge_pages", {"path": str(found)}).wait(timeout_s=30) == 0
    assert (int(found.read_text()) > 8 << 20) == kernel_collapses()


_OWNER = """
import signal, sys
from resiliency.testing.zygote import Zygote
zygote = Zygote([], path=sys.argv[3:])
zygote.start("tests.testing.test_zygote:hold", {"path": sys.argv[1], "ends": sys.argv[2] == "ends"})
signal.pause()
"""


def hold(*, path: str, ends: bool) -> None:
    """Says by the end of a file that it has ended, with the process that it has forked, which SIGTERM does not end.
    SIGTERM ends this one if ``ends``."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    file = os.open(path, os.O_WRONLY)

    def told(*_: object) -> None:
        os.write(file, b"told to end")  # safe in a handler, which a buffered file is not
        if ends:
            os._exit(0)

    if os.fork() != 0:
        signal.signal(signal.SIGTERM, told)
        os.write(file, b"ready, ")
    while True:
        signal.pause()


@pytest.mark.long
@pytest.mark.parametrize("ends", ["ends", "stays"])
def test_workers_whose_owner_was_killed_are_told_to_end_and_what_they_have_forked_is_killed_after(
    tmp_path: Path, ends: str
) -> None:
    said = tmp_path / "said"
    os.mkfifo(said)
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    owner = subprocess.Popen([sys.executable, "-c", _OWNER, str(said), ends, root], env=environment)
    processes: list[psutil.Process] = []
    try:
        with open(said, "rb", buffering=0) as file:
            assert file.read(7) == b"ready, "
            processes = psutil.Process(owner.pid).children(recursive=True)
            owner.kill()
            assert file.read(11) == b"told to end"
            readable, _, _ = select.select([file], [], [], 30)
            assert readable and file.read(1) == b"", "nobody has it open any more"
    finally:
        owner.kill()
        owner.wait(10)
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
