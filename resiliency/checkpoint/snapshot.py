"""Lazy copy of live tensors into a mapped shard file, and the fence before they may change.

``start`` queues the copies and returns; a background thread works through them while forward and backward run.
``fence`` is called before anything mutates the tensors: the caller helps with what is left, so that waiting is never
longer than copying everything at once would have been (two threads share the work). Copies go in file order and in
pieces, so that the agent can digest the finished part of the file behind the copy.

CPU tensors are copied without the GIL, by one of two ways into the same pages. A ramdisk takes stores to the mapping.
On a disk, an fsync of the step before has write-protected every page, and a store pays a fault for each 4 KiB: the
copy thread uses ``pwrite`` there, which needs half the CPU (256 MiB: 28 ms on one core, against 32 ms on two), while
the thread at the fence stores to the mapping, as two writers of one file would wait for each other (both: 19 ms).

CUDA tensors are copied asynchronously on a side stream into the mapping registered as page-locked memory, where the
fence makes the compute stream wait, not the CPU. The idea of overlapping the copy with the next forward and backward
and gating only the update is that of CheckFreq (FAST '21) and DataStates-LLM (HPDC '24).
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from resiliency.checkpoint._cuda import DeviceCopies
from resiliency.errors import Timeout

__all__ = ["Copier", "Copy", "Snapshot"]

logger = logging.getLogger(__name__)

#: Bytes per piece: large enough that Python costs nothing, small enough to hand over quickly at the fence.
PIECE_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Copy:
    """``source`` (any strides, CPU or CUDA) goes to file offset ``start`` in C order."""

    source: Tensor
    start: int


@dataclass
class _Piece:
    source: Tensor  # keeps the storage alive
    address: int | None  # of the first source byte; None: copy through torch into ``target``
    target: int | Tensor  # address in the mapping
    start: int  # file offset
    nbytes: int

    @property
    def end(self) -> int:
        """File offset after this piece."""
        return self.start + self.nbytes


@dataclass
class Snapshot:
    """One pending copy of a state. Made by :meth:`Copier.start`; every attribute is guarded by its lock.

    Attributes:
        fd: file the copy thread writes to; None: it stores to the mapping.
        done: set when every byte is in the file, or the copy failed.
        error: what went wrong, if anything.
        device: copies that run on GPUs; they are one piece of work, done by waiting for them.
        copied_s: monotonic time at which the last byte was copied.
    """

    pieces: list[_Piece]
    fd: int | None
    on_progress: Callable[[int], None]
    on_done: Callable[[Snapshot], None]
    device: DeviceCopies | None = None
    done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    copied_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _next: int = 0
    _left: int = 0
    _running: int = 0
    _device_waited: bool = False
    _finished: list[bool] = field(default_factory=list)
    _prefix: int = 0

    def __post_init__(self) -> None:
        self._left = len(self.pieces) + (self.device is not None)
        self._finished = [False] * len(self.pieces)

    def wait_device(self) -> None:
        """Waits for the GPUs' part, if there is one. Thread: copy."""
        if self.device is None or self._device_waited:
            return
        self._device_waited = True
        with self._lock:
            self._running += 1
        error: BaseException | None = None
        try:
            self.device.wait()
        except RuntimeError as failure:  # what every CUDA failure is
            logger.exception("copying from the GPU failed")
            error = failure
        self._ended(error)

    def work(self, *, helping: bool = False) -> bool:
        """Copies one piece. Returns False when none is left to start. Thread: any, all but one ``helping``."""
        with self._lock:
            if self._next >= len(self.pieces) or self.error is not None:
                return False
            index = self._next
            piece = self.pieces[index]
            self._next += 1
            self._running += 1
        error: BaseException | None = None
        try:
            _copy(piece, None if helping else self.fd)
        except BaseException as failure:  # Boundary: the copy thread must report, not die; the fence's caller hears of it.
            logger.exception("copying %d bytes into the shard file failed", piece.nbytes)
            error = failure
        progress = None
        with self._lock:
            if error is None:
                self._finished[index] = True
                before = self._prefix
                while self._prefix < len(self._finished) and self._finished[self._prefix]:
                    self._prefix += 1
                if self._prefix > before:
                    progress = self.pieces[self._prefix - 1].end
        if not self._ended(error) and progress is not None:
            self.on_progress(progress)
        return error is None

    def _ended(self, error: BaseException | None) -> bool:
        """Counts a finished part; the last one running ends the snapshot. Returns whether this was it."""
        with self._lock:
            self._running -= 1
            self._left -= 1
            self.error = self.error or error
            # After an error nothing new is started, but what the other thread is copying still uses tensors and file.
            last = self._left == 0 or (self.error is not None and self._running == 0)
        if last:
            self._finish()
        return last

    def _finish(self) -> None:
        with self._lock:
            if self.done.is_set():
                return
            self.copied_s = time.monotonic()
            self.pieces = []  # lets go of the tensors
            self.done.set()
        self.on_done(self)


_void = ctypes.c_void_p


def _copy(piece: _Piece, fd: int | None) -> None:
    if isinstance(piece.target, Tensor):
        piece.target.copy_(piece.source)
    elif fd is None:
        ctypes.memmove(_void(piece.target), _void(piece.address), piece.nbytes)
    else:
        assert piece.address is not None
        done = 0
        while done < piece.nbytes:  # a signal may cut a write short
            rest = (ctypes.c_char * (piece.nbytes - done)).from_address(piece.address + done)
            done += os.pwrite(fd, rest, piece.start + done)


class Copier:
    """Copies snapshots, one at a time, on one background thread.

    Threads: ``start`` and ``fence`` from the training thread; callbacks run on whichever thread finished the piece.
    """

    def __init__(self, *, name: str = "resiliency-copy") -> None:
        self._wake = threading.Condition()
        self._current: Snapshot | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(
        self,
        copies: Sequence[Copy],
        *,
        mapping: memoryview,
        address: int,
        fd: int | None,
        on_progress: Callable[[int], None],
        on_done: Callable[[Snapshot], None],
    ) -> Snapshot:
        """Queues copies and returns at once. Collective: no.

        Args:
            copies: sources in file order. They must not change before :meth:`fence` has returned.
            mapping: the shard file, writable.
            address: address of its first byte.
            fd: the shard file, open for writing until the snapshot is done, when writes to it are faster than stores to the
                mapping; None: stores only.
            on_progress: called with the file offset below which everything is copied.
            on_done: called once, with the snapshot, after the last byte or an error.
        """
        assert self._current is None or self._current.done.is_set(), "fence the previous snapshot first"
        pieces: list[_Piece] = []
        on_gpu: list[tuple[Tensor, Tensor]] = []
        for copy in copies:
            if copy.source.device.type == "cuda":
                if copy.source.numel():
                    on_gpu.append((copy.source, _target(copy, mapping)))
            else:
                pieces.extend(_pieces(copy, mapping, address))
        # With copies on a GPU the end of the finished part of the file is not known before all of it is.
        progress = (lambda upto: None) if on_gpu else on_progress
        snapshot = Snapshot(pieces, fd, progress, on_done, DeviceCopies(on_gpu) if on_gpu else None)
        if not pieces and not on_gpu:
            snapshot._finish()
            return snapshot
        with self._wake:
            self._current = snapshot
            self._wake.notify()
        return snapshot

    def fence(self, snapshot: Snapshot, *, deadline_s: float) -> float:
        """Returns when nothing reads the sources any more; helps copying meanwhile.

        For sources on a GPU it returns at once: what the compute stream runs next waits there.

        Returns:
            Seconds spent here.

        Raises:
            Timeout: the other thread did not finish its piece within ``deadline_s`` (a device that hangs).
        """
        began = time.monotonic()
        if snapshot.device is not None:
            snapshot.device.fence()
        while snapshot.work(helping=True):
            if time.monotonic() - began > deadline_s:
                break
        if snapshot.device is None and not snapshot.done.wait(max(0.0, deadline_s - (time.monotonic() - began))):
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
            snapshot.wait_device()
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
            logger.warning("the copy thread did not end within 60 s; it is left behind as a daemon")


def _pieces(copy: Copy, mapping: memoryview, address: int) -> list[_Piece]:
    source = copy.source
    nbytes = source.numel() * source.element_size()
    if nbytes == 0:
        return []
    if source.device.type == "cpu" and source.is_contiguous() and not source.is_conj() and not source.is_neg():
        first = source.data_ptr()
        return [
            _Piece(source, first + at, address + copy.start + at, copy.start + at, min(PIECE_BYTES, nbytes - at))
            for at in range(0, nbytes, PIECE_BYTES)
        ]
    return [_Piece(source, None, _target(copy, mapping), copy.start, nbytes)]


def _target(copy: Copy, mapping: memoryview) -> Tensor:
    """Where a copy goes, as a tensor over the mapping."""
    source = copy.source
    nbytes = source.numel() * source.element_size()
    return torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes, offset=copy.start).view(source.dtype).view(source.shape)
