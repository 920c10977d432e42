"""Files that are written in pieces, large ones past the page cache."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from resiliency.errors import TierError
from resiliency.storage.blocks import BLOCK_BYTES
from resiliency.storage.tiers import _file_writer
from resiliency.storage.tiers.local import LocalTier
from tests.rings import few

LARGE = _file_writer.LARGE_FILE


@pytest.fixture
def tier(tmp_path: Path) -> LocalTier:
    return LocalTier(tmp_path / "root")


@pytest.fixture(params=[LARGE, LARGE + 4096, LARGE + 123], ids=["pieces", "blocks", "and bytes"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(random.Random(7).randbytes(request.param))
    return path


def writes(monkeypatch: pytest.MonkeyPatch, write: Callable[[int, memoryview], int]) -> list[bool]:
    """Puts a function in the place of ``os.write``; returns of each call whether it went past the page cache."""
    direct: list[bool] = []

    def called(fd: int, data: memoryview) -> int:
        direct.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        return write(fd, data)

    monkeypatch.setattr(_file_writer.os, "write", called)
    return direct


def has_disk(folder: Path) -> bool:
    return os.major(os.stat(folder).st_dev) != 0


def test_a_large_file_is_stored_whole_past_the_page_cache(
    tier: LocalTier, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = writes(monkeypatch, os.write)
    tier.put_file("k", str(source))
    assert Path(tier.root, "k").read_bytes() == source.read_bytes()
    pieces, tail = divmod(source.stat().st_size, 4096)
    assert direct[:-1] == [has_disk(tmp_path)] * (len(direct) - 1) and len(direct) >= pieces * 4096 // BLOCK_BYTES
    assert direct[-1] == (has_disk(tmp_path) and not tail)


def test_a_small_file_goes_through_the_page_cache(
    tier: LocalTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(LARGE - 1))
    direct = writes(monkeypatch, os.write)
    tier.put_file("k", str(source))
    assert direct and not any(direct)


def test_a_file_system_that_refuses_is_written_to_through_the_page_cache(
    tier: LocalTier, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write

    def write(fd: int, data: memoryview) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "not past the page cache")
        return real(fd, data)

    direct = writes(monkeypatch, write)
    tier.put_file("k", str(source))
    assert Path(tier.root, "k").read_bytes() == source.read_bytes()
    assert sum(direct) <= 1, "it is asked again for each piece"


@pytest.mark.parametrize("most", few([5000, 4096 * 3 + 1, BLOCK_BYTES - 512], [4096 * 3 + 1]))
def test_writes_that_are_cut_short_are_continued(
    most: int, tier: LocalTier, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that is nearly full, or when a signal comes."""
    real = os.write

    def write(fd: int, data: memoryview) -> int:
        return real(fd, data[: most - most % 512])

    writes(monkeypatch, write)
    tier.put_file("k", str(source))
    assert Path(tier.root, "k").read_bytes() == source.read_bytes()


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_write_that_fails_leaves_nothing(
    at: int, tier: LocalTier, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.put_bytes("k", b"old")
    real, left = os.write, at

    def write(fd: int, data: memoryview) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left -= 1
        return real(fd, data)

    writes(monkeypatch, write)
    with pytest.raises(TierError, match="No space left"):
        tier.put_file("k", str(source))
    assert os.listdir(tier.root) == ["k"] and tier.read("k") == b"old"
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("resiliency-write")]


def test_a_check_that_refuses_waits_for_the_writes_before_it(
    tier: LocalTier, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing writes into a file that is removed, or whose number another file has by then."""
    real, unlink = os.write, os.unlink
    under_way, removed = threading.Event(), threading.Event()
    early: list[bool] = []

    def write(fd: int, data: memoryview) -> int:
        under_way.set()
        early.append(removed.wait(0.3))  # time for a removal that does not wait
        return real(fd, data)

    def remove(path: str) -> None:
        removed.set()
        unlink(path)

    def check(block: bytes | memoryview) -> None:
        if bytes(block[:8]) != first:
            assert under_way.wait(30)
            raise ValueError("refused")

    first = source.read_bytes()[:8]
    writes(monkeypatch, write)
    monkeypatch.setattr(os, "unlink", remove)
    with pytest.raises(ValueError, match="refused"):
        tier.put_file("k", str(source), check=check)
    assert early == [False] and removed.is_set() and os.listdir(tier.root) == []


def test_without_a_thread_it_writes_all_the_same(
    tier: LocalTier, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the interpreter ends, from Python 3.12 on."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)
    tier.put_file("k", str(source))
    assert Path(tier.root, "k").read_bytes() == source.read_bytes()


def test_a_file_is_stored_when_the_interpreter_ends(tmp_path: Path) -> None:
    """An embedded agent finishes its uploads then; executors of the standard library take nothing any more."""
    source = tmp_path / "source"
    source.write_bytes(random.Random(7).randbytes(LARGE + 5))
    script = (
        "import atexit, sys, threading\n"
        "from resiliency.storage.tiers.local import LocalTier\n"
        "import concurrent.futures.thread\n"
        "atexit.register(lambda: LocalTier(sys.argv[1]).put_file('k', sys.argv[2]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "root"), str(source)], capture_output=True, timeout=60
    )
    assert done.returncode == 0 and done.stderr == b""
    assert (tmp_path / "root" / "k").read_bytes() == source.read_bytes()


def test_progress_tells_what_was_written_and_not_what_was_read(
    tier: LocalTier, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, written = os.write, 0

    def write(fd: int, data: memoryview) -> int:
        nonlocal written
        count = real(fd, data)
        written += count
        return count

    def progress(nbytes: int) -> None:
        told.append(nbytes)
        assert nbytes <= written

    told: list[int] = []
    writes(monkeypatch, write)
    tier.put_file("k", str(source), progress=progress)
    assert told == sorted(told) and told[-1] == source.stat().st_size and len(told) > 2
