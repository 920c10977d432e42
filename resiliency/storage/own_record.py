"""The records of a step inside its file, so that a checkpoint of one file needs nothing beside it. No torch.

A step of one rank is one file. Its entry :data:`OWN_RECORD` holds the shard's record, which has a check sum of its own,
and a digest of everything else that follows the storages. So every byte is covered wherever the file is copied to, and
the step's folder can be made again from the file (:mod:`resiliency.storage.single_files`).

A step of several ranks of one host becomes one file too: :func:`joined_tail` adds the other ranks' shards, each as an
entry, and their records. It only appends: everything that the ranks have written stays in place, including their
directory, which the new end repeats.

In the file's own record the digests of the blocks behind the storages are empty, because the record itself lies in one
of those blocks. They are computed from the file once it was checked by the other digest.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence

from resiliency.errors import CorruptShard
from resiliency.storage.archive import (
    PREFIX,
    ArchiveEntry,
    directory,
    entry_at,
    listed_entries,
    local_header,
    read_directory,
)
from resiliency.storage.blocks import Blocks, block_digest
from resiliency.storage.format_version import FORMAT_VERSION
from resiliency.storage.json_object import json_object, reason
from resiliency.storage.manifest import Manifest, ShardRecord, gather_records, shard_file
from resiliency.storage.shard_file import IDENTITY, IDENTITY_BYTES, Identity, StorageLayout, archive_tail

__all__ = [
    "OWN_RECORD",
    "check_identity_is_absent",
    "joined_tail",
    "read_other_shard",
    "read_own_manifest",
    "shard_entry",
    "tail_digests",
    "tail_with_record",
]

OWN_RECORD = "resiliency/record.json"
_SHARDS = "resiliency/shard-"

#: Room for the digits of numbers that are known only when the size of the entry is.
_SPARE_BYTES = 64


def check_identity_is_absent(read: Callable[[int, int], bytes], nbytes: int, *, where: str) -> None:
    """Checks that a file which does not begin as a checkpoint of this library does not end as one either. If it does,
    its first bytes, which identify the file, are damaged, and without them nothing else of the file is checked.

    Args:
        read: returns bytes ``[start, end)`` of the file.
        nbytes: size of the file.
        where: path, for messages.

    Raises:
        CorruptShard: the file ends as a checkpoint of this library.
    """
    try:
        listed, _ = listed_entries(read, nbytes, where=where)
    except CorruptShard:
        return  # the file is no archive
    if (PREFIX + IDENTITY).encode() in listed:
        raise CorruptShard(
            f"{where}: its first {IDENTITY_BYTES} bytes are damaged; by its end it is a checkpoint of this library."
            " torch.load reads it as far as torch can, without a check",
            path=where,
            ranges=[(0, IDENTITY_BYTES)],
        )


def shard_entry(rank: int, version: int = FORMAT_VERSION) -> str:
    """Name of the entry with the shard of another rank, the bytes of that shard file, in a step of this version."""
    return f"resiliency/{shard_file(rank, version)}"


def _entry_of(record: ShardRecord) -> str:
    return shard_entry(record.rank, record.version)


def tail_with_record(layout: StorageLayout, entries: Sequence[tuple[str, bytes]], record: ShardRecord) -> bytes:
    """Returns everything that follows the storages, including this shard's record.

    Args:
        layout: of the storages.
        entries: other entries of the file, as (name, data).
        record: of this shard as far as it is known: sections and digests of the bytes up to ``layout.end``.
    """

    def assemble(size: int) -> tuple[bytes, int]:
        with_room = [*entries, (OWN_RECORD, bytes(size))]
        return archive_tail(layout, with_room), _start_of_last(layout.end, with_room)

    return _with_records(assemble, dataclasses.replace(record, sections=(*record.sections, layout.end)), ())


def joined_tail(tail: bytes, step: Manifest, others: Sequence[bytes], *, where: str) -> bytes | None:
    """Returns everything that follows the storages of shard 0 when the file holds the whole step. It begins with
    ``tail``.

    Args:
        tail: what follows the storages now, up to the end of the file.
        step: the records of all shards, with all digests.
        others: the bytes of the other ranks' shard files, by rank.
        where: path, for messages.

    Returns:
        None when the file holds the whole step already.

    Raises:
        CorruptShard: ``tail`` or a shard does not match its record.
    """
    record = step.shards[0]
    begin = record.sections[-1]
    if tail_digests(tail, record) != record.digests[record.blocks.index_at(begin) :]:
        raise CorruptShard(f"{where}: bytes {begin} to {record.nbytes} do not match their digests", path=where)
    listed, count = listed_entries(lambda start, end: tail[start - begin : end - begin], record.nbytes, where=where)
    if OWN_RECORD.encode() in listed:
        return None
    pieces, placed, at = [tail], [], record.nbytes
    for other, data in zip(step.shards[1:], others, strict=True):
        if not _matches(data, other):
            raise CorruptShard(f"{where}: shard {other.rank} of the step does not match its record", path=where)
        entry = entry_at(_entry_of(other), at, len(data))
        pieces += [local_header(entry), data]
        placed.append(entry)
        at = entry.end
    before = b"".join(pieces)

    def assemble(size: int) -> tuple[bytes, int]:
        own = entry_at(OWN_RECORD, at, size)
        front = before + local_header(own)
        return front + bytes(size) + directory([*placed, own], own.end, listed=listed, count=count), len(front)

    so_far = dataclasses.replace(record, digests=record.digests[: record.blocks.index_at(begin)])
    return _with_records(assemble, so_far, step.shards[1:])


def _with_records(
    assemble: Callable[[int], tuple[bytes, int]], record: ShardRecord, others: Sequence[ShardRecord]
) -> bytes:
    """Returns what follows the storages, with the records in it.

    Args:
        assemble: makes it with room for the given number of bytes of records, and returns where that room begins.
        record: of the file; its digests are those up to its last section, where the result is to be written.
        others: records of the other shards in the file.
    """
    text, size = b"", 0
    while True:
        tail, at = assemble(size)
        unknown = [""] * Blocks(len(tail), record.block_bytes).count
        nbytes = record.sections[-1] + len(tail)
        whole = dataclasses.replace(record, nbytes=nbytes, digests=(*record.digests, *unknown))
        rest = block_digest(tail[:at] + tail[at + size :])
        content: dict[str, object] = {"record": whole.to_dict(), "rest": rest}
        if others:
            content["others"] = [other.to_dict() for other in others]
        text = json.dumps(content).encode()
        if len(text) <= size:
            return b"".join((tail[:at], text.ljust(size), tail[at + size :]))
        size = len(text) + _SPARE_BYTES


def _start_of_last(at: int, entries: Sequence[tuple[str, bytes]]) -> int:
    """Where the data of the last of these entries begin, relative to ``at``, the offset of the first entry."""
    begin, start = at, at
    for name, data in entries:
        entry = entry_at(name, at, len(data))
        start, at = entry.start, entry.end
    return start - begin


def tail_digests(tail: bytes, record: ShardRecord) -> tuple[str, ...]:
    """Digests of the blocks that follow the storages; the record tells the size of blocks."""
    blocks = Blocks(len(tail), record.block_bytes)
    return tuple(block_digest(memoryview(tail)[slice(*blocks.bounds(index))]) for index in range(blocks.count))


def _matches(data: bytes, record: ShardRecord) -> bool:
    """True when ``data`` are the bytes of this record's shard."""
    blocks = record.blocks
    return len(data) == record.nbytes and all(
        block_digest(memoryview(data)[slice(*blocks.bounds(index))]) == digest
        for index, digest in enumerate(record.digests)
    )


def read_own_manifest(
    identity: Identity, read: Callable[[int, int], bytes], nbytes: int, *, where: str
) -> Manifest | None:
    """The records in a file that is a whole replicated step, with the digests of all blocks.

    Reads and checks everything that follows the storages, but not the storages.

    Args:
        identity: the identity that the file has: shard 0 of a replicated step.
        read: returns bytes ``[start, end)`` of the file.
        nbytes: size of the file.
        where: path, for messages.

    Returns:
        None for a file of a step of several ranks that does not hold the other ranks' shards.

    Raises:
        CorruptShard: what follows the storages is damaged, or has no record of that step.
    """
    entries = read_directory(read, nbytes, where=where)
    entry = entries.get(OWN_RECORD)
    if entry is None:
        if identity.world_size > 1 and not any(name.startswith(_SHARDS) for name in entries):
            return None
        raise CorruptShard(f"{where}: the record of {identity.id} is missing in it", path=where)
    try:
        data = json_object(read(entry.start, entry.end), what=f"a record in its entry {OWN_RECORD}", where=where)
        others = data["others"] if identity.world_size > 1 else ()
        record, *further = [ShardRecord.from_dict(item, where=where) for item in (data["record"], *others)]
        rest = str(data["rest"])
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptShard(
            f"{where}: its record, entry {OWN_RECORD}, is damaged ({reason(error)})", path=where
        ) from error
    begin = record.sections[-1] if record.sections else nbytes
    if (
        (record.version, record.id, record.run) != (identity.version, identity.id, identity.run)
        or record.nbytes != nbytes
        or not begin <= entry.at
    ):
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
        damaged = _damaged_shard(tail, begin, entries, further) if len(tail) == nbytes - begin else ""
        raise CorruptShard(f"{where}: {damaged}bytes {begin} to {nbytes} do not match its record", path=where)
    record = dataclasses.replace(record, digests=(*record.digests[:known], *tail_digests(tail, record)))
    step = gather_records([record, *further])
    if not isinstance(step, Manifest) or step.world_size != identity.world_size or step.shards[0] != record:
        raise CorruptShard(f"{where}: the records in it do not make {identity.id}", path=where)
    for other in step.shards[1:]:
        found = entries.get(_entry_of(other))
        if found is None or found.nbytes != other.nbytes or found.at < begin:
            raise CorruptShard(f"{where}: entry {_entry_of(other)} is missing, or of another size", path=where)
    return step


def _damaged_shard(tail: bytes, begin: int, entries: Mapping[str, ArchiveEntry], others: Sequence[ShardRecord]) -> str:
    """Names a damaged shard of another rank, as the beginning of a sentence; "" when none of them is damaged."""
    for other in others:
        entry = entries.get(_entry_of(other))
        if entry is not None and not _matches(tail[entry.start - begin : entry.end - begin], other):
            return f"entry {entry.name} is damaged: "
    return ""


def read_other_shard(read: Callable[[int, int], bytes], nbytes: int, record: ShardRecord, *, where: str) -> bytes:
    """The bytes of another rank's shard in a file that is a whole step. They are not checked here.

    Args:
        read, nbytes, where: as in :func:`read_own_manifest`.
        record: of that shard.

    Raises:
        CorruptShard: the shard is not in the file.
    """
    entry = read_directory(read, nbytes, where=where).get(_entry_of(record))
    if entry is None:
        raise CorruptShard(f"{where}: entry {_entry_of(record)} is missing", path=where)
    return read(entry.start, entry.end)
