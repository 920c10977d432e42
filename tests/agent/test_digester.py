"""The digest follows the copy, never runs ahead of it, and is that of the bytes that end up in the file."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

from resiliency.agent import digester
from resiliency.agent.digester import Fill, MapCache, digest
from resiliency.checkpoint.catalog import block_digest
from resiliency.checkpoint.manifest import StepId

BLOCK = 64
SIZE = 5 * BLOCK + 7


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digester, "BLOCK_BYTES", BLOCK)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "shard"
    path.write_bytes(bytes(SIZE))
    return path


def fill_of(file: Path) -> Fill:
    return Fill(StepId(1, 1, "00000000"), 0, str(file), file.stat().st_ino, file.stat().st_size)


def in_thread(fill: Fill, maps: MapCache) -> tuple[threading.Thread, list[tuple[str, ...] | None]]:
    got: list[tuple[str, ...] | None] = []
    thread = threading.Thread(target=lambda: got.append(digest(fill, maps, fill.path)))
    thread.start()
    return thread, got


@pytest.mark.parametrize("seed", range(5))
def test_digest_is_that_of_the_final_bytes(file: Path, seed: int) -> None:
    """The file is filled in pieces of odd sizes while the digest is being taken."""
    chance = random.Random(seed)
    final = chance.randbytes(SIZE)
    maps, fill = MapCache(), fill_of(file)
    thread, got = in_thread(fill, maps)
    fd = os.open(file, os.O_RDWR)
    try:
        at = 0
        while at < SIZE:
            end = min(SIZE, at + chance.randint(1, 2 * BLOCK))
            os.pwrite(fd, final[at:end], at)
            if chance.random() < 0.8:
                fill.advance(end)
            at = end
        # The header may be written last of all; only the seal makes it final.
        fill.finish({})
    finally:
        os.close(fd)
    thread.join(10)
    assert got == [tuple(block_digest(final[a : a + BLOCK]) for a in range(0, SIZE, BLOCK))]
    maps.close()


def test_the_last_block_waits_for_the_seal(file: Path) -> None:
    maps, fill = MapCache(), fill_of(file)
    thread, got = in_thread(fill, maps)
    fill.advance(SIZE)
    thread.join(0.2)
    assert thread.is_alive(), "digested before the rank had sealed"
    fill.finish({})
    thread.join(10)
    assert got[0] is not None
    maps.close()


def test_progress_never_goes_back(file: Path) -> None:
    fill = fill_of(file)
    fill.advance(200)
    fill.advance(100)
    assert fill.upto == 200


@pytest.mark.parametrize("when", [0, 2 * BLOCK, SIZE])
def test_aborted_fills_give_no_digest(file: Path, when: int) -> None:
    maps, fill = MapCache(), fill_of(file)
    thread, got = in_thread(fill, maps)
    fill.advance(when)
    fill.abort()
    thread.join(10)
    assert got == [None]
    maps.close()


def test_a_file_of_another_size_is_refused(file: Path) -> None:
    maps, fill = MapCache(), fill_of(file)
    os.truncate(file, SIZE - 1)
    with pytest.raises(OSError, match=f"{SIZE - 1} bytes instead of {SIZE}"):
        digest(fill, maps, fill.path)
    file.unlink()
    with pytest.raises(FileNotFoundError):
        digest(fill, maps, fill.path)


def test_mappings_are_kept_by_file_and_not_by_name(file: Path, tmp_path: Path) -> None:
    maps = MapCache()
    first = maps.get(str(file), SIZE)
    moved = tmp_path / "moved"
    file.rename(moved)
    assert maps.get(str(moved), SIZE) is first
    file.write_bytes(b"y" * SIZE)
    other = maps.get(str(file), SIZE)
    assert other is not first and other[:1] == b"y"
    os.truncate(moved, 10)
    assert len(maps.get(str(moved), 10)) == 10
    maps.drop(moved.stat().st_ino)
    maps.drop(12345)
    maps.close()


def test_no_descriptor_is_left(file: Path) -> None:
    maps = MapCache()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        maps.get(str(file), SIZE)
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # mmap keeps one for its own
    maps.close()
    assert len(os.listdir("/proc/self/fd")) == before
