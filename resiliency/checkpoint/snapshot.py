"""Copies live tensors into a shard file in the background, with digests, and the fence before they may change.

``start`` queues the copies and returns; a background thread makes them while forward and backward run. ``fence`` is
called before anything changes the tensors: the caller copies the remaining blocks together with that thread, so that
waiting never takes longer than copying everything at once would have.

The file is divided into blocks with a digest each. A block is read in strides that fit into a core's cache: each stride
is digested, and copied while it is in the cache. That makes the digest nearly free (1 GiB on two cores: 63 ms with it,
58 ms without; 95 ms when another process digested the file after the copy).

CPU tensors are copied without the GIL, in one of two ways. Stores to the mapping are fastest on ramdisks and in files
with huge pages (256 MiB: 18 to 20 ms on two cores; a bare copy to shared memory takes 14). In files with small pages,
which every fsync write-protects, stores fault once per 4 KiB (32 to 35 ms). There the copy thread uses ``pwrite``, and
the thread at the fence still stores, because two threads in ``pwrite`` on one file would wait for each other (23 to
28 ms). The threads count their page faults to find the page size. Pages that are not in memory yet are created first,
huge if possible.

CUDA tensors are copied asynchronously on a side stream into the mapping, registered as page-locked memory. Their fence
makes the compute stream wait, not the CPU; the copy thread digests the mapping afterwards. Overlapping the copy with
the next forward and backward, so that only the update waits, is the idea of CheckFreq (FAST '21) and DataStates-LLM
(HPDC '24).
"""

from __future__ import annotations

import bisect
import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from resiliency import faultpoints
from resiliency.checkpoint._cuda import DeviceCopies
from resiliency.checkpoint._pages import fill, has_small_pages, page_faults, view
from resiliency.checkpoint.arena import Slot
from resiliency.errors import Timeout, TornSnapshot
from resiliency.storage.blocks import BLOCK_BYTES, Blocks, block_digest, new_digest

__all__ = ["Copier", "CopyTask", "Snapshot"]

logger = logging.getLogger(__name__)

#: Bytes digested and then copied at a time: half a core's second-level cache on the machines at hand.
_STRIDE = 512 * 1024
#: A block takes milliseconds; a thread that has not finished one after this time hangs.
_HELPER_S = 60.0


class CopyTask(NamedTuple):
    """A copy of ``source`` (any strides, CPU or CUDA) in C order to ``nbytes`` bytes at file offset ``start``.

    ``key`` is for messages.
    """

    source: Tensor
    start: int
    nbytes: int
    key: str = ""


class _Sources:
    """Maps byte ranges of the file to the memory they are copied from. Thread: any.

    Args:
        copies: in file order.
        nbytes: size of the file.
        gaps: True when some bytes of the file have no source in ``copies``.
    """

    def __init__(self, copies: Sequence[CopyTask], nbytes: int, *, gaps: bool) -> None:
        if copies and copies[-1].start + copies[-1].nbytes > nbytes:
            raise ValueError(f"the last source ends at {copies[-1].start + copies[-1].nbytes}, the file at {nbytes}")
        self._copies, self._gaps = copies, gaps
        self._starts = [copy.start for copy in copies]
        self._versions = _versions(copies)
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
            if (
                at >= end
                or copy.start >= end
                or (copy.start != at and (copy.start > at or index > begin) and not self._gaps)
            ):
                break
            first, last = max(at, copy.start), min(copy.start + copy.nbytes, end)
            if last > first:
                yield self._address(index) + first - copy.start, first, last - first
                at = last
        if at < end and not self._gaps:
            raise ValueError(f"no source fills bytes {at} to {end} of the file")  # no digest would cover them

    def changed(self) -> list[str]:
        """Keys of sources that were changed in place since construction."""
        versions = zip(self._copies, self._versions, _versions(self._copies), strict=True)
        return [copy.key for copy, before, now in versions if before != now]

    def _address(self, index: int) -> int:
        """Address of the first byte of a copy; copies a tensor that is not in C order into C order, once."""
        tensor = self._copies[index].source
        if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            with self._lock:
                if index not in self._ordered:
                    self._ordered[index] = tensor.detach().resolve_conj().resolve_neg().contiguous()
                tensor = self._ordered[index]
        return tensor.data_ptr()


def _versions(copies: Sequence[CopyTask]) -> list[int]:
    """Torch's count of in-place changes to each source; 0 for inference tensors, which have no count."""
    try:
        return [copy.source._version for copy in copies]
    except RuntimeError:
        return [0 if copy.source.is_inference() else copy.source._version for copy in copies]


@dataclass
class Snapshot:
    """One copy of a state. Created by :meth:`Copier.start`; every attribute is guarded by its lock.

    Attributes:
        sources: the copies from CPU memory; None once done.
        slot: the file, used by this snapshot only until it is done.
        digests: one per block, once done.
        done: set when every byte is in the file and digested, or the copy failed.
        error: why the copy failed, None if it did not.
        device: the copies from GPUs, None without any.
    """

    sources: _Sources | None
    slot: Slot
    on_done: Callable[[Snapshot], None]
    device: DeviceCopies | None = None
    digests: list[str] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    _lock: threading.Condition = field(default_factory=threading.Condition)
    _blocks: Blocks = field(init=False)
    _next: int = 0
    _blocks_left: int = 0
    _running: int = 0
    _stored: int = 0
    _faults: int = 0
    _device_waited: bool = False

    def __post_init__(self) -> None:
        self._blocks = Blocks(self.slot.nbytes, BLOCK_BYTES)
        self._blocks_left = self._blocks.count
        self.digests = [""] * self._blocks_left

    def finish_device(self) -> None:
        """Waits for the copies from GPUs, if any, and then digests the file. Thread: copy, after the last
        :meth:`work`."""
        if self.device is None or self._device_waited:
            return
        error: BaseException | None = None
        try:
            self.device.wait()
            if not self.wait_blocks(_HELPER_S):
                raise Timeout(f"the thread at the fence did not finish its block within {_HELPER_S:.0f} s")
            for index in range(len(self.digests)):
                start, end = self._blocks.bounds(index)
                self.digests[index] = block_digest(view(self.slot.address + start, end - start))
        except (RuntimeError, Timeout) as failure:  # CUDA failures are RuntimeErrors
            logger.exception("copying from the GPU failed")
            error = failure
        with self._lock:
            self._device_waited = True
            self.error = self.error or error
        self._finish_if_last()

    def wait_blocks(self, timeout_s: float) -> bool:
        """Waits until no thread copies from a CPU tensor any more; False when ``timeout_s`` passes first."""
        with self._lock:
            return self._lock.wait_for(
                lambda: self._running == 0 and (self._blocks_left == 0 or self.error is not None), timeout_s
            )

    def work(self, *, helping: bool = False) -> bool:
        """Copies one block. Returns False when none is left to start. Thread: any; only one with ``helping=False``."""
        with self._lock:
            if self._next == len(self.digests) or self.error is not None:
                return False
            self._running += 1
            index, self._next = self._next, self._next + 1
        error: BaseException | None = None
        stored = faults = 0
        try:
            faultpoints.hit("save.block")
            # The first block is always copied by stores, to notice when the pages have become huge.
            stored, faults = self._copy_block(index, by_writes=self.slot.small_pages and not helping and index > 0)
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
            self.error = self.error or error or (self._torn() if self._blocks_left == 0 else None)
            self._lock.notify_all()
        self._finish_if_last()
        return error is None

    def _copy_block(self, index: int, *, by_writes: bool) -> tuple[int, int]:
        """See :func:`_copy` for what is returned."""
        slot, sources = self.slot, self.sources
        assert sources is not None  # not None while a block is left
        start, end = self._blocks.bounds(index)
        if slot.fresh and not slot.in_memory and self.device is None:  # a GPU may already have written to it
            fill(slot.fd, start, end)
        digest = new_digest() if self.device is None else None
        cost = _copy(sources.within(start, end), slot.address, slot.fd if by_writes else None, digest)
        if digest is not None:
            self.digests[index] = digest.hexdigest()
        return cost

    def _torn(self) -> TornSnapshot | None:
        """An error when a source was changed in place meanwhile: the file may have bytes from before and after."""
        changed = self.sources.changed() if self.sources is not None else []
        if not changed:
            return None
        what = f"tensor {changed[0]!r} (and {len(changed) - 1} more)" if len(changed) > 1 else f"tensor {changed[0]!r}"
        return TornSnapshot(
            f"{what} was changed before the fence, while it was being copied; fence first, or do not copy it lazily"
        )

    def _finish_if_last(self) -> None:
        with self._lock:
            # After an error no further block is started, but running copies still use tensors and file.
            device_done = self.device is None or self._device_waited
            last = device_done and self._running == 0 and (self._blocks_left == 0 or self.error is not None)
        if last:
            self._finish()

    def _finish(self) -> None:
        with self._lock:
            if self.done.is_set():
                return
            self.sources = None  # drops the references to the tensors
            if self.error is None and self.device is None:
                self.slot.fresh = False
            if self._stored and not self.slot.in_memory:
                self.slot.small_pages = has_small_pages(self._faults, self._stored)
            self.done.set()
        self.on_done(self)


def _copy(pieces: Iterable[tuple[int, int, int]], base: int, fd: int | None, digest: Any) -> tuple[int, int]:
    """Copies (address, file offset, bytes) to file ``fd``, or to its mapping at ``base``; updates the digest, if any.

    Returns:
        For a sample of the stores: bytes, and page faults.
    """
    stored = faults = 0
    for address, offset, nbytes in pieces:
        for at in range(0, nbytes, _STRIDE):
            stride = view(address + at, min(_STRIDE, nbytes - at))
            if digest is not None:
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


class Copier:
    """Copies snapshots, one at a time, on one background thread.

    Threads: ``start`` and ``fence`` from the training thread; ``on_done`` runs on the thread that finishes last.
    """

    def __init__(self, *, name: str = "resiliency-copy") -> None:
        self._wake = threading.Condition()
        self._current: Snapshot | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(
        self,
        copies: Sequence[CopyTask],
        slot: Slot,
        on_done: Callable[[Snapshot], None],
    ) -> Snapshot:
        """Queues copies and returns at once. Collective: no.

        Args:
            copies: sources in file order, which fill the file without a gap. They must not change before :meth:`fence`
                has returned.
            slot: the file, which must stay open and mapped until the snapshot is done.
            on_done: called once, with the snapshot, after the last byte or an error.
        """
        assert self._current is None or self._current.done.is_set(), "fence the previous snapshot first"
        on_gpu = [(copy.source, _target(copy, slot)) for copy in copies if copy.source.is_cuda and copy.nbytes]
        # Sources on a GPU are not checked for changes: a change after the fence waits for the copy on the stream, but
        # its version is counted at once.
        on_cpu = [copy for copy in copies if not copy.source.is_cuda] if on_gpu else copies
        sources = _Sources(on_cpu, slot.nbytes, gaps=bool(on_gpu))
        snapshot = Snapshot(sources, slot, on_done, DeviceCopies(on_gpu) if on_gpu else None)
        if not slot.nbytes:
            snapshot._finish()
            return snapshot
        with self._wake:
            self._current = snapshot
            self._wake.notify()
        return snapshot

    def fence(self, snapshot: Snapshot, *, deadline_s: float) -> float:
        """Returns when nothing reads the sources any more; helps copying until then.

        For sources on a GPU it does not wait: later work of the compute stream waits for the copies.

        Returns:
            Seconds spent here.

        Raises:
            Timeout: the other thread did not finish its block within ``deadline_s`` (a device that hangs).
        """
        began = time.monotonic()
        if snapshot.device is not None:
            snapshot.device.fence()
        while snapshot.work(helping=True):
            if time.monotonic() - began > deadline_s:
                break
        left = max(0.0, deadline_s - (time.monotonic() - began))
        if not (snapshot.done.wait(left) if snapshot.device is None else snapshot.wait_blocks(left)):
            raise Timeout(f"the snapshot was not copied within {deadline_s:.0f} s; the device or the file system hangs")
        return time.monotonic() - began

    def _run(self) -> None:
        while True:
            with self._wake:
                while self._current is None and not self._closed:
                    self._wake.wait()
                if self._current is None:
                    return
                snapshot = self._current
            while snapshot.work():
                continue
            snapshot.finish_device()
            with self._wake:
                if self._current is snapshot:
                    self._current = None

    def close(self) -> None:
        """Finishes the pending snapshot and ends the thread. Idempotent. Blocks: up to the rest of the copy."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(timeout=60)
        if self._thread.is_alive():
            logger.warning("the copy thread is still copying after 60 s; it ends with the process")


def _target(copy: CopyTask, slot: Slot) -> Tensor:
    """The destination of a copy, as a tensor over the mapping."""
    source = copy.source
    return (
        torch.frombuffer(slot.map, dtype=torch.uint8, count=copy.nbytes, offset=copy.start)
        .view(source.dtype)
        .view(source.shape)
    )
