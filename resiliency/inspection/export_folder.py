"""Writes a step as a distributed checkpoint of torch, for which nothing of this library is needed to read it."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from resiliency.errors import ConfigError, CorruptShard, TierError
from resiliency.inspection.by_path import Located
from resiliency.storage.fetch import copy_checked
from resiliency.storage.manifest import MANIFEST, Manifest, gather_records
from resiliency.storage.shard_file import STOCK_METADATA
from resiliency.storage.stock_folder import files_in_shard
from resiliency.storage.tiers.local import fsync_dir

__all__ = ["write_stock_folder"]


def write_stock_folder(located: Located, target: str, force: bool, load: Callable[[], Any]) -> int:
    """Writes the step beside the target, and renames it when it is complete and on the disk. Of a sharded step the
    files are copied, of any other the state is written by torch.

    Args:
        target: path of a folder.
        force: replace the folder that is there.
        load: loads the whole state.

    Returns:
        The bytes of its files.

    Raises:
        ConfigError: torch cannot write the state so; and what ``load`` raises.
        CorruptShard: bytes do not match their digests.
        TierError: the step cannot be read, or the folder not be written.
    """
    above = os.path.dirname(target)
    temp = os.path.join(above, f".{os.path.basename(target)}.partial-{secrets.token_hex(4)}")
    old = f"{temp}-old"
    try:
        os.mkdir(temp)
        if located.replicated or not _copy_sharded(located, temp):
            _save(load(), temp, located)
        nbytes = sum(_flushed(os.path.join(temp, name)) for name in os.listdir(temp))
        fsync_dir(temp)
        if force and os.path.lexists(target):
            os.rename(target, old)
        os.rename(temp, target)  # fails when something is there, unless it is an empty folder
        fsync_dir(above)
        return nbytes
    except OSError as error:
        raise TierError(f"{target} cannot be written: {error}", retryable=error.errno == errno.ENOSPC) from error
    finally:
        shutil.rmtree(temp, ignore_errors=True)
        if os.path.isdir(old) and not os.path.lexists(target):
            os.rename(old, target)
        shutil.rmtree(old, ignore_errors=True)


def _copy_sharded(located: Located, temp: str) -> bool:
    """Copies the files of a sharded step, checking every byte. False, with nothing copied: they are not stock, because
    an earlier format has them or torch cannot flatten the state."""
    manifest = gather_records(located.listing.records.values())
    if not isinstance(manifest, Manifest):
        raise CorruptShard(f"{located.where(0)}: records of its step's shards are missing", path=located.where(0))
    held: dict[str, bytes] = {}
    for record in manifest.shards:
        target = Path(temp, record.file)
        copy_checked(located.tier, located.files[record.rank], record, target)
        if record.rank == 0:
            with open(target, "rb") as file:
                held = files_in_shard(partial(_read, file), record.nbytes, where=located.where(0))
            if STOCK_METADATA not in held:
                target.unlink()
                return False
    # With it, this library compares a copy with its digests; torch does not look at it.
    Path(temp, MANIFEST).write_text(manifest.to_json())
    for name, data in held.items():
        Path(temp, name).write_bytes(data)
    return True


def _read(file: BinaryIO, start: int, end: int) -> bytes:
    file.seek(start)
    return file.read(end - start)


def _save(state: Any, temp: str, located: Located) -> None:
    if not isinstance(state, dict):
        raise ConfigError(f"{located.id} holds a {type(state).__qualname__}, and a distributed checkpoint is a dict")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        try:
            save(state, checkpoint_id=temp, no_dist=True)
        except (CheckpointException, ValueError) as error:
            causes = error.failures.values() if isinstance(error, CheckpointException) else [(error, None)]
            cause = next(cause for cause, _ in causes)
            if isinstance(cause, OSError):
                raise cause from error
            raise ConfigError(f"torch cannot write {located.id} as a distributed checkpoint: {cause}") from error


def _flushed(path: str) -> int:
    """The bytes of a file, which is on the disk now."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size
