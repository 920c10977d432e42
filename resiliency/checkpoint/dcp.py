"""Storage for those who call torch's distributed checkpoint (DCP) themselves: the engine writes, and checks every read.

::

    with Checkpointer("/ckpts") as checkpointer:
        dcp.save(state, storage_writer=StorageWriter(checkpointer, step=100, names=["step=100.ckpt"]))
    dcp.load(state, storage_reader=StorageReader("/ckpts/step=100.ckpt"))

:func:`load_folder` loads a folder without DCP's calls, be it a step of this library or what torch or Lightning wrote.

DCP's planner says what each rank writes. The step is one like all others: the agent commits it, makes it durable and
uploads it; stock ``dcp.load`` reads its folder, too, but checks nothing.
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import storage as stock
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.futures import Future

from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.shard_assembler import threads_for
from resiliency.checkpoint.stock_reader import StockReader, read_stock_metadata
from resiliency.checkpoint.stock_view import StockView
from resiliency.checkpoint.write_plan import WriteChunk, WritePlan
from resiliency.errors import ConfigError, CorruptShard, NoCheckpointFound, ResiliencyError
from resiliency.state.harmless import harmless_classes
from resiliency.storage.blocks import block_digest
from resiliency.storage.manifest import MANIFEST, Manifest, ShardRecord
from resiliency.storage.shard_file import STOCK_METADATA
from resiliency.storage.stage import Stage
from resiliency.storage.stock_folder import files_in_shard

__all__ = ["StorageReader", "StorageWriter", "check_folder", "load_folder", "write_plan_of"]


class StorageWriter(stock.StorageWriter):
    """Writes one step through a :class:`~resiliency.checkpoint.checkpointer.Checkpointer`. Make one for each save.

    ``dcp.save`` returns when the step is committed, and raises when it is not. With ``dcp.async_save`` (a thread, not a
    process) the checkpointer belongs to that thread until the save has ended: nothing else may call it.

    Thread: that of ``dcp.save``. Collective: as ``dcp.save``; the ranks of DCP's process group are the checkpointer's.

    Args:
        checkpointer: of all ranks.
        step: number of the optimizer step.
        names: names by which the step can be loaded, relative to the checkpointer's directory.
        timeout: most time that a rank waits for the commit.
        arguments: further arguments of :meth:`Checkpointer.save <resiliency.Checkpointer.save>`.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        step: int,
        *,
        names: Sequence[str] = (),
        timeout: timedelta = timedelta(minutes=5),
        **arguments: Any,
    ) -> None:
        super().__init__()
        self._checkpointer, self._step, self._timeout = checkpointer, step, timeout
        self._names, self._arguments = tuple(names), arguments

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """DCP passes ``checkpoint_id``, if it has one: a path in the checkpointer's directory, which becomes a name of
        the step."""
        if checkpoint_id is not None:
            name = os.path.relpath(os.path.abspath(checkpoint_id), os.path.abspath(self._checkpointer.directory))
            self._names = tuple(dict.fromkeys((*self._names, name)))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in os.fspath(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[stock.WriteResult]]:
        """Saves this rank's part, and waits until the whole step is committed.

        Raises:
            ConfigError: something cannot be stored.
            ResiliencyError, Timeout: the step is not committed.
        """
        planned = write_plan_of(plan, planner)
        ticket = self._checkpointer.save(
            self._step,
            planned,
            names=self._names,
            **self._arguments,
        )
        if ticket is None:
            raise ResiliencyError(
                f"step {self._step} was not saved, because the save before it was not recorded in time"
            )
        ticket.wait(Stage.COMMITTED, timeout=self._timeout)
        results = [stock.WriteResult(item.index, _nbytes(item, planned), None) for item in plan.items]
        done: Future[list[stock.WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[stock.WriteResult]]) -> None:
        """Does nothing: the step is committed."""


def write_plan_of(plan: SavePlan, planner: SavePlanner) -> WritePlan:
    """What DCP's planner has planned for this rank, as a :class:`WritePlan`. Its tensors are the live ones. When
    something cannot be stored, the plan says so, and its save is refused on all ranks."""
    try:
        return _planned(plan, planner)
    except ConfigError as error:
        return WritePlan(chunks=(), problem=str(error))


def _planned(plan: SavePlan, planner: SavePlanner) -> WritePlan:
    chunks: list[WriteChunk] = []
    objects: dict[str, bytes] = {}
    for item in plan.items:
        data = planner.resolve_data(item)
        box = item.tensor_data
        if not isinstance(data, Tensor):
            objects[item.index.fqn] = data.getvalue()
        elif box is not None:
            offsets, shape = tuple(box.chunk.offsets), tuple(box.size)
            chunks.append(WriteChunk(key=_key(item.index.fqn), tensor=data, offsets=offsets, shape=shape))
    found = getattr(planner, "metadata", None)  # the coordinator's planner has it
    paths = found.planner_data if isinstance(found, Metadata) else None
    return _PlannedSave(chunks=chunks, objects=objects, paths=paths)


def _nbytes(item: WriteItem, planned: WritePlan) -> int:
    if item.tensor_data is None:
        return len(planned.objects[item.index.fqn])
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _key(fqn: str) -> str:
    """The key of a tensor that DCP knows by a name: a path of one part, see :class:`WriteChunk`."""
    return fqn.replace("%", "%25").replace("/", "%2F")


@dataclass(frozen=True, kw_only=True)
class _PlannedSave(WritePlan):
    """What DCP's planner wants this rank to write.

    Attributes:
        objects: FQN -> its bytes, as DCP's readers want them.
        paths: the planner's data for ``.metadata``.
    """

    paths: Any = None

    def complete(self, gather: Callable[[bytes], Sequence[bytes]]) -> WritePlan:
        """DCP spreads the objects over the ranks, and here rank 0 writes them."""
        mine = {fqn: base64.b64encode(data).decode() for fqn, data in self.objects.items()}
        everywhere: dict[str, bytes] = {}
        for answer in gather(json.dumps(mine).encode()):
            everywhere.update({fqn: base64.b64decode(data) for fqn, data in json.loads(answer).items()})
        return replace(self, objects=everywhere)

    def stock_view(self, structure: bytes) -> StockView:
        keys = json.loads(structure.partition(b"\n")[0])
        names = {key: [key.replace("%2F", "/").replace("%25", "%")] for key in keys}
        return StockView(names, dict(self.objects), self.paths)


class StorageReader(FileSystemReader):
    """Reads a step's folder, by name or from ``.resiliency/<run>/steps``, and compares every byte that it gives to
    DCP with the step's digests first.

    Args:
        path: of a local folder.

    Raises (the methods):
        NoCheckpointFound: the folder has no manifest: it is no sharded step of this library, or is not committed.
        CorruptShard: bytes are damaged or missing; names the file and the byte range.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self._records: Mapping[str, ShardRecord] = {}
        self._good: set[tuple[str, int]] = set()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        self._records, self._good = {}, set()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        described = self._files_beside().get(STOCK_METADATA)
        if described is None:
            raise NoCheckpointFound(f"{self.path} has no form that torch's distributed checkpoint reads")
        return read_stock_metadata(described)

    def _files_beside(self) -> dict[str, bytes]:
        """What lies beside the shards, as shard 0 holds it: file name -> its bytes."""
        first = next(iter(self._load_records()))
        record, where = self._records[first], os.path.join(self.path, first)
        end = record.sections[-1] if record.sections else 0
        self._check(first, end, record.nbytes)
        with open(where, "rb") as file:

            def read(start: int, end: int) -> bytes:
                file.seek(start)
                return file.read(end - start)

            return files_in_shard(read, record.nbytes, where=where)

    def check(self, *, part: int = 0, parts: int = 1) -> None:
        """Compares every byte of the step with its digest; of the shards only each ``parts``-th, from ``part`` on.

        Raises:
            NoCheckpointFound, CorruptShard: as the class.
        """
        for file in list(self._load_records())[part::parts]:
            self._check(file, 0, self._records[file].nbytes, threads=threads_for(parts))
        if part:
            return
        for name, data in self._files_beside().items():
            where = os.path.join(self.path, name)
            try:
                with open(where, "rb") as beside:
                    found = beside.read()
            except FileNotFoundError:
                raise CorruptShard(f"{where} is missing", path=where) from None
            if found != data:
                raise CorruptShard(f"{where} is damaged: it is not what the step's first shard says", path=where)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._load_records()  # DCP asks one rank for the metadata
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            self._check(place.relative_path, place.offset, place.offset + place.length)
        read: Future[None] = super().read_data(plan, planner)
        return read

    def _load_records(self) -> Mapping[str, ShardRecord]:
        if not self._records:
            where = os.path.join(self.path, MANIFEST)
            try:
                with open(where, "rb") as file:
                    manifest = Manifest.from_json(file.read(), where=where)
            except FileNotFoundError:
                raise NoCheckpointFound(
                    f"{self.path} has no {MANIFEST}: it is no committed step of this library; a checkpoint that torch"
                    " wrote is read by torch.distributed.checkpoint.FileSystemReader"
                ) from None
            self._records = {record.file: record for record in manifest.shards}
        return self._records

    def _check(self, file: str, start: int, end: int, *, threads: int = 1) -> None:
        """Compares the blocks that hold these bytes with their digests, each once."""
        record, where = self._records.get(file), os.path.join(self.path, file)
        if record is None:
            raise CorruptShard(f"{where} is not a shard of the step", path=where)
        wanted = [index for index in record.blocks.within(start, end) if (file, index) not in self._good]
        shares = [wanted[first::threads] for first in range(min(threads, len(wanted)))]
        if len(shares) < 2:
            for share in shares:
                _check_blocks(where, record, share)
        else:
            with ThreadPoolExecutor(len(shares), "resiliency-check") as pool:
                list(pool.map(lambda share: _check_blocks(where, record, share), shares))
        self._good.update((file, index) for index in wanted)


def _check_blocks(where: str, record: ShardRecord, indexes: Sequence[int]) -> None:
    """Compares blocks of a file with their digests."""
    buffer = memoryview(bytearray(max(last - first for first, last in map(record.blocks.bounds, indexes))))
    try:
        with open(where, "rb", buffering=0) as source:
            for index in indexes:
                first, last = record.blocks.bounds(index)
                source.seek(first)
                count = 0
                while count < last - first and (more := source.readinto(buffer[count : last - first])):
                    count += more
                if count < last - first or block_digest(buffer[:count]) != record.digests[index]:
                    raise CorruptShard(
                        f"{where}: bytes {first:,} to {last:,} are damaged or missing; load another copy of the step,"
                        " or an older one",
                        path=where,
                        ranges=((first, last),),
                    )
    except FileNotFoundError:
        raise CorruptShard(f"{where} is missing", path=where) from None


def load_folder(
    path: str | os.PathLike[str],
    *,
    into: dict[str, Any] | None = None,
    allow_pickle: bool = False,
    advance: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Loads the state in a local folder: a sharded step of this library, every byte checked, or a distributed
    checkpoint that torch or Lightning wrote, which has no digests (see
    :class:`~resiliency.checkpoint.stock_reader.StockReader` for what is checked).

    Collective: with ``into`` and several ranks, over the default process group.

    Args:
        into: a nested dict whose tensors (DTensors, too) are filled in place, and whose objects are replaced. None: the
            whole state is loaded into new CPU tensors, as nested dicts.
        allow_pickle: also load objects of any class. Only for checkpoints you trust: it can run code.
        advance: called with the number of bytes of each part of a stock folder when they are checked.

    Returns:
        ``into``, or the state.

    Raises:
        NoCheckpointFound: the folder has no ``.metadata``: it is no distributed checkpoint, or its save did not end.
        CorruptShard: a file is missing, too short or damaged, or is not what ``.metadata`` says; names the file.
        ConfigError: the state does not fit ``into``.
        pickle.UnpicklingError: it holds objects of classes that may not be loaded; the error says how to allow them.
    """
    ours = os.path.exists(os.path.join(path, MANIFEST))
    reader = StorageReader(path) if ours else StockReader(path, allow_pickle=allow_pickle, advance=advance)
    # Checked here and not within DCP, which would report errors of this library as its own.
    if isinstance(reader, StockReader):
        reader.check()
    else:
        reader.set_up_storage_reader(reader.read_metadata(), True)
    state = {} if into is None else into
    planner = (_WholeState if into is None else _Objects)(allow_pickle)
    alone = into is None or not torch.distributed.is_initialized()
    try:
        _load_state_dict(state, storage_reader=reader, planner=planner, no_dist=alone)
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        known = (ResiliencyError, pickle.UnpicklingError)
        first = next((cause for cause in causes if isinstance(cause, known)), None)
        if first is not None:
            raise first from error
        raise ConfigError(f"{os.fspath(path)} does not fit: {causes[0]}") from error
    return state


def check_folder(path: str | os.PathLike[str]) -> bool:
    """Compares a sharded step of this library with its digests; each rank reads its share of the files.

    Collective: over the default process group, if there is one. Blocks: for reading.

    Returns:
        False when the folder is none of this library, and nothing can be compared.

    Raises:
        CorruptShard: on all ranks, when any of them has found damage; names the file.
    """
    rank, world_size = 0, 1
    if torch.distributed.is_initialized():
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found: CorruptShard | None = None
    ours = os.path.exists(os.path.join(path, MANIFEST))
    try:
        if ours:
            StorageReader(path).check(part=rank, parts=world_size)
    except CorruptShard as error:
        found = error
    except (OSError, ResiliencyError) as error:  # the other ranks must not wait for this one
        found = CorruptShard(f"{os.fspath(path)} cannot be checked: {error}", path=os.fspath(path))
    if world_size > 1:
        everywhere: list[tuple[str, str] | None] = [None] * world_size
        torch.distributed.all_gather_object(everywhere, found and (str(found), found.path))
        first = next((one for one in everywhere if one is not None), None)
        if found is None and first is not None:
            found = CorruptShard(first[0], path=first[1])
    if found is not None:
        raise found
    return ours


class _Objects(DefaultLoadPlanner):
    """Loads objects as this library does: without ``allow_pickle`` none of a class that may run code."""

    def __init__(self, allow_pickle: bool) -> None:
        super().__init__()
        self._allow_pickle = allow_pickle

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        with harmless_classes():
            found = torch.load(value, map_location="cpu", weights_only=not self._allow_pickle)
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], found)


class _WholeState(_Objects, _EmptyStateDictLoadPlanner):
    """Makes a state of all that ``.metadata`` names."""
