"""Writes a step as a stock torch/Lightning ``.ckpt``, or its weights as a safetensors file.

Both can be read without this library. Every shard is checked before a byte is written; the file appears complete or not
at all, and replaces an existing file only with ``force``.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from resiliency.errors import ConfigError, NoCheckpointFound, TierError
from resiliency.inspection.by_path import Located, load_path
from resiliency.inspection.contents import branches, pickled, read_header, read_objects, tensor_keys
from resiliency.inspection.survey import Target, close_tier, find, one_step
from resiliency.storage.catalog import scan
from resiliency.storage.manifest import NameFile
from resiliency.storage.step_id import StepId
from resiliency.storage.tiers.local import fsync_dir

__all__ = ["Exported", "Format", "export", "format_of"]

Format = Literal["ckpt", "safetensors"]

_SUFFIXES: Mapping[str, Format] = {".ckpt": "ckpt", ".pt": "ckpt", ".pth": "ckpt", ".safetensors": "safetensors"}


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written.

    Attributes:
        path, format, nbytes: the file.
        run, id: the step it was made from.
        tensors: how many tensors are in it.
        weights_only: True when ``torch.load(path, weights_only=True)`` reads it; None for safetensors.
        unsafe: classes that ``weights_only=True`` refuses, as far as torch can name them.
        plain: (where, class) of objects that became the builtin they derive from, because unpickling was not allowed.
        tied: name -> the name it shares a tensor with; safetensors stores it under both, a .ckpt keeps them tied.
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
    plain: tuple[tuple[str, str], ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def format_of(out: str | os.PathLike[str], wanted: str | None = None) -> Format:
    """``wanted``, otherwise the format of the file's suffix.

    Raises:
        ConfigError: neither is a known format.
    """
    suffix = os.path.splitext(os.fspath(out))[1].lower()
    found = _SUFFIXES.get(f".{wanted}" if wanted else suffix)
    if found is None:
        what = f"format {wanted!r}" if wanted else f"suffix {suffix!r} of {os.fspath(out)}"
        raise ConfigError(
            f"{what} is not known; use .ckpt or .safetensors, or say --format ckpt or --format safetensors"
        )
    return found


def export(
    source: str | os.PathLike[str] | Located,
    out: str | os.PathLike[str],
    *,
    format: Format | None = None,
    run: str | None = None,
    allow_pickle: bool = False,
    force: bool = False,
    key: str = "state_dict",
) -> Exported:
    """Writes a step as one stock file. Collective: no. Blocks: for reading, checking and writing everything.

    The whole state is held in memory once. Shards of a remote tier go through a temporary folder (``TMPDIR``).

    Args:
        source: a path as ``resiliency ckpt`` takes them, or what :func:`~resiliency.inspection.by_path.locate`
            returned.
        out: the file to write; its folder must exist.
        format: "ckpt": the whole state tree by ``torch.save``. "safetensors": the tensors below ``key``. None: by
            suffix.
        run: which run, when ``source`` is a folder with several.
        allow_pickle: restore objects of classes of your own. Only for checkpoints you trust: it can run code.
        force: replace ``out`` when it exists.
        key: which entry of the state holds the weights.

    Raises:
        ConfigError: ``out`` exists or cannot be made, an object needs ``allow_pickle``, or there are no weights below
            ``key``.
        NoCheckpointFound: there is no committed step.
        CorruptShard: bytes do not match their digests; names the file. Nothing is written.
        TierError: a tier cannot be read or written.
    """
    target = os.path.abspath(os.fspath(out))
    kind = format_of(target, format)
    _check_target(os.fspath(out), target, force)
    if isinstance(source, Located):
        return _export(source, target, kind, allow_pickle, force, key)
    found = find(os.fspath(source))
    try:
        return _export(_located(found, run), target, kind, allow_pickle, force, key)
    finally:
        close_tier(found.tier)


def _export(located: Located, target: str, kind: Format, allow_pickle: bool, force: bool, key: str) -> Exported:
    manifest = located.listing.manifest
    assert manifest is not None
    first = manifest.shards[0]
    header = read_header(located.tier, located.run, first)
    skeleton = read_objects(located.tier, located.run, first, header)["state"]
    if kind == "ckpt":
        plain = _check_pickles(skeleton, allow_pickle)
        state = _load(located, allow_pickle, None)
        nbytes, unsafe = _write(target, force, lambda temp: _save_ckpt(state, temp))
        return Exported(
            path=target,
            format=kind,
            nbytes=nbytes,
            run=located.run,
            id=manifest.id,
            tensors=len(tensor_keys(skeleton)),
            weights_only=not unsafe,
            unsafe=tuple(sorted(unsafe)),
            plain=plain,
        )
    parts = branches(skeleton)
    if key not in parts:
        keys = ", ".join(parts) or "none"
        raise ConfigError(f"{manifest.id} has no entry {key!r} to take weights from; choose with --key: {keys}")
    wanted = tensor_keys(parts[key])
    if not wanted:
        raise ConfigError(f"the entry {key!r} of {manifest.id} holds no tensors; choose another with --key")
    state = _load(located, allow_pickle, wanted.__contains__)
    tensors, tied, left_out = _weights(state[key])
    nbytes, _ = _write(target, force, lambda temp: _save_safetensors(tensors, tied, temp))
    return Exported(
        path=target,
        format=kind,
        nbytes=nbytes,
        run=located.run,
        id=manifest.id,
        tensors=len(tensors),
        tied=tied,
        left_out=left_out,
    )


def _located(target: Target, wanted: str | None) -> Located:
    run, step = one_step(target, run=wanted)
    for listing in scan(target.tier, run):
        if listing.id == step and listing.manifest is not None:
            return Located(target.tier, run, listing)
    shows = f"`resiliency ckpt ls {target.tier.root}` shows what is there"
    raise NoCheckpointFound(f"{target.path}: {step} of run {run!r} is not committed; {shows}")


def _check_target(shown: str, target: str, force: bool) -> None:
    if "://" in shown:
        raise ConfigError(f"{shown}: export writes to a local file; write it here and copy it there")
    folder = os.path.dirname(target)
    if not os.path.isdir(folder):
        raise ConfigError(f"{shown}: the folder {folder} does not exist; make it first")
    if os.path.isdir(target):
        raise ConfigError(f"{shown} is a folder; say the name of the file to write")
    if not os.path.lexists(target):
        return
    try:
        with open(target, "rb") as file:
            ours = NameFile.from_json(file.read(65536)) is not None
    except FileNotFoundError:
        ours = False  # a dangling symbolic link
    if ours:
        raise ConfigError(f"{shown} is the name file of a checkpoint; choose another name")
    if not force:
        raise ConfigError(f"{shown} exists; choose another name or say --force")


def _check_pickles(skeleton: Any, allow_pickle: bool) -> tuple[tuple[str, str], ...]:
    if allow_pickle:
        return ()
    objects = pickled(skeleton)
    barred = [f"{where} ({name})" for where, name, plain in objects if not plain]
    if barred:
        more = f" and {len(barred) - 5} more" if len(barred) > 5 else ""
        raise ConfigError(
            "the checkpoint holds objects of classes that must be unpickled, which can run code:"
            f" {', '.join(barred[:5])}{more};"
            " if you trust it, say --allow-pickle where those classes can be imported"
        )
    return tuple((where, name) for where, name, _ in objects)


def _load(located: Located, allow_pickle: bool, keys: Callable[[str], bool] | None) -> Any:
    try:
        state, _ = load_path(located, allow_pickle=allow_pickle, keys=keys)
    except (AttributeError, ImportError) as error:
        if not allow_pickle:
            raise
        raise ConfigError(
            f"an object of the checkpoint cannot be unpickled: {error}; put its module on PYTHONPATH"
        ) from error
    return state


def _save_ckpt(state: Any, temp: str) -> set[str]:
    """Writes the file and returns the classes that ``torch.load(weights_only=True)`` refuses to load from it."""
    torch.save(state, temp)
    try:
        torch.load(temp, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # Boundary: unpickling runs the code of any class that users keep in their state.
        name = getattr(torch.serialization, "get_unsafe_globals_in_checkpoint", None)
        return set(name(temp) if name is not None else ()) or {type(error).__name__}
    return set()


def _weights(tree: Any) -> tuple[dict[str, Tensor], dict[str, str], tuple[str, ...]]:
    """(name -> tensor, tied name -> the first name of its tensor, names of entries that are not tensors); nested
    names are joined by "."."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    left_out: list[str] = []
    seen: dict[int, str] = {}

    def walk(item: Any, name: str) -> None:
        if isinstance(item, Tensor):
            if id(item) in seen:
                tied[name] = seen[id(item)]
            seen.setdefault(id(item), name)
            # Stock loaders expect every name, and a safetensors file cannot share storage between names.
            tensors[name] = item.clone() if name in tied else item.contiguous()
        elif isinstance(item, dict):
            for part, value in item.items():
                walk(value, f"{name}.{part}" if name else str(part))
        else:
            left_out.append(name)

    walk(tree, "")
    return tensors, tied, tuple(left_out)


def _save_safetensors(tensors: dict[str, Tensor], tied: Mapping[str, str], temp: str) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    metadata = {"format": "pt", **({"tied": json.dumps(dict(tied))} if tied else {})}
    try:
        save_file(tensors, temp, metadata=metadata)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    except (KeyError, ValueError) as error:
        dtypes = sorted({str(tensor.dtype) for tensor in tensors.values()})
        raise ConfigError(
            f"safetensors cannot hold all of {', '.join(dtypes)}: {error}; export a .ckpt instead"
        ) from error


def _write(target: str, force: bool, save: Callable[[str], Any]) -> tuple[int, Any]:
    """Lets ``save`` write a temp file beside the target and renames it; returns its size and what ``save`` returned."""
    temp = os.path.join(os.path.dirname(target), f".{os.path.basename(target)}.partial-{secrets.token_hex(4)}")
    try:
        result = save(temp)
        with open(temp, "rb") as file:
            nbytes = os.fstat(file.fileno()).st_size
            os.fsync(file.fileno())
        if force:
            os.replace(temp, target)
        else:
            _put(temp, target)
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


def _put(temp: str, target: str) -> None:
    """Renames without replacing an existing file: a hard link fails where a rename would replace."""
    try:
        os.link(temp, target)
    except FileExistsError:
        raise
    except OSError:
        # No hard links (FUSE, some network mounts): a file made between this check and the rename is replaced.
        if os.path.lexists(target):
            raise FileExistsError(target) from None
        os.replace(temp, target)
