"""A folder of this machine (ramdisk, SSD, NFS or FUSE mount) as a tier. No torch.

An object is written to a temp file in the same folder and renamed (``os.replace``), so a crash at any moment leaves
the old object, the new one or none, and at worst a temp file that no listing shows and :meth:`LocalTier.sweep`
removes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import BinaryIO

from resiliency.regular_file import open_own, opened
from resiliency.storage.tiers._file_writer import FileWriter
from resiliency.storage.tiers._keys import check_key, check_prefix, check_range, is_partial, partial_name
from resiliency.storage.tiers._os_errors import tier_error
from resiliency.storage.tiers._source import Source
from resiliency.storage.tiers.base import ObjectInfo, UnreadableFolders

__all__ = [
    "LocalTier",
    "copies_on_write",
    "fsync_dir",
    "fsync_file",
    "may_share_blocks",
    "on_ramdisk",
    "stores_may_end_the_process",
    "used_by_this_host_only",
]

# How often a put makes its folder again when deletes remove it as empty.
_FOLDER_ATTEMPTS = 16
#: ``f_type`` of statfs(2) for tmpfs, ramfs, hugetlbfs.
_IN_MEMORY = (0x01021994, 0x858458F6, 0x958458F6)
#: ``f_type`` of file systems that never overwrite a file's blocks in place: Btrfs, bcachefs, ZFS, NILFS2, F2FS.
_COPY_ON_WRITE = (0x9123683E, 0xCA451A4E, 0x2FC12FC1, 0x3434, 0xF2F52010)
_XFS, _OVERLAY = 0x58465342, 0x794C7630
#: ``f_type`` of file systems that only one kernel can mount: ext2 to ext4, and those above.
_ONE_HOST = (0xEF53, _XFS, _OVERLAY, *_IN_MEMORY, *_COPY_ON_WRITE)


_libc = ctypes.CDLL(None)


def on_ramdisk(path: str) -> bool:
    """True when the file or folder is on a ramdisk, or would be if it were created; False when not, or when unknown."""
    return _kind(path) in _IN_MEMORY


def copies_on_write(path: str) -> bool:
    """True when the file system never overwrites the blocks of a file in place."""
    return _kind(path) in _COPY_ON_WRITE


def stores_may_end_the_process(path: str) -> bool:
    """True when storing into a file's existing block may need a new block, which a full disk does not have. Through a
    mapping of the file that is SIGBUS (seen on Btrfs, and on an overlay on top of it, which does not tell what it is
    on); through ``write`` it is an error."""
    return _kind(path) in (*_COPY_ON_WRITE, _OVERLAY)


def may_share_blocks(path: str) -> bool:
    """True when a file may share blocks with a copy of it (``cp`` makes such copies by itself), so that writes to this
    file go to new blocks."""
    return _kind(path) in (*_COPY_ON_WRITE, _XFS)


def used_by_this_host_only(path: str) -> bool:
    """True when no other host can have mounted the file system. Other hosts can mount NFS, FUSE, Lustre and the
    like."""
    return _kind(path) in _ONE_HOST


def _kind(path: str) -> int:
    """``f_type`` of the file system of a file or folder, or of its nearest existing parent; 0 when unknown."""
    while not os.path.lexists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    buffer = (ctypes.c_long * 64)()  # struct statfs begins with f_type; it is shorter than this everywhere
    failed = _libc.statfs(os.fsencode(path), buffer)
    return 0 if failed else int(buffer[0])


def fsync_file(path: str) -> None:
    """Syncs a file. Blocks: until its bytes would survive a power loss; its name does only after :func:`fsync_dir`.

    Raises:
        OSError: as ``open(2)`` and ``fsync(2)``.
    """
    fd = open_own(path)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_dir(path: str) -> None:
    """Syncs a folder. Blocks: until names created, renamed and removed in it would survive a power loss.

    Raises:
        OSError: as ``open(2)`` and ``fsync(2)``; file systems that cannot sync folders (EINVAL, ENOTSUP, ENOSYS) are
            ignored.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        # FUSE mounts and some network file systems have no folder sync; nothing more can be done for the data there.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(fd)


#: Errors of file systems without hard links, of a file with too many of them, and across file systems.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


def _link(source: str, target: str, folder: str) -> None:
    """Links a file. Where no hard link is possible, makes a symbolic link that is valid once it is moved into
    ``folder``."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS or not os.path.isfile(source):
            raise
        # Use real paths, because the name's folder may be reached through a symbolic link.
        os.symlink(os.path.relpath(os.path.realpath(source), os.path.realpath(folder)), target)


class LocalTier:
    """A folder as a :class:`~resiliency.storage.tiers.base.Tier`.

    Thread: any; several processes may share the folder. Nothing is touched before the first verb; the first put makes
    the folder. Blocks: as long as the file system does; no verb retries.

    Args:
        root: the folder; made absolute.
        durable: True: a put returns after fsync of file and folders. False (ramdisk, or the caller syncs later with
            :func:`fsync_file` and :func:`fsync_dir`): also atomic, but may be lost in a power loss.
        name: word for listings, events and error messages.
        staging: returns a folder, relative to the root, through which every put, alias and deletion goes: new files are
            made there and then moved to their place, deleted files are moved there first. While the folder is missing
            these verbs fail, so whoever removes it stops the writer, even one that was stopped right before a move. The
            caller makes the folder. Not used for names in a folder on another file system.
    """

    is_local = True

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        durable: bool = True,
        name: str = "local",
        staging: Callable[[], str] | None = None,
    ) -> None:
        self.root = os.path.abspath(os.fspath(root))
        self.durable = durable
        self.name = name
        self._staging_now = staging

    def __repr__(self) -> str:
        return f"LocalTier({self.root!r}, durable={self.durable}, name={self.name!r})"

    def path(self, key: str) -> str:
        """Path of an object, whether or not it exists; for callers that map or rename files themselves.

        Raises:
            TierError: the key is invalid (not retryable).
        """
        check_key(key, tier=self._where)
        return self.location(key)

    def location(self, key: str) -> str:
        """Path of an object or a folder of objects ("" is the root); see the protocol."""
        return os.path.join(self.root, *key.split("/")) if key else self.root

    def put_bytes(self, key: str, data: bytes) -> None:
        """Stores small data atomically; see the protocol."""
        target = self.path(key)
        with self._partial(key, target) as file, self._errors("store", key):
            file.write(data)

    def put_file(
        self,
        key: str,
        path: str,
        *,
        check: Callable[[bytes | memoryview], None] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Copies a file atomically; see the protocol."""
        target = self.path(key)
        with (
            Source(path, where=self._where, key=key) as source,
            self._partial(key, target) as file,
            FileWriter(file.fileno(), source.nbytes) as writer,
        ):
            while True:
                with self._errors("store", key):
                    buffer = writer.buffer()
                count = source.read_into(buffer)
                if not count:
                    break
                if check is not None:
                    check(buffer[:count])
                writer.write(buffer, count)
                if progress is not None and writer.written:
                    progress(writer.written)
            with self._errors("store", key):
                writer.finish()
            if progress is not None:
                progress(writer.written)

    @property
    def _staging(self) -> str | None:
        return None if self._staging_now is None else self.location(self._staging_now())

    def alias(self, key: str, name: str) -> None:
        """Links the file under another name; see the protocol.

        On a file system without hard links the name becomes a symbolic link, which does not outlive the object.
        """
        source, target = self.path(key), self.path(name)
        with self._errors("name", name):
            folder = os.path.dirname(target)
            try:
                self._alias(source, target, through=self._staging or folder)
            except OSError as error:
                if error.errno != errno.EXDEV or self._staging is None:
                    raise
                self._alias(source, target, through=folder)
            if self.durable:
                fsync_dir(folder)

    def _alias(self, source: str, target: str, *, through: str) -> None:
        folder, temp = os.path.dirname(target), os.path.join(through, partial_name())
        for attempt in range(_FOLDER_ATTEMPTS):
            try:
                self._make_folder(folder)
                _link(source, temp, folder)
                break
            except FileNotFoundError:
                # The folder was removed as empty between the two calls, or the object is gone.
                if attempt == _FOLDER_ATTEMPTS - 1 or through != folder or not os.path.lexists(source):
                    raise
        try:
            os.replace(temp, target)
        finally:
            # Also after success: renaming a link to another link of the same file does nothing and leaves both.
            with suppress(OSError):
                os.unlink(temp)

    def read(self, key: str) -> bytes:
        """The whole object; see the protocol.

        Raises:
            FileNotFoundError: no such key.
        """
        with self._open(key) as file, self._errors("read", key):
            return file.read()

    def read_range(self, key: str, start: int, end: int) -> bytes:
        """Bytes ``[start, end)``; shorter when the object is. See the protocol.

        Raises:
            FileNotFoundError: no such key.
        """
        check_range(key, start, end, tier=self._where)
        with self._open(key) as file, self._errors("read", key):
            file.seek(start)
            return file.read(end - start)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object whose key starts with ``prefix``, in any order; files that vanish meanwhile are left out.

        Raises:
            UnreadableFolders: some folders cannot be read; raised last, after all that can be read.
        """
        check_prefix(prefix, tier=self._where)
        folder, _, start = prefix.rpartition("/")
        return self._walk(folder, start)

    def delete(self, key: str, *, keep_folder: bool = False) -> None:
        """Removes one object, and unless ``keep_folder`` its folder when that is empty now (never the root). A missing
        object is no error."""
        path = self.path(key)
        with self._errors("delete", key):
            try:
                self._unlink(path)
            except (FileNotFoundError, NotADirectoryError):
                if self._staging is not None and os.path.lexists(path):
                    raise
                return
            except (IsADirectoryError, PermissionError):
                # It is a folder, not an object; POSIX allows unlink to report EPERM for it.
                if os.path.isdir(path):
                    return
                raise
            folder = os.path.dirname(path)
            if folder != self.root and not keep_folder:
                try:
                    os.rmdir(folder)
                    folder = os.path.dirname(folder)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.EBUSY):
                        raise
            if self.durable:
                # Otherwise a power loss could bring the manifest back, while its shards, which are deleted later, are
                # gone.
                with suppress(FileNotFoundError):
                    fsync_dir(folder)

    def _unlink(self, path: str) -> None:
        staging = self._staging
        if staging is None or not os.path.lexists(path) or (os.path.isdir(path) and not os.path.islink(path)):
            os.unlink(path)
            return
        temp = os.path.join(staging, partial_name())
        try:
            os.rename(path, temp)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            temp = path
        os.unlink(temp)

    def sweep(self, *, older_than: timedelta = timedelta(hours=1)) -> int:
        """Removes temp files that killed writers left behind; returns how many.

        Args:
            older_than: leave files whose last write is younger: they may still be written to.

        Raises:
            TierError: a folder cannot be read or a file cannot be removed.
        """
        limit = time.time() - older_than.total_seconds()
        removed = 0
        unreadable: dict[str, OSError] = {}
        for entry, key in self._entries("", unreadable):
            if is_partial(entry.name):
                with self._errors("sweep", key), suppress(FileNotFoundError):
                    if entry.stat(follow_symlinks=False).st_mtime <= limit:
                        os.unlink(entry.path)
                        removed += 1
        if unreadable:
            raise self._unreadable(unreadable, ())
        return removed

    def close(self) -> None:
        """Does nothing; object stores have connections to close, and callers need not know which tier they have."""

    @property
    def _where(self) -> str:
        return f"{self.name} tier {self.root}"

    @contextmanager
    def _errors(self, action: str, key: str) -> Iterator[None]:
        """Turns OSError into TierError. Callbacks are called outside of it, so that their exceptions are passed on
        unchanged."""
        try:
            yield
        except OSError as error:
            raise tier_error(error, where=self._where, action=action, key=key, path=self.root) from error

    @contextmanager
    def _partial(self, key: str, target: str) -> Iterator[BinaryIO]:
        """A temp file to write to. It becomes ``target`` when the block succeeds and is removed when it raises."""
        with self._errors("store", key):
            temp, file = self._create(os.path.dirname(target))
        try:
            try:
                yield file
                with self._errors("store", key):
                    file.flush()
                    if self.durable:
                        os.fsync(file.fileno())
            finally:
                # After a failed write the buffer holds bytes that close() would try to write again, and fail again.
                with suppress(OSError):
                    file.close()
            with self._errors("store", key):
                self._move(temp, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(temp)
            raise
        if self.durable:
            # Another process may delete the object and the folder at once; then nothing needs to be made durable.
            with self._errors("sync", key), suppress(FileNotFoundError):
                fsync_dir(os.path.dirname(target))

    def _move(self, temp: str, target: str) -> None:
        try:
            os.replace(temp, target)
        except OSError as error:
            if error.errno != errno.EXDEV or self._staging is None:
                raise
            beside = os.path.join(os.path.dirname(target), partial_name())
            shutil.copyfile(temp, beside)
            os.replace(beside, target)
            os.unlink(temp)

    def _create(self, folder: str) -> tuple[str, BinaryIO]:
        for attempt in range(_FOLDER_ATTEMPTS):
            temp = os.path.join(self._staging or folder, partial_name())
            try:
                self._make_folder(folder)
                return temp, os.fdopen(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb")
            except FileNotFoundError:
                # A delete removed the folder, or one above it, as empty between two of these calls.
                if attempt == _FOLDER_ATTEMPTS - 1 or self._staging is not None:
                    raise
        raise AssertionError("unreachable")

    def _make_folder(self, folder: str) -> None:
        if os.path.isdir(folder):
            return
        parent = os.path.dirname(folder)
        if parent != folder:
            self._make_folder(parent)
        try:
            os.mkdir(folder)
        except FileExistsError:
            # Another writer has made it, and may be removing it again; or it is a file, which the next call reports.
            return
        if self.durable:
            fsync_dir(parent)

    @contextmanager
    def _open(self, key: str) -> Iterator[BinaryIO]:
        path = self.path(key)
        with self._errors("read", key):
            try:
                file: BinaryIO | None = opened(path)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                file = None
        if file is None:
            raise FileNotFoundError(errno.ENOENT, f"{self._where}: no object", key)
        with file:
            yield file

    def _walk(self, folder: str, start: str) -> Iterator[ObjectInfo]:
        unreadable: dict[str, OSError] = {}
        found: list[ObjectInfo] = []
        for entry, key in self._entries(folder, unreadable, start):
            if is_partial(entry.name):
                continue
            try:
                nbytes = entry.stat().st_size if entry.is_file() else None
            except FileNotFoundError:
                continue
            except OSError as error:
                unreadable[key.rpartition("/")[0]] = error
                continue
            if nbytes is not None:
                found.append(ObjectInfo(key, nbytes))
                yield found[-1]
        if unreadable:
            raise self._unreadable(unreadable, found)

    def _unreadable(self, folders: Mapping[str, OSError], found: Sequence[ObjectInfo]) -> UnreadableFolders:
        """The error of a listing that is not complete."""
        errors = {
            folder: tier_error(error, where=self._where, action="list", key=folder, path=self.location(folder))
            for folder, error in folders.items()
        }
        retryable = any(error.retryable for error in errors.values())
        return UnreadableFolders({folder: str(error) for folder, error in errors.items()}, found, retryable=retryable)

    def _entries(
        self, folder: str, unreadable: dict[str, OSError], start: str = ""
    ) -> Iterator[tuple[os.DirEntry[str], str]]:
        """All files below ``folder``, with their keys; directly in ``folder`` only names that begin with ``start``.

        Args:
            unreadable: folders that cannot be read completely are added here, each with its error.
        """
        pending = [folder]
        while pending:
            current = pending.pop()
            try:
                with os.scandir(self.location(current)) as scan:
                    entries = list(scan)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                unreadable[current] = error
                continue
            for entry in entries:
                if current == folder and not entry.name.startswith(start):
                    continue
                key = f"{current}/{entry.name}" if current else entry.name
                try:
                    # Links to folders are not followed: they may form a circle or lead out of the root.
                    is_folder = entry.is_dir(follow_symlinks=False)
                except OSError as error:
                    unreadable[current] = error
                    continue
                if is_folder:
                    pending.append(key)
                else:
                    yield entry, key
