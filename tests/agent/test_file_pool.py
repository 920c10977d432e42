"""Files for the next saves: prepared beforehand, and used a second time only with proof that nobody has them."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resiliency.agent import file_pool, reader_watch
from resiliency.agent.file_pool import FilePool
from resiliency.agent.messages import FileReady
from resiliency.storage.change_times import newer_than_before
from resiliency.storage.known_files import remember
from resiliency.storage.names import read_name
from resiliency.storage.shard_file import Identity
from resiliency.storage.step_id import StepId
from resiliency.storage.stock import is_stock
from resiliency.storage.tiers._source import Source
from resiliency.storage.tiers.local import LocalTier, fsync_file
from tests.agent.sealing import config_for

SIZE = 2 << 20
MARK = b"bytes of the deleted step"
IDENTITY = Identity(id=StepId(1, 1, "0a0b0c"), run="run", rank=0, world_size=1, replicated=True)


class Pool(FilePool):
    """A pool that notes what it says, and can be waited for."""

    def __init__(self, local: Path, **values: Any) -> None:
        self.said: list[tuple[int, FileReady]] = []
        super().__init__(config_for(local, **values), lambda rank, message: self.said.append((rank, message)))  # type: ignore[arg-type]

    @property
    def files(self) -> list[str]:
        return sorted(os.listdir(self._folder)) if os.path.isdir(self._folder) else []

    def settle(self) -> None:
        assert self._worker.wait_idle(time.monotonic() + 20)

    def prepare(self, nbytes: int = SIZE, count: int = 2) -> None:
        self.expect(nbytes, count)
        self.refill()
        self.settle()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Pool]]:
    made: list[Pool] = []

    def new(**values: Any) -> Pool:
        made.append(Pool(tmp_path / "local", **values))
        return made[-1]

    yield new
    for pool in made:
        pool.close()
        assert pool.files == [], "files stay after close"


def shard(tmp_path: Path, pool: Pool, nbytes: int = SIZE) -> Path:
    """The file of a step that was committed and is about to be deleted."""
    path = tmp_path / "local" / "step" / "shard-00000.shard"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(MARK.ljust(nbytes, b"."))
    pool.watch(str(path))
    return path


def save(pool: Pool, nbytes: int = SIZE) -> None:
    """One that takes a file that is ready."""
    os.unlink(os.path.join(pool._folder, pool.files[-1]))
    pool.saved(nbytes)


def holds_mark(message: FileReady) -> bool:
    return Path(message.path).read_bytes().startswith(MARK)


def test_files_are_prepared_up_to_two_and_announced_to_every_rank_of_the_host(make: Callable[..., Pool]) -> None:
    pool = make(world_size=2, local_ranks=(0, 1))
    pool.prepare(count=9)
    assert len(pool.files) == 2
    assert [rank for rank, _ in pool.said] == [0, 1, 0, 1]
    for _, message in pool.said:
        found = os.stat(message.path)
        assert (found.st_ino, found.st_size, message.nbytes) == (message.inode, SIZE, SIZE) and message.is_new
        assert found.st_blocks * 512 >= SIZE, "its blocks are not allocated: a full disk would be SIGBUS"


def test_small_files_are_not_prepared(make: Callable[..., Pool]) -> None:
    pool = make()
    pool.prepare(nbytes=1000)
    assert pool.files == [] and pool.said == []


def test_a_file_that_was_taken_is_replaced(make: Callable[..., Pool], tmp_path: Path) -> None:
    pool = make()
    pool.prepare()
    taken = tmp_path / "local" / "taken"
    os.rename(pool.said[0][1].path, taken)
    pool.refill()
    pool.settle()
    assert len(pool.files) == 2 and len(pool.said) == 3
    pool.close()
    assert taken.exists(), "a file that a save has taken is not the pool's any more"


def test_a_rank_that_connects_late_is_told_of_the_files_that_are_ready(make: Callable[..., Pool]) -> None:
    pool = make()
    pool.prepare()
    before = list(pool.said)
    pool.announce(5)
    pool.settle()
    late = pool.said[len(before) :]
    assert {rank for rank, _ in late} == {5}
    assert [message for _, message in late] == [message for _, message in before]


def test_a_file_is_announced_with_the_size_that_it_has(
    make: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save of another size may come while it is made."""
    pool = make()
    write = file_pool.write_zeros

    def changed(*arguments: Any, **named: Any) -> None:
        write(*arguments, **named)
        pool.expect(2 * SIZE, 1)

    monkeypatch.setattr(file_pool, "write_zeros", changed)
    pool.prepare()
    pool.announce(5)
    pool.settle()
    assert pool.said and all(os.stat(message.path).st_size == message.nbytes for _, message in pool.said)


def test_a_file_that_nobody_has_is_used_again(make: Callable[..., Pool], tmp_path: Path) -> None:
    pool = make()
    path = shard(tmp_path, pool)
    pool.expect(SIZE, 1)
    inode = path.stat().st_ino
    pool.use_again(str(path))
    pool.settle()
    ((_, message),) = pool.said
    assert message.inode == inode and holds_mark(message) and not path.exists()
    assert not message.is_new, "the ranks would make its pages dirty, which the disk has already"


READERS = {
    "read": "os.read(fd, 100)",
    "mapped": "m = mmap.mmap(fd, 0, prot=mmap.PROT_READ); os.close(fd); m[0]; m.close(); sys.exit()",
    "spliced": "os.splice(fd, 1, 4096)",
    "by another name": "",
}


@pytest.mark.parametrize("how", READERS)
def test_a_file_that_somebody_has_read_is_never_used_again(make: Callable[..., Pool], tmp_path: Path, how: str) -> None:
    """Its pages may still be in a socket or a pipe, where the receiver would find what is written into them later."""
    pool = make()
    path = shard(tmp_path, pool)
    script = "import mmap, os, sys\nfd = os.open(sys.argv[1], os.O_RDONLY)\n" + READERS[how]
    opened = path
    if how == "by another name":
        opened = tmp_path / "best.ckpt"
        opened.hardlink_to(path)
    with subprocess.Popen([sys.executable, "-S", "-c", script, str(opened)], stdout=subprocess.PIPE) as reader:
        assert reader.wait(30) == 0
        if how == "by another name":
            opened.unlink()
        pool.expect(SIZE, 1)
        pool.use_again(str(path))
        pool.settle()
        ((_, message),) = pool.said
        assert not holds_mark(message)
        with open(message.path, "r+b") as file:
            file.write(b"the next step")
        assert reader.stdout is not None
        assert reader.stdout.read() == (MARK.ljust(4096, b".") if how == "spliced" else b"")


def test_what_this_library_does_with_a_file_is_not_reading(make: Callable[..., Pool], tmp_path: Path) -> None:
    pool = make()
    path = shard(tmp_path, pool)
    fsync_file(str(path))
    with Source(str(path), where="", key="") as source:
        assert source.nbytes == SIZE
    with newer_than_before(str(path)):
        pass
    remember(str(path), IDENTITY)
    name = tmp_path / "local" / "best.ckpt"
    name.hardlink_to(path)
    assert read_name(LocalTier(tmp_path / "local"), "best.ckpt") == IDENTITY
    assert is_stock(str(name)), "it looked into the file"
    name.unlink()
    pool.expect(SIZE, 1)
    pool.use_again(str(path))
    pool.settle()
    assert [holds_mark(message) for _, message in pool.said] == [True]


def test_a_reader_of_the_step_before_in_the_same_file_is_forgotten(make: Callable[..., Pool], tmp_path: Path) -> None:
    pool = make()
    path = shard(tmp_path, pool)
    path.read_bytes()
    pool.watch(str(path))  # the next step in it
    pool.expect(SIZE, 1)
    pool.use_again(str(path))
    pool.settle()
    assert [holds_mark(message) for _, message in pool.said] == [True]


@pytest.mark.parametrize("why", ["not watched", "refused", "too many events", "deleted since"])
def test_a_file_of_which_readers_are_not_known_is_not_used_again(
    why: str, make: Callable[..., Pool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "refused":
        monkeypatch.setattr(reader_watch, "_checked", refuse)
    pool = make()
    path = shard(tmp_path, pool)
    if why == "not watched":
        pool._readers.close()
    elif why == "too many events":
        event = reader_watch._EVENT.pack(-1, reader_watch._IN_Q_OVERFLOW, 0, 0)
        read, write = os.pipe2(os.O_NONBLOCK)
        os.write(write, event)
        os.dup2(read, pool._readers._fd)
        os.close(read)
    elif why == "deleted since":
        path.unlink()
        path.write_bytes(MARK.ljust(SIZE, b"."))  # it may get the same inode number
    pool.expect(SIZE, 1)
    pool.use_again(str(path))
    pool.settle()
    ((_, message),) = pool.said
    assert not holds_mark(message)
    if why == "too many events":
        os.close(write)


def refuse(*_: Any) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


HOLDERS = {
    "open for reading": "fd = os.open(path, os.O_RDONLY); done(); wait()",
    "open for writing": "fd = os.open(path, os.O_RDWR); done(); wait()",
    "mapped, and closed": "fd = os.open(path, os.O_RDONLY); m = mmap.mmap(fd, 0, prot=mmap.PROT_READ); os.close(fd);"
    " done(); wait()",
    "stopped while writing": "fd = os.open(path, os.O_RDWR); done(); os.kill(os.getpid(), signal.SIGSTOP)",
    "open in a forked child": "fd = os.open(path, os.O_RDONLY)\nif os.fork() == 0:\n    done(); wait()\n    os._exit(0)\nos._exit(0)",
    "under another name": "os.link(path, path + '.copy'); done(); wait()",
}


@pytest.mark.parametrize("how", HOLDERS)
def test_a_file_that_somebody_has_is_never_used_again(make: Callable[..., Pool], tmp_path: Path, how: str) -> None:
    pool = make()
    path = shard(tmp_path, pool)
    before = path.read_bytes()
    script = (
        "import mmap, os, signal, sys\npath = sys.argv[1]\n"
        "def done(): os.write(1, b'x')\ndef wait(): os.read(0, 1)\n" + HOLDERS[how]
    )
    holder = subprocess.Popen(
        [sys.executable, "-S", "-c", script, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdin is not None and holder.stdout is not None
    try:
        assert holder.stdout.read(1) == b"x"
        if how == "stopped while writing":
            os.waitid(os.P_PID, holder.pid, os.WSTOPPED)
        with open(path, "rb") if how == "under another name" else open(os.devnull, "rb") as reader:
            pool.expect(SIZE, 1)
            pool.use_again(str(path))
            pool.settle()
            ((_, message),) = pool.said
            assert not holds_mark(message), "a file that somebody has open was given to the next save"
            if how == "under another name":
                assert reader.read() == before
    finally:
        holder.send_signal(signal.SIGCONT)
        holder.stdin.close()  # ends the waiting, of a forked child too
        holder.stdout.close()
        holder.wait(10)
    if how == "under another name":
        assert Path(f"{path}.copy").read_bytes() == before


def test_a_file_that_this_process_has_open_is_never_used_again(make: Callable[..., Pool], tmp_path: Path) -> None:
    """An embedded agent is in the trainer, which may read the step."""
    pool = make()
    path = shard(tmp_path, pool)
    with open(path, "rb") as reader:
        pool.expect(SIZE, 1)
        pool.use_again(str(path))
        pool.settle()
        ((_, message),) = pool.said
        assert not holds_mark(message)
        assert reader.read(len(MARK)) == MARK


def test_the_place_of_a_small_file_is_free_at_once(make: Callable[..., Pool], tmp_path: Path) -> None:
    """It is never used again, so it does not wait for the thread of low priority."""
    pool = make()
    path = shard(tmp_path, pool, (1 << 20) - 1)
    pool.use_again(str(path))
    assert not path.exists() and pool.files == [] and pool.idle


@pytest.mark.parametrize("nbytes", [SIZE - (64 << 10) - 1, 2 * SIZE + 1])
def test_a_file_of_another_size_is_deleted(make: Callable[..., Pool], tmp_path: Path, nbytes: int) -> None:
    pool = make()
    path = shard(tmp_path, pool, nbytes)
    pool.expect(SIZE, 1)
    pool.use_again(str(path))
    pool.settle()
    ((_, message),) = pool.said
    assert not holds_mark(message) and len(pool.files) == 1


@pytest.mark.parametrize("missing", [1, 64, 64 << 10])
def test_a_file_that_is_a_little_too_short_is_lengthened_and_used_again(
    make: Callable[..., Pool], tmp_path: Path, missing: int
) -> None:
    """Files of equal states differ by some bytes, where a time in the record has another number of digits."""
    pool = make()
    path = shard(tmp_path, pool, SIZE - missing)
    pool.expect(SIZE, 1)
    pool.use_again(str(path))
    pool.settle()
    ((_, message),) = pool.said
    assert holds_mark(message) and message.nbytes == SIZE
    found = os.stat(message.path)
    assert (found.st_ino, found.st_size) == (message.inode, SIZE)
    assert found.st_blocks * 512 >= missing, "it has holes, for which a full disk has no room"


def test_a_file_that_may_share_blocks_with_a_copy_is_not_used_again(
    make: Callable[..., Pool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_pool, "may_share_blocks", lambda path: True)
    pool = make()
    path = shard(tmp_path, pool)
    pool.expect(SIZE, 1)
    pool.use_again(str(path))
    pool.settle()
    ((_, message),) = pool.said
    assert not holds_mark(message) and len(pool.files) == 1


def test_a_file_that_another_host_may_have_open_is_not_used_again(
    make: Callable[..., Pool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This kernel grants the proof on FUSE, too, and knows of its own processes only."""
    monkeypatch.setattr(file_pool, "used_by_this_host_only", lambda path: False)
    pool = make()
    path = shard(tmp_path, pool)
    pool.expect(SIZE, 1)
    pool.use_again(str(path))
    pool.settle()
    ((_, message),) = pool.said
    assert not holds_mark(message) and len(pool.files) == 1


def test_nothing_is_prepared_where_files_are_written_elsewhere_anyway(
    make: Callable[..., Pool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_pool, "copies_on_write", lambda path: True)
    pool = make(world_size=2, local_ranks=(0, 1))
    pool.prepare()
    pool.use_again(str(shard(tmp_path, pool)))
    pool.settle()
    assert pool.files == [] and {message.path for _, message in pool.said} == {""}
    assert {rank for rank, _ in pool.said} == {0, 1}, "a rank that warms up waits for its deadline"


def test_a_full_disk_leaves_no_file_and_the_next_call_tries_again(
    make: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = file_pool.write_zeros

    def full(fd: int, start: int, end: int, **_: Any) -> None:
        real(fd, start, end // 2)
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(file_pool, "write_zeros", full)
    pool = make()
    pool.prepare()
    assert pool.files == [] and {message.path for _, message in pool.said} == {""}, "nobody need wait"
    monkeypatch.setattr(file_pool, "write_zeros", real)
    pool.prepare()
    assert len(pool.files) == 2


def test_a_restart_takes_over_files_that_were_ready(make: Callable[..., Pool], tmp_path: Path) -> None:
    """Their pages are in memory; filling new ones takes 0.3 to 3 s for 1 GiB."""
    killed = Pool(tmp_path / "local", attempt=1)
    killed.prepare()
    inodes = {message.inode for _, message in killed.said}
    for _, message in killed.said:
        with open(message.path, "r+b") as file:
            file.write(MARK)
    held = os.open(killed.said[0][1].path, os.O_RDWR)  # by a trainer of yesterday that was stopped
    try:
        pool = make(attempt=2, token="beefed")
        pool.take_leftovers()
        pool.settle()
        assert pool.said == [], "nobody has said yet how large the next saves are"
        pool.prepare()
        told = {message.inode for _, message in pool.said}
        assert len(inodes) == len(pool.files) == 2 and told & inodes == inodes - {os.fstat(held).st_ino}
        assert sorted(holds_mark(message) for _, message in pool.said) == [False, True]
    finally:
        os.close(held)
        killed._worker.close()


@pytest.mark.parametrize("nbytes", [SIZE * 4, SIZE // 4, 1000])
def test_what_a_restart_cannot_use_is_deleted_when_it_knows(
    make: Callable[..., Pool], tmp_path: Path, nbytes: int
) -> None:
    killed = Pool(tmp_path / "local", attempt=1)
    killed.prepare()
    killed._worker.close()
    for _, message in killed.said:
        with Path(message.path).open("r+b") as file:
            file.write(MARK)
    pool = make(attempt=2, token="beefed")
    pool.take_leftovers()
    pool.saved(nbytes)
    pool.refill()
    pool.settle()
    assert len(pool.files) == (0 if nbytes < file_pool.SMALL_FILE else 2)
    assert not any(map(holds_mark, (message for _, message in pool.said)))


def test_what_earlier_attempts_of_this_host_left_is_deleted(make: Callable[..., Pool]) -> None:
    pool = make(attempt=3)
    pool.prepare()
    folder = Path(pool._folder)
    left = ["n-a0001-ffffff-0-000001.free", "n-a0002-eeeeee-4-000007.used"]
    others = [
        "m-a0001-ffffff-0-000001.free",  # another host's
        "n-ab-a0001-ffffff-0-000001.free",  # of one whose name begins alike
        "n-a0004-dddddd-0-000001.free",  # of a later attempt
        "notes.txt",
    ]
    for name in (*left, *others):
        (folder / name).write_text("x")
    mine = {Path(message.path).name for _, message in pool.said}
    pool.take_leftovers()
    pool.settle()
    assert set(pool.files) == mine | set(others)
    for name in others:
        (folder / name).unlink()


def test_after_close_nothing_is_prepared(make: Callable[..., Pool], tmp_path: Path) -> None:
    pool = make()
    pool.prepare()
    pool.close()
    pool.refill()
    assert pool.files == []
    pool.close()


def saves(pool: Pool, *, deletes: Path | None) -> None:
    """A save, its commit, and that it is durable; then the deletion of an earlier step."""
    save(pool)
    pool.refill(more_to_come=True)
    pool.refill(unless_taken=True)
    pool.settle()
    if deletes is not None:
        pool.use_again(str(deletes))
        pool.settle()


def test_who_deletes_a_step_long_after_each_save_has_no_file_of_zeros_made_meanwhile(
    make: Callable[..., Pool], tmp_path: Path
) -> None:
    pool = make()
    pool.prepare(count=1)
    saves(pool, deletes=None)
    saves(pool, deletes=shard(tmp_path, pool))
    made = len(pool.said)
    for _ in range(3):
        saves(pool, deletes=shard(tmp_path, pool))
        assert len(pool.files) == 1 and holds_mark(pool.said[-1][1]), "the file of the deleted step"
    assert len(pool.said) == made + 3
    saves(pool, deletes=None)
    assert pool.files == []
    pool.saved(SIZE)  # it had no file ready, because nothing is deleted any more
    pool.refill(unless_taken=True)
    pool.settle()
    assert len(pool.files) == file_pool.MOST_READY and pool.said[-1][1].is_new
