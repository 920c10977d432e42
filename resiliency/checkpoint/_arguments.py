"""Checks users' arguments; each error says what to pass instead. Pure."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from resiliency.errors import ConfigError
from resiliency.storage.manifest import META_DIR
from resiliency.storage.tiers._address import local_path

__all__ = ["checked_info", "checked_names", "checked_step", "refuse_same_folder"]


def checked_step(step: Any) -> int:
    """The step number, checked. Raises TypeError or ConfigError."""
    if isinstance(step, bool) or not isinstance(step, int):
        raise TypeError(f"step is a {type(step).__name__}; pass an int such as trainer.global_step")
    if step < 0:
        raise ConfigError(f"step={step}; pass the number of the optimizer step, 0 or more")
    return step


def checked_names(what: str, names: Iterable[Any]) -> tuple[str, ...]:
    """Names relative to the directory, checked. Raises TypeError or ConfigError."""
    if isinstance(names, (str, bytes, os.PathLike)) or not isinstance(names, Iterable):
        raise TypeError(f"{what} is a {type(names).__name__}; pass a list of names such as ['step=100.ckpt']")
    checked = []
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"{what} holds a {type(name).__name__}; a name is a str such as 'step=100.ckpt'")
        parts = name.split("/")
        if (
            any(part in ("", ".", "..") for part in parts)
            or name.startswith(".")
            or any(ord(c) < 32 for c in name)
            or META_DIR in parts
        ):
            raise ConfigError(
                f"{what}: the name {name!r} must be a path below the directory, without a leading dot or empty parts"
            )
        checked.append(name)
    return tuple(checked)


def checked_info(info: Any) -> dict[str, Any]:
    """Facts for listings, checked to be JSON and copied. Raises TypeError."""
    if info is None:
        return {}
    if not isinstance(info, Mapping):
        raise TypeError(f"info is a {type(info).__name__}; pass a dict of plain values such as {{'epoch': 3}}")
    try:
        return dict(json.loads(json.dumps(dict(info))))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"info holds a value that JSON cannot represent ({error}); pass plain values, such as float(loss)"
        ) from None


def refuse_same_folder(directory: str, addresses: Sequence[str]) -> None:
    """Refuses a remote tier in the local tier's folder, because two retentions would apply. Raises ConfigError."""
    for address in addresses:
        path = local_path(address)
        if path is not None and os.path.realpath(path) == os.path.realpath(directory):
            raise ConfigError(
                f"the remote tier {address!r} is the same folder as the local tier {directory!r}; pass another, or"
                " leave it out"
            )
