"""Finds, makes and removes the engine's own folder of a local tier, :data:`META_DIR` in the keys of files. No torch.

It lies in the tier's folder, under that name; or *apart* from it, so that the folder holds checkpoints and nothing
else even while a job of one host trains, and a script that lists, copies or searches it meets what stock Lightning
leaves. Apart is a place on the same mount, because checkpoints are linked from one to the other: where the user's state
belongs (``~/.local/state/resiliency``), or else in the highest folder of the mount that this user may write to
(``.resiliency-<user id>``). File managers choose the place of deleted files by the same rule (the Trash specification
of freedesktop.org).

The folder has a ``.gitignore`` that leaves out everything, as caches of other tools do, so ``git add checkpoints/``
takes the files under the users' names and not the same bytes once more. One that lies apart says in ``directory`` whose
it is, by path and by identity: who deletes or moves the checkpoints of a killed job away and makes a new folder in
their place does not mean the old ones any more.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import logging
import os
import re
import secrets
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress

from resiliency.settings import state_home
from resiliency.storage.manifest import META_DIR, STEPS_DIR

__all__ = [
    "MetaFolder",
    "folders_apart",
    "is_left_behind",
    "key_of",
    "make_meta_folder",
    "meta_folder",
    "move_into_directory",
    "owner_of",
    "remove_meta_folder",
]

logger = logging.getLogger(__name__)

_GIT_IGNORE, _OWNER = ".gitignore", "directory"
#: Names of the folder of folders apart: where the user's state belongs, and at the top of a mount.
_BASE, _OWN_BASE = "resiliency", re.compile(rf"{re.escape(META_DIR)}-\d+")
#: Longest part of a folder's own name in the name of its folder apart, in bytes.
_NAME_BYTES = 80
#: ``ioctl`` that reads the project id of a file (FS_IOC_FSGETXATTR), and its ``struct fsxattr``.
_GET_ATTRIBUTES, _ATTRIBUTES = 0x801C581F, struct.Struct("4I12x")
#: ``ioctl`` that reads the generation of a file (FS_IOC_GETVERSION), which tells it from an earlier one of its number.
_GET_GENERATION, _GENERATION = 0x80087601, struct.Struct("q")
#: Ends the name of a folder that is left behind, see :func:`is_left_behind`.
_LEFT = re.compile(r"\.left-[0-9a-f]{8}\Z")
_NO_ATTRIBUTES = (errno.ENOTTY, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EACCES)


class MetaFolder:
    """Finds the engine's own folder of one local tier, each time anew: a job may make or remove it. Thread: any.

    Args:
        directory: of the tier.
    """

    def __init__(self, directory: str) -> None:
        self._within = os.path.join(directory, META_DIR)
        self._directory = directory
        self._apart: str | None = None  # the place does not change, so it is looked for once
        self._counts = False  # True once the folder there was found to be the directory's

    def find(self) -> str:
        """The folder, where it is now; in the directory if there is none. Blocks: for two system calls, about 60 the
        first time."""
        if os.path.lexists(self._within):
            return self._within
        self._apart = self._apart or _apart(self._directory)
        if self._apart is None or not os.path.isdir(self._apart):
            return self._within
        self._counts = self._counts or not is_left_behind(self._apart)
        return self._apart if self._counts else self._within


def meta_folder(directory: str) -> str:
    """The engine's own folder of a local tier, as :meth:`MetaFolder.find` finds it."""
    return MetaFolder(directory).find()


def make_meta_folder(directory: str, *, apart: bool) -> str:
    """Makes the engine's own folder of a local tier, if there is none, and returns it. Safe to call in several
    processes at once, with the same arguments.

    Args:
        apart: make it apart from the directory, if that is possible. False: in the directory; one that lies apart, as a
            killed job leaves it, is moved there.

    Raises:
        OSError: it cannot be made.
    """
    within = os.path.join(directory, META_DIR)
    os.makedirs(directory, exist_ok=True)
    place = None if os.path.lexists(within) else _apart(directory)
    if place is not None:
        _leave_behind(place)
    if place is not None and apart:
        try:
            _make_apart(place, directory)
        except OSError as error:
            logger.debug("%s cannot be used: %s", place, error)
        else:
            return place
    elif place is not None and os.path.isdir(place):
        with suppress(FileNotFoundError, FileExistsError):  # another process was first
            _move(place, within)
    os.makedirs(within, exist_ok=True)
    _write_once(os.path.join(within, _GIT_IGNORE), "*\n")
    return within


def move_into_directory(run_folder: str, directory: str, *, through: str) -> str:
    """Moves the folder of a run that lies apart into the directory, where people see it, and returns where it is then.

    Args:
        through: a folder in the run's folder. Whoever removes it stops this, up to the moment of the move.

    Raises:
        OSError: it cannot be moved; FileNotFoundError: also when the folder that it goes through is gone.
    """
    meta, run = os.path.split(run_folder)
    target = os.path.join(directory, META_DIR, run)
    if meta == os.path.dirname(target):
        return target
    os.makedirs(os.path.dirname(target), exist_ok=True)
    _write_once(os.path.join(os.path.dirname(target), _GIT_IGNORE), "*\n")
    try:
        os.rename(os.path.join(through, os.pardir, os.pardir, run), target)
    except OSError:
        remove_meta_folder(os.path.dirname(target))  # unless there was one
        raise
    with suppress(OSError):
        os.rmdir(os.path.join(target, os.path.basename(through)))
    remove_meta_folder(meta)  # unless there are other runs
    return target


def _make_apart(place: str, directory: str) -> None:
    if not os.path.isdir(place):
        base = os.path.dirname(place)
        os.makedirs(os.path.dirname(base), exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(base, 0o700)
        try:
            _try_links(directory, base)
        except OSError:
            _remove_base(base)
            raise
        os.makedirs(place, exist_ok=True)
    _write_owner(place, os.path.realpath(directory))


def _write_owner(place: str, real: str) -> None:
    path, text = os.path.join(place, _OWNER), f"{_from(os.path.dirname(place), real)}\0{_identity(real)}"
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            if file.read() == text:
                return
    except FileNotFoundError:
        _write_once(path, text)
    except OSError as error:
        logger.debug("%s cannot be read: %s", path, error)
    else:  # the directory was deleted and made anew while a job wrote to it, or it was restored from a copy
        new = os.path.join(place, f".{_OWNER}-{secrets.token_hex(4)}")
        _write_once(new, text)
        with suppress(OSError):
            os.replace(new, path)


def _leave_behind(place: str) -> None:
    """Renames a folder apart that is left behind, so that it is deleted (:mod:`resiliency.agent.abandoned`)."""
    if not os.path.isdir(place) or not _is_of_another(place):
        return
    left = f"{place}.left-{secrets.token_hex(4)}"
    try:
        os.rename(place, left)
        if not _is_of_another(left):  # another process was first, and has made a new one meanwhile
            os.rename(left, place)
            return
    except OSError as error:
        logger.debug("%s cannot be renamed: %s", place, error)
        return
    logger.warning(
        "%s was made anew after a job in it was killed: the steps of that job, in %s, do not count, and are deleted"
        " when a job of this user next begins without a launcher",
        owner_of(left),
        left,
    )


def is_left_behind(meta: str) -> bool:
    """True when a folder apart is of a directory that was deleted or moved since: there is another one now under its
    path, which holds no checkpoint of the folder's steps. One that does was restored from a copy, or made anew by the
    job itself. False where file systems do not tell such folders apart; ext4, XFS and Btrfs do."""
    return _LEFT.search(meta) is not None or _is_of_another(meta)


def _is_of_another(meta: str) -> bool:
    directory, identity = _owner(meta)
    if not directory or not identity:
        return False
    now = _identity(directory)
    return bool(now) and now != identity and not _has_checkpoints_of(meta, directory)


def _has_checkpoints_of(meta: str, directory: str) -> bool:
    """True also when that is not known: a record cannot be read, or no step of the folder has a name."""
    known = False
    for record in glob.iglob(os.path.join(glob.escape(meta), "*", STEPS_DIR, "*", "shard-*.json")):
        try:
            with open(record, "rb") as file:
                names = json.load(file)["names"]
            if any(os.path.lexists(os.path.join(directory, name)) for name in names):
                return True
            known = known or bool(names)
        except FileNotFoundError:
            continue  # its job deletes it
        except (OSError, ValueError, KeyError, TypeError):
            return True
    return not known


def _identity(directory: str) -> str:
    """What tells a folder from every other one that had or will have its path; "" when the file system cannot tell."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        (generation,) = _GENERATION.unpack(fcntl.ioctl(fd, _GET_GENERATION, bytes(_GENERATION.size)))
        return f"{os.fstat(fd).st_ino}-{generation & 0xFFFFFFFF}"
    except OSError:
        return ""
    finally:
        os.close(fd)


def _try_links(directory: str, base: str) -> None:
    """Raises OSError if no file can be linked from one folder into the other. Where the file system cannot make files
    without a name, this is not tried, because the directory must not show a file that is no checkpoint."""
    try:
        fd = os.open(directory, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    except OSError as error:
        logger.debug("links from %s to %s are not tried: %s", directory, base, error)
        return
    try:
        link = os.path.join(base, f".link-{os.getpid()}-{fd}")
        os.link(f"/proc/self/fd/{fd}", link, src_dir_fd=fd)  # with a descriptor given, os.link follows the first path
        os.unlink(link)
    finally:
        os.close(fd)


def _move(place: str, within: str) -> None:
    os.rename(place, within)
    with suppress(FileNotFoundError):
        os.unlink(os.path.join(within, _OWNER))
    _remove_base(os.path.dirname(place))
    logger.info("%s was moved to %s", place, within)


def _write_once(path: str, text: str) -> None:
    """Nothing depends on the file, so an error is not raised."""
    try:
        with suppress(FileExistsError), open(path, "x", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
    except OSError as error:
        logger.debug("%s cannot be written: %s", path, error)


def remove_meta_folder(meta: str) -> None:
    """Removes the folder if it holds no run; a job may begin in it meanwhile. Raises nothing for a folder that is gone
    or that must stay."""
    is_apart = os.path.basename(meta) != META_DIR
    own = os.path.join(meta, _OWNER if is_apart else _GIT_IGNORE)
    text = None
    try:
        if os.listdir(meta) == [os.path.basename(own)]:
            with open(own, encoding="utf-8", errors="surrogateescape") as file:
                text = file.read()
            os.unlink(own)
        os.rmdir(meta)
    except OSError:  # it is gone, or holds more
        if text is not None and os.path.isdir(meta):
            _write_once(own, text)  # a job has begun in it after the look
        return
    if is_apart:
        _remove_base(os.path.dirname(meta))


def _remove_base(base: str) -> None:
    """Removes the folder of folders apart if it is empty."""
    with suppress(OSError):
        os.rmdir(base)


def folders_apart(meta: str) -> Iterator[str]:
    """All folders of this user beside one that lies apart, itself included; none for a folder that does not."""
    base = os.path.dirname(meta)
    if os.path.basename(meta) == META_DIR:
        return
    with suppress(OSError):
        yield from (entry.path for entry in list(os.scandir(base)) if entry.is_dir(follow_symlinks=False))


def key_of(path: str) -> str:
    """The path that a file in a folder apart would have, if the folder were in its directory: messages show paths as
    they are, and people pass them on. Other paths are returned as they are."""
    meta, rest = path, ""
    while os.path.basename(os.path.dirname(meta)) != _BASE and not _OWN_BASE.fullmatch(
        os.path.basename(os.path.dirname(meta))
    ):
        meta, last = os.path.split(meta)
        if not last:
            return path
        rest = os.path.join(last, rest) if rest else last
    directory = owner_of(meta)
    return path if directory is None else os.path.join(directory, META_DIR, rest).rstrip("/")


def owner_of(meta: str) -> str | None:
    """The directory of a folder that lies apart; None when it is not known."""
    return _owner(meta)[0] or None


def _owner(meta: str) -> tuple[str, str]:
    """The directory of a folder that lies apart, and its identity; "" for what is not known."""
    try:
        with open(os.path.join(meta, _OWNER), encoding="utf-8", errors="surrogateescape") as file:
            path, _, identity = file.read().partition("\0")
    except OSError:
        return "", ""
    return (os.path.normpath(os.path.join(os.path.dirname(meta), "..", path)) if path else ""), identity


# -- where apart is -------------------------------------------------------------------------------------------------


def _apart(directory: str) -> str | None:
    """The place of the folder apart from a directory, whether or not it exists; None: there is none, or the directory
    does not exist."""
    real = os.path.realpath(directory)
    try:
        mount = _mount(real)
    except OSError:
        return None
    for base in _bases(real, mount):
        digest = hashlib.blake2b(os.fsencode(_from(base, real)), digest_size=6).hexdigest()
        name = os.fsencode(os.path.basename(real))[:_NAME_BYTES].decode(errors="replace").lstrip(".")
        return os.path.join(base, f"{name or 'root'}-{digest}")
    return None


def _from(base: str, real: str) -> str:
    """The directory as seen from where the base is: the same volume is often mounted elsewhere the next time."""
    return os.path.relpath(real, os.path.dirname(base))


def _bases(real: str, mount: tuple[int, ...]) -> Iterator[str]:
    state = state_home()
    if os.path.isabs(state):
        base = os.path.join(os.path.realpath(state), _BASE)
        if _is_usable(base, real, mount):
            yield base
    top, above = real, os.path.dirname(real)
    while above != top and _is_on(above, mount) and os.access(above, os.W_OK | os.X_OK):
        top, above = above, os.path.dirname(above)
    base = os.path.join(top, f"{META_DIR}-{os.geteuid()}")
    if top != real and _is_usable(base, real, mount):
        yield base


def _is_usable(base: str, real: str, mount: tuple[int, ...]) -> bool:
    """True when a folder, which may not exist, is or would be on the mount, this user's, and not in the directory."""
    if f"{base}/".startswith(f"{real}/"):
        return False
    try:
        found = os.lstat(base)
    except FileNotFoundError:
        parent = os.path.dirname(base)
        while not os.path.lexists(parent) and os.path.dirname(parent) != parent:
            parent = os.path.dirname(parent)
        return _is_on(parent, mount) and os.access(parent, os.W_OK | os.X_OK)
    except OSError:
        return False
    # Not another user's, who could put checkpoints there (the top of a mount may be open to all, as /tmp is).
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and _is_on(base, mount)


def _is_on(path: str, mount: tuple[int, ...]) -> bool:
    try:
        return _mount(path) == mount
    except OSError:
        return False


def _mount(path: str) -> tuple[int, ...]:
    """Values that are equal for two folders if files can be linked from one into the other: the mount, the device
    (subvolumes have their own) and the project of quotas.

    Raises:
        OSError: the folder does not exist, or this is not Linux.
    """
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), path)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with open(f"/proc/self/fdinfo/{fd}", encoding="ascii") as file:
            mount = next(int(line.split()[1]) for line in file if line.startswith("mnt_id:"))
        return mount, os.fstat(fd).st_dev, _project(fd)
    except StopIteration:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), path) from None
    finally:
        os.close(fd)


def _project(fd: int) -> int:
    try:
        return int(_ATTRIBUTES.unpack(fcntl.ioctl(fd, _GET_ATTRIBUTES, bytes(_ATTRIBUTES.size)))[3])
    except OSError as error:
        if error.errno not in _NO_ATTRIBUTES:
            raise
        return 0
