"""Loads the state of a checkpoint that torch or Lightning wrote: a distributed one, which is a folder, or a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from resiliency.checkpoint.dcp import load_folder
from resiliency.checkpoint.lightning_forms import META
from resiliency.checkpoint.stock_reader import check_crcs
from resiliency.errors import CorruptShard, NoCheckpointFound
from resiliency.state.harmless import harmless_classes

#: Beginning of a file as torch before 1.6 wrote it, which is no archive and has no CRCs.
_BEFORE_1_6 = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."

__all__ = ["load_lightning_folder", "load_stock_file", "load_stock_folder"]


def load_lightning_folder(path: str | os.PathLike[str], *, allow_pickle: bool = False) -> dict[str, Any]:
    """As :func:`load_stock_folder`, for a trainer that resumes.

    Raises:
        NoCheckpointFound: the folder has no ``meta.pt``.
    """
    state = load_stock_folder(path, allow_pickle=allow_pickle)
    if META not in state:
        raise NoCheckpointFound(
            f"{os.fspath(path)} has no {META}, without which Lightning does not know where training was: Lightning has"
            " not written it, or its save did not end"
        )
    return state


def load_stock_folder(
    path: str | os.PathLike[str], *, allow_pickle: bool = False, advance: Callable[[int], None] = lambda _: None
) -> dict[str, Any]:
    """The whole state of a distributed checkpoint, in CPU tensors; of one that Lightning wrote with its ``meta.pt``, in
    the sharded form (:mod:`resiliency.checkpoint.lightning_forms`). Collective: no. Blocks: for reading it twice.

    Args:
        allow_pickle: also load objects of any class. Only for checkpoints you trust: it can run code.
        advance: called with the number of bytes of each part that is checked.

    Raises:
        As :func:`resiliency.checkpoint.dcp.load_folder`.
    """
    state = load_folder(path, allow_pickle=allow_pickle, advance=advance)
    meta = os.path.join(path, META)
    if os.path.exists(meta):
        state[META] = load_stock_file(meta, allow_pickle=allow_pickle)
    for optimizer in state.get("optimizer_states", ()):  # of a whole Lightning checkpoint
        # torch's distributed checkpoint makes text of keys that are numbers, and leaves empty dicts out.
        optimizer["state"] = {int(number): value for number, value in optimizer.get("state", {}).items()}
    return state


def load_stock_file(
    path: str | os.PathLike[str], *, allow_pickle: bool = False, advance: Callable[[int], None] = lambda _: None
) -> Any:
    """What ``torch.load`` makes of a file, whose bytes are compared with their CRCs first. Its tensors may be mapped
    from the file. Collective: no. Blocks: for reading it.

    Args:
        allow_pickle: as :func:`load_stock_folder`.
        advance: called with the number of bytes compared since the last call.

    Raises:
        CorruptShard: the file is damaged or no checkpoint.
        pickle.UnpicklingError: it holds objects of classes that may not be loaded.
        OSError: it cannot be read.
    """
    where = os.fspath(path)
    with open(where, "rb") as file:
        archive = not file.read(len(_BEFORE_1_6)) == _BEFORE_1_6
        if archive:
            check_crcs(file, where, advance=advance)
    try:
        with harmless_classes():
            return torch.load(where, map_location="cpu", mmap=archive, weights_only=not allow_pickle)
    except (RuntimeError, EOFError, KeyError, ValueError) as error:
        raise CorruptShard(f"{where}: cannot be read ({error})", path=where) from error
