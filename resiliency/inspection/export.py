"""Writes a step as a stock torch/Lightning ``.ckpt`` or distributed checkpoint, or its weights as a safetensors file.

All can be read without this library. For a replicated step the ``.ckpt`` is a copy of the step's own file, and nothing
is unpickled. (A hard link would be quicker, but overwriting it would overwrite the checkpoint.) Every byte is checked
before the file appears; the file appears complete or not at all, and replaces an existing one only with ``force``. The
distributed checkpoint of a sharded step is a copy of its files, too.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from resiliency.checkpoint.lightning_forms import dumped_form
from resiliency.checkpoint.read_plan import plan_new
from resiliency.checkpoint.shard_reader import ShardReader
from resiliency.errors import ConfigError, CorruptShard, NoCheckpointFound, TierError
from resiliency.inspection.by_path import Located, load_path, locate
from resiliency.inspection.contents import ShardContents, read_contents, stored_once
from resiliency.inspection.export_folder import write_stock_folder
from resiliency.inspection.pickle_errors import pickle_errors
from resiliency.inspection.pickle_view import Made, TensorView, as_tensor, children
from resiliency.inspection.survey import close_tier, find
from resiliency.state.tree import dtype_from_name, keyed_leaves
from resiliency.storage.catalog import verify_shard
from resiliency.storage.fetch import copy_checked
from resiliency.storage.manifest import MANIFEST
from resiliency.storage.names import is_in_stock_folder, read_name
from resiliency.storage.shard_file import Chunk, Placed, storage_name
from resiliency.storage.step_id import StepId
from resiliency.storage.tiers import open_tier
from resiliency.storage.tiers.local import fsync_dir

__all__ = ["Exported", "Format", "export", "format_of"]

Format = Literal["ckpt", "safetensors", "dcp"]

_SUFFIXES: Mapping[str, Format] = {
    ".ckpt": "ckpt",
    ".pt": "ckpt",
    ".pth": "ckpt",
    ".torch": "ckpt",
    ".safetensors": "safetensors",
    ".dcp": "dcp",
}


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written.

    Attributes:
        path, format, nbytes: of the file, or of the folder of a distributed checkpoint ("dcp").
        run, id: the step that was exported.
        tensors: number of tensors in the file.
        weights_only: True when ``torch.load(path, weights_only=True)`` reads it; None for other formats than "ckpt".
        unsafe: classes that ``weights_only=True`` refuses, as far as torch can name them.
        tied: name -> other name of the same tensor; safetensors stores the tensor under both, a .ckpt keeps them tied.
        left_out: entries of the state dict that are not tensors, which safetensors cannot hold.
    """

    path: str
    format: Format
    nbytes: int
    run: str
    id: StepId
    tensors: int
    weights_only: bool | None = None
    unsafe: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def format_of(out: str | os.PathLike[str], wanted: str | None = None) -> Format:
    """``wanted`` if given, otherwise the format that the file's suffix names.

    Raises:
        ConfigError: neither is a known format.
    """
    suffix = os.path.splitext(os.fspath(out))[1].lower()
    found = _SUFFIXES.get(f".{wanted}" if wanted else suffix)
    if found is None:
        what = f"format {wanted!r}" if wanted else f"suffix {suffix!r} of {os.fspath(out)}"
        formats = " or ".join(f"--format {name}" for name in ("ckpt", "safetensors", "dcp"))
        raise ConfigError(f"{what} is not known; use .ckpt or .safetensors, or say {formats}")
    return found


def export(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    format: Format | None = None,
    run: str | None = None,
    allow_pickle: bool = False,
    force: bool = False,
    key: str = "state_dict",
) -> Exported:
    """Writes a step as one stock file or folder. Collective: no. Blocks: for reading, checking and writing everything.

    A sharded state is held in memory once; of a replicated one only the weights, and only for safetensors. Shards of a
    remote tier go through a temporary folder (``TMPDIR``), except for the ``.ckpt`` of a replicated step.

    Args:
        source: a path as ``resiliency ckpt`` takes it.
        out: the file to write, or the folder ("dcp"); the folder above must exist.
        format: "ckpt": the whole state tree, as ``torch.save`` writes it. "safetensors": the tensors below ``key``.
            "dcp": a distributed checkpoint of torch, of a sharded Lightning checkpoint with its ``meta.pt``. None: by
            suffix.
        run: which run, when ``source`` is a folder with several.
        allow_pickle: load objects of classes of your own; needed only where files are not copied: for the ``.ckpt`` of
            a sharded step and the "dcp" of a replicated one. Only for checkpoints you trust: it can run code.
        force: replace ``out`` when it exists.
        key: entry of the state that holds the weights.

    Raises:
        ConfigError: ``out`` exists or cannot be made, an object needs ``allow_pickle``, or there are no weights below
            ``key``.
        NoCheckpointFound: there is no committed step.
        CorruptShard: bytes do not match their digests; names the file. Nothing is written.
        TierError: a tier cannot be read or written.
    """
    target = os.path.abspath(os.fspath(out))
    kind = format_of(target, format)
    _check_target(os.fspath(out), target, force, folder=kind == "dcp")
    located = _located(os.fspath(source), run)
    try:
        return _export(located, target, kind, allow_pickle, force, key)
    finally:
        close_tier(located.tier)


def _located(source: str, run: str | None) -> Located:
    located = locate(source, run=run)
    if located is not None:
        return located
    target = find(source)  # raises an error about what is there instead, if anything
    close_tier(target.tier)
    raise NoCheckpointFound(f"{source}: no committed checkpoint; `resiliency ckpt ls {source}` shows what is there")


def _export(located: Located, target: str, kind: Format, allow_pickle: bool, force: bool, key: str) -> Exported:
    if not located.is_checked:
        raise NoCheckpointFound(
            f"{located.where(0)} is a copy of {located.id}, whose record is not there, so that its bytes cannot be"
            " checked; torch.load reads it directly"
        )
    first = read_contents(located.tier, located.run, located.listing.records[0], key=located.files[0])
    done = Exported(path=target, format=kind, nbytes=0, run=located.run, id=located.id, tensors=0)
    if kind == "dcp":
        nbytes = write_stock_folder(located, target, force, lambda: _load(located, allow_pickle, None))
        return replace(done, nbytes=nbytes, tensors=sum(1 for _ in stored_once(first.tree)))
    if kind == "ckpt":
        nbytes, unsafe = _write(target, force, lambda temp: _write_ckpt(located, allow_pickle, temp))
        tensors = sum(1 for _ in stored_once(first.tree))
        return replace(done, nbytes=nbytes, tensors=tensors, weights_only=not unsafe, unsafe=tuple(sorted(unsafe)))
    views = _weight_views(first, key, located.id)
    with tempfile.TemporaryDirectory(prefix="resiliency-") as scratch, ExitStack() as stack:
        if located.replicated:
            weights = _stored_weights(located, views, stack.enter_context(_opened(located, scratch)))
        else:
            weights = _loaded_weights(located, first, views, key, allow_pickle)
        nbytes, _ = _write(target, force, lambda temp: _save_safetensors(weights, views.tied, temp))
    return replace(done, nbytes=nbytes, tensors=len(weights), tied=views.tied, left_out=views.left_out)


# -- a stock checkpoint -----------------------------------------------------------------------------------------------


def _write_ckpt(located: Located, allow_pickle: bool, temp: str) -> set[str]:
    """Writes the file and returns the classes that ``torch.load(weights_only=True)`` refuses to load from it."""
    if located.replicated:
        copy_checked(located.tier, located.files[0], located.listing.records[0], Path(temp))
    else:
        torch.save(_load(located, allow_pickle, None), temp)
    try:
        torch.load(temp, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # Boundary: unpickling runs the code of any class that users allowed.
        return set(torch.serialization.get_unsafe_globals_in_checkpoint(temp)) or {type(error).__name__}
    return set()


def _load(located: Located, allow_pickle: bool, keys: Callable[[str], bool] | None) -> Any:
    with pickle_errors(allow_pickle):
        state, _ = load_path(located, allow_pickle=allow_pickle, planner=None if keys is None else plan_new(keys))
        if keys is None and isinstance(state, dict):
            state = dumped_form(state, allow_pickle=allow_pickle)
    return state


# -- weights ----------------------------------------------------------------------------------------------------------


@dataclass
class _WeightViews:
    """Descriptions of tensors by name; tied name -> the first name of its tensor; names of entries that are not
    tensors."""

    tensors: dict[str, TensorView] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def _weight_views(first: ShardContents, key: str, step: StepId) -> _WeightViews:
    """The tensors below ``key``; nested names are joined by ".".

    Raises:
        ConfigError: there is no entry ``key``, or it holds no tensors.
    """
    parts = dict(children(first.tree))
    if key not in parts:
        raise ConfigError(
            f"{step} has no entry {key!r} to take weights from; choose with --key: {', '.join(parts) or 'none'}"
        )
    found = _WeightViews()
    first_names: dict[object, str] = {}

    def walk(item: Any, name: str) -> None:
        tensor = as_tensor(item)
        if tensor is not None:
            same = (tensor.storage, tensor.offset, tensor.shape, tensor.strides)
            if tensor.storage is not None and same in first_names:
                found.tied[name] = first_names[same]
            first_names.setdefault(same, name)
            found.tensors[name] = tensor
        elif isinstance(item, dict) or (isinstance(item, Made) and item.pairs):
            for part, value in children(item):
                walk(value, f"{name}.{part}" if name else part)
        elif not isinstance(item, Made) or item.name != "collections.OrderedDict":  # empty: nothing left out
            found.left_out += (name,)

    walk(parts[key], key if as_tensor(parts[key]) is not None else "")
    if not found.tensors:
        raise ConfigError(f"the entry {key!r} of {step} holds no tensors; choose another with --key")
    return found


@contextmanager
def _opened(located: Located, scratch: str) -> Iterator[ShardReader]:
    """Shard 0 of a replicated step, open, after every byte of it was checked."""
    record, where = located.listing.records[0], located.where(0)
    if located.tier.is_local:
        path = where
        bad = verify_shard(located.tier, located.run, record, key=located.files[0])
        if bad:
            raise CorruptShard(f"{where}: bytes {bad} do not match their digests", path=where, ranges=bad)
    else:
        path = os.path.join(scratch, record.file)
        copy_checked(located.tier, located.files[0], record, Path(path))
    reader = ShardReader(path, record)
    try:
        yield reader
    finally:
        reader.close()


def _stored_weights(located: Located, views: _WeightViews, reader: ShardReader) -> dict[str, Tensor]:
    """Copies of the tensors, read from the file; nothing is unpickled."""
    weights = {}
    for name, view in views.tensors.items():
        entry = reader.entries.get(storage_name(view.storage or ""))
        if entry is None or view.kind == "quantized" or view.strides is None:
            raise ConfigError(
                f"safetensors cannot hold {name}, a {view.kind} tensor{f' of {view.dtype}' if view.dtype else ''};"
                " export a .ckpt instead"
            )
        itemsize = dtype_from_name(view.dtype).itemsize
        extent = 1 + sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))
        extent = 0 if 0 in view.shape else extent * itemsize
        start = entry.start + view.offset * itemsize
        if start + extent > entry.end:
            raise CorruptShard(f"{located.where(0)}: {name} does not lie within its storage", path=located.where(0))
        chunk = Chunk(name, (0,) * len(view.shape), view.shape, view.dtype, itemsize, view.shape)
        tensor = reader.tensor(Placed(chunk, start, start + extent, view.strides))
        # Stock loaders expect every name, and a safetensors file cannot share storage between names.
        weights[name] = tensor.clone() if name in views.tied else tensor.contiguous()
    return weights


def _loaded_weights(
    located: Located, first: ShardContents, views: _WeightViews, key: str, allow_pickle: bool
) -> dict[str, Tensor]:
    """The tensors, reassembled from all shards."""
    numbers = [(view.storage or "").removeprefix("leaf-") for view in views.tensors.values()]
    wanted = {first.leaves[int(number)] for number in numbers if number.isdecimal() and int(number) < len(first.leaves)}
    state = _load(located, allow_pickle, wanted.__contains__)
    weights = {}
    loaded = {key: state[key]} if isinstance(state[key], Tensor) else keyed_leaves(state[key])
    for name, leaf in loaded.items():
        plain = name if name == key else name.replace("/", ".").replace("%2F", "/").replace("%25", "%")
        if plain in views.tensors:
            weights[plain] = leaf.clone() if plain in views.tied else leaf.contiguous()
    return weights


def _check_target(shown: str, target: str, force: bool, *, folder: bool) -> None:
    if "://" in shown:
        raise ConfigError(f"{shown}: export writes to a local file or folder; write it here and copy it there")
    above = os.path.dirname(target)
    if not os.path.isdir(above):
        raise ConfigError(f"{shown}: the folder {above} does not exist; make it first")
    if not os.path.lexists(target):
        return
    identity = read_name(open_tier(above), os.path.basename(target))
    if identity is not None and not (folder and _is_copy(target)):
        raise ConfigError(f"{shown} is {identity.id} of run {identity.run!r}; choose another name")
    if os.path.isdir(target) != folder:
        is_, wanted = ("file", "folder") if folder else ("folder", "file")
        raise ConfigError(f"{shown} is a {is_}; say the name of the {wanted} to write")
    if folder and not all(name == MANIFEST or is_in_stock_folder(name) for name in os.listdir(target)):
        raise ConfigError(f"{shown} holds other files than a distributed checkpoint; say a folder that does not exist")
    if not force:
        raise ConfigError(f"{shown} exists; choose another name or say --force")


def _is_copy(target: str) -> bool:
    """True for a folder of a step, such as an export, that is not a name of it."""
    try:
        found = find(target)
    except NoCheckpointFound:
        return True
    close_tier(found.tier)
    return found.step is None


def _save_safetensors(weights: dict[str, Tensor], tied: Mapping[str, str], temp: str) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    metadata = {"format": "pt", **({"tied": json.dumps(tied)} if tied else {})}
    try:
        save_file(weights, temp, metadata=metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    except (KeyError, ValueError) as error:
        dtypes = sorted({str(tensor.dtype) for tensor in weights.values()})
        raise ConfigError(
            f"safetensors cannot hold all of {', '.join(dtypes)}: {error}; export a .ckpt instead"
        ) from error


def _write(target: str, force: bool, save: Callable[[str], Any]) -> tuple[int, Any]:
    """Lets ``save`` write a temporary file beside the target, then renames it; returns its size in bytes and the result
    of ``save``."""
    temp = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.partial-{secrets.token_hex(4)}")
    try:
        result = save(temp)
        with open(temp, "rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            os.fsync(file.fileno())
        if not force and os.path.lexists(target):
            raise FileExistsError(target)
        os.replace(temp, target)
        fsync_dir(os.path.dirname(target))
        return nbytes, result
    except FileExistsError:
        raise ConfigError(
            f"{target} was created by another program during the export; choose another name or say --force"
        ) from None
    except (OSError, RuntimeError) as error:
        # torch raises RuntimeError when the disk is full.
        retryable = getattr(error, "errno", None) == errno.ENOSPC
        raise TierError(f"{target} cannot be written: {error}", retryable=retryable) from error
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temp)
