"""Reads a distributed checkpoint that torch or Lightning wrote, checked as far as such a folder can be.

It has no digests, but each of its parts is a torch archive with a CRC-32 of every entry. What nothing in it can tell:
that a whole file is that of another save with the same layout.
"""

from __future__ import annotations

import enum
import io
import logging
import os
import pathlib
import pickle
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from resiliency.errors import CorruptShard, NoCheckpointFound
from resiliency.storage.shard_file import STOCK_METADATA

__all__ = ["StockReader", "check_crcs", "is_stock_folder", "read_stock_metadata"]

logger = logging.getLogger(__name__)

_DISTCP = ".distcp"


def is_stock_folder(path: str | os.PathLike[str]) -> bool:
    """True for a local folder with files of torch's distributed checkpoint, be they complete or not."""
    if not os.path.isdir(path):
        return False
    return any(name == STOCK_METADATA or name.endswith(_DISTCP) for name in os.listdir(path))


class StockReader(FileSystemReader):
    """Reads what torch wrote, and names the file when one is missing, damaged or not what ``.metadata`` says.

    Args:
        path: of a local folder.
        allow_pickle: ``.metadata`` may name any class. Only for checkpoints you trust: it can run code.
        advance: called with the number of bytes of each part when its CRC-32 is right.

    Raises (the methods):
        NoCheckpointFound: the folder has no ``.metadata``: it is no distributed checkpoint, or its save did not end.
        CorruptShard: a file is missing, damaged, or of another checkpoint.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        allow_pickle: bool = False,
        advance: Callable[[int], None] = lambda _: None,
    ) -> None:
        super().__init__(path)
        self._allow_pickle, self._advance = allow_pickle, advance
        self._checked: set[tuple[str, int]] = set()

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        where = os.path.join(self.path, STOCK_METADATA)
        try:
            with open(where, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            raise NoCheckpointFound(
                f"{where} is missing: {os.fspath(self.path)} is no distributed checkpoint, or its save did not end"
            ) from None
        try:
            return read_stock_metadata(data, allow_pickle=self._allow_pickle)
        except Exception as error:  # Boundary: pickle raises anything for damaged bytes.
            raise CorruptShard(f"{where} cannot be read: {type(error).__name__}: {error}", path=where) from error

    def check(self) -> int:
        """Checks that each part that ``.metadata`` names begins and ends within its file, not what is in it. Blocks:
        for a small read of each part.

        Returns:
            The bytes of all parts.
        """
        self.set_up_storage_reader(self.read_metadata(), True)
        files: dict[str, list[tuple[int, int, str]]] = {}
        for index, place in self.storage_data.items():
            files.setdefault(place.relative_path, []).append((place.offset, place.offset + place.length, index.fqn))
        for name, parts in files.items():
            self._check_parts(os.path.join(self.path, name), sorted(parts))
        self._warn_of_other_saves(set(files))
        return sum(end - start for parts in files.values() for start, end, _ in parts)

    def _check_parts(self, where: str, parts: list[tuple[int, int, str]]) -> None:
        try:
            with open(where, "rb") as file:
                nbytes = os.fstat(file.fileno()).st_size
                for start, end, fqn in parts:
                    file.seek(start)
                    if nbytes < end or file.read(4) != b"PK\x03\x04":
                        raise CorruptShard(
                            f"{where} is cut off or belongs to another checkpoint: {fqn!r} is not at its byte"
                            f" {start:,}",
                            path=where,
                        )
        except FileNotFoundError:
            raise CorruptShard(f"{where} is missing", path=where) from None

    def _warn_of_other_saves(self, files: set[str]) -> None:
        """Warns of signs that two saves have written into the folder. They are no proof: a copy changes times."""
        described = os.stat(os.path.join(self.path, STOCK_METADATA)).st_mtime_ns
        newer = [name for name in files if os.stat(os.path.join(self.path, name)).st_mtime_ns > described]
        others = [name for name in os.listdir(self.path) if name.endswith(_DISTCP) and name not in files]
        if newer:
            logger.warning(
                "%s: %s is newer than %s, which every save writes last: unless the folder was copied so, a later save"
                " was cut off in it, and what is loaded is a mixture. Compare with another checkpoint",
                self.path,
                min(newer),
                STOCK_METADATA,
            )
        if others:
            logger.warning(
                "%s: %s is not read: %s does not name it, so another save left it",
                self.path,
                min(others),
                STOCK_METADATA,
            )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            part = place.relative_path, place.offset
            if part in self._checked:
                continue
            where = os.path.join(self.path, place.relative_path)
            with open(where, "rb") as file:
                check_crcs(_Part(file, place.offset, place.length), where, what=f"{item.storage_index.fqn!r} in it")
            self._checked.add(part)
            self._advance(place.length)
        read: Future[None] = super().read_data(plan, planner)
        return read


class _Part(io.RawIOBase):
    """A part of a file as a file of its own. (The one that torch has cannot seek from its end.)"""

    def __init__(self, file: IO[bytes], start: int, nbytes: int) -> None:
        self._file, self._start, self._nbytes, self._at = file, start, nbytes, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence]
        if self._at < 0:
            raise ValueError("it is too short")
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), max(0, self._nbytes - self._at))
        self._file.seek(self._start + self._at)
        data = self._file.read(wanted)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def check_crcs(file: Any, where: str, *, what: str = "it", advance: Callable[[int], None] = lambda _: None) -> None:
    """Compares the entries of a torch archive with their CRC-32. An entry without one passes: torch can be told to
    write none, and this library, which has digests, writes none. Blocks: for reading the file.

    Args:
        file: a binary file that can seek.
        what: the part of the file that it is, for messages.
        advance: called with the number of bytes compared since the last call.

    Raises:
        CorruptShard: bytes are damaged or missing.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            for entry in filter(lambda entry: entry.CRC, archive.infolist()):
                with archive.open(entry) as data:
                    while block := data.read(1 << 22):
                        advance(len(block))
    except (zipfile.BadZipFile, EOFError, ValueError, NotImplementedError) as error:
        raise CorruptShard(f"{where} is damaged: {what} cannot be read: {error}", path=where) from error


def read_stock_metadata(data: bytes, *, allow_pickle: bool = False) -> Metadata:
    """What is in the file ``.metadata``.

    Raises:
        Exception: it is damaged, or names a class that does not belong there.
    """
    found: Metadata = (_AnyUnpickler if allow_pickle else _MetadataUnpickler)(io.BytesIO(data)).load()
    return found


class _Properties(TensorProperties):
    """Properties of a tensor as torch 2.15 and newer store them, too: the fields that an older torch has come first."""

    def __setstate__(self, state: Sequence[Any]) -> None:
        super().__setstate__(state[: len(fields(TensorProperties))])  # type: ignore[no-untyped-call]
        self.__class__ = TensorProperties  # type: ignore[assignment]


class _MetadataUnpickler(pickle.Unpickler):
    """Makes what ``.metadata`` consists of, and nothing else. Imports nothing that it names."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member  # with which Python pickles members of an Enum
        if module in _MODULES:
            found = super().find_class(module, name)
            if found is TensorProperties:
                return _Properties
            known = module in _METADATA_MODULES and isinstance(found, type)
            if known or isinstance(found, torch.dtype) or found in _OTHERS:
                return found
        raise pickle.UnpicklingError(f"{STOCK_METADATA} names {module}.{name}, which does not belong there")


class _AnyUnpickler(pickle.Unpickler):
    """Makes whatever it names: the caller vouches for it."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return _Properties if found is TensorProperties else found


def _member(class_: Any, name: str) -> Any:
    if not (isinstance(class_, type) and issubclass(class_, enum.Enum)):
        raise pickle.UnpicklingError(f"{STOCK_METADATA} names an attribute of {class_!r}, which does not belong there")
    return class_[name]


_METADATA_MODULES = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "torch.distributed._shard.sharded_tensor.metadata",  # before torch 2.4
)
_MODULES = (*_METADATA_MODULES, "torch", "torch.serialization", "pathlib", "pathlib._local")
#: Besides them, where a save went: a path.
_OTHERS = (torch.Size, torch.serialization._get_layout, pathlib.PosixPath, pathlib.PurePosixPath)
