"""The lazy copy is bit for bit what the tensors were at the save, whatever happens to them after the fence."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from resiliency import faultpoints
from resiliency.checkpoint import copier as copier_module
from resiliency.checkpoint import snapshot as snapshot_module
from resiliency.checkpoint.arena import Slot
from resiliency.checkpoint.copier import Copier
from resiliency.checkpoint.copy_sources import CopyTask
from resiliency.checkpoint.snapshot import Job, Snapshot
from resiliency.errors import Timeout, TornSnapshot
from resiliency.storage.blocks import Blocks, block_digest
from resiliency.testing.checkpoints import bytes_of


@pytest.fixture
def copier() -> Iterator[Copier]:
    made = Copier(name="resiliency-copy")
    yield made
    made.close()


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_module, "_STRIDE", 1000)


@pytest.fixture(autouse=True, params=["stores", "writes", "fresh"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every test holds for all ways into the file."""
    File.way = request.param
    yield request.param
    while File.made:
        os.close(File.made.pop())


class File:
    """A nameless file in place of a shard file."""

    way = "stores"
    made: ClassVar[list[int]] = []

    def __init__(self, nbytes: int) -> None:
        fd = os.memfd_create("shard")
        self.made.append(fd)
        os.truncate(fd, max(nbytes, 1))
        self.map = mmap.mmap(fd, max(nbytes, 1))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.slot = Slot(
            inode=0,
            path="",
            fd=fd,
            map=self.map,
            nbytes=nbytes,
            address=self.address,
            in_memory=self.way == "stores",
            fresh=self.way == "fresh",
            small_pages=self.way == "writes",
        )
        self.finished: list[Snapshot] = []

    def start(self, copier: Copier, copies: list[CopyTask]) -> Snapshot:
        return copier.start(self.job(copies), self.finished.append)

    def job(self, copies: list[CopyTask], **further: Any) -> Job:
        blocks = Blocks(self.slot.nbytes, 4096)
        self.slot.close = lambda: None  # type: ignore[method-assign]  # the tests look into it
        return Job(copies=copies, blocks=blocks, mine=range(blocks.count), open=lambda: self.slot, **further)


def train_until_done(snapshot: Snapshot) -> bool:
    """Without a fence: the training thread settles once the copy is done."""
    assert snapshot.copied.wait(10)
    snapshot.settle()
    return snapshot.done.wait(10)


def copy_of(tensor: torch.Tensor, start: int) -> CopyTask:
    return CopyTask(tensor, start, tensor.numel() * tensor.element_size(), storage=start)


def laid_out(tensors: list[torch.Tensor]) -> tuple[list[CopyTask], int]:
    copies, at = [], 0
    for tensor in tensors:
        copies.append(copy_of(tensor, at))
        at += tensor.numel() * tensor.element_size()
    return copies, at


base = torch.arange(120, dtype=torch.float32).view(4, 5, 6)
complexes = torch.view_as_complex(torch.arange(40, dtype=torch.float32).view(20, 2))
ODD = {
    "contiguous": base,
    "transposed": base.transpose(0, 2),
    "slice": base[1:3, ::2, 1],
    "expanded": torch.tensor([1.0, 2.0]).expand(7, 2),
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 4),
    "conj": complexes.conj(),
    "neg": complexes.conj().imag,
    "offset": base.view(-1)[7:50],
    "flipped": torch.flip(base, (0,)),
    "bfloat16": base.to(torch.bfloat16).t() if base.ndim == 2 else base.to(torch.bfloat16)[:, 0],
    "float8": base.to(torch.float8_e5m2),
    "bool": base[..., 0] > 3,
    "strided out": torch.as_strided(base, (3, 4), (1, 30)),
    "one": base[0, 0, :1],
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "large": torch.randn(3000),
    "large strided": torch.randn(100, 60)[:, ::2],
}


@pytest.mark.parametrize("kind", ODD)
def test_every_kind_of_tensor_is_copied_bit_for_bit(copier: Copier, kind: str) -> None:
    tensor = ODD[kind]
    copies, size = laid_out([tensor])
    file = File(size)
    copier.fence(file.start(copier, copies), deadline_s=10)
    assert copier.wait_idle(10)
    assert file.map[: tensor.numel() * tensor.element_size()] == bytes_of(tensor)
    assert len(file.finished) == 1 and file.finished[0].error is None


def test_many_at_once_and_nothing_outside(copier: Copier) -> None:
    tensors = list(ODD.values())
    copies, size = laid_out(tensors)
    file = File(size + 64)
    file.map[:] = b"\xaa" * (size + 64)
    file.slot.nbytes = size
    copier.fence(file.start(copier, copies), deadline_s=10)
    assert file.map[:size] == b"".join(map(bytes_of, tensors))
    assert file.map[size:] == b"\xaa" * 64, "wrote beyond the tensors"


@pytest.mark.parametrize("fenced", [True, False])
def test_the_digests_are_those_of_the_file(copier: Copier, fenced: bool) -> None:
    """Whoever reads the file later compares with them; blocks hold parts of several tensors and cut others in two."""
    copies, size = laid_out([torch.randn(n) for n in (1, 3000, 7, 0, 1024, 2047, 5000)])
    file = File(size)
    snapshot = file.start(copier, copies)
    if fenced:
        copier.fence(snapshot, deadline_s=10)
    assert train_until_done(snapshot)
    assert size > 9 * 4096
    assert snapshot.digests == [block_digest(file.map[at : at + 4096]) for at in range(0, size, 4096)]


@pytest.mark.parametrize(
    ("starts", "nbytes", "missing"),
    [
        ((0, 5), 9, "4 to 9"),
        ((0, 3), 7, "4 to 7"),
        ((0, 4), 9, "8 to 9"),
        ((1, 5), 9, "0 to 9"),
        ((0, 4096), 4100, "4 to 4096"),
        ((4096,), 4100, "0 to 4096"),
    ],
)
def test_bytes_with_no_source_or_two_are_refused(copier: Copier, starts: list[int], nbytes: int, missing: str) -> None:
    """They would be those of an older step, and no digest would know them."""
    file = File(nbytes)
    snapshot = file.start(copier, [copy_of(torch.zeros(4, dtype=torch.uint8), start) for start in starts])
    copier.fence(snapshot, deadline_s=5)
    assert "no source fills bytes" in str(snapshot.error) and snapshot.done.wait(5)
    assert nbytes > 4096 or f"no source fills bytes {missing}" in str(
        snapshot.error
    )  # of two blocks either may be first


def test_a_process_that_was_stopped_at_the_fence_does_not_take_the_copy_for_hanging(
    copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Woken after the deadline, it finds the copy where it was; the copy goes on with it."""
    real = snapshot_module._copy
    monkeypatch.setattr(snapshot_module, "_copy", lambda *args: (woken.wait(10), real(*args))[1])
    woken = threading.Event()
    copies, size = laid_out([torch.ones(10)])
    snapshot = File(size).start(copier, copies)
    assert snapshot.opened.wait(10)
    while snapshot._next == 0:
        threading.Event().wait(0.001)  # until the copy thread has the only block
    threading.Timer(0.6, woken.set).start()
    copier.fence(snapshot, deadline_s=0.5)


@pytest.mark.parametrize("fenced", [True, False])
def test_changes_right_after_the_fence_do_not_show(
    copier: Copier, monkeypatch: pytest.MonkeyPatch, fenced: bool
) -> None:
    """And without the fence they do: the test can fail."""
    real = snapshot_module._copy
    go_on = threading.Event()
    monkeypatch.setattr(snapshot_module, "_copy", lambda *args: (go_on.wait(10), real(*args))[1])
    weights = [torch.full((5000,), float(i)) for i in range(8)]
    wanted = [bytes_of(weight) for weight in weights]
    copies, size = laid_out(weights)
    file = File(size)
    snapshot = file.start(copier, copies)
    if fenced:
        go_on.set()
        copier.fence(snapshot, deadline_s=10)
    for weight in weights:
        weight.fill_(-1.0)
    go_on.set()
    copier.fence(snapshot, deadline_s=10)
    got = [file.map[copy.start : copy.start + len(data)] for copy, data in zip(copies, wanted, strict=True)]
    assert (got == wanted) is fenced
    assert isinstance(snapshot.error, TornSnapshot) is not fenced, "a file that mixes two moments would be committed"


@pytest.mark.parametrize("changed", [True, False])
def test_changes_are_noticed_beside_tensors_that_cannot_count_them(
    copier: Copier, monkeypatch: pytest.MonkeyPatch, changed: bool
) -> None:
    real, go_on = snapshot_module._copy, threading.Event()
    monkeypatch.setattr(snapshot_module, "_copy", lambda *args: (go_on.wait(10), real(*args))[1])
    with torch.inference_mode():
        frozen = torch.ones(50)
    live = torch.zeros(50)
    copies, size = laid_out([frozen, live])
    file = File(size)
    snapshot = file.start(copier, copies)
    if changed:
        live.add_(1)
    go_on.set()
    copier.fence(snapshot, deadline_s=10)
    assert isinstance(snapshot.error, TornSnapshot) is changed


def test_a_change_after_the_copy_is_none(copier: Copier) -> None:
    """The copy was done before the fence was called: what changes then does not matter."""
    weights = [torch.ones(5000), torch.zeros(7)]
    copies, size = laid_out(weights)
    file = File(size)
    snapshot = file.start(copier, copies)
    assert train_until_done(snapshot)
    weights[0].add_(1)
    copier.fence(snapshot, deadline_s=10)
    assert snapshot.error is None and file.map[:20_000] == bytes_of(torch.ones(5000))


class Discarded:
    """A file that notes when its save is given up."""

    def __init__(self, file: File, copies: list[CopyTask]) -> None:
        self.given_up = 0
        self.job = file.job(copies, discard=self._discard)

    def _discard(self) -> None:
        self.given_up += 1


def test_a_change_that_torch_counts_when_its_kernel_ends_gives_the_save_up(copier: Copier) -> None:
    """The copy is done and its digests taken while the kernel runs; at that moment the count has not moved."""
    slow = torch.full((2_000_000,), 3.9)
    for _ in range(20):  # on a busy machine the kernel may be done first, which shows nothing
        weight = torch.full((2_000_000,), 3.7)
        file = File(8_000_000)
        one = Discarded(file, [copy_of(weight, 0)])
        snapshot = copier.start(one.job, file.finished.append)
        weight.igamma_(slow)
        copied_first = snapshot.copied.is_set()
        copier.fence(snapshot, deadline_s=30)
        assert isinstance(snapshot.failure, TornSnapshot), "a file that mixes two moments would be committed"
        assert copier.wait_idle(10)
        assert one.given_up == 1 and isinstance(file.finished[0].error, TornSnapshot)
        if copied_first:
            return
    pytest.fail("the copy was never done before the kernel")


def test_nobody_is_told_of_a_copy_before_the_fence_agrees(copier: Copier) -> None:
    file = File(40_000)
    snapshot = file.start(copier, [copy_of(torch.ones(10_000), 0)])
    assert snapshot.copied.wait(10)
    assert not snapshot.done.wait(0.3) and not file.finished
    copier.fence(snapshot, deadline_s=10)
    assert snapshot.done.wait(10) and file.finished == [snapshot] and snapshot.error is None


@pytest.mark.parametrize("compare", [False, True])
def test_the_end_of_the_file_is_written_once_nobody_waits_at_the_fence(
    copier: Copier, monkeypatch: pytest.MonkeyPatch, compare: bool
) -> None:
    """It takes milliseconds of Python, and the training thread would wait for the GIL."""
    monkeypatch.setattr(snapshot_module, "_LEAVES_S", 30)
    begun, at_fence, real = threading.Event(), [], Snapshot.help_compare

    def help_compare(self: Snapshot) -> None:
        real(self)
        at_fence.append(begun.wait(0.2))

    monkeypatch.setattr(Snapshot, "help_compare", help_compare)
    for fenced in (True, False):
        begun.clear()
        file = File(40_000)
        job = file.job(
            [copy_of(torch.ones(10_000), 0)], tail=lambda fd, digests: begun.set() or [], compare=compare and fenced
        )
        snapshot = copier.start(job, file.finished.append)
        if fenced:
            copier.fence(snapshot, deadline_s=10)
        assert begun.wait(10), "it waits for a training thread that is not there"
        snapshot.decide()
        assert copier.wait_idle(10) and snapshot.error is None
    assert at_fence == [False]


def test_a_count_that_moves_after_the_copy_and_before_the_fence_gives_the_save_up(copier: Copier) -> None:
    """As a kernel looks that began during the copy and ended after it, without the luck of a race."""
    weight = torch.ones(10_000)
    file = File(40_000)
    one = Discarded(file, [copy_of(weight, 0)])
    snapshot = copier.start(one.job, file.finished.append)
    assert snapshot.copied.wait(10)
    torch.autograd.graph.increment_version(weight)
    copier.fence(snapshot, deadline_s=10)
    assert isinstance(snapshot.failure, TornSnapshot)
    assert copier.wait_idle(10) and one.given_up == 1


def test_what_changes_after_a_moment_that_saw_the_copy_done_does_not_matter(copier: Copier) -> None:
    weight = torch.ones(10_000)
    file = File(40_000)
    snapshot = file.start(copier, [copy_of(weight, 0)])
    snapshot.settle()
    assert snapshot.copied.wait(10)
    snapshot.settle()
    weight.add_(1)
    copier.fence(snapshot, deadline_s=10)
    assert copier.wait_idle(10)
    assert snapshot.error is None and file.map[:] == bytes_of(torch.ones(10_000))


def test_a_fence_that_gave_up_waiting_gives_the_save_up(copier: Copier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors change from then on, while the rest is still to be copied."""
    real, inside, go_on = snapshot_module._copy, threading.Event(), threading.Event()
    monkeypatch.setattr(snapshot_module, "_copy", lambda *args: (inside.set(), go_on.wait(10), real(*args))[2])
    file = File(4000)
    one = Discarded(file, [copy_of(torch.ones(1000), 0)])
    snapshot = copier.start(one.job, file.finished.append)
    assert inside.wait(5)
    with pytest.raises(Timeout):
        copier.fence(snapshot, deadline_s=0.1)
    assert not snapshot.at_fence.locked()
    go_on.set()
    assert copier.wait_idle(10)
    assert isinstance(file.finished[0].error, Timeout) and one.given_up == 1


def sleeps(thread: threading.Thread) -> bool:
    """True when the kernel has put the thread to sleep, as in a call that waits for a lock."""
    return Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def test_many_steps_of_a_training_loop(copier: Copier) -> None:
    weights = [torch.randn(3000), torch.randn(50, 40).t(), torch.randn(7)]
    copies, size = laid_out(weights)
    files = [File(size), File(size)]
    for step in range(60):
        file = files[step % 2]
        wanted = [bytes_of(weight) for weight in weights]
        snapshot = file.start(copier, copies)
        [weight.sum() for weight in weights]  # forward and backward only read
        copier.fence(snapshot, deadline_s=10)
        for weight in weights:
            weight.mul_(1.5).add_(step)
        assert [file.map[c.start : c.start + len(d)] for c, d in zip(copies, wanted, strict=True)] == wanted


def test_the_background_thread_alone_is_enough(copier: Copier) -> None:
    file = File(80_000)
    snapshot = file.start(copier, [copy_of(torch.ones(20_000), 0)])
    assert train_until_done(snapshot)
    assert file.map[:] == bytes_of(torch.ones(20_000))
    assert copier.fence(snapshot, deadline_s=1) < 0.5


def test_the_fence_does_its_share(copier: Copier, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the other thread is held up in one piece, the caller copies all the others."""
    real, main, inside, go_on = snapshot_module._copy, threading.current_thread(), threading.Event(), threading.Event()
    mine = []

    def copy(pieces: Any, base: int, fd: int | None, digest: Any) -> tuple[int, int]:
        if threading.current_thread() is main:
            mine.append(pieces)
            if len(mine) == 9:
                go_on.set()
        else:
            inside.set()
            assert go_on.wait(10)
        return real(pieces, base, fd, digest)

    monkeypatch.setattr(snapshot_module, "_copy", copy)
    tensor = torch.randn(10 * 1024)
    file = File(40 * 1024)
    snapshot = file.start(copier, [copy_of(tensor, 0)])
    assert inside.wait(5)
    copier.fence(snapshot, deadline_s=5)
    assert len(mine) == 9 and file.map[:] == bytes_of(tensor)


def test_the_two_threads_use_the_two_ways(copier: Copier, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Two writers of one file would wait for each other; with large pages stores are faster on both threads."""
    real, main = snapshot_module._copy, threading.current_thread()
    here, there = threading.Event(), threading.Event()
    used: dict[bool, list[bool]] = {True: [], False: []}

    def copy(pieces: Any, base: int, fd: int | None, digest: Any) -> tuple[int, int]:
        mine = threading.current_thread() is main
        used[mine].append(fd is not None)
        if len(used[mine]) == 2:
            (here if mine else there).set()
            assert (there if mine else here).wait(5), "one thread did all of it"
        return real(pieces, base, fd, digest)

    monkeypatch.setattr(snapshot_module, "_copy", copy)
    file = File(40 * 1024)
    copier.fence(file.start(copier, [copy_of(torch.zeros(10 * 1024), 0)]), deadline_s=10)
    assert set(used[True]) == {way == "fresh"}
    assert used[False][-1] is (way != "stores")


def test_pages_are_found_to_be_small_or_large(copier: Copier, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """By the faults that stores cost; on a ramdisk it does not matter. Every save looks again: pages come and go."""
    faults = iter(range(0, 10_000_000, 500))
    monkeypatch.setattr(snapshot_module, "page_faults", lambda: next(faults))
    file = File(40 * 1024)
    tensor = torch.randn(10 * 1024)
    copier.fence(file.start(copier, [copy_of(tensor, 0)]), deadline_s=10)
    assert file.slot.small_pages is (way == "writes")
    monkeypatch.setattr(snapshot_module, "page_faults", lambda: 7)
    assert train_until_done(file.start(copier, [copy_of(tensor, 0)]))
    assert not file.slot.small_pages and file.map[:] == bytes_of(tensor)


def test_stores_into_pages_that_were_mapped_in_advance_show_nothing(
    copier: Copier, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    faults = iter(range(0, 10_000_000, 500))
    file = File(40 * 1024)
    file.slot.populated, known = True, file.slot.small_pages
    for count in (lambda: 7, lambda: next(faults)):
        monkeypatch.setattr(snapshot_module, "page_faults", count)
        copier.fence(file.start(copier, [copy_of(torch.randn(10 * 1024), 0)]), deadline_s=10)
        assert file.slot.small_pages is known


def test_nothing_is_stored_into_fresh_pages(copier: Copier, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """One fault each is ten times as slow as writes; and a store would end the process where blocks cannot be allocated
    ahead, and there is none left."""
    stored: list[int] = []
    real = ctypes.memmove
    monkeypatch.setattr(snapshot_module.ctypes, "memmove", lambda *a: (stored.append(a[2]), real(*a)))
    file, tensor = File(40_000), torch.randn(10_000)
    copier.fence(file.start(copier, [copy_of(tensor, 0)]), deadline_s=10)
    assert file.map[:] == bytes_of(tensor) and bool(stored) is (way != "fresh")


@pytest.mark.parametrize("whose", ["training", "copy"])
def test_no_room_for_fresh_pages_fails_the_save(
    copier: Copier, monkeypatch: pytest.MonkeyPatch, way: str, whose: str
) -> None:
    """Whichever thread's write fails first."""
    real, main, failed = snapshot_module._copy, threading.current_thread(), threading.Event()

    def copy(pieces: Any, base: int, fd: int | None, digest: Any) -> tuple[int, int]:
        if (threading.current_thread() is main) is (whose == "training"):
            try:
                return real(pieces, base, fd, digest)
            finally:
                failed.set()
        assert failed.wait(10)
        return real(pieces, base, fd, digest)

    monkeypatch.setattr(snapshot_module, "_copy", copy)
    file = File(20_000)
    with open("/dev/full", "r+b", buffering=0) as full:
        os.dup2(full.fileno(), file.slot.fd)
    snapshot = file.start(copier, [copy_of(torch.zeros(5000), 0)])
    copier.fence(snapshot, deadline_s=10)
    if way != "writes":  # of which the helper's are stores
        assert ("No space left" in str(snapshot.error)) is (way == "fresh")


def test_short_writes_are_continued(copier: Copier, monkeypatch: pytest.MonkeyPatch) -> None:
    File.way = "writes"
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, memoryview(data)[:300], at))
    file = File(40_000)
    tensor = torch.randn(10_000)
    snapshot = file.start(copier, [copy_of(tensor, 0)])
    assert train_until_done(snapshot)
    assert file.map[:] == bytes_of(tensor)


def test_nothing_to_copy_is_done_at_once(copier: Copier) -> None:
    file = File(0)
    snapshot = file.start(copier, [copy_of(torch.empty(0), 0)])
    assert copier.fence(snapshot, deadline_s=5) >= 0
    assert snapshot.done.wait(5) and file.finished == [snapshot]


def test_tensors_are_let_go_after_the_copy(copier: Copier) -> None:
    import gc
    import weakref

    tensor = torch.ones(9000)
    alive = weakref.ref(tensor)
    file = File(36_000)
    snapshot = file.start(copier, [copy_of(tensor, 0)])
    copier.fence(snapshot, deadline_s=10)
    assert snapshot.done.wait(10)  # the copy thread lets go after the fence
    del tensor
    gc.collect()
    assert alive() is None, "a finished snapshot keeps the state alive"


def test_an_error_is_reported_and_the_copier_lives_on(copier: Copier, monkeypatch: pytest.MonkeyPatch) -> None:
    faultpoints.arm("save.block:error")
    file = File(40_000)
    snapshot = file.start(copier, [copy_of(torch.ones(10_000), 0)])
    copier.fence(snapshot, deadline_s=10)
    assert copier.wait_idle(10)  # the copy thread tells the end after the fence
    assert isinstance(snapshot.error, OSError) and snapshot.error.errno == errno.EIO and file.finished == [snapshot]
    faultpoints.arm("")
    again = file.start(copier, [copy_of(torch.ones(10_000), 0)])
    copier.fence(again, deadline_s=10)
    assert again.error is None and file.map[:] == bytes_of(torch.ones(10_000))


def test_after_an_error_the_fence_waits_for_the_other_thread(copier: Copier, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread's piece fails while the other is in the middle of its own: the tensors and the file are still in use."""
    inside, go_on, left = threading.Event(), threading.Event(), threading.Event()
    main = threading.current_thread()

    def copy(pieces: Any, base: int, fd: int | None, digest: Any) -> tuple[int, int]:
        if threading.current_thread() is main:
            inside.wait(5)
            faultpoints.arm("save.block:error")
            faultpoints.hit("save.block")
        inside.set()
        go_on.wait(5)
        left.set()

    monkeypatch.setattr(snapshot_module, "_copy", copy)
    file = File(40_000)
    snapshot = file.start(copier, [copy_of(torch.ones(10_000), 0)])
    assert inside.wait(5)
    threading.Timer(0.3, go_on.set).start()
    copier.fence(snapshot, deadline_s=10)
    faultpoints.arm("")
    assert left.is_set(), "the fence returned while a piece was still being copied"


class Stop(Exception):
    """What a handler of a user's program may raise, as a limit of time does."""


@pytest.fixture
def handlers() -> Iterator[None]:
    """Processes that a shell has started in the background ignore SIGINT."""

    def handler(*_: Any) -> None:
        raise Stop

    old = {
        kind: signal.signal(kind, how)
        for kind, how in ((signal.SIGUSR1, handler), (signal.SIGINT, signal.default_int_handler))
    }
    yield
    for kind, how in old.items():
        signal.signal(kind, how)


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGUSR1])
@pytest.mark.parametrize(
    "where", ["in its first block", "in the last block", "while no other copies", "while it waits"]
)
def test_a_signal_at_the_fence_is_raised_there_and_the_save_goes_on(
    copier: Copier, monkeypatch: pytest.MonkeyPatch, handlers: None, kind: signal.Signals, where: str
) -> None:
    """As in code that knows nothing of checkpoints. What the program does next must not get into the copy."""
    main, real = threading.main_thread(), snapshot_module._copy
    entered, go_on, sent = threading.Event(), threading.Event(), threading.Event()

    def until(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def copy(*args: Any) -> tuple[int, int]:
        last = snapshot._next == snapshot._count
        if threading.current_thread() is not main:
            if not entered.is_set():
                entered.set()
                if where == "while it waits":
                    until(lambda: snapshot._next == snapshot._count and snapshot._running == 1 and sleeps(main))
                    sent.set()
                    signal.pthread_kill(main.ident or 0, kind)
                else:
                    assert go_on.wait(10)
        elif not sent.is_set() and (last or where == "in its first block") and where != "while it waits":
            go_on.set()
            if where == "while no other copies":
                until(lambda: snapshot._running == 1 and sleeps(copier._thread))
            sent.set()
            signal.raise_signal(kind)
        return real(*args)

    monkeypatch.setattr(snapshot_module, "_copy", copy)
    weight = torch.randn(20_000)
    wanted = bytes_of(weight)
    file = File(80_000)
    snapshot = file.start(copier, [copy_of(weight, 0)])
    assert entered.wait(10)
    with pytest.raises(KeyboardInterrupt if kind is signal.SIGINT else Stop):
        copier.fence(snapshot, deadline_s=30)
    assert snapshot.decided
    weight.fill_(7)
    assert copier.wait_idle(10) and snapshot.error is None and file.map[:] == wanted


def test_what_signals_have_interrupted_the_copy_thread_makes_up_for(
    copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the copy would never end: two signals come while the training thread, in the last block, tells of its end."""
    main, real, finish = threading.main_thread(), snapshot_module._copy, Snapshot.finish_copy
    entered, go_on, raised = threading.Event(), threading.Event(), []

    def copy(*args: Any) -> tuple[int, int]:
        if threading.current_thread() is main:
            go_on.set()
            deadline = time.monotonic() + 10
            while snapshot._next < snapshot._count or snapshot._running > 1 or not sleeps(copier._thread):
                assert time.monotonic() < deadline
                time.sleep(0.001)
        else:
            entered.set()
            assert go_on.wait(10)
        return real(*args)

    def finish_copy(self: Snapshot) -> None:
        if threading.current_thread() is main and len(raised) < 2:
            raised.append(1)
            raise KeyboardInterrupt
        finish(self)

    monkeypatch.setattr(snapshot_module, "_copy", copy)
    monkeypatch.setattr(Snapshot, "finish_copy", finish_copy)
    weight = torch.randn(20_000)
    file = File(80_000)
    snapshot = file.start(copier, [copy_of(weight, 0)])
    assert entered.wait(10)
    with pytest.raises(KeyboardInterrupt):
        copier.fence(snapshot, deadline_s=30)
    assert len(raised) == 2 and snapshot.copied.wait(10)
    copier.fence(snapshot, deadline_s=30)
    assert copier.wait_idle(10) and snapshot.error is None and file.map[:] == bytes_of(weight)


def test_a_copy_that_hangs_is_a_timeout(copier: Copier, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go_on = threading.Event(), threading.Event()
    main = threading.current_thread()

    def copy(pieces: Any, base: int, fd: int | None, digest: Any) -> tuple[int, int]:
        if threading.current_thread() is not main:
            inside.set()
            go_on.wait(10)
        return 0, 0

    monkeypatch.setattr(snapshot_module, "_copy", copy)
    file = File(40_000)
    snapshot = file.start(copier, [copy_of(torch.ones(10_000), 0)])
    assert inside.wait(5)
    with pytest.raises(Timeout, match="hangs"):
        copier.fence(snapshot, deadline_s=0.2)
    go_on.set()
    copier.fence(snapshot, deadline_s=10)


def test_closing_finishes_the_copy_and_ends_the_thread() -> None:
    copier = Copier(name="resiliency-copy-x")
    file = File(400_000)
    snapshot = file.start(copier, [copy_of(torch.ones(100_000), 0)])
    copier.close()
    copier.close()
    assert snapshot.done.is_set() and file.map[:] == bytes_of(torch.ones(100_000))
    assert "resiliency-copy-x" not in [thread.name for thread in threading.enumerate()]


# ---- copies a device makes by itself


class Device:
    """In place of copies on a GPU: fills page-locked memory when it is waited for, or fails as CUDA does."""

    failure = ""

    def __init__(self, copies: Any) -> None:
        self.copies = copies
        self.go_on, self.waited = threading.Event(), threading.Event()

    def fence(self) -> None:
        """Nothing: the stream of a GPU would wait, the CPU does not."""

    def wait(self) -> None:
        assert self.go_on.wait(10)
        for source, target in self.copies:
            target.copy_(source)
        self.waited.set()
        if self.failure:
            raise RuntimeError(self.failure)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> type[Device]:
    monkeypatch.setattr(copier_module, "DeviceCopies", Device)
    monkeypatch.setattr(Device, "failure", "")
    return Device


def begin(copier: Copier, file: File) -> tuple[Snapshot, torch.Tensor, Any]:
    """A snapshot of a tensor on the device, by way of memory that has other bytes before."""
    on_device = torch.randint(0, 255, (file.slot.nbytes,), dtype=torch.uint8)
    staged = torch.full_like(on_device, 7)
    copies = [CopyTask(staged, 0, len(staged), staged.data_ptr())]
    snapshot = copier.start(file.job(copies, device_copies=[(on_device, staged)]), file.finished.append)
    return snapshot, on_device, snapshot.device


@pytest.mark.usefixtures("device")
def test_the_file_is_filled_and_digested_after_the_device_is_done(copier: Copier) -> None:
    file = File(13_000)
    snapshot, tensor, device = begin(copier, file)
    assert copier.fence(snapshot, deadline_s=5) < 1, "the CPU waits for the device"
    assert not snapshot.done.wait(0.2)
    device.go_on.set()
    assert snapshot.done.wait(10) and snapshot.error is None and file.finished == [snapshot]
    assert file.map[:] == bytes_of(tensor)
    assert snapshot.digests == [block_digest(file.map[at : min(at + 4096, 13_000)]) for at in range(0, 13_000, 4096)]


def test_a_device_that_fails_fails_the_save(
    copier: Copier, device: type[Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "failure", "CUDA error: device-side assert triggered")
    file = File(8192)
    snapshot, _, one = begin(copier, file)
    one.go_on.set()
    assert snapshot.done.wait(10)
    assert "device-side assert" in str(snapshot.error) and file.finished == [snapshot]


@pytest.mark.usefixtures("device")
def test_a_copy_that_fails_is_done_only_after_the_device_is(copier: Copier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then the device writes into memory that the next save would use."""

    def broken(*args: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(snapshot_module, "_copy", broken)
    file = File(8192)
    snapshot, _, one = begin(copier, file)
    assert not snapshot.done.wait(0.3) and not file.finished
    one.go_on.set()
    assert snapshot.done.wait(10) and one.waited.is_set()
    assert file.finished == [snapshot] and str(snapshot.error) == "no"
