"""Copies live tensors into a shard file in the background, with digests, and the fence before they may change.

A background thread makes the copies while forward and backward run (:mod:`resiliency.checkpoint.copier`). The fence is
called before anything changes the tensors: the caller copies the remaining blocks together with that thread, so that
waiting never takes longer than copying everything at once would have.

A snapshot has two phases. *Copied* means that every byte was read once. *Agreed* means that none of them changed
meanwhile, by torch's count of changes in place. Torch counts when a kernel ends, so the copy thread cannot tell: it may
look while a kernel runs that changes what was copied. Only the training thread knows that it runs no kernel: at the
fence, and in :meth:`Snapshot.settle`. The first of these decides. So changes after it do not matter, and a save that is
given up is given up before anybody is told of its file.

The file is divided into blocks with a digest each. A block is read in strides that fit into a core's cache: each stride
is digested, and copied while it is in the cache. That makes the digest nearly free (1 GiB on two cores: 63 ms with it,
58 ms without; 95 ms when another process digested the file after the copy).

CPU tensors are copied without the GIL, in one of two ways. Stores to the mapping are fastest on ramdisks and in files
with huge pages (256 MiB: 18 to 20 ms on two cores; a bare copy to shared memory takes 14). In files with small pages,
which every fsync write-protects, stores fault once per 4 KiB (32 to 35 ms). There the copy thread uses ``pwrite``, and
the thread at the fence still stores, because two threads in ``pwrite`` on one file would wait for each other (23 to
28 ms). The threads count their page faults to find the page size. Pages that are not in memory yet are created first,
huge if possible.

CUDA tensors are copied asynchronously on a side stream into page-locked memory of this process, and from there by the
copy thread. Their fence makes the compute stream wait, not the CPU. Overlapping the copy with the next forward and
backward, so that only the update waits, is the idea of CheckFreq (FAST '21) and DataStates-LLM (HPDC '24).

The ranks of a host that hold the same state write one file together: each copies its own blocks.
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.storage import UntypedStorage

from resiliency.checkpoint._cuda import DeviceCopies
from resiliency.checkpoint._pages import has_small_pages, page_faults, view
from resiliency.checkpoint.arena import Slot
from resiliency.checkpoint.comparison import Comparison
from resiliency.checkpoint.copy_sources import ChangeWatch, CopyTask, Sources
from resiliency.errors import Timeout, TornSnapshot
from resiliency.faultpoints import hit
from resiliency.spans import Recorder, traced
from resiliency.storage.blocks import Blocks, new_digest

__all__ = ["HELPER_S", "Job", "Snapshot"]

logger = logging.getLogger(__name__)

#: Bytes digested and then copied at a time: half the second-level cache of a core on the machines measured.
_STRIDE = 512 * 1024
#: Seconds after which a thread that has not finished a block hangs; a block takes milliseconds.
HELPER_S = 60.0
#: Seconds after which the copy thread looks whether a signal has kept another thread from waking it.
_LOST_S = 1.0
#: Most seconds that the copy thread lets the training thread leave the fence first.
_LEAVES_S = 0.01
#: Seconds between two log messages of a copy that waits for the fence.
_AGREE_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one rank copies into one file.

    Attributes:
        copies: in file order, without gaps within this rank's blocks.
        device_copies: copies from a GPU into page-locked memory, which some of ``copies`` then read.
        watched: further tensors whose version counters count changes of sources, each with the number of its storage:
            sources on a GPU, DTensors.
        blocks: the blocks of the file up to its tail.
        mine: numbers of the blocks this rank copies.
        open: opens the file; called on the copy thread before anything is copied, because making a file waits while the
            file system commits its journal, and the training thread must not. None: there is nothing to copy.
        tail: writes what follows the blocks, and returns the digests of its own blocks. Called on the copy thread with
            the file's descriptor and the digests of the file's blocks, once this rank's blocks are copied.
        discard: deletes the file; called on the copy thread when the save is given up.
        compare: after the copy, read the tensors in CPU memory once more and compare. This notices changes that torch
            does not count (``.data``, a custom kernel). The fence waits for it.
        key_of: path in the state of a storage, by number; for messages.
        trace: of the save, if it is traced.
    """

    copies: Sequence[CopyTask]
    device_copies: Sequence[tuple[Tensor, Tensor]] = ()
    watched: Sequence[tuple[Tensor, int]] = ()
    blocks: Blocks
    mine: Sequence[int]
    open: Callable[[], Slot] | None = None
    tail: Callable[[int, Sequence[str]], list[str]] = lambda fd, digests: []
    discard: Callable[[], None] = lambda: None
    compare: bool = False
    key_of: Callable[[int], str] = str
    trace: Recorder | None = None


@dataclass
class Snapshot:
    """One copy of a state. Its lock guards every attribute.

    Created by :meth:`resiliency.checkpoint.copier.Copier.start`.

    Attributes:
        sources: the copies from CPU memory; None once done.
        slot: the file, used by this snapshot only until it is done; None before it is open.
        digests: one per block of the file, "" for other ranks' blocks; complete once done.
        opened: set when the file is open, or could not be opened.
        copied: set when nothing reads the sources any more, or the copy failed.
        compared: set when the tensors were compared with the copied bytes, or need not be.
        at_fence: held by the training thread while it waits at the fence.
        done: set when every byte of this rank is in the file and digested, and the training thread has agreed; or when
            the save is given up.
        error: why the copy failed; None: it has not.
        afterwards: called on the copy thread by :meth:`close`, last.
        device: the copies from GPUs; None without any.
    """

    job: Job
    on_done: Callable[[Snapshot], None]
    device: DeviceCopies | None = None
    slot: Slot | None = None
    digests: list[str] = field(default_factory=list)
    opened: threading.Event = field(default_factory=threading.Event)
    copied: threading.Event = field(default_factory=threading.Event)
    compared: threading.Event = field(default_factory=threading.Event)
    at_fence: threading.Lock = field(default_factory=threading.Lock)
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    afterwards: Callable[[], None] | None = None
    sources: Sources | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    # The verdict, once decided: why the save is given up; None: the copy is good. Only the first entry counts.
    _verdicts: list[TornSnapshot | Timeout | None] = field(default_factory=list)
    _decided: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)
    _watch: ChangeWatch | None = None
    _comparison: Comparison | None = None  # from the end of the copy on, if it is to be compared
    # Storages of the live tensors: a tensor may get other memory meanwhile (``tensor.data = other``), and the old
    # memory, which is being read, must not be freed.
    _memory: list[UntypedStorage] = field(default_factory=list)
    _fenced: bool = False
    _next: int = 0
    _count: int = 0
    _again: list[int] = field(default_factory=list)  # positions of blocks whose copy was interrupted
    # Wakes the copy thread, which has found no block: the copy has ended, or a block must be copied again.
    _stirred: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)
    _blocks_left: int = 0
    _running: int = 0
    _stored: int = 0
    _faults: int = 0

    def __post_init__(self) -> None:
        self.sources = Sources(self.job.copies)
        self._watch = ChangeWatch(self.job.copies, self.job.watched)
        if not self._watch.tensors:
            self._verdicts.append(None)  # nothing that this snapshot reads can change
        self._memory = [copy.source.untyped_storage() for copy in self.job.copies if copy.storage >= 0]
        self._blocks_left = self._count = len(self.job.mine)
        self.digests = [""] * self.job.blocks.count

    @property
    def failure(self) -> BaseException | None:
        """Why the save is given up; None as long as no reason is known. After the fence only an error of the file can
        be added."""
        return self.error or next(iter(self._verdicts), None)

    @property
    def decided(self) -> bool:
        """True when the training thread has agreed to the copy, or has given it up."""
        return bool(self._verdicts)

    def reads(self, optimizer: Optimizer) -> bool:
        """True when the copy reads memory of a parameter that this optimizer steps. Thread: any. Blocks: no."""
        watch = self._watch
        if watch is None:
            return False
        stepped = {_memory(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        return any(_memory(tensor) in stepped for tensor in watch.tensors)

    def settle(self) -> None:
        """Decides whether the copy is good, if it is done. Thread: training, which runs no kernel then. Blocks: no."""
        if self.copied.is_set():
            self.decide()

    def decide(self, given_up: Timeout | None = None, *, fenced: bool = False) -> None:
        """Agrees to the copy if no tensor has changed since it began. An earlier decision stays.

        Thread: training, once later changes cannot get into the copy. Blocks: no.

        Args:
            given_up: do not agree, for this reason.
            fenced: the training thread will change nothing until the comparison is done.
        """
        if fenced:
            self._fenced = True  # before others can see the decision
        watch = self._watch
        if watch is not None and not self._verdicts:
            self._verdicts.append(given_up or self._torn(watch.changed()))
        self._decided.put(None)

    def finish(self) -> None:
        """Waits for all blocks, writes the tail, waits until the training thread has agreed, and compares if wanted.

        Thread: copy, after its last :meth:`work`. Blocks: until the fence, at most.
        """
        self._await_blocks()
        steps = [self._write_tail, self._agree]
        if self.job.compare:
            steps.reverse()  # the fence waits for the comparison, but not for the tail
        for step in steps:
            self.error = self.error or step()
        self._end_comparison()
        if self.error is not None and self.slot is not None:
            self._discard()
        self._watch = None
        # A holder of this snapshot must not keep the tensors alive.
        self.job = Job(copies=(), blocks=self.job.blocks, mine=self.job.mine)
        self.device = None
        on_done, self.on_done = self.on_done, _done_already
        try:
            on_done(self)
        except Exception:  # Boundary: the copy thread must survive; the agent did not get the message.
            logger.exception("the end of a save could not be reported")
        self.done.set()

    def _await_blocks(self) -> None:
        deadline = time.monotonic() + HELPER_S
        while not self.copied.is_set():
            if self.work():  # a block that another thread was interrupted in
                continue
            self.finish_copy()  # which a signal may have interrupted, too
            with suppress(queue.Empty):
                self._stirred.get(timeout=_LOST_S)
            if time.monotonic() > deadline:
                with self._lock:
                    self.error = Timeout(f"the thread at the fence did not finish its block within {HELPER_S:.0f} s")
                return

    def close(self) -> None:
        """Unmaps the file, which itself stays, and runs ``afterwards``. Thread: copy, once done. Blocks: for some
        60 ms per GiB."""
        if self.slot is not None:
            self.slot.close()  # first, because until then the agent cannot use the file again
        afterwards, self.afterwards = self.afterwards, None
        if afterwards is not None:
            try:
                afterwards()
            except Exception:  # Boundary: the copy thread must survive.
                logger.exception("the check whether a save can be loaded has failed; the save itself is complete")

    def _write_tail(self) -> BaseException | None:
        # The tail is Python work: without this, the training thread would wait at the fence until it gets the GIL, 1 to
        # 3 ms for 300 tensors.
        if self.at_fence.acquire(timeout=_LEAVES_S):
            self.at_fence.release()
        if self.slot is not None:
            try:
                self.digests += self.job.tail(self.slot.fd, self.digests)
            except Exception as failure:  # Boundary: as in work.
                logger.exception("writing the end of a shard file failed")
                return failure
        return None

    def _agree(self) -> BaseException | None:
        """Waits for the verdict, and compares if wanted. From then on nothing reads the tensors."""
        with traced(self.job.trace, "waiting for agreement"):
            error = self._await_verdict() or self._compare()
        self._end_comparison()
        return error

    def _end_comparison(self) -> None:
        self._stop_comparison()
        self._memory = []
        self.compared.set()

    def _await_verdict(self) -> BaseException | None:
        self._await_training_thread(lambda: bool(self._verdicts))
        return self._verdicts[0]

    def _await_training_thread(self, has_come: Callable[[], bool]) -> None:
        while not has_come():
            try:
                self._decided.get(timeout=_AGREE_S)
            except queue.Empty:
                logger.info("a checkpoint that is copied waits for the fence; call Checkpointer.fence or poll")

    def _discard(self) -> None:
        try:
            self.job.discard()
        except OSError as failure:
            logger.info("the file of a save that was given up stays until the next one is committed: %s", failure)

    def open_file(self) -> None:
        """Opens the file, or records the error. Thread: copy, before anything else."""
        if self.job.open is not None:
            try:
                self.slot = self.job.open()
            except Exception as failure:  # Boundary: as in work.
                with self._lock:
                    self.error = failure
        self.opened.set()
        self.finish_copy()

    def wait_device(self) -> None:
        """Waits for the copies from GPUs, if any. Thread: copy, before its first :meth:`work`."""
        if self.device is None:
            return
        try:
            self.device.wait()
        except RuntimeError as failure:  # CUDA failures are RuntimeErrors
            logger.exception("copying from the GPU failed")
            with self._lock:
                self.error = failure
            self.finish_copy()

    def work(self, *, helping: bool = False) -> bool:
        """Copies one block. Returns False when no block is left to start, or after an error. Thread: any; only one
        thread passes ``helping=False``.

        Blocks: until the file is open, and for the copy of the block.

        Raises:
            BaseException: a signal's handler raised it on this thread (Ctrl-C); the block is left to another thread.
        """
        if not self.opened.wait(HELPER_S):
            with self._lock:
                self.error = self.error or Timeout(f"the shard file was not opened within {HELPER_S:.0f} s")
        number: int | None = None
        error: BaseException | None = None
        done, stored, faults = False, 0, 0
        try:
            with self._lock:
                if self.error is not None:
                    return False
                # Without calls, because Python runs the handlers of signals after a call.
                if self._again:
                    number = self._again[-1]
                    del self._again[-1]
                elif self._next < self._count:
                    number, self._next = self._next, self._next + 1
                else:
                    return False
                self._running += 1
            hit("save.block")
            # The first block is always copied by stores, to find out whether the pages have become huge.
            stored, faults = self._copy_block(self.job.mine[number], by_writes=not helping and number > 0)
            done = True
        except Exception as failure:  # Boundary: the copy thread must go on; the training thread reports the error.
            of_system = isinstance(failure, OSError) and failure.errno is not None
            if number is None or (threading.current_thread() is threading.main_thread() and not of_system):
                raise  # a signal's handler has raised it
            logger.exception("copying block %d of a shard file failed", self.job.mine[number])
            error = failure
        finally:
            if number is not None:
                with self._lock:
                    self._running -= 1
                    if done or error is not None:
                        self._blocks_left -= 1
                    else:
                        self._again += [number]
                    self._stored += stored
                    self._faults += faults
                    self.error = self.error or error
                self.finish_copy()
        return done

    def _copy_block(self, index: int, *, by_writes: bool) -> tuple[int, int]:
        """Copies and digests a block; returns what :func:`_copy` returns."""
        slot, sources = self.slot, self.sources
        assert sources is not None and slot is not None  # while a block is left
        by_writes = slot.writes_only or slot.fresh or (by_writes and slot.small_pages)
        start, end = self.job.blocks.bounds(index)
        digest = new_digest()
        cost = _copy(sources.within(start, end), slot.address, slot.fd if by_writes else None, digest)
        self.digests[index] = digest.hexdigest()
        return cost

    def _torn(self, changed: list[int], how: str = "") -> TornSnapshot | None:
        """The error for sources that were changed in place during the copy; None without any. The file may mix old and
        new bytes."""
        if not changed:
            return None
        key = self.job.key_of(changed[0])
        what = f"tensor {key!r} (and {len(changed) - 1} more)" if len(changed) > 1 else f"tensor {key!r}"
        return TornSnapshot(
            f"{what} was changed before the fence, while it was being copied{how}; fence first, or do not copy it"
            " lazily"
        )

    def _compare(self) -> Exception | None:
        """The error for tensors whose values differ from the copied bytes although torch has counted no change, or of
        the comparison itself; None: none.

        Thread: copy, once the training thread has agreed. Blocks: while it reads the tensors; until the fence, if any
            differ.
        """
        comparison, watch = self._comparison, self._watch
        if comparison is None or watch is None:
            return None
        try:
            changed = comparison.changed()
        except Timeout as hangs:
            return hangs
        except Exception as failure:  # Boundary: the copy thread must survive; the save fails.
            logger.exception("comparing a copy with the tensors failed")
            return failure
        if changed:
            self._await_training_thread(lambda: self._fenced)
            if watch.changed():
                return None  # torch counts a change, so it came after the copy, which was agreed to
        return self._torn(changed, how=" in a way that torch does not count (.data, a kernel of your own)")

    def help_compare(self) -> None:
        """Compares with the copy thread, if the copy is to be compared. Thread: training, once it has agreed to the
        copy. Blocks: until the comparison has ended, a read of the tensors by two threads."""
        if not self.job.compare:
            return
        comparison = self._comparison
        while comparison is not None and self.failure is None and comparison.work():
            continue
        self.compared.wait(HELPER_S)  # a change after the fence must not count as one during the copy

    def _stop_comparison(self) -> None:
        comparison, self._comparison = self._comparison, None
        if comparison is not None:
            try:
                comparison.stop()
            except Timeout as hangs:
                logger.warning("%s", hangs)

    def finish_copy(self) -> None:
        """Ends the copy if no block is left. Thread: any; repeats what a signal has interrupted."""
        with self._lock:
            if self._again:
                self._stirred.put(None)
            # After an error no further block is started, but running copies still use the tensors and the file.
            if self._running or (self._blocks_left and self.error is None) or self.copied.is_set():
                return
            if self.error is None and self._watch is not None:
                self.error = self._torn(self._watch.changed())  # certain; only the fence can rule changes out
            if self.job.compare and self.error is None and self.slot is not None and self.sources is not None:
                blocks, mine, address = self.job.blocks, self.job.mine, self.slot.address
                self._comparison = Comparison(self.sources, address, blocks=blocks, mine=mine, digests=self.digests)
            else:
                self._memory = []
            self.sources = None  # drops the references to the tensors
            if self.slot is not None and self._stored and not (self.slot.in_memory or self.slot.populated):
                self.slot.small_pages = has_small_pages(self._faults, self._stored)
            self.copied.set()
            self._stirred.put(None)


def _memory(tensor: Tensor) -> int:
    """Address of a tensor's storage; of a DTensor, of this rank's part."""
    return int(getattr(tensor, "_local_tensor", tensor).untyped_storage().data_ptr())


def _copy(pieces: Iterable[tuple[int, int, int]], base: int, fd: int | None, digest: Any) -> tuple[int, int]:
    """Copies each (address, file offset, bytes) to file ``fd``, or, when that is None, to its mapping at ``base``;
    updates the digest.

    Returns:
        (bytes, page faults) of a sample of the stores.
    """
    stored = faults = 0
    for address, offset, nbytes in pieces:
        for at in range(0, nbytes, _STRIDE):
            stride = view(address + at, min(_STRIDE, nbytes - at))
            digest.update(stride)  # also brings the source into memory, so that its faults are not counted below
            if fd is not None:
                written = 0
                while written < len(stride):  # a signal may cut a write short
                    written += os.pwrite(fd, stride[written:], offset + at + written)
            elif stored < 4 * _STRIDE and len(stride) == _STRIDE:
                before = page_faults()
                ctypes.memmove(base + offset + at, address + at, len(stride))
                stored, faults = stored + len(stride), faults + page_faults() - before
            else:
                ctypes.memmove(base + offset + at, address + at, len(stride))
    return stored, faults


def _done_already(snapshot: Snapshot) -> None:
    """Replaces a callback that has already been called."""
