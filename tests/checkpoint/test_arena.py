"""Shard files that are used again: same file, same pages, and nothing left behind when the disk is full."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from resiliency.checkpoint.arena import Arena, Slot
from resiliency.errors import TierError

PAGE = 4096


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "arena"


@pytest.fixture
def arena(folder: Path) -> Iterator[Arena]:
    made = Arena(str(folder), 0)
    yield made
    made.close()


def taken(arena: Arena, nbytes: int = PAGE) -> Slot:
    slot = arena.acquire(nbytes)
    assert slot is not None
    return slot


def write(slot: Slot, byte: bytes) -> None:
    with slot.view() as view:
        view[: slot.nbytes] = byte * slot.nbytes


def test_acquire_gives_none_when_no_file_is_free(arena: Arena) -> None:
    assert arena.acquire(10) is None and arena.free == 0 and arena.mapped_bytes == 0


def test_a_slot_is_its_file(arena: Arena, folder: Path) -> None:
    arena.grow(3 * PAGE)
    slot = taken(arena, 3 * PAGE)
    write(slot, b"x")
    path = Path(slot.path)
    assert path.parent == folder and path.read_bytes() == b"x" * 3 * PAGE and path.stat().st_ino == slot.inode
    assert path.stat().st_blocks * 512 >= 3 * PAGE, "a hole would be a SIGBUS on a full disk"


def test_a_recycled_slot_keeps_its_file_and_mapping(arena: Arena, tmp_path: Path) -> None:
    arena.grow(PAGE)
    slot = taken(arena)
    step = tmp_path / "step"
    os.rename(slot.path, step)
    assert arena.acquire(PAGE) is None
    back = tmp_path / "arena" / f"shard-00000-i{slot.inode:08d}.slot"
    os.rename(step, back)
    arena.release(slot.inode, str(back))
    again = taken(arena)
    assert again is slot and again.path == str(back)
    write(again, b"y")
    assert back.read_bytes() == b"y" * PAGE


def test_released_twice_is_free_once(arena: Arena) -> None:
    arena.grow(PAGE)
    slot = taken(arena)
    arena.release(slot.inode, slot.path)
    arena.release(slot.inode, slot.path)
    assert arena.free == 1
    taken(arena)
    assert arena.acquire(PAGE) is None, "two saves would share a file"


def test_a_file_takes_steps_shorter_and_longer_than_its_last(arena: Arena) -> None:
    arena.grow(4 * PAGE)
    for nbytes, fresh in ((4 * PAGE, False), (PAGE, False), (3 * PAGE + 5, True), (17, False), (4 * PAGE, True)):
        slot = taken(arena, nbytes)
        assert slot.fresh is fresh, "what is longer than before has pages that are not in memory"
        slot.fresh = False
        assert slot.nbytes == nbytes == os.stat(slot.path).st_size
        write(slot, b"z")
        assert Path(slot.path).read_bytes() == b"z" * nbytes
        arena.release(slot.inode, slot.path)
    larger = taken(arena, 9 * PAGE)
    write(larger, b"w")
    assert Path(larger.path).read_bytes() == b"w" * 9 * PAGE and larger.capacity == 9 * PAGE


def test_the_best_fit_is_taken(arena: Arena) -> None:
    for nbytes in (8 * PAGE, 2 * PAGE, 4 * PAGE):
        arena.grow(nbytes)
    assert [taken(arena, 2 * PAGE).capacity, taken(arena, 3 * PAGE).capacity] == [2 * PAGE, 4 * PAGE]


def test_the_next_attempt_takes_over_the_files(folder: Path) -> None:
    first = Arena(str(folder), 0)
    first.grow(PAGE)
    first.grow(2 * PAGE)
    first.close()
    other = Arena(str(folder), 1)
    other.grow(PAGE)
    other.close()
    (folder / "notes.txt").write_text("mine")
    (folder / "shard-00000-0009.slot").write_bytes(b"")
    (folder / "shard-00000-0008.slot").mkdir()
    second = Arena(str(folder), 0)
    try:
        second.adopt()
        assert second.free == 2
        second.grow(PAGE)
        assert len({taken(second).path for _ in range(3)}) == 3
        assert (folder / "notes.txt").exists() and not (folder / "shard-00000-0009.slot").exists()
    finally:
        second.close()


def test_adopting_a_file_whose_blocks_are_missing(folder: Path) -> None:
    folder.mkdir()
    with open(folder / "shard-00000-0000.slot", "wb") as file:
        file.truncate(8 * PAGE)
    arena = Arena(str(folder), 0)
    try:
        arena.adopt()
        slot = taken(arena, 8 * PAGE)
        assert os.stat(slot.path).st_blocks * 512 >= 8 * PAGE
    finally:
        arena.close()


def test_what_was_touched_is_not_fresh(arena: Arena, folder: Path, tmp_path: Path) -> None:
    """Fresh pages are made once more by the copy: too often costs time, not at all costs more on a disk."""
    arena.grow(3 * PAGE)
    touched = taken(arena, 3 * PAGE)
    assert not touched.fresh and Path(touched.path).read_bytes() == bytes(3 * PAGE)
    arena.grow(PAGE, populate=False)
    assert taken(arena).fresh
    arena.release(touched.inode, touched.path)
    assert taken(arena, 5 * PAGE).fresh, "its further pages are not in memory yet"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"x" * PAGE)
    arena.release(elsewhere.stat().st_ino, str(elsewhere))
    assert not taken(arena).fresh, "a file that was filled a while ago and unmapped since would be filled at every save"
    again = Arena(str(folder), 0)
    again.adopt()
    assert again.free == 2 and taken(again, 5 * PAGE).fresh
    again.close()


def test_a_disk_that_fails_while_pages_are_touched_leaves_nothing(
    arena: Arena, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(fd: int, start: int, end: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("resiliency.checkpoint.arena.fill", broken)
    monkeypatch.setattr("resiliency.checkpoint.arena.on_ramdisk", lambda path: False)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(TierError, match="Input/output error"):
        arena.grow(PAGE)
    assert list(folder.iterdir()) == [] and set(os.listdir("/proc/self/fd")) == before


def test_a_forgotten_file_is_unmapped_and_not_used_again(arena: Arena) -> None:
    arena.grow(PAGE)
    slot = taken(arena)
    os.unlink(slot.path)
    arena.forget(slot.inode)
    arena.forget(slot.inode)
    assert arena.mapped_bytes == 0
    arena.release(slot.inode, slot.path)
    assert arena.free == 0


def test_forgetting_a_file_whose_number_went_to_a_new_one(arena: Arena) -> None:
    """File systems give the number of a deleted file to the next one made; the news of the deletion may come after that."""
    arena.grow(PAGE)
    old = taken(arena)
    arena.trim(0)
    os.unlink(old.path)
    arena.grow(PAGE)
    filling = taken(arena)
    arena._slots[old.inode] = arena._slots.pop(
        filling.inode
    )  # the same number, also where this file system gave another
    arena.forget(old.inode)
    assert not filling.map.closed, "the mapping of the save in progress is gone"


def test_trim_unmaps_the_oldest_in_use_and_never_a_free_one(arena: Arena) -> None:
    slots = []
    for _ in range(5):
        arena.grow(PAGE)
        slots.append(taken(arena))
    arena.release(slots[0].inode, slots[0].path)
    arena.trim(3)
    assert arena.mapped_bytes == 3 * PAGE and arena.free == 1
    write(slots[4], b"x")
    again = taken(arena)
    assert again is slots[0]


def test_trim_never_unmaps_what_is_being_filled(arena: Arena) -> None:
    """A recycled file is old as a file but the newest in use: unmapping it under the copy thread is a segmentation fault."""
    slots = []
    for _ in range(4):
        arena.grow(PAGE)
        slots.append(taken(arena))
    arena.release(slots[0].inode, slots[0].path)
    filling = taken(arena)
    assert filling is slots[0]
    arena.trim(3)
    assert not filling.map.closed, "the mapping of the save in progress is gone"
    assert arena.mapped_bytes == 3 * PAGE


def test_a_slot_of_another_size_is_mapped_again_after_trim(arena: Arena) -> None:
    arena.grow(PAGE)
    slot = taken(arena)
    arena.trim(0)
    assert arena.mapped_bytes == 0
    arena.release(slot.inode, slot.path)
    assert taken(arena).inode == slot.inode


def test_closing_leaves_no_mapping_and_no_descriptor(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    arena = Arena(str(folder), 0)
    for _ in range(3):
        arena.grow(PAGE)
    taken(arena)
    arena.close()
    arena.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert str(folder) not in Path("/proc/self/maps").read_text()
    assert len(list(folder.iterdir())) == 3


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], check=True, timeout=20)
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True, timeout=20)


def used(disk: Path) -> int:
    info = os.statvfs(disk)
    return (info.f_blocks - info.f_bfree) * info.f_frsize


def test_no_room_to_grow_leaves_nothing(small: Path) -> None:
    arena = Arena(str(small / "arena"), 0)
    try:
        with pytest.raises(TierError, match="free space") as caught:
            arena.grow(1 << 20)
        assert caught.value.retryable and str(small) in str(caught.value)
        assert used(small) == 0 and list((small / "arena").iterdir()) == []
        arena.grow(64 * 1024)
        assert arena.free == 1
    finally:
        arena.close()


@pytest.mark.parametrize("how", ["longer than ever", "long again"])
def test_no_room_to_lengthen_a_slot_does_not_lose_it(small: Path, how: str) -> None:
    arena = Arena(str(small / "arena"), 0)
    try:
        arena.grow(160 * 1024)
        if how == "long again":
            slot = taken(arena, 8 * 1024)
            arena.release(slot.inode, slot.path)
            (small / "filler").write_bytes(b"x" * 200 * 1024)
        with pytest.raises(TierError):
            arena.acquire(160 * 1024 if how == "long again" else 400 * 1024)
        (small / "filler").unlink(missing_ok=True)
        if arena.free == 0:
            arena.grow(160 * 1024)
        slot = taken(arena, 160 * 1024)
        write(slot, b"x")
        files = list((small / "arena").iterdir())
        assert [str(path) for path in files] == [slot.path], "an orphan keeps its blocks"
    finally:
        arena.close()


def test_read_only_is_permanent(small: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small)], check=True, timeout=20)
    with pytest.raises((TierError, OSError), match="ead-only") as caught:
        Arena(str(small / "arena"), 0).grow(PAGE)
    assert isinstance(caught.value, TierError) and not caught.value.retryable
