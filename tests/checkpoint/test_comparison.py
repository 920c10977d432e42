"""The comparison of live tensors with what was copied from them, shared by the copy thread and the fence."""

from __future__ import annotations

import ctypes
import dis
import mmap
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from resiliency.checkpoint import comparison as comparison_module
from resiliency.checkpoint import copier as copier_module
from resiliency.checkpoint.arena import Slot
from resiliency.checkpoint.comparison import Comparison
from resiliency.checkpoint.copier import Copier
from resiliency.checkpoint.copy_sources import CopyTask, Sources
from resiliency.checkpoint.snapshot import Job, Snapshot
from resiliency.errors import Timeout, TornSnapshot
from resiliency.storage.blocks import Blocks, block_digest

BLOCK = 4096


class Copied:
    """Two tensors of 5 and 3 blocks, and the memory that holds a copy of them."""

    def __init__(self) -> None:
        self.tensors = [torch.arange(5 * BLOCK // 4, dtype=torch.int32), torch.ones(3 * BLOCK // 4, dtype=torch.int32)]
        self.sources = Sources(
            [
                CopyTask(self.tensors[0], 0, 5 * BLOCK, self.tensors[0].data_ptr(), storage=0),
                CopyTask(self.tensors[1], 5 * BLOCK, 3 * BLOCK, self.tensors[1].data_ptr(), storage=1),
            ]
        )
        self.file = torch.cat(self.tensors)
        self.blocks = Blocks(8 * BLOCK, BLOCK)
        data = memoryview(self.file.numpy().tobytes())
        self.digests = [block_digest(data[slice(*self.blocks.bounds(number))]) for number in range(self.blocks.count)]

    def comparison(self) -> Comparison:
        return Comparison(
            self.sources,
            self.file.data_ptr(),
            blocks=self.blocks,
            mine=range(self.blocks.count),
            digests=self.digests,
        )


@pytest.fixture
def copier() -> Iterator[Copier]:
    made = Copier()
    yield made
    made.close()


def test_tensors_that_are_as_they_were_copied_are_not_changed() -> None:
    assert Copied().comparison().changed() == []


@pytest.mark.parametrize("byte", [0, 5 * BLOCK - 4, 5 * BLOCK, 8 * BLOCK - 4])
def test_a_change_of_any_byte_is_found_with_its_storage(byte: int) -> None:
    copied = Copied()
    storage = int(byte >= 5 * BLOCK)
    copied.tensors[storage].numpy()[(byte - 5 * BLOCK * storage) // 4] += 1
    assert copied.comparison().changed() == [storage]


def test_a_second_thread_compares_every_other_block_and_no_block_is_compared_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied, both = Copied(), threading.Barrier(2)
    begun: list[tuple[int, int]] = []
    real = Comparison._changed_in

    def in_step(self: Comparison, index: int) -> set[int]:
        begun.append((index, threading.get_ident()))
        both.wait(10)  # so that neither thread goes on alone
        return real(self, index)

    monkeypatch.setattr(Comparison, "_changed_in", in_step)
    copied.tensors[1].numpy()[-1] += 1  # the second thread may be the one that finds it
    comparison = copied.comparison()

    def help_compare() -> None:
        while comparison.work():
            continue

    helper = threading.Thread(target=help_compare)
    helper.start()
    assert comparison.changed() == [1]
    helper.join(10)
    assert sorted(index for index, _ in begun) == list(range(8))
    threads = [thread for _, thread in begun]
    assert {threads.count(thread) for thread in set(threads)} == {4}


def test_changed_waits_for_the_block_of_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    copied, inside, go_on = Copied(), threading.Event(), threading.Event()
    real = Comparison._changed_in

    def slowly(self: Comparison, index: int) -> set[int]:
        if index == 0:
            inside.set()
            assert go_on.wait(10)
        return real(self, index)

    monkeypatch.setattr(Comparison, "_changed_in", slowly)
    copied.tensors[0].numpy()[0] += 1
    comparison, found = copied.comparison(), []
    helper = threading.Thread(target=comparison.work)
    helper.start()
    assert inside.wait(10)
    asker = threading.Thread(target=lambda: found.append(comparison.changed()))
    asker.start()
    while comparison.work():  # all other blocks
        continue
    asker.join(0.2)
    assert found == [], "the answer came before the last block was compared"
    go_on.set()
    asker.join(10)
    helper.join(10)
    assert found == [[0]]


def test_after_stop_no_tensor_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    copied, inside, go_on, read = Copied(), threading.Event(), threading.Event(), threading.Event()
    real = Comparison._changed_in

    def slowly(self: Comparison, index: int) -> set[int]:
        inside.set()
        assert go_on.wait(10)
        changed = real(self, index)
        read.set()
        return changed

    monkeypatch.setattr(Comparison, "_changed_in", slowly)
    comparison = copied.comparison()
    helper = threading.Thread(target=comparison.work)
    helper.start()
    assert inside.wait(10)
    threading.Timer(0.2, go_on.set).start()
    comparison.stop()
    assert read.is_set(), "stop returned while a block was being read"
    assert not comparison.work() and comparison.changed() == []
    helper.join(10)


def test_a_block_that_an_interrupted_thread_gives_back_after_stop_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go_on = threading.Event(), threading.Event()
    calls: list[int] = []

    def interrupted(self: Comparison, index: int) -> set[int]:
        calls.append(index)
        inside.set()
        assert go_on.wait(10)
        raise KeyboardInterrupt

    def work() -> None:
        with suppress(KeyboardInterrupt):
            comparison.work()

    monkeypatch.setattr(Comparison, "_changed_in", interrupted)
    comparison = Copied().comparison()
    helper = threading.Thread(target=work)
    helper.start()
    assert inside.wait(10)
    threading.Timer(0.2, go_on.set).start()
    comparison.stop()
    helper.join(10)
    assert not comparison.work() and comparison.changed() == [] and calls == [0]


def test_a_block_in_which_a_thread_was_interrupted_is_compared_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Comparison, index: int) -> set[int]:
        raise KeyboardInterrupt

    copied = Copied()
    copied.tensors[0].numpy()[0] += 1  # in the block that is begun first
    comparison = copied.comparison()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Comparison, "_changed_in", interrupted)
        comparison.work()
    assert comparison.changed() == [0]


def test_ctrl_c_at_any_moment_keeps_nobody_waiting() -> None:
    """Python raises it in the training thread after a call, or at a jump back; not between any two byte codes."""
    copied = Copied()
    copied.tensors[0].numpy()[0] += 1
    before, at, unseen, moments = sys.gettrace(), 0, 0, 1
    while at < moments:
        comparison, done_last = copied.comparison(), dict[int, int]()
        moments = 0

        def interrupt(frame: Any, event: str, argument: Any, limit: int = at, last: dict[int, int] = done_last) -> Any:
            nonlocal moments
            frame.f_trace_opcodes = True
            if event == "opcode" and frame.f_code.co_filename == comparison_module.__file__:
                done = last.get(id(frame))
                last[id(frame)] = frame.f_lasti
                if done is not None and dis.opname[frame.f_code.co_code[done]].startswith(("CALL", "JUMP_BACKWARD")):
                    moments += 1
                    if moments > limit:
                        raise KeyboardInterrupt
            return interrupt

        try:
            sys.settrace(interrupt)
            comparison.work()
        except KeyboardInterrupt:
            moments = at + 2  # there may be a later moment
        finally:
            sys.settrace(before)
        unseen += comparison.changed() != [0]
        at += 1
    assert at > 10
    assert unseen <= 1, "more than between the call that takes a block and the note of its number"


def test_a_thread_that_hangs_in_its_block_is_waited_for_with_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def hangs(self: Comparison, index: int) -> set[int]:
        inside.set()
        go_on.wait(30)
        return set()

    comparison = Copied().comparison()
    monkeypatch.setattr(comparison_module, "_BLOCK_S", 0.05)
    with monkeypatch.context() as patched:
        patched.setattr(Comparison, "_changed_in", hangs)
        helper = threading.Thread(target=comparison.work)
        helper.start()
        assert inside.wait(10)
    with pytest.raises(Timeout, match="did not compare its block"):
        comparison.changed()
    with pytest.raises(Timeout, match="did not compare its block"):
        comparison.stop()
    go_on.set()
    helper.join(10)


# -- in a snapshot ------------------------------------------------------------------------------------------------


class File:
    """A nameless file in place of a shard file."""

    def __init__(self, nbytes: int) -> None:
        self.map = mmap.mmap(-1, nbytes)
        self.closed = threading.Event()
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.slot = Slot(path="", inode=0, fd=-1, map=self.map, nbytes=nbytes, address=address, in_memory=True)
        self.slot.close = self.closed.set  # type: ignore[method-assign]

    def job(self, tensor: torch.Tensor, **further: Any) -> Job:
        blocks = Blocks(self.slot.nbytes, BLOCK)
        task = CopyTask(tensor, 0, self.slot.nbytes, tensor.data_ptr(), storage=0)
        return Job(copies=[task], blocks=blocks, mine=range(blocks.count), open=lambda: self.slot, **further)


def test_the_fence_helps_to_compare(copier: Copier, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[threading.Thread] = set()
    both, real = threading.Barrier(2), comparison_module.new_digest

    def digest() -> Any:
        if threading.current_thread() not in threads:
            threads.add(threading.current_thread())
            both.wait(10)
        return real()

    monkeypatch.setattr(comparison_module, "new_digest", digest)
    file, tensor = File(16 * BLOCK), torch.ones(4 * BLOCK)
    snapshot = copier.start(file.job(tensor, compare=True), lambda _: None)
    copier.fence(snapshot, deadline_s=10)
    assert snapshot.done.wait(10) and snapshot.error is None
    assert {thread.name for thread in threads} == {"MainThread", "resiliency-copy"}


def test_an_error_of_the_comparison_fails_the_save_and_no_other(
    copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Comparison, index: int) -> set[int]:
        raise MemoryError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(Comparison, "_changed_in", fails)
        patched.setattr(Snapshot, "help_compare", lambda self: self.compared.wait(10))
        file, tensor = File(4 * BLOCK), torch.ones(BLOCK)
        snapshot = copier.start(file.job(tensor, compare=True), lambda _: None)
        copier.fence(snapshot, deadline_s=10)
        assert snapshot.done.wait(10) and copier.wait_idle(10)
        assert isinstance(snapshot.error, MemoryError)
    again = File(4 * BLOCK)
    snapshot = copier.start(again.job(tensor, compare=True), lambda _: None)
    copier.fence(snapshot, deadline_s=10)
    assert snapshot.done.wait(10) and snapshot.error is None


def test_the_fence_does_not_wait_until_the_end_of_a_compared_file_is_written(copier: Copier) -> None:
    returned = threading.Event()
    file, tensor = File(16 * BLOCK), torch.ones(4 * BLOCK)

    def tail(fd: int, digests: Any) -> list[str]:
        assert returned.wait(10)
        return ["of the tail"]

    snapshot = copier.start(file.job(tensor, compare=True, tail=tail), lambda _: None)
    copier.fence(snapshot, deadline_s=10)
    returned.set()
    assert snapshot.done.wait(5) and snapshot.error is None and snapshot.digests[-1] == "of the tail"


def test_nothing_is_written_behind_a_compared_file_that_is_torn(
    copier: Copier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Comparison, "_changed_in", lambda self, index: {0} if index == 3 else set())
    written: list[int] = []
    discarded = threading.Event()
    file, tensor = File(16 * BLOCK), torch.ones(4 * BLOCK)

    def tail(fd: int, digests: Any) -> list[str]:
        written.append(fd)
        return []

    snapshot = copier.start(file.job(tensor, compare=True, tail=tail, discard=discarded.set), lambda _: None)
    copier.fence(snapshot, deadline_s=10)
    assert snapshot.done.wait(10) and isinstance(snapshot.error, TornSnapshot)
    assert written == [] and discarded.is_set()


# -- what can wait ------------------------------------------------------------------------------------------------


@pytest.fixture
def slow_to_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copier_module, "_CLOSE_AFTER_S", 30)


def finished(copier: Copier, events: list[str]) -> SimpleNamespace:
    """A save that is done, and what is to be done after it."""

    def done(snapshot: Snapshot) -> None:
        snapshot.afterwards = lambda: events.append(f"afterwards, file closed: {file.closed.is_set()}")

    file, tensor = File(16 * BLOCK), torch.ones(4 * BLOCK)
    snapshot = copier.start(file.job(tensor), done)
    copier.fence(snapshot, deadline_s=10)
    assert snapshot.done.wait(10) and snapshot.error is None
    return SimpleNamespace(file=file, snapshot=snapshot)


@pytest.mark.usefixtures("slow_to_close")
def test_the_file_is_unmapped_only_after_the_commit_has_had_time(copier: Copier) -> None:
    events: list[str] = []
    save = finished(copier, events)
    assert copier.wait_idle(10), "the next save would wait for it"
    assert not save.file.closed.wait(0.2) and events == []
    began = time.monotonic()
    copier.close()
    assert time.monotonic() - began < 20, "closing waited, too"
    assert save.file.closed.is_set() and events == ["afterwards, file closed: True"]


@pytest.mark.usefixtures("slow_to_close")
def test_a_save_that_follows_at_once_finds_the_file_before_it_unmapped(copier: Copier) -> None:
    events: list[str] = []
    save = finished(copier, events)
    began = time.monotonic()
    following = finished(copier, events)
    assert time.monotonic() - began < 20, "the second save waited for the first to be closed"
    assert save.file.closed.is_set() and events == ["afterwards, file closed: True"]
    assert not following.file.closed.is_set()


def test_without_another_save_the_file_is_unmapped_by_itself(copier: Copier) -> None:
    events: list[str] = []
    save = finished(copier, events)
    assert save.file.closed.wait(10)
    copier.close()
    assert events == ["afterwards, file closed: True"]
