"""A file is used again only with the kernel's proof that nobody else has it; moved into place, it replaces nothing."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from resiliency.storage import shared_files
from resiliency.storage.shared_files import is_ours_alone, move_without_replacing, write_zeros

NBYTES = 1 << 20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="write leases and renameat2 are Linux's")


@pytest.fixture(params=["disk", "ramdisk"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
        return
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no ramdisk")
    made = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def path(folder: Path) -> str:
    file = folder / "file"
    file.write_bytes(bytes(NBYTES))
    return str(file)


# -- the proof --------------------------------------------------------------------------------------------------------

HOLD = {
    "open for reading": "held = open(path, 'rb')",
    "open for writing": "held = open(path, 'r+b')",
    "open as a path only for a moment, then mapped": (
        "fd = os.open(path, os.O_RDWR); held = mmap.mmap(fd, 0); os.close(fd)"
    ),
    "mapped for reading, descriptor closed": (
        "fd = os.open(path, os.O_RDONLY); held = mmap.mmap(fd, 0, access=mmap.ACCESS_READ); os.close(fd)"
    ),
    "mapped copy-on-write, descriptor closed": (
        "fd = os.open(path, os.O_RDONLY); held = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY); os.close(fd)"
    ),
    "open in a forked child only": (
        "held = open(path, 'rb')\nchild = os.fork()\nif child == 0:\n    sys.stdin.read(); os._exit(0)\nheld.close()"
    ),
    "mapped in a forked child only": (
        "fd = os.open(path, os.O_RDONLY); held = mmap.mmap(fd, 0, access=mmap.ACCESS_READ); os.close(fd)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    sys.stdin.read(); os._exit(0)\n"
        "held.close()"
    ),
}


def _kill_group(leader: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


@contextmanager
def holding(code: str, path: str) -> Iterator[subprocess.Popen[str]]:
    """A process, with a group of its own, that runs ``code`` and then waits until its input ends."""
    code = f"import mmap, os, sys\npath = sys.argv[1]\n{code}\nprint('ready', flush=True)\nsys.stdin.read()\n"
    with subprocess.Popen(
        [sys.executable, "-c", code, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        timer = threading.Timer(60, _kill_group, (process.pid,))
        timer.start()
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()
            if process.poll() is None:
                os.kill(process.pid, signal.SIGCONT)
            process.wait(60)
            # A child of it ends with the input too; its end is the end of the output.
            assert process.stdout is not None and process.stdout.read() == ""
            timer.cancel()


def test_a_file_nobody_has_open_is_ours_alone_and_stays_as_it_is(path: str) -> None:
    before = os.stat(path)
    for _ in range(3):
        assert is_ours_alone(path)
    after = os.stat(path)
    assert (before.st_ino, before.st_size, before.st_mtime_ns) == (after.st_ino, after.st_size, after.st_mtime_ns)
    with open(path, "r+b") as file:  # the lease is given back: opening does not wait for it to be broken
        assert fcntl.fcntl(file.fileno(), fcntl.F_GETLEASE if hasattr(fcntl, "F_GETLEASE") else 1025) == fcntl.F_UNLCK


@pytest.mark.parametrize("how", HOLD)
def test_a_file_another_process_has_is_not_ours(path: str, how: str) -> None:
    with holding(HOLD[how], path):
        assert not is_ours_alone(path)
    assert is_ours_alone(path)


@pytest.mark.parametrize("how", ["open for reading", "mapped for reading, descriptor closed"])
def test_a_stopped_process_keeps_what_it_has(path: str, how: str) -> None:
    """It is continued some day, and reads on."""
    with holding(HOLD[how], path) as process:
        os.kill(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert not is_ours_alone(path)
        os.kill(process.pid, signal.SIGCONT)
        assert not is_ours_alone(path)
    assert is_ours_alone(path)


def test_a_killed_process_keeps_nothing(path: str) -> None:
    with holding(HOLD["mapped for reading, descriptor closed"], path) as process:
        assert not is_ours_alone(path)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
        assert is_ours_alone(path)


def test_a_reader_in_this_very_process_counts(path: str) -> None:
    with open(path, "rb") as file:
        assert not is_ours_alone(path)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    assert not is_ours_alone(path)
    mapped.close()
    assert is_ours_alone(path)


def test_a_file_with_a_second_name_is_not_ours(path: str) -> None:
    """A user linked the checkpoint to keep it."""
    os.link(path, f"{path}-kept")
    assert not is_ours_alone(path) and not is_ours_alone(f"{path}-kept")
    os.unlink(f"{path}-kept")
    assert is_ours_alone(path)


def test_whoever_opens_the_file_while_it_is_examined_gets_it(path: str) -> None:
    """Openers are not refused and wait at most for an instant."""
    stop = threading.Event()
    opened = 0

    def reader() -> None:
        nonlocal opened
        while not stop.is_set():
            with open(path, "rb") as file:
                assert file.read(1) == b"\0"
            opened += 1

    thread = threading.Thread(target=reader)
    thread.start()
    try:
        answers = {is_ours_alone(path) for _ in range(2000)}
        deadline = time.monotonic() + 20  # on a busy machine the threads may take turns that never meet in the file
        while not (opened > 50 and False in answers) and time.monotonic() < deadline:
            answers.add(is_ours_alone(path))
    finally:
        stop.set()
        thread.join(60)
    assert opened > 50 and False in answers


def test_without_leases_a_file_is_never_taken_for_ours(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Network file systems have none; nor does another user's file."""

    def refuse(fd: int, command: int, argument: int = 0) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    assert not is_ours_alone(path)


def test_what_cannot_be_opened_is_an_error_and_a_link_is_not_followed(path: str) -> None:
    os.symlink(path, f"{path}-link")
    with pytest.raises(OSError) as caught:
        is_ours_alone(f"{path}-link")
    assert caught.value.errno == errno.ELOOP
    with pytest.raises(FileNotFoundError):
        is_ours_alone(f"{path}-none")


# -- moving -----------------------------------------------------------------------------------------------------------


def test_a_file_moves_to_a_free_name_with_all_it_is(path: str) -> None:
    inode = os.stat(path).st_ino
    assert move_without_replacing(path, f"{path}-moved")
    assert os.stat(f"{path}-moved").st_ino == inode and not os.path.exists(path)


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, lambda path: path.symlink_to("nowhere")])
def test_nothing_that_exists_is_replaced(path: str, make: Callable[[Path], object]) -> None:
    make(Path(f"{path}-target"))
    before = os.lstat(f"{path}-target")
    assert not move_without_replacing(path, f"{path}-target")
    assert os.lstat(f"{path}-target").st_ino == before.st_ino and os.path.getsize(path) == NBYTES


def test_what_is_gone_or_on_another_file_system_is_not_moved(path: str, tmp_path: Path) -> None:
    assert not move_without_replacing(f"{path}-none", f"{path}-target")
    assert not move_without_replacing(path, f"{path}-none/target")
    other = "/dev/shm" if os.stat("/dev/shm").st_dev != os.stat(path).st_dev else str(tmp_path)
    target = f"{other}/resiliency-{os.getpid()}-target"
    assert not move_without_replacing(path, target)
    assert os.path.exists(path) and not os.path.exists(target)


def test_any_other_failure_is_an_error_with_the_path(path: str) -> None:
    with pytest.raises(OSError, match="too long") as caught:
        move_without_replacing(path, f"{path}-{'x' * 300}")
    assert caught.value.errno == errno.ENAMETOOLONG


def test_on_a_system_without_it_nothing_is_moved(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_files, "_libc", object())
    assert not move_without_replacing(path, f"{path}-target")
    assert os.path.exists(path)


RACE = """
import os, sys
from resiliency.storage.shared_files import move_without_replacing
folder, me, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
won = []
for turn in range(rounds):
    source = f"{folder}/{me}-{turn}"
    with open(source, "w") as file:
        file.write(me)
    if move_without_replacing(source, f"{folder}/target-{turn}"):
        won.append(str(turn))
    else:
        assert open(source).read() == me
print(" ".join(won), flush=True)
"""


def test_of_several_processes_that_move_to_one_name_exactly_one_does(folder: Path) -> None:
    rounds, racers = 300, 3
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(folder), f"p{number}", str(rounds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(racers)
    ]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        won: dict[str, str] = {}
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        for number, process in enumerate(processes):
            answer, _ = process.communicate(timeout=60)
            assert process.returncode == 0
            for turn in answer.split():
                assert turn not in won, "two processes say that they moved their file there"
                won[turn] = f"p{number}"
    finally:
        for process in processes:
            process.kill()
            process.wait(60)
    assert len(won) == rounds
    for turn, winner in won.items():
        assert (folder / f"target-{turn}").read_text() == winner
        assert not (folder / f"{winner}-{turn}").exists()


# -- preparing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 2 << 20, (2 << 20) + 1, (5 << 20) + 123])
@pytest.mark.parametrize("in_memory", [False, True])
def test_zeros_fill_the_range_and_take_their_place_on_the_disk(folder: Path, nbytes: int, in_memory: bool) -> None:
    if in_memory and not nbytes:
        return  # posix_fallocate refuses an empty range; nobody asks for one
    path = folder / "zeros"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        write_zeros(fd, 0, nbytes, in_memory=in_memory)
    finally:
        os.close(fd)
    assert path.read_bytes() == bytes(nbytes)
    assert os.stat(path).st_blocks * 512 >= nbytes


def test_zeros_leave_what_is_before_them(folder: Path) -> None:
    path = folder / "zeros"
    path.write_bytes(b"x" * (2 << 20) + b"y" * 100)
    fd = os.open(path, os.O_RDWR)
    try:
        write_zeros(fd, 2 << 20, (2 << 20) + 50)
    finally:
        os.close(fd)
    assert path.read_bytes() == b"x" * (2 << 20) + bytes(50) + b"y" * 50


def test_a_full_disk_is_an_error() -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(OSError) as caught:
            write_zeros(fd, 0, 1)
    finally:
        os.close(fd)
    assert caught.value.errno == errno.ENOSPC


def test_zeros_are_written_until_all_are_when_a_write_is_short(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:1000], at))
    path = folder / "zeros"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        write_zeros(fd, 0, 12_345)
    finally:
        os.close(fd)
    assert path.read_bytes() == bytes(12_345)
