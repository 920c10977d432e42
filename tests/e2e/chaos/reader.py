"""A process that reads checkpoints beside the job: by path with this library, and with nothing but torch."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from resiliency.inspection.by_path import load_path, locate
from tests.e2e.chaos.ledger import Ledger, committed_folders, committed_now, key_of
from tests.e2e.chaos.models import digest

#: What is read may be deleted between two looks at the folder; that often in a row it is not.
_TRIES = 6
#: Where a shard file says which step it is, as docs/format.md has it.
_IDENTITY = slice(64, 1024)


class _Gone(Exception):
    """What was to be read is not there (any more)."""


@dataclass(frozen=True)
class _Read:
    """What a load gave. ``state`` and ``own`` are digests; ``checked``: the library compared the bytes."""

    key: str | None
    state: str
    own: str | None
    checked: bool


def read(*, directory: str, ledger: str, name: str, seed: int, loads: int, life_s: int) -> None:
    """The process. Loads ``loads`` times, each time in another way, and writes into the ledger what it got."""
    signal.alarm(life_s)
    logging.basicConfig(level=logging.ERROR, format=f"{name}: %(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(1)
    chance = random.Random(seed)
    reader = _Reader(Path(directory), chance)
    written = Ledger(ledger, job=name, pid=os.getpid())
    ways: list[tuple[str, str, Callable[[int], _Read]]] = [
        ("a reader of the folder", "newest", reader.newest),
        ("a reader of last.ckpt", "named", reader.last),
        ("torch.load of last.ckpt", "named", reader.stock_last),
        ("torch.load of a name", "one", reader.stock_name),
        ("a mapped torch.load of a shard", "one", reader.stock_mapped),
    ]
    for number in range(loads):
        how, scope, load = chance.choice(ways)
        rank = chance.choice([0, 0, 1])
        _load(written, f"{os.getpid()}-{number}", how, scope, directory, rank, load)
        reader.pause()


def _load(
    ledger: Ledger, load: str, how: str, scope: str, directory: str, rank: int, way: Callable[[int], _Read]
) -> None:
    pause = threading.Event()
    for attempt in range(_TRIES):
        last = attempt == _TRIES - 1
        pause.wait(0.02 * attempt)
        ledger.write("loading", load=load, how=how, scope=scope, falls_back=False, seen=committed_now(directory))
        try:
            found = way(rank)
        except Exception as error:  # Boundary: the judge knows what may fail.
            # Before the last try an error is taken for a sign that the step was just being deleted.
            text, still = f"{type(error).__name__}: {error}"[:500], committed_now(directory)
            ledger.write("refused" if last else "again", load=load, rank=rank, error=text, still=still)
            continue
        ledger.write("loaded", load=load, rank=rank, still=committed_now(directory), **vars(found))
        return


class _Reader:
    def __init__(self, directory: Path, chance: random.Random) -> None:
        self._directory, self._chance = directory, chance
        self._pause = threading.Event()

    def pause(self) -> None:
        self._pause.wait(self._chance.choice([0.0, 0.02, 0.1, 0.3]))

    # -- with this library ----------------------------------------------------------------------------------------

    def newest(self, rank: int) -> _Read:
        return self._by_path(self._directory, rank)

    def last(self, rank: int) -> _Read:
        return self._by_path(self._directory / "last.ckpt", rank)

    def _by_path(self, path: Path, rank: int) -> _Read:
        located = locate(str(path))
        if located is None:
            raise _Gone(f"nothing at {path}")
        state, own = load_path(located, rank=rank)
        at = located.id
        return _Read(
            key=key_of(at.step, at.attempt, at.token, at.serial),
            state=digest(state),
            own=digest(own) if own is not None else None,
            checked=located.is_checked,
        )

    # -- with torch -----------------------------------------------------------------------------------------------

    def stock_last(self, rank: int) -> _Read:
        return self._stock(self._directory / "last.ckpt")

    def stock_name(self, rank: int) -> _Read:
        names = sorted(self._directory.glob("*.ckpt"))
        if not names:
            raise _Gone("no name")
        return self._stock(self._chance.choice(names))

    def stock_mapped(self, rank: int) -> _Read:
        steps = committed_folders(self._directory)
        if not steps:
            raise _Gone("no step")
        path = steps[self._chance.choice(sorted(steps))] / "shard-00000.shard"
        return self._stock(path, mapped=True)

    def _stock(self, path: Path, *, mapped: bool = False) -> _Read:
        try:
            file = open(path, "rb")
        except OSError as error:
            raise _Gone(str(error)) from error
        with file:
            try:
                said: dict[str, Any] = json.loads(file.read(1024)[_IDENTITY])
                key = key_of(said["step"], said["attempt"], said["token"], said["serial"])
            except (ValueError, KeyError, TypeError):
                key = "unreadable"
            file.seek(0)
            self.pause()  # as a slow reader
            # Mapped by the descriptor, because torch opens the file twice.
            source = f"/proc/self/fd/{file.fileno()}" if mapped else file
            try:
                state = torch.load(source, mmap=mapped, weights_only=False)
                self.pause()
                found = digest(state)
            except (
                Exception
            ) as error:  # Boundary: a damaged pickle can raise anything; the judge knows what is damaged.
                found = f"{type(error).__name__}: {error}"[:300]
            return _Read(key=key, state=found, own=None, checked=False)
