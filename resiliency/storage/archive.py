"""The zip archive in which torch stores a checkpoint: headers, directory, where an entry's data are. Pure; no torch.

``torch.save`` writes a zip archive without compression: ``<prefix>/data.pkl`` is the pickled structure,
``<prefix>/data/<key>`` the bytes of each storage. This module computes headers and offsets, so that the bytes can be
written in any order by any process, and reads the directory back.

Where the data of an entry begin follows from its header's offset, the length of its name and its size
(:func:`data_start`), so that a reader needs the directory only. CRC fields are 0, as torch's own
``set_crc32_options(False)`` leaves them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

from resiliency.errors import CorruptShard

__all__ = [
    "ALIGNMENT",
    "PREFIX",
    "ArchiveEntry",
    "data_start",
    "directory",
    "directory_part",
    "entry_at",
    "listed_entries",
    "local_header",
    "read_directory",
]

#: Data of every entry begin at a multiple of this many bytes, as in archives that torch writes.
ALIGNMENT = 64
#: First part of every entry's name.
PREFIX = "archive/"

_LARGE = 0xFFFFFFFF  # sizes and offsets from here on stand in a 64-bit extra field
_LOCAL, _CENTRAL, _END, _END64, _LOCATOR = 0x04034B50, 0x02014B50, 0x06054B50, 0x06064B50, 0x07064B50
_LOCAL_HEADER = struct.Struct("<IHHHHHIIIHH")
_CENTRAL_HEADER = struct.Struct("<IHHHHHHIIIHHHHHII")
_CENTRAL_FIELDS = struct.Struct("<I6xH12xIHH10xI")  # of a central header: magic, method, size, lengths, offset
_END_RECORD = struct.Struct("<IHHHHIIH")
_END64_RECORD = struct.Struct("<IQHHIIQQQQ")
_LOCATOR_RECORD = struct.Struct("<IIQI")
_EXTRA64 = struct.Struct("<HHQQ")
_CENTRAL_EXTRA64 = struct.Struct("<HHQQQ")
_PADDING = struct.Struct("<HH")
_SMALL_HEADER = _LOCAL_HEADER.size + _PADDING.size  # the least header, without the name
_PADDING_ID = 0x4246  # "FB", which torch uses too
_MAX_DIRECTORY = 1 << 30


class ArchiveEntry(NamedTuple):
    """An entry; made by :func:`entry_at`.

    Attributes:
        name: without :data:`PREFIX`.
        at: offset of its header.
        nbytes: size of its data.
        start, end: offsets of the first byte of its data, and behind the last one.
    """

    name: str
    at: int
    nbytes: int
    start: int
    end: int


def entry_at(name: str, at: int, nbytes: int) -> ArchiveEntry:
    """An entry whose header is at an offset."""
    start = data_start(name, nbytes, at)
    return ArchiveEntry(name, at, nbytes, start, start + nbytes)


def data_start(name: str, nbytes: int, at: int) -> int:
    """Offset of the data of an entry whose header is at ``at``."""
    return _data_start(len(PREFIX) + len(name.encode()), nbytes, at)


def _data_start(name_length: int, nbytes: int, at: int) -> int:
    """:func:`data_start`, for a name of so many bytes with :data:`PREFIX`."""
    header = _SMALL_HEADER if nbytes < _LARGE else _SMALL_HEADER + _EXTRA64.size
    return (at + header + name_length + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def local_header(entry: ArchiveEntry) -> bytes:
    """The bytes from ``entry.at`` to ``entry.start``."""
    name = (PREFIX + entry.name).encode()
    large = entry.nbytes >= _LARGE
    extra = _EXTRA64.pack(1, 16, entry.nbytes, entry.nbytes) if large else b""
    padding = entry.start - entry.at - _LOCAL_HEADER.size - len(name) - len(extra) - _PADDING.size
    extra += _PADDING.pack(_PADDING_ID, padding) + b"Z" * padding
    size = _LARGE if large else entry.nbytes
    return (
        _LOCAL_HEADER.pack(_LOCAL, 45 if large else 20, 0, 0, 0, 0, 0, size, size, len(name), len(extra)) + name + extra
    )


def directory(entries: Sequence[ArchiveEntry], at: int, *, listed: bytes = b"", count: int = 0) -> bytes:
    """The directory and the end of an archive, to be written at offset ``at``, behind the last entry.

    Args:
        listed: what :func:`directory_part` returned for ``count`` entries that come first.
    """
    listed += directory_part(entries)
    count += len(entries)
    if at < _LARGE and count < 0xFFFF and len(listed) < _LARGE:
        return listed + _END_RECORD.pack(_END, 0, 0, count, count, len(listed), at, 0)
    return b"".join(
        (
            listed,
            _END64_RECORD.pack(_END64, 44, 45, 45, 0, 0, count, count, len(listed), at),
            _LOCATOR_RECORD.pack(_LOCATOR, 0, at + len(listed), 1),
            _END_RECORD.pack(_END, 0, 0, 0xFFFF, 0xFFFF, _LARGE, _LARGE, 0),
        )
    )


def directory_part(entries: Sequence[ArchiveEntry]) -> bytes:
    """The lines of the directory for some entries."""
    return b"".join(map(_central_header, entries))


def _central_header(entry: ArchiveEntry) -> bytes:
    name = (PREFIX + entry.name).encode()
    large = entry.nbytes >= _LARGE or entry.at >= _LARGE
    extra = _CENTRAL_EXTRA64.pack(1, 24, entry.nbytes, entry.nbytes, entry.at) if large else b""
    size, at = (_LARGE, _LARGE) if large else (entry.nbytes, entry.at)
    version = 45 if large else 20
    fields = (_CENTRAL, version, version, 0, 0, 0, 0, 0, size, size, len(name), len(extra), 0, 0, 0, 0, at)
    return _CENTRAL_HEADER.pack(*fields) + name + extra


def read_directory(read: Callable[[int, int], bytes], nbytes: int, *, where: str) -> dict[str, ArchiveEntry]:
    """The entries of an archive that this library wrote, by name, in the order of the directory.

    Args:
        read: returns bytes ``[start, end)`` of the file.
        nbytes: size of the file.
        where: path, for messages.

    Raises:
        CorruptShard: the file does not end with a directory, or the directory does not add up.
    """
    try:
        count, size, at = _find_directory(read, nbytes)
        data = read(at, at + size)
        if len(data) != size:
            raise ValueError(f"the directory has {len(data)} of {size} bytes")
        entries: dict[str, ArchiveEntry] = {}
        position = 0
        for _ in range(count):
            entry, position = _read_central(data, position)
            if entry.name in entries or entry.end > at:
                raise ValueError(f"entry {entry.name!r} is listed twice or ends behind the directory")
            entries[entry.name] = entry
        if position != size:
            raise ValueError(f"{size - position} bytes follow the last of {count} entries")
        return entries
    except (ValueError, struct.error, UnicodeDecodeError) as error:
        raise CorruptShard(f"{where}: not a checkpoint archive ({error})", path=where) from error


def listed_entries(read: Callable[[int, int], bytes], nbytes: int, *, where: str) -> tuple[bytes, int]:
    """The lines of an archive's directory as they stand, and how many there are, see :func:`directory`.

    Args:
        read, nbytes, where: as in :func:`read_directory`.

    Raises:
        CorruptShard: the file does not end with a directory.
    """
    try:
        count, size, at = _find_directory(read, nbytes)
        return read(at, at + size), count
    except (ValueError, struct.error) as error:
        raise CorruptShard(f"{where}: not a checkpoint archive ({error})", path=where) from error


def _find_directory(read: Callable[[int, int], bytes], nbytes: int) -> tuple[int, int, int]:
    """(entries, size, offset) of the directory."""
    tail_at = max(0, nbytes - _END_RECORD.size - _LOCATOR_RECORD.size)
    tail = read(tail_at, nbytes)
    if len(tail) < _END_RECORD.size:
        raise ValueError(f"{nbytes} bytes are too few")
    magic, _, _, _, count, size, at, _ = _END_RECORD.unpack(tail[-_END_RECORD.size :])
    if magic != _END:
        raise ValueError("the end of the archive is missing")
    if at == _LARGE or count == 0xFFFF or size == _LARGE:
        magic, _, end_at, _ = _LOCATOR_RECORD.unpack(tail[: _LOCATOR_RECORD.size])
        if magic != _LOCATOR:
            raise ValueError("the end of the archive is damaged")
        magic, *_, count, size, at = _END64_RECORD.unpack(read(end_at, end_at + _END64_RECORD.size))
        if magic != _END64:
            raise ValueError("the end of the archive is damaged")
    if not 0 <= at <= at + size <= nbytes or size > _MAX_DIRECTORY:
        raise ValueError(f"the directory cannot be {size} bytes at {at} of {nbytes}")
    return count, size, at


def _read_central(data: bytes, position: int) -> tuple[ArchiveEntry, int]:
    magic, method, size, name_length, extra_length, at = _CENTRAL_FIELDS.unpack_from(data, position)
    if magic != _CENTRAL or method != 0:
        raise ValueError(f"the directory is damaged at its byte {position}")
    position += _CENTRAL_HEADER.size
    name = data[position : position + name_length].decode()
    if not name.startswith(PREFIX):
        raise ValueError(f"entry {name!r} is not one of ours")
    position += name_length
    if extra_length:
        tag, _, _, size, at = _CENTRAL_EXTRA64.unpack_from(data, position)
        if tag != 1:
            raise ValueError(f"entry {name!r} has an unknown extra field")
    start = _data_start(name_length, size, at)
    return ArchiveEntry(name[len(PREFIX) :], at, size, start, start + size), position + extra_length
