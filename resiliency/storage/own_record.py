"""The record of a shard inside its own file, so that a checkpoint that is one file needs nothing beside it. No torch.

A step of one rank is one file. Its entry :data:`OWN_RECORD` holds the shard's record, which has a check sum of itself,
and a digest of everything else that follows the storages. So every byte is covered wherever the file is copied to, and
the step's folder can be made again from it (:mod:`resiliency.storage.single_files`).

In that record the digests of the blocks behind the storages are empty, because it lies in one of them itself. They are
taken from the file once it has been checked in the other way.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence

from resiliency.errors import CorruptShard
from resiliency.storage.archive import ArchiveEntry, read_directory
from resiliency.storage.blocks import Blocks, block_digest
from resiliency.storage.manifest import ShardRecord
from resiliency.storage.shard_file import Identity, StorageLayout, archive_tail

__all__ = ["OWN_RECORD", "read_own_record", "tail_with_record"]

OWN_RECORD = "resiliency/record.json"

#: Room for the digits of numbers that are not known before the entry has its size.
_SPARE_BYTES = 64


def tail_with_record(layout: StorageLayout, entries: Sequence[tuple[str, bytes]], record: ShardRecord) -> bytes:
    """Everything that follows the storages, this shard's record included.

    Args:
        layout: of the storages.
        entries: what else the file holds.
        record: of this shard as far as it is known: sections and digests of the bytes up to ``layout.end``.
    """
    record = dataclasses.replace(record, sections=(*record.sections, layout.end))
    text, size = b"", 0
    while True:
        tail = archive_tail(layout, [*entries, (OWN_RECORD, bytes(size))])
        at = _start_of_last(layout.end, [*entries, (OWN_RECORD, bytes(size))])
        unknown = [""] * Blocks(len(tail), record.block_bytes).count
        whole = dataclasses.replace(record, nbytes=layout.end + len(tail), digests=(*record.digests, *unknown))
        rest = block_digest(tail[:at] + tail[at + size :])
        text = json.dumps({"record": whole.to_dict(), "rest": rest}).encode()
        if len(text) <= size:
            break
        size = len(text) + _SPARE_BYTES
    return b"".join((tail[:at], text.ljust(size), tail[at + size :]))


def _start_of_last(at: int, entries: Sequence[tuple[str, bytes]]) -> int:
    """Where the data of the last of these entries begin, counted from ``at``, the place of the first."""
    begin, start = at, at
    for name, data in entries:
        entry = ArchiveEntry(name, at, len(data))
        start, at = entry.start, entry.end
    return start - begin


def read_own_record(identity: Identity, read: Callable[[int, int], bytes], nbytes: int, *, where: str) -> ShardRecord:
    """The record in a file that is a whole step of one rank, with the digests of all blocks.

    Reads and checks all that follows the storages, not the storages.

    Args:
        identity: what the file says that it is.
        read: returns bytes ``[start, end)`` of the file.
        nbytes: size of the file.
        where: path, for messages.

    Raises:
        CorruptShard: what follows the storages is damaged, or there is no record of that step.
    """
    entry = read_directory(read, nbytes, where=where).get(OWN_RECORD)
    if entry is None:
        raise CorruptShard(f"{where}: the record of {identity.id} is missing in it", path=where)
    try:
        data = json.loads(read(entry.start, entry.end))
        record = ShardRecord.from_dict(data["record"], where=where)
        rest = str(data["rest"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptShard(f"{where}: its record is damaged ({type(error).__name__}: {error})", path=where) from error
    begin = record.sections[-1] if record.sections else nbytes
    if (record.id, record.run) != (identity.id, identity.run) or record.nbytes != nbytes or not begin <= entry.at:
        raise CorruptShard(f"{where}: its record is of another file", path=where)
    known = record.blocks.index_at(begin)
    tail = read(begin, nbytes)
    start, end = entry.start - begin, entry.end - begin
    if (
        "" in record.digests[:known]
        or any(record.digests[known:])
        or len(tail) != nbytes - begin
        or block_digest(tail[:start] + tail[end:]) != rest
    ):
        raise CorruptShard(f"{where}: bytes {begin} to {nbytes} do not match its record", path=where)
    blocks = Blocks(len(tail), record.block_bytes)
    digests = [block_digest(memoryview(tail)[slice(*blocks.bounds(index))]) for index in range(blocks.count)]
    return dataclasses.replace(record, digests=(*record.digests[:known], *digests))
