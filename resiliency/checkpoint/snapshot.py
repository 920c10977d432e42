"""Copies live tensors into a shard file in the background, with digests, and the fence before they may change.

``start`` queues the copies and returns; a background thread makes them while forward and backward run. ``fence`` is
called before anything changes the tensors: the caller copies the remaining blocks together with that thread, so that
waiting never takes longer than copying everything at once would have.

A snapshot has two phases. *Copied* says that every byte was read once. *Agreed* says that none of them changed
meanwhile, by torch's count of changes in place. Torch counts when a kernel ends, so the copy thread cannot tell: it may
look while the kernel runs that changes what it has copied. Only the training thread knows that it is in no kernel: at
the fence, in :meth:`Snapshot.settle`, and, if it is the main thread, at its next byte code, for which it is asked once
the copy is done (:mod:`resiliency.checkpoint._quiet`). Whoever is first decides. So what changes after the end of the
copy does not matter, and what is given up is given up before anybody is told of the file.

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

import bisect
import ctypes
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor
from torch.storage import UntypedStorage

from resiliency import faultpoints
from resiliency.checkpoint import _freed_memory
from resiliency.checkpoint._cuda import DeviceCopies
from resiliency.checkpoint._pages import has_small_pages, page_faults, view
from resiliency.checkpoint._quiet import Question, can_ask
from resiliency.checkpoint.arena import Slot
from resiliency.errors import Timeout, TornSnapshot
from resiliency.storage.blocks import Blocks, new_digest
from resiliency.storage.shared_files import write_zeros

__all__ = ["Copier", "CopyTask", "Job", "Snapshot"]

logger = logging.getLogger(__name__)

#: Bytes digested and then copied at a time: half a core's second-level cache on the machines at hand.
_STRIDE = 512 * 1024
#: A block takes milliseconds; a thread that has not finished one after this time hangs.
_HELPER_S = 60.0
#: How long a fence waits on when its deadline has passed.
_STOPPED_S = 10.0
#: How often a copy that waits for the fence says so in the log.
_AGREE_S = 600.0


class CopyTask(NamedTuple):
    """A copy of ``nbytes`` bytes to file offset ``start``.

    Attributes:
        source: the tensor they come from, on the CPU.
        address: where its bytes are. 0: they are its elements in C order, whatever its strides.
        storage: number of the storage, for messages; -1: none that a user knows.
    """

    source: Tensor
    start: int
    nbytes: int
    address: int = 0
    storage: int = -1


class _Sources:
    """Maps byte ranges of the file to the memory they are copied from. Thread: any.

    Args:
        copies: in file order.
    """

    def __init__(self, copies: Sequence[CopyTask]) -> None:
        self._copies = copies
        self._starts = [copy.start for copy in copies]
        self._ordered: dict[int, Tensor] = {}
        self._lock = threading.Lock()

    def within(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Pieces that fill bytes ``[start, end)`` of the file, in order, as (address, file offset, bytes). Thread: any.

        Raises:
            ValueError: a byte has no source, or two.
        """
        at, begin = start, max(0, bisect.bisect_right(self._starts, start) - 1)
        for index in range(begin, len(self._copies)):
            copy = self._copies[index]
            if at >= end or copy.start >= end or (copy.start != at and (copy.start > at or index > begin)):
                break
            first, last = max(at, copy.start), min(copy.start + copy.nbytes, end)
            if last > first:
                yield self._address(index) + first - copy.start, first, last - first
                at = last
        if at < end:
            raise ValueError(f"no source fills bytes {at} to {end} of the file")  # no digest would cover them

    def storage_at(self, offset: int) -> int:
        """Number of the storage whose bytes fill the file from ``offset`` on; -1: none that a user knows."""
        return self._copies[max(0, bisect.bisect_right(self._starts, offset) - 1)].storage

    def _address(self, index: int) -> int:
        """Address of the first byte of a copy; copies a tensor that is not in C order into C order, once."""
        copy = self._copies[index]
        tensor = copy.source
        if copy.address and not tensor.is_neg():
            return copy.address
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            with self._lock:
                if index not in self._ordered:
                    self._ordered[index] = tensor.detach().resolve_conj().resolve_neg().contiguous()
                tensor = self._ordered[index]
        return tensor.data_ptr()


_count: Callable[[Tensor], int] = attrgetter("_version")


class _Watch:
    """Notices changes in place of live tensors, by torch's count of them. Thread: any.

    Made at every save, while the training thread waits: what is needed after a change only is looked up then.

    Args:
        copies: those of them that read live tensors are watched; the others are of private memory, or headers.
        on_gpu: further tensors, each with the number of its storage.

    Attributes:
        tensors: those that are watched. Inference tensors have no count, and are not.
    """

    def __init__(self, copies: Sequence[CopyTask], on_gpu: Sequence[tuple[Tensor, int]]) -> None:
        self._copies, self._on_gpu = [copy for copy in copies if copy.storage >= 0], on_gpu
        self.tensors: list[Tensor] = [*[copy.source for copy in self._copies], *[tensor for tensor, _ in on_gpu]]
        try:
            self._before = list(map(_count, self.tensors))
        except RuntimeError:
            self._copies = [copy for copy in self._copies if not copy.source.is_inference()]
            self._on_gpu = [(tensor, number) for tensor, number in on_gpu if not tensor.is_inference()]
            self.tensors = [*[copy.source for copy in self._copies], *[tensor for tensor, _ in self._on_gpu]]
            self._before = list(map(_count, self.tensors))

    def changed(self, counts: Sequence[int] | None = None) -> list[int]:
        """Numbers of the storages that were changed since construction, by these counts; None: by those of now."""
        now = list(map(_count, self.tensors)) if counts is None else list(counts)
        if now == self._before:
            return []
        numbers = [*[copy.storage for copy in self._copies], *[number for _, number in self._on_gpu]]
        counts_of = zip(numbers, self._before, now, strict=True)
        return [number for number, before, after in counts_of if before != after]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one rank copies into one file.

    Attributes:
        copies: in file order, without a gap between them where blocks of this rank are.
        device_copies: copies from a GPU into page-locked memory, from which some of ``copies`` come.
        watched: sources on a GPU, each with the number of its storage.
        blocks: the blocks of the file up to its tail.
        mine: numbers of the blocks this rank copies.
        open: called on the copy thread before anything is copied; opens the file. None: there is nothing to copy. Not
            on the training thread, because what makes a file waits while the file system commits its journal.
        tail: called on the copy thread with the file's descriptor and the digests of its blocks, once this rank's are
            copied; writes what follows them. Returns the digests of the tail's blocks.
        discard: called on the copy thread when the save is given up; removes the file.
        compare: read the tensors in CPU memory once more when they are copied, and compare. It notices changes that
            torch does not count (``.data``, a kernel of the user's). The fence waits for it.
        key_of: where in the state a storage is, for messages.
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


@dataclass
class Snapshot:
    """One copy of a state. Created by :meth:`Copier.start`; every attribute is guarded by its lock.

    Attributes:
        sources: the copies from CPU memory; None once done.
        slot: the file, used by this snapshot only until it is done; None before it is open.
        digests: one per block of the file, "" for those of other ranks, once done.
        opened: set when the file is open, or could not be opened.
        copied: set when nothing reads the sources any more, or the copy failed.
        compared: set when the tensors were compared with what was copied, if the job asks for it.
        done: set when every byte of this rank is in the file and digested, and the training thread has agreed, or the
            save is given up.
        error: why the copy failed, None if it did not.
        device: the copies from GPUs, None without any.
    """

    job: Job
    on_done: Callable[[Snapshot], None]
    device: DeviceCopies | None = None
    slot: Slot | None = None
    digests: list[str] = field(default_factory=list)
    opened: threading.Event = field(default_factory=threading.Event)
    copied: threading.Event = field(default_factory=threading.Event)
    compared: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    sources: _Sources | None = None
    _lock: threading.Condition = field(default_factory=threading.Condition)
    # Why the save is given up, None: it is good. The first counts.
    _verdicts: list[TornSnapshot | Timeout | None] = field(default_factory=list)
    _decided: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)
    _watch: _Watch | None = None
    _kept: _Sources | None = None  # to be compared; changed under the next lock
    # Of live tensors, which may be given other memory meanwhile (``tensor.data = other``): theirs is read, not freed.
    _memory: list[UntypedStorage] = field(default_factory=list)
    _comparing: threading.Lock = field(default_factory=threading.Lock)
    _fenced: bool = False
    _question: Question | None = None
    _by_main_thread: bool = field(default_factory=can_ask)
    _next: int = 0
    _blocks_left: int = 0
    _running: int = 0
    _stored: int = 0
    _faults: int = 0

    def __post_init__(self) -> None:
        self.sources = _Sources(self.job.copies)
        self._watch = _Watch(self.job.copies, self.job.watched)
        if not self._watch.tensors:
            self._verdicts.append(None)  # nothing that it reads can change
        self._memory = [copy.source.untyped_storage() for copy in self.job.copies if copy.storage >= 0]
        self._blocks_left = len(self.job.mine)
        self.digests = [""] * self.job.blocks.count

    @property
    def failure(self) -> BaseException | None:
        """Why the save is given up, as far as is known; after the fence, for good what the tensors are concerned."""
        return self.error or next(iter(self._verdicts), None)

    @property
    def reads_live_memory(self) -> bool:
        """True when it reads tensors in host memory that others may change."""
        return self.device is None and self._watch is not None and bool(self._watch.tensors)

    def settle(self) -> None:
        """Decides whether the copy is good, if it is done. Thread: training, which is in no kernel then. Blocks: no."""
        if self.copied.is_set():
            self.decide()

    def decide(self, given_up: Timeout | None = None, *, fenced: bool = False) -> None:
        """Agrees to the copy if no tensor has changed since its start. What was decided before stays.

        Thread: training, once no later change can come into the copy; or any, once the main thread has answered.
        Blocks: no.

        Args:
            given_up: do not agree, for this reason.
            fenced: the training thread changes nothing before the comparison is over.
        """
        if fenced:
            self._fenced = True  # before it is said that something was decided
        watch, question = self._watch, self._question
        if watch is not None and not self._verdicts:
            counts = question.answer if question is not None else None
            self._verdicts.append(given_up or self._torn(watch.changed(counts)))
        self._decided.put(None)

    def finish(self) -> None:
        """Waits for the blocks, writes the tail, and waits for the training thread to agree.

        Thread: copy, after its last :meth:`work`. Blocks: until the fence, at most.
        """
        if not self.copied.wait(_HELPER_S):
            with self._lock:
                self.error = Timeout(f"the thread at the fence did not finish its block within {_HELPER_S:.0f} s")
        if self._by_main_thread and self._watch is not None and self.error is None and not self._verdicts:
            self._question = Question(self._watch.tensors, self._decided.put)  # at once: changes come any moment now
        if self.error is None and self.slot is not None:
            try:
                self.digests += self.job.tail(self.slot.fd, self.digests)
            except Exception as failure:  # Boundary: as in work.
                logger.exception("writing the end of a shard file failed")
                self.error = failure
        if self.error is None:
            self.error = self._await_verdict() or self._compare()
        with self._comparing:
            self._kept = None
        self._memory = []
        self.compared.set()
        _freed_memory.release(self)
        if self.error is not None and self.slot is not None:
            self._discard()
        self._watch = None
        # Whoever holds the snapshot must not hold the tensors.
        self.job = Job(copies=(), blocks=self.job.blocks, mine=self.job.mine)
        self.device = None
        on_done, self.on_done = self.on_done, _done_already
        try:
            on_done(self)
        except Exception:  # Boundary: the copy thread must go on; the agent did not take the message.
            logger.exception("the end of a save could not be reported")
        self.done.set()
        if self.slot is not None:
            self.slot.close()  # last, because it takes milliseconds per GiB

    def _await_verdict(self) -> BaseException | None:
        while not self._verdicts:
            try:
                self._decided.get(timeout=_AGREE_S)
            except queue.Empty:
                logger.info("a checkpoint that is copied waits for the fence; call Checkpointer.fence or poll")
            if self._question is not None and self._question.answer is not None:
                self.decide()
        self._question = None
        return self._verdicts[0]

    def _quiet_counts(self, watch: _Watch) -> list[int] | None:
        """Counts of changes, for :meth:`_Watch.changed`, at a moment when the training thread is in no kernel."""
        question = Question(watch.tensors, self._decided.put) if self._by_main_thread else None
        while not self._fenced and (question is None or question.answer is None):
            try:
                self._decided.get(timeout=_AGREE_S)
            except queue.Empty:
                logger.info("a checkpoint that is copied waits for the fence; call Checkpointer.fence or poll")
        return question.answer if question is not None else None

    def _discard(self) -> None:
        try:
            self.job.discard()
        except OSError as failure:
            logger.info("the file of a save that was given up stays until the next one is committed: %s", failure)

    def open_file(self) -> None:
        """Opens the file. Thread: copy, first of all."""
        if self.job.open is not None:
            try:
                self.slot = self.job.open()
            except Exception as failure:  # Boundary: as in work.
                with self._lock:
                    self.error = failure
        self.opened.set()
        self._finish_if_last()

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
            self._finish_if_last()

    def work(self, *, helping: bool = False) -> bool:
        """Copies one block. Returns False when none is left to start. Thread: any; only one with ``helping=False``.

        Blocks: until the file is open.
        """
        if not self.opened.wait(_HELPER_S):
            with self._lock:
                self.error = self.error or Timeout(f"the shard file was not opened within {_HELPER_S:.0f} s")
        with self._lock:
            if self._next == len(self.job.mine) or self.error is not None:
                return False
            self._running += 1
            number, self._next = self._next, self._next + 1
        index = self.job.mine[number]
        error: BaseException | None = None
        stored = faults = 0
        try:
            faultpoints.hit("save.block")
            # The first block is always copied by stores, to notice when the pages have become huge.
            stored, faults = self._copy_block(index, by_writes=not helping and number > 0)
        except (
            BaseException
        ) as failure:  # Boundary: the copy thread must go on; the caller of the fence gets the error.
            logger.exception("copying block %d of a shard file failed", index)
            error = failure
        with self._lock:
            self._stored += stored
            self._faults += faults
            self._running -= 1
            self._blocks_left -= 1
            self.error = self.error or error
            if self.error is None and self._blocks_left == 0 and self._watch is not None:
                self.error = self._torn(self._watch.changed())  # certainly; whether it is not, the fence says
            self._lock.notify_all()
        self._finish_if_last()
        return error is None

    def _copy_block(self, index: int, *, by_writes: bool) -> tuple[int, int]:
        """See :func:`_copy` for what is returned."""
        slot, sources = self.slot, self.sources
        assert sources is not None and slot is not None  # while a block is left
        by_writes = by_writes and slot.small_pages
        start, end = self.job.blocks.bounds(index)
        if slot.fresh and not slot.in_memory:
            write_zeros(slot.fd, start, end)
        digest = new_digest()
        cost = _copy(sources.within(start, end), slot.address, slot.fd if by_writes else None, digest)
        self.digests[index] = digest.hexdigest()
        return cost

    def _torn(self, changed: list[int], how: str = "") -> TornSnapshot | None:
        """An error when sources were changed in place meanwhile: the file may have bytes from before and after."""
        if not changed:
            return None
        key = self.job.key_of(changed[0])
        what = f"tensor {key!r} (and {len(changed) - 1} more)" if len(changed) > 1 else f"tensor {key!r}"
        return TornSnapshot(
            f"{what} was changed before the fence, while it was being copied{how}; fence first, or do not copy it"
            " lazily"
        )

    def _compare(self) -> TornSnapshot | None:
        """An error when tensors have other values than were copied, and torch has counted no change of them.

        Thread: copy, once the training thread has agreed. Blocks: for reading the tensors; until the fence, if they
        have changed.
        """
        slot, watch = self.slot, self._watch
        if slot is None or watch is None:
            return None
        with self._comparing:
            changed = {} if self._kept is None else self._changed_bytes(self._kept, slot)
        if changed and watch.changed(self._quiet_counts(watch)):
            return None  # after the copy, as far as anybody can tell
        return self._torn(list(changed), how=" in a way that torch does not count (.data, a kernel of your own)")

    def _changed_bytes(self, sources: _Sources, slot: Slot) -> dict[int, None]:
        """Numbers of the storages that have other bytes now than the file."""
        changed: dict[int, None] = {}
        for index in self.job.mine:
            pieces = list(sources.within(*self.job.blocks.bounds(index)))
            digest = new_digest()
            for address, _, nbytes in pieces:
                digest.update(view(address, nbytes))
            if digest.hexdigest() != self.digests[index]:
                different = [at for address, at, n in pieces if view(address, n) != view(slot.address + at, n)]
                changed.update(dict.fromkeys(map(sources.storage_at, different)))
        return changed

    def let_go(self, storage: UntypedStorage) -> None:
        """Returns when the memory of this storage is not read any more: the copy has ended, and is not compared.

        Thread: any. Blocks: for the rest of the copy, which it helps with, if that reads the storage.
        """
        if self.compared.is_set():
            return
        begin, nbytes = storage.data_ptr(), storage.nbytes()
        live = [copy for copy in self.job.copies if copy.storage >= 0]
        if not any(begin <= (copy.address or copy.source.data_ptr()) < begin + nbytes for copy in live):
            return
        while self.work(helping=True):
            continue
        if not self.copied.wait(_HELPER_S):
            logger.warning("a storage is resized while it is being copied, for which it was waited %.0f s", _HELPER_S)
        with self._comparing:
            self._kept = None

    def _finish_if_last(self) -> None:
        with self._lock:
            # After an error no further block is started, but running copies still use tensors and file.
            if self._running or (self._blocks_left and self.error is None) or self.copied.is_set():
                return
            if self.job.compare:
                self._kept = self.sources
            else:
                self._memory = []
            self.sources = None  # drops the references to the tensors
            if self.slot is not None and self._stored and not self.slot.in_memory:
                self.slot.small_pages = has_small_pages(self._faults, self._stored)
            self.copied.set()


def _copy(pieces: Iterable[tuple[int, int, int]], base: int, fd: int | None, digest: Any) -> tuple[int, int]:
    """Copies (address, file offset, bytes) to file ``fd``, or to its mapping at ``base``; updates the digest.

    Returns:
        For a sample of the stores: bytes, and page faults.
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
    """In place of a callback that was called."""


class Copier:
    """Copies snapshots, one at a time, on one background thread.

    Threads: ``start``, ``fence`` and ``close`` from the training thread; ``on_done`` runs on the copy thread.
    """

    def __init__(self, *, name: str = "resiliency-copy") -> None:
        self._wake = threading.Condition()
        self._current: Snapshot | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, job: Job, on_done: Callable[[Snapshot], None]) -> Snapshot:
        """Queues copies and returns at once. Collective: no.

        Args:
            job: the copies; their sources must not change before :meth:`fence` has returned.
            on_done: called once, with the snapshot, on the copy thread, after the last byte or an error.
        """
        with self._wake:
            # The previous save may be recorded while the thread still returns from telling so.
            if not self._wake.wait_for(lambda: self._current is None, _HELPER_S):
                raise Timeout(f"the previous snapshot was not done within {_HELPER_S:.0f} s")
            snapshot = Snapshot(job, on_done, DeviceCopies(job.device_copies) if job.device_copies else None)
            if snapshot.reads_live_memory:
                _freed_memory.guard(snapshot)
            self._current = snapshot
            self._wake.notify_all()
        return snapshot

    def fence(self, snapshot: Snapshot, *, deadline_s: float) -> float:
        """Returns when nothing reads the sources any more, and decides whether they have changed; helps copying.

        For sources on a GPU it does not wait: later work of the compute stream waits for the copies.

        Returns:
            Seconds spent here.

        Raises:
            Timeout: the other thread did not finish its block within ``deadline_s``, and 10 s more (a device that
                hangs).
        """
        began = time.monotonic()
        device = snapshot.device
        if device is not None:
            # Its other sources are private copies, see resiliency.checkpoint.shard_writer.
            device.fence()
            snapshot.decide()
            return time.monotonic() - began
        while snapshot.work(helping=True):
            if time.monotonic() - began > deadline_s:
                break
        left = max(0.0, deadline_s - (time.monotonic() - began))
        # Once more: this process, and the copy with it, may have been stopped for longer than that.
        if not (snapshot.copied.wait(left) or snapshot.copied.wait(min(deadline_s, _STOPPED_S))):
            hangs = Timeout(
                f"the snapshot was not copied within {deadline_s:.0f} s; the device or the file system hangs"
            )
            snapshot.decide(given_up=hangs)  # what it has not read yet may change from now on
            raise hangs
        snapshot.decide(fenced=True)
        if snapshot.job.compare:
            snapshot.compared.wait(_HELPER_S)  # what changes from now on must not be taken for an earlier change
        return time.monotonic() - began

    def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no snapshot is being copied; False when ``timeout_s`` passes first."""
        with self._wake:
            return self._wake.wait_for(lambda: self._current is None, timeout_s)

    def _run(self) -> None:
        while True:
            with self._wake:
                while self._current is None and not self._closed:
                    self._wake.wait()
                if self._current is None:
                    return
                snapshot = self._current
            snapshot.open_file()
            snapshot.wait_device()
            while snapshot.work():
                continue
            snapshot.finish()
            with self._wake:
                self._current = None
                self._wake.notify_all()

    def close(self) -> None:
        """Finishes the pending snapshot and ends the thread. Idempotent. Blocks: up to the rest of the copy."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
            current = self._current
        if current is not None and current.copied.wait(_HELPER_S):
            current.decide(fenced=True)
        self._thread.join(timeout=60)
        if self._thread.is_alive():
            logger.warning("the copy thread is still copying after 60 s; it ends with the process")
