"""Turns a shard plan into the copies that fill its files. Independent of state trees."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from resiliency.checkpoint._pages import view
from resiliency.checkpoint.snapshot import CopyTask, Job
from resiliency.checkpoint.structure import Structure
from resiliency.storage.blocks import Blocks, block_digest
from resiliency.storage.shard_file import (
    DATA_PICKLE,
    RANK_STATE,
    Identity,
    StorageLayout,
    archive_tail,
    lay_out_storages,
)

__all__ = ["BouncePool", "OwnState", "ShardPlan", "StateFile", "WrittenFile", "small_file", "state_job"]


@dataclass(frozen=True)
class OwnState:
    """What only this rank has, with copies of its tensors' bytes."""

    structure: Structure
    data: tuple[bytes, ...]

    @classmethod
    def of(cls, structure: Structure) -> OwnState:
        """Copies the bytes of the tensors; they may change then."""
        return cls(structure, tuple(_copied(*extent) for extent in structure.extents))

    def to_bytes(self) -> bytes:
        """A stock checkpoint with this state."""
        keys = self.structure.set_keys(range(len(self.data)))
        layout = lay_out_storages([(key, len(data)) for key, data in zip(keys, self.data, strict=True)], identity=False)
        pieces: list[bytes] = []
        for header, data in zip(layout.headers, self.data, strict=True):
            pieces += [header, data]
        return b"".join((*pieces, archive_tail(layout, [(DATA_PICKLE, self.structure.data_pickle())])))


def _copied(tensor: Tensor, address: int, nbytes: int) -> bytes:
    if tensor.is_cpu and not tensor.is_neg():
        return bytes(view(address, nbytes)) if nbytes else b""
    return bytes(_raw(tensor, address).cpu().numpy())


def _raw(tensor: Tensor, address: int) -> Tensor:
    """The bytes of an extent, on its device: its elements in C order; of a tensor that does not lie so and has an
    address, all of its storage."""
    if address and not tensor.is_contiguous():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


@dataclass(frozen=True, kw_only=True)
class StateFile:
    """The file with (a part of) the state that this rank writes, alone or with other ranks of its host.

    Attributes:
        layout: of the file.
        headers: the headers of the storages, as U8 tensors, in file order.
        starts: offset of each storage, in file order.
        extents: (tensor, address, bytes) of each, in file order; address 0: the tensor's elements in C order.
        storages: number of each in the structure, in file order; for messages.
        lazy: which may be copied after ``save`` has returned, in file order. None: none may; the caller fences before
            it returns, so that no private copy is needed.
        shared_end: the ranks share the bytes before this offset; index 0 writes all that follows.
        block_bytes: size of the blocks.
        writers, index: how many ranks write it, and which of them this one is.
        tail: makes the entries that follow the storages; called on the copy thread.
        key_of: where in the state a storage is, for messages.
    """

    layout: StorageLayout
    headers: Sequence[Tensor]
    starts: Sequence[int]
    extents: Sequence[tuple[Tensor, int, int]]
    storages: Sequence[int]
    lazy: Sequence[bool] | None
    shared_end: int
    block_bytes: int
    writers: int
    index: int
    tail: Callable[[], list[tuple[str, bytes]]]
    key_of: Callable[[int], str]

    @property
    def mapped_nbytes(self) -> int:
        """How much of the file this rank maps."""
        return self.layout.end if self.index == 0 else self.shared_end

    @property
    def blocks(self) -> Blocks:
        """The blocks of the file up to its tail."""
        sections = (self.shared_end,) if self.shared_end < self.layout.end else ()
        return Blocks(self.layout.end, self.block_bytes, sections)

    @property
    def mine(self) -> range | list[int]:
        """Numbers of the blocks this rank writes."""
        blocks = self.blocks
        shared = len(blocks.within(0, self.shared_end))
        own = range(shared * self.index // self.writers, shared * (self.index + 1) // self.writers)
        return own if self.index else [*own, *range(shared, blocks.count)]

    @property
    def on_cuda(self) -> bool:
        """True when a source is on a GPU."""
        return any(tensor.is_cuda for tensor, _, _ in self.extents)


@dataclass(frozen=True, kw_only=True)
class ShardPlan:
    """What one rank writes at one save.

    Attributes:
        replicated: shard 0 holds the whole state.
        plan: hex digest of what all ranks write; equal in all shards of a step.
        own: what only this rank has.
        file: the file with the state; None: other hosts' ranks write it.
    """

    replicated: bool
    plan: str
    own: OwnState
    file: StateFile | None

    @property
    def nbytes(self) -> int:
        """Bytes of the state's file up to its tail; 0 when this rank writes none."""
        return self.file.layout.end if self.file is not None else 0


@dataclass
class WrittenFile:
    """What became of a file, known once its tail is written: its size, and where blocks begin anew."""

    nbytes: int = 0
    sections: tuple[int, ...] = ()


class BouncePool:
    """Page-locked memory for copies from a GPU; kept from save to save. Thread: training."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def take(self, nbytes: int) -> Tensor:
        """``nbytes`` bytes, U8; those given before must not be in use any more."""
        if self._buffer is None or self._buffer.numel() < nbytes:
            self._buffer = None  # first free it, then take the larger one
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        return self._buffer[:nbytes]


def state_job(
    file: StateFile, identity: Identity, own: OwnState | None, fd: int, written: WrittenFile, bounce: BouncePool
) -> tuple[Job, int]:
    """The copies that fill a rank's part of the state's file, and the number of bytes that may be copied late.

    The training thread never writes to the mapping: while the file system commits its journal (during an fsync of the
    previous step), a store of one byte can block for tens of milliseconds. Tensors that must be copied now are copied
    to private memory.

    Args:
        own: what only this rank has, for the file's tail; None: it is not in this file.
        fd: of the file, open for writing until the job is done.
        written: filled in when the tail is written.
    """
    mine = file.mine
    copies: list[CopyTask] = []
    late_nbytes = 0
    device_copies: list[tuple[Tensor, Tensor]] = []
    on_cuda = file.on_cuda
    staged = bounce.take(sum(n for tensor, _, n in file.extents if tensor.is_cuda)) if on_cuda else None
    staged_at = 0
    first = torch.frombuffer(bytearray(identity.to_bytes()), dtype=torch.uint8)
    copies.append(CopyTask(first, 0, first.numel(), first.data_ptr()))
    late = file.lazy
    needed = _needed(file, mine)
    for number, ((tensor, address, nbytes), start, header, storage) in enumerate(
        zip(file.extents, file.starts, file.headers, file.storages, strict=True)
    ):
        copies.append(CopyTask(header, start - header.numel(), header.numel(), header.data_ptr()))
        if not nbytes or not needed[number]:
            copies.append(CopyTask(header, start, nbytes, header.data_ptr()))  # of another rank's blocks; never read
            continue
        if tensor.is_cuda:
            assert staged is not None
            target = staged[staged_at : staged_at + nbytes]
            staged_at += nbytes
            device_copies.append((_raw(tensor, address), target))
            late_nbytes += nbytes
            copies.append(CopyTask(target, start, nbytes, target.data_ptr()))
        elif late is None and not on_cuda:
            # Queued like lazy copies and fenced at once, so that two threads share the work.
            copies.append(CopyTask(tensor, start, nbytes, address, storage))
        elif late is not None and late[number] and not on_cuda:
            copies.append(CopyTask(tensor, start, nbytes, address, storage))
            late_nbytes += nbytes
        else:
            private = _raw(tensor, address).clone()
            copies.append(CopyTask(private, start, nbytes, private.data_ptr()))

    def tail() -> list[str]:
        if file.index:
            return []
        entries = file.tail()
        if own is not None:
            entries.append((RANK_STATE, own.to_bytes()))
        data = archive_tail(file.layout, entries)
        end = file.layout.end
        done = 0
        while done < len(data):
            done += os.pwrite(fd, memoryview(data)[done:], end + done)
        os.ftruncate(fd, end + len(data))
        written.nbytes, written.sections = end + len(data), (*file.blocks.sections, end)
        blocks = Blocks(len(data), file.block_bytes)
        return [block_digest(memoryview(data)[slice(*blocks.bounds(index))]) for index in range(blocks.count)]

    job = Job(
        copies=copies, device_copies=device_copies, blocks=file.blocks, mine=mine, tail=tail, key_of=file.key_of
    )
    return job, late_nbytes


def _needed(file: StateFile, mine: Sequence[int]) -> list[bool]:
    """For each storage, whether this rank's blocks hold a byte of it."""
    if file.writers == 1:
        return [True] * len(file.starts)
    blocks = file.blocks
    chosen = set(mine)
    return [
        any(block in chosen for block in blocks.within(start, start + nbytes))
        for start, (_, _, nbytes) in zip(file.starts, file.extents, strict=True)
    ]


def small_file(identity: Identity, own: OwnState) -> bytes:
    """A shard with nothing but what its rank has for itself."""
    layout = lay_out_storages([])
    entries = [(DATA_PICKLE, _EMPTY_DICT), (RANK_STATE, own.to_bytes())]
    return identity.to_bytes() + archive_tail(layout, entries)


#: An empty dict, for torch.load.
_EMPTY_DICT = b"\x80\x02}q\x00."
