"""The truth, as lines of one file beside the checkpoint folder. Every process appends what it is about to do or has done.

The order of the lines is the order of what they tell, over all processes. A line survives SIGKILL once ``write``
returns (nobody pulls the plug here, so nothing is fsynced).
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

#: The name of a step's folder, as docs/format.md has it.
_STEP = re.compile(r"(\d{10,}-a\d{4,}-[0-9a-f]{6}-\d{2,})(-l\d{4,})?")


def key_of(step: int, attempt: int, token: str, serial: int) -> str:
    """A save by the name of its folder, as docs/format.md has it, without its line of descent: which line a save
    belongs to the library decides, and the judge judges that."""
    return f"{step:010d}-a{attempt:04d}-{token}-{serial:02d}"


def keys_of(folders: Iterable[str]) -> list[str]:
    """The saves whose folders these are."""
    return sorted(found[1] for found in map(_STEP.fullmatch, folders) if found)


def steps_folder(directory: str | os.PathLike[str]) -> Path:
    return Path(directory, ".resiliency", "default", "steps")


def committed_folders(directory: str | os.PathLike[str]) -> dict[str, Path]:
    """The folders of the steps with a readable manifest by their keys, by a listing of our own."""
    found = {}
    try:
        folders = os.listdir(steps_folder(directory))
    except OSError:
        return {}
    for folder in sorted(folders):
        key = _STEP.fullmatch(folder)
        if key is None:
            continue
        try:
            manifest = json.loads((steps_folder(directory) / folder / "manifest.json").read_bytes())
            identity = key_of(manifest["step"], manifest["attempt"], manifest["token"], manifest["serial"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if identity == key[1]:
            found[identity] = steps_folder(directory) / folder
    return found


def committed_now(directory: str | os.PathLike[str]) -> list[str]:
    """The keys of :func:`committed_folders`, in order."""
    return sorted(committed_folders(directory))


class Ledger:
    """Appends lines. One for each process; a forked child may go on with its parent's."""

    def __init__(self, path: str | os.PathLike[str], **facts: Any) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._facts = facts

    def write(self, what: str, **facts: Any) -> None:
        line = {"what": what, "at": round(time.monotonic(), 3), **self._facts, **facts}
        os.write(self._fd, json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        os.close(self._fd)


class LedgerReader:
    """Returns the lines that are new since the last call."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path, self._at = path, 0

    def lines(self) -> list[dict[str, Any]]:
        with open(self._path, "rb") as file:
            file.seek(self._at)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        return [json.loads(line) for line in whole.splitlines()]
