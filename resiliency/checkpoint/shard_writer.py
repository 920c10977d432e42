"""Turns a shard plan into the copies that fill its files. Knows nothing of state trees."""

from __future__ import annotations

import ctypes
import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from resiliency.checkpoint._pages import view
from resiliency.checkpoint.arena import Slot
from resiliency.checkpoint.copy_sources import CopyTask
from resiliency.checkpoint.snapshot import Job
from resiliency.errors import ConfigError
from resiliency.state.structure import Structure
from resiliency.storage.blocks import Blocks, block_digest
from resiliency.storage.file_end import cut
from resiliency.storage.manifest import ShardRecord
from resiliency.storage.own_record import tail_with_record
from resiliency.storage.shard_file import (
    DATA_PICKLE,
    RANK_STATE,
    STRUCTURE,
    Identity,
    StorageLayout,
    archive_tail,
    lay_out_storages,
)

__all__ = ["BouncePool", "FilePlan", "OwnState", "ShardPlan", "StateFile", "WrittenFile", "small_file", "state_job"]


@dataclass(frozen=True)
class OwnState:
    """This rank's own state, with copies of its tensors' bytes."""

    structure: Structure
    data: tuple[bytes, ...]

    @classmethod
    def of(cls, structure: Structure) -> OwnState:
        """Copies the bytes of the tensors, which may change afterwards."""
        return cls(structure, tuple(_copied(*extent) for extent in structure.extents))

    def to_bytes(self) -> bytes:
        """The state as the bytes of a stock checkpoint."""
        keys = self.structure.set_keys(range(len(self.data)))
        layout = lay_out_storages([(key, len(data)) for key, data in zip(keys, self.data, strict=True)], identity=False)
        pieces: list[bytes] = []
        for header, data in zip(layout.headers, self.data, strict=True):
            pieces += [header, data]
        return b"".join((*pieces, archive_tail(layout, [(DATA_PICKLE, self.structure.data_pickle())])))


def _structure_of(entries: Sequence[tuple[str, bytes]]) -> bytes:
    """The pickle of the state's structure in a file's tail; a sharded state has a second pickle there, for
    torch.load."""
    found = dict(entries)
    if STRUCTURE in found:
        return found[STRUCTURE].partition(b"\n")[2]
    return found.get(DATA_PICKLE, b"")


def _copied(tensor: Tensor, address: int, nbytes: int) -> bytes:
    if tensor.is_cpu and not tensor.is_neg():
        return bytes(view(address, nbytes)) if nbytes else b""
    return bytes(_raw(tensor, address).cpu().numpy())


def _raw(tensor: Tensor, address: int) -> Tensor:
    """The bytes of an extent, as a tensor on the same device: the elements in C order, or, for a non-contiguous tensor
    with an address, its whole storage."""
    if address and not tensor.is_contiguous():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


@dataclass(frozen=True)
class FilePlan:
    """What this rank copies into a file, as far as it follows from the layout alone; kept from save to save.

    Attributes:
        layout: of the file.
        shared_end: the ranks of the host share the bytes before this offset; the rank with index 0 writes all that
            follows.
        block_bytes: size of the blocks.
        writers, index: number of ranks that write the file, and which of them this one is.
        blocks: the blocks of the file up to its tail.
        mine: numbers of the blocks this rank writes.
        starts: offset of each storage, in file order.
        needed: for each storage, whether this rank's blocks hold a byte of it. None: all do.
        tasks: the copies: for each storage a header (at 1, 3, 5, ...) and a stand-in for its data (at 2, 4, 6, ...).
    """

    layout: StorageLayout
    shared_end: int
    block_bytes: int
    writers: int
    index: int
    blocks: Blocks
    mine: Sequence[int]
    starts: Sequence[int]
    needed: Sequence[bool] | None
    tasks: Sequence[CopyTask]

    @classmethod
    def of(cls, layout: StorageLayout, *, shared_end: int, block_bytes: int, writers: int, index: int) -> FilePlan:
        """The plan of one rank."""
        sections = (shared_end,) if shared_end < layout.end else ()
        blocks = Blocks(layout.end, block_bytes, sections)
        shared = len(blocks.within(0, shared_end))
        # Rounded up, so that the first rank, which also writes the rest, has a block even if there are fewer blocks
        # than ranks.
        mine: Sequence[int] = range(-(-shared * index // writers), -(-shared * (index + 1) // writers))
        if index == 0:
            mine = [*mine, *range(shared, blocks.count)]
        chosen = set(mine)
        needed = None
        if writers > 1:
            needed = [any(at in chosen for at in blocks.within(entry.start, entry.end)) for entry in layout.storages]
        tasks = [CopyTask(torch.empty(0, dtype=torch.uint8, device="cpu"), 0, 0)]
        for entry, header in zip(layout.storages, layout.headers, strict=True):
            data = torch.frombuffer(bytearray(header), dtype=torch.uint8)
            tasks.append(CopyTask(data, entry.start - len(header), len(header), data.data_ptr()))
            tasks.append(CopyTask(data, entry.start, entry.nbytes, data.data_ptr()))
        starts = tuple(entry.start for entry in layout.storages)
        return cls(layout, shared_end, block_bytes, writers, index, blocks, mine, starts, needed, tasks)

    @property
    def mapped_nbytes(self) -> int:
        """Number of bytes of the file that this rank maps."""
        return self.layout.end if self.index == 0 else self.shared_end


@dataclass(frozen=True, kw_only=True)
class StateFile:
    """The file with (a part of) the state that this rank writes, alone or with other ranks of its host.

    Attributes:
        plan: what follows from the file's layout.
        extents: (tensor, address, bytes) of each storage, in file order; address 0: the tensor's elements in C order.
        storages: each storage's number in the structure, in file order; for messages.
        lazy: for each storage, in file order, whether it may be copied after ``save`` has returned. None: none may; the
            caller fences before it returns, so that no private copy is needed.
        counted: for each storage, in file order, a tensor whose version counter also counts its changes. Empty: none.
        on_cuda: a source is on a GPU.
        tail: makes the archive entries that follow the storages; called on the copy thread.
        key_of: path in the state of a storage, by number; for messages.
    """

    plan: FilePlan
    extents: Sequence[tuple[Tensor, int, int]]
    storages: Sequence[int]
    lazy: Sequence[bool] | None
    counted: Sequence[Tensor] = ()
    on_cuda: bool
    tail: Callable[[], list[tuple[str, bytes]]]
    key_of: Callable[[int], str]


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """What one rank writes at one save.

    Attributes:
        replicated: shard 0 holds the whole state.
        plan: hex digest of what all ranks write; equal in all shards of a step.
        own: this rank's own state.
        file: the file with the state; None: ranks of other hosts write it.
    """

    replicated: bool
    plan: str
    own: OwnState
    file: StateFile | None

    @property
    def nbytes(self) -> int:
        """Bytes of the state's file up to its tail; 0 when this rank does not write it."""
        return self.file.plan.layout.end if self.file is not None else 0


@dataclass
class WrittenFile:
    """Facts of a file, known once its tail is written: its size, the offsets where block numbering starts anew, and the
    pickle of the state's structure."""

    nbytes: int = 0
    sections: tuple[int, ...] = ()
    structure: bytes = b""


class BouncePool:
    """Page-locked memory for copies from a GPU, kept from save to save. Thread: training."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def take(self, nbytes: int) -> Tensor:
        """A buffer of ``nbytes`` bytes (uint8). Buffers given before must not be in use any more, because they share
        its memory."""
        if self._buffer is None or self._buffer.numel() < nbytes:
            self._buffer = None  # frees the old buffer before the larger one is made
            pinned = torch.cuda.is_available()
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        return self._buffer[:nbytes]


def state_job(
    file: StateFile,
    identity: Identity,
    own: OwnState | None,
    written: WrittenFile,
    bounce: BouncePool,
    *,
    open_file: Callable[[], Slot],
    discard: Callable[[], None],
    compare: bool = False,
    record: Callable[[], ShardRecord] | None = None,
) -> tuple[Job, int]:
    """The copies that fill this rank's part of the state's file, and the number of bytes that may be copied late.

    The training thread never writes to the mapping: while the file system commits its journal (during an fsync of the
    previous step), a store of one byte can block for tens of milliseconds. Tensors that must be copied now are copied
    to private memory.

    Args:
        own: this rank's own state, for the file's tail; None: it is in another file.
        written: is filled in when the tail is written.
        open_file: opens the file.
        discard: deletes the file when the save is given up.
        compare: as in :class:`~resiliency.checkpoint.snapshot.Job`; ignored when nothing may be copied late.
        record: for a file that is the whole step: returns its record, without the facts of the file itself, when the
            tail is written; the record goes into the tail. None: the file is not the whole step.
    """
    plan = file.plan
    first = torch.frombuffer(bytearray(identity.to_bytes()), dtype=torch.uint8)
    copies = list(plan.tasks)
    copies[0] = CopyTask(first, 0, first.numel(), first.data_ptr())
    device_copies: list[tuple[Tensor, Tensor]] = []
    watched: list[tuple[Tensor, int]] = []
    if file.on_cuda:
        late_nbytes = _through_bounce(file, copies, device_copies, watched, bounce)
    else:
        late_nbytes = _from_memory(file, copies)
    if file.lazy is not None:
        watched += [
            (tensor, storage)
            for tensor, storage, is_late in zip(file.counted, file.storages, file.lazy, strict=False)
            if is_late
        ]

    def tail(fd: int, digests: Sequence[str]) -> list[str]:
        if plan.index:
            return []
        entries = file.tail()
        written.structure = _structure_of(entries)
        if own is not None:
            entries.append((RANK_STATE, own.to_bytes()))
        end = plan.layout.end
        if record is None:
            data = archive_tail(plan.layout, entries)
        else:
            so_far = dataclasses.replace(
                record(),
                nbytes=end,
                block_bytes=plan.block_bytes,
                sections=plan.blocks.sections,
                digests=tuple(digests),
            )
            data = tail_with_record(plan.layout, entries, so_far)
        done = 0
        while done < len(data):
            done += os.pwrite(fd, memoryview(data)[done:], end + done)
        if plan.writers == 1:
            os.ftruncate(fd, end + len(data))
        elif not cut(fd, end + len(data)):
            raise ConfigError(
                "another rank of this host writes behind the end of the file: the ranks saved different sets of"
                " tensors; every rank must pass the same state (what differs belongs into per_rank)"
            )
        written.nbytes, written.sections = end + len(data), (*plan.blocks.sections, end)
        blocks = Blocks(len(data), plan.block_bytes)
        return [block_digest(memoryview(data)[slice(*blocks.bounds(index))]) for index in range(blocks.count)]

    job = Job(
        copies=copies,
        device_copies=device_copies,
        watched=watched,
        blocks=plan.blocks,
        mine=plan.mine,
        open=open_file if plan.mine or plan.index == 0 else None,
        tail=tail,
        # The file also holds other ranks' blocks, so only the rank that writes its end may delete it.
        discard=discard if plan.index == 0 else lambda: None,
        compare=compare and not file.on_cuda and file.lazy is not None and True in file.lazy,
        key_of=file.key_of,
    )
    return job, late_nbytes


def _from_memory(file: StateFile, copies: list[CopyTask]) -> int:
    """Puts the sources of a state in host memory into ``copies``. Returns the number of bytes that may be copied late.

    Runs at every save, while the training thread waits; loops over all tensors are comprehensions, for speed.
    """
    plan, extents, late, new = file.plan, file.extents, file.lazy, tuple.__new__
    tasks = [
        new(CopyTask, (tensor, start, nbytes, address, storage))
        for (tensor, address, nbytes), start, storage in zip(extents, plan.starts, file.storages, strict=True)
    ]
    if late is not None:
        early = [number for number, is_late in enumerate(late) if not is_late and extents[number][2]]
        private = torch.empty(sum([extents[number][2] for number in early]), dtype=torch.uint8, device="cpu")
        target = private.data_ptr()
        for number in early:
            tensor, address, nbytes = extents[number]
            if address and not tensor.is_neg():
                ctypes.memmove(target, address, nbytes)
                tasks[number] = new(CopyTask, (private, plan.starts[number], nbytes, target, -1))
                target += nbytes
            else:
                ordered = _raw(tensor, address).clone()
                tasks[number] = CopyTask(ordered, plan.starts[number], nbytes, ordered.data_ptr())
    if plan.needed is not None:
        unneeded = [number for number, needed in enumerate(plan.needed) if not needed]
        for number in unneeded:
            tasks[number] = copies[2 + 2 * number]  # a stand-in, for data in another rank's blocks; never read
    copies[2::2] = tasks
    if late is None:
        return 0
    return sum([extent[2] for extent, is_late in zip(extents, late, strict=True) if is_late])


def _through_bounce(
    file: StateFile,
    copies: list[CopyTask],
    device_copies: list[tuple[Tensor, Tensor]],
    watched: list[tuple[Tensor, int]],
    bounce: BouncePool,
) -> int:
    """Puts the sources of a state on a GPU into ``copies``, by way of page-locked memory. Returns the number of bytes
    that are copied late. Sources in host memory are copied now, so that a fence need not wait for the CPU."""
    plan = file.plan
    needed = plan.needed or [True] * len(plan.starts)
    staged = bounce.take(
        sum(n for (tensor, _, n), wanted in zip(file.extents, needed, strict=True) if wanted and tensor.is_cuda)
    )
    staged_at = 0
    for number, ((tensor, address, nbytes), start, wanted) in enumerate(
        zip(file.extents, plan.starts, needed, strict=True)
    ):
        if not nbytes or not wanted:
            continue
        if tensor.is_cuda:
            source = staged[staged_at : staged_at + nbytes]
            staged_at += nbytes
            device_copies.append((_raw(tensor, address), source))
            watched.append((tensor, file.storages[number]))
        else:
            source = _raw(tensor, address).clone()
        copies[2 + 2 * number] = CopyTask(source, start, nbytes, source.data_ptr())
    return staged_at


def small_file(identity: Identity, own: OwnState) -> bytes:
    """The bytes of a shard that holds only its rank's own state."""
    layout = lay_out_storages([])
    entries = [(DATA_PICKLE, _EMPTY_DICT), (RANK_STATE, own.to_bytes())]
    return identity.to_bytes() + archive_tail(layout, entries)


#: An empty dict, pickled, for torch.load.
_EMPTY_DICT = b"\x80\x02}q\x00."
