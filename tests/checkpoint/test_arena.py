"""Shard files belong to one step each: made where they are needed, shared by the ranks of a host, never written again."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from resiliency.checkpoint import arena as arena_module
from resiliency.checkpoint._pages import page_faults
from resiliency.checkpoint.arena import Arena, Slot
from resiliency.errors import TierError

PAGE = 4096


@pytest.fixture
def slots() -> Iterator[list[Slot]]:
    made: list[Slot] = []
    yield made
    for slot in made:
        slot.close()


def prepared(folder: Path, nbytes: int, name: str = "free") -> Path:
    path = folder / name
    path.write_bytes(b"\xaa" * nbytes)
    return path


def offer(arena: Arena, path: Path, *, is_new: bool = False) -> int:
    inode = path.stat().st_ino
    arena.offer(str(path), inode, path.stat().st_size, is_new=is_new)
    return inode


def test_a_slot_is_its_file_and_has_all_its_blocks(tmp_path: Path, slots: list[Slot]) -> None:
    path = tmp_path / "steps" / "1" / "shard"
    slots.append(Arena().open(str(path), 3 * PAGE))
    slots[0].map[:] = b"x" * 3 * PAGE
    assert path.read_bytes() == b"x" * 3 * PAGE and path.stat().st_ino == slots[0].inode and slots[0].fresh
    assert path.stat().st_blocks * 512 >= 3 * PAGE, "a hole would be a SIGBUS on a full disk"


def test_a_prepared_file_is_moved_into_the_step(tmp_path: Path, slots: list[Slot]) -> None:
    arena = Arena()
    inode = offer(arena, prepared(tmp_path, 8 * PAGE))
    assert arena.prepared == 1
    slots.append(arena.open(str(tmp_path / "s" / "shard"), 8 * PAGE))
    assert slots[0].inode == inode and not slots[0].fresh and not (tmp_path / "free").exists()
    assert arena.prepared == 0


@pytest.mark.parametrize("nbytes", [PAGE, 3 * PAGE])
def test_a_prepared_file_of_another_size_fits_too(tmp_path: Path, slots: list[Slot], nbytes: int) -> None:
    arena = Arena()
    inode = offer(arena, prepared(tmp_path, nbytes))
    slots.append(arena.open(str(tmp_path / "s" / "shard"), 2 * PAGE))
    slot = slots[0]
    assert slot.inode == inode and slot.nbytes == 2 * PAGE and slot.fresh is (nbytes < 2 * PAGE)
    assert os.stat(slot.path).st_size == max(nbytes, 2 * PAGE)


def test_a_prepared_file_that_is_gone_is_passed_over(tmp_path: Path, slots: list[Slot]) -> None:
    arena = Arena()
    offer(arena, prepared(tmp_path, PAGE, "gone"))
    inode = offer(arena, prepared(tmp_path, PAGE, "there"))
    (tmp_path / "gone").unlink()
    assert arena.prepared == 1
    slots.append(arena.open(str(tmp_path / "s" / "shard"), PAGE))
    assert slots[0].inode == inode


def test_a_file_is_taken_although_no_thread_can_map_it_in_advance(
    ramdisk: Path, slots: list[Slot], arenas: list[Arena], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The link to the agent, which offers it, must not break."""
    monkeypatch.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError("can't start new thread")))
    arenas.append(arena := Arena())
    inode = offer(arena, prepared(ramdisk, PAGE))
    slots.append(arena.open(str(ramdisk / "s" / "shard"), PAGE))
    assert slots[0].inode == inode


def test_ranks_of_a_host_open_the_same_file_whoever_comes_first(tmp_path: Path, slots: list[Slot]) -> None:
    """Both were told of the same prepared files; only one file is used."""
    ranks = [Arena(), Arena()]
    for name in ("first", "second"):
        path = prepared(tmp_path, 4 * PAGE, name)
        for arena in ranks:
            offer(arena, path)
    for arena, nbytes in zip(ranks, (2 * PAGE, 4 * PAGE), strict=True):
        slots.append(arena.open(str(tmp_path / "s" / "shard"), nbytes))
    assert slots[0].inode == slots[1].inode and not slots[1].fresh
    slots[0].map[:4], slots[1].map[-4:] = b"head", b"tail"
    data = (tmp_path / "s" / "shard").read_bytes()
    assert data[:4] == b"head" and data[-4:] == b"tail"
    assert [arena.prepared for arena in ranks] == [1, 1]
    for arena in ranks:
        slots.append(arena.open(str(tmp_path / f"other{id(arena)}" / "shard"), PAGE))
    assert slots[2].inode != slots[3].inode, "two steps share a file"


def test_a_link_in_the_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "shard").symlink_to(tmp_path / "mine")
    with pytest.raises(TierError):
        Arena().open(str(tmp_path / "s" / "shard"), PAGE)
    assert (tmp_path / "mine").read_bytes() == b"mine"


def test_closing_leaves_no_mapping_and_no_descriptor(tmp_path: Path) -> None:
    gc.collect()  # what other tests have left
    before = os.listdir("/proc/self/fd")
    slot = Arena().open(str(tmp_path / "s" / "shard"), PAGE)
    slot.close()
    slot.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize(
    ("code", "advice", "retryable"),
    [(errno.ENOSPC, "free space", True), (errno.EDQUOT, "quota", True), (errno.EROFS, "read-only", False)],
)
def test_no_room_leaves_no_descriptor_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, advice: str, retryable: bool
) -> None:
    def fails(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(arena_module.os, "posix_fallocate", fails)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TierError, match=advice) as caught:
        Arena().open(str(tmp_path / "s" / "shard"), PAGE)
    assert caught.value.retryable is retryable and str(tmp_path) in str(caught.value)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_system_that_cannot_allocate_ahead_gets_a_longer_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slots: list[Slot]
) -> None:
    def fails(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    monkeypatch.setattr(arena_module.os, "posix_fallocate", fails)
    slots.append(Arena().open(str(tmp_path / "s" / "shard"), 2 * PAGE))
    assert os.stat(slots[0].path).st_size == 2 * PAGE


def test_what_a_copy_learned_about_pages_goes_on_to_the_next_file(tmp_path: Path, slots: list[Slot]) -> None:
    arena = Arena()
    slots.append(arena.open(str(tmp_path / "1" / "shard"), PAGE))
    assert not slots[0].small_pages
    slots[0].small_pages = True
    arena.learn(slots[0])
    slots.append(arena.open(str(tmp_path / "2" / "shard"), PAGE))
    assert slots[1].small_pages


@pytest.mark.parametrize("from_pool", [False, True])
def test_a_file_for_which_there_is_no_room_does_not_keep_what_was_left_of_the_disk(
    tmp_path: Path, arenas: list[Arena], monkeypatch: pytest.MonkeyPatch, from_pool: bool
) -> None:
    """ext4 leaves the blocks that it has found."""

    def until_the_disk_is_full(fd: int, start: int, nbytes: int) -> None:
        os.ftruncate(fd, start + nbytes // 2)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", until_the_disk_is_full)
    monkeypatch.setattr(arena_module, "stores_may_end_the_process", lambda path: False)
    arenas.append(arena := Arena())
    if from_pool:
        offer(arena, prepared(tmp_path, PAGE), is_new=True)
        idle(arena)
        assert str(tmp_path) in Path("/proc/self/maps").read_text()
    with pytest.raises(TierError, match="free space"):
        arena.open(str(tmp_path / "steps" / "1" / "shard"), 8 * PAGE, writers=2)
    assert list(tmp_path.rglob("*")) == [tmp_path / "steps"]
    assert str(tmp_path) not in Path("/proc/self/maps").read_text(), "its blocks are not free while it is mapped"


# -- a prepared file is mapped before a save takes it, on a ramdisk each, on a disk a new one ---------------------------


@pytest.fixture
def ramdisk() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def idle(arena: Arena) -> None:
    assert arena._pages.wait_idle(time.monotonic() + 30)


def faults_of_stores(slot: Slot, first: int, last: int) -> int:
    before = page_faults()
    for at in range(first, last, PAGE):
        slot.map[at] = 1
    return page_faults() - before


@pytest.fixture
def arenas() -> Iterator[list[Arena]]:
    made: list[Arena] = []
    yield made
    for arena in made:
        arena.close()


@pytest.mark.parametrize("part", [0, 1])
def test_pages_of_this_ranks_part_of_a_prepared_file_are_there_before_a_save(
    part: int, ramdisk: Path, slots: list[Slot], arenas: list[Arena]
) -> None:
    arenas.append(arena := Arena(part=part, writers=2))
    inode = offer(arena, prepared(ramdisk, 512 * PAGE))
    idle(arena)
    slots.append(arena.open(str(ramdisk / "s" / "shard"), 512 * PAGE, writers=2))
    assert slots[0].inode == inode and not slots[0].fresh and slots[0].in_memory
    halves = [faults_of_stores(slots[0], start, start + 256 * PAGE) for start in (0, 256 * PAGE)]
    assert halves[part] < 16 < halves[1 - part]
    assert (ramdisk / "s" / "shard").read_bytes() == (b"\x01" + b"\xaa" * (PAGE - 1)) * 512


@pytest.mark.parametrize(
    ("kind", "is_new", "populated"),
    [("disk", True, True), ("disk", False, False), ("copy on write", True, False), ("ramdisk", False, True)],
)
def test_on_a_disk_only_pages_that_it_does_not_have_yet_are_made_dirty_in_advance(
    kind: str,
    is_new: bool,
    populated: bool,
    tmp_path: Path,
    slots: list[Slot],
    arenas: list[Arena],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else each byte of a deleted step's file would be written to the disk twice per save."""
    monkeypatch.setattr(arena_module, "on_ramdisk", lambda path: kind == "ramdisk")
    monkeypatch.setattr(arena_module, "stores_may_end_the_process", lambda path: kind == "copy on write")
    advised: list[int] = []
    real = arena_module._madvise

    def madvise(address: int, nbytes: int, advice: int) -> int:
        advised.append(nbytes)
        return int(real(address, nbytes, advice))

    monkeypatch.setattr(arena_module, "_madvise", madvise)
    arenas.append(arena := Arena())
    offer(arena, prepared(tmp_path, 256 * PAGE), is_new=is_new)
    idle(arena)
    assert advised == [256 * PAGE] * populated
    slots.append(arena.open(str(tmp_path / "s" / "shard"), 256 * PAGE))
    assert slots[0].populated is populated and not slots[0].fresh
    if populated:  # else it depends on the file system how many faults there are
        assert faults_of_stores(slots[0], 0, 256 * PAGE) < 16


def test_a_kernel_that_cannot_map_in_advance_lets_the_save_fault(
    tmp_path: Path, slots: list[Slot], arenas: list[Arena], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arena_module, "_madvise", lambda *_: -1)
    arenas.append(arena := Arena())
    offer(arena, prepared(tmp_path, 64 * PAGE), is_new=True)
    idle(arena)
    slots.append(arena.open(str(tmp_path / "s" / "shard"), 64 * PAGE))
    assert not slots[0].populated, "the copy would not find out how large its pages are"


@pytest.mark.parametrize("nbytes", [100 * PAGE, 900 * PAGE])
def test_a_prepared_file_that_is_mapped_fits_another_size_too(
    nbytes: int, ramdisk: Path, slots: list[Slot], arenas: list[Arena]
) -> None:
    arenas.append(arena := Arena())
    offer(arena, prepared(ramdisk, 500 * PAGE))
    idle(arena)
    slots.append(arena.open(str(ramdisk / "s" / "shard"), nbytes))
    slots[0].map[nbytes - 1] = 7
    assert slots[0].nbytes == nbytes and not slots[0].fresh
    assert (ramdisk / "s" / "shard").read_bytes()[nbytes - 1] == 7


def test_nothing_is_held_of_prepared_files_that_went_elsewhere(ramdisk: Path, arenas: list[Arena]) -> None:
    before = descriptors()
    arenas.append(arena := Arena())
    for number in range(20):
        offer(arena, prepared(ramdisk, 64 * PAGE, f"free-{number}"))
    idle(arena)
    for path in ramdisk.iterdir():
        path.unlink()
    assert arena.prepared == 0 and descriptors() == before
    offer(arena, prepared(ramdisk, 64 * PAGE))
    idle(arena)
    arena.close()
    assert descriptors() == before


def test_a_save_does_not_wait_until_a_file_is_mapped_in_advance(
    ramdisk: Path, slots: list[Slot], arenas: list[Arena], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def populate(address: int, nbytes: int, advice: int) -> int:
        begun.set()
        assert go_on.wait(30)
        ctypes.memmove(address, ctypes.string_at(address, nbytes), nbytes)  # it is mapped still
        return 0

    monkeypatch.setattr(arena_module, "_madvise", populate)
    arenas.append(arena := Arena())
    offer(arena, prepared(ramdisk, 64 * PAGE))
    assert begun.wait(30)
    slot = arena.open(str(ramdisk / "s" / "shard"), 64 * PAGE)
    slot.close()
    go_on.set()
    idle(arena)


def test_a_child_does_not_map_a_file_that_was_mapped_in_advance(ramdisk: Path, arenas: list[Arena]) -> None:
    arenas.append(arena := Arena())
    offer(arena, prepared(ramdisk, 64 * PAGE))
    idle(arena)
    assert str(ramdisk) in Path("/proc/self/maps").read_text()
    pid = os.fork()
    if pid == 0:
        mapped = str(ramdisk) in Path("/proc/self/maps").read_text()
        arena.close()  # what is mapped at the same address in the child is not unmapped
        os._exit(mapped)
    assert os.waitpid(pid, 0)[1] == 0
