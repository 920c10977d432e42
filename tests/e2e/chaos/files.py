"""What is done to the files of a folder: moved away and back, replaced, damaged. Each is told to the ledger before."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.chaos.ledger import Ledger, committed_folders, keys_of, steps_folder


@dataclass
class _Away:
    id: str
    place: Path
    kept: Path


class Files:
    """The files of one checkpoint folder.

    Args:
        directory: the checkpoint folder.
        aside: a folder beside it, for what is away.
        ledger: gets a line before anything is changed.
    """

    def __init__(self, directory: Path, aside: Path, ledger: Ledger) -> None:
        self._directory, self._aside, self._ledger = directory, aside, ledger
        self._away: list[_Away] = []
        self._number = 0
        self._damaged: set[str] = set()
        self._pause = threading.Event()
        aside.mkdir()

    @property
    def is_away(self) -> bool:
        return bool(self._away)

    # -- moving ---------------------------------------------------------------------------------------------------

    def move(self, place: Path, keys: list[str] | None, *, put_file: bool = False) -> bool:
        """Moves a folder away; False when it is not there.

        Args:
            keys: the saves in it; None: all.
            put_file: put an empty file in its place.
        """
        if not place.is_dir():
            return False
        self._number += 1
        away = _Away(str(self._number), place, self._aside / f"away-{self._number}")
        self._ledger.write("away", id=away.id, keys=keys)
        try:
            os.rename(place, away.kept)
        except FileNotFoundError:  # a step that was deleted just now
            self._ledger.write("back", id=away.id)
            return False
        if put_file:
            with suppress(FileExistsError, FileNotFoundError), open(place, "xb"):
                pass
        self._away.append(away)
        return True

    def put_back(self) -> bool:
        """Moves everything back; what was made in its place meanwhile is taken out, and is gone."""
        moved = bool(self._away)
        while self._away:
            self._put_back(self._away.pop())
        return moved

    def _put_back(self, away: _Away) -> None:
        for attempt in range(200):
            if os.path.lexists(away.place):
                self._take_out(away.place, self._aside / f"stray-{away.id}-{attempt}")
            try:
                away.place.parent.mkdir(parents=True, exist_ok=True)
                os.rename(away.kept, away.place)
                break
            except OSError:
                self._pause.wait(0.005)  # a process has made something there again
        else:
            raise AssertionError(f"{away.place} cannot be put back")
        self._ledger.write("back", id=away.id)

    def _take_out(self, place: Path, stray: Path) -> None:
        with suppress(FileNotFoundError):
            os.rename(place, stray)
        steps = stray if place == steps_folder(self._directory) else steps_folder(stray)
        if place.parent == steps_folder(self._directory):
            keys = keys_of([place.name])
        else:
            keys = keys_of(os.listdir(steps)) if steps.is_dir() else []
        if keys:
            self._ledger.write("gone", keys=keys)

    # -- damage ---------------------------------------------------------------------------------------------------

    def damage(self, pick: float, size: float, how: Callable[[int, int, float], None]) -> bool:
        """Damages a file of a committed step, unless no other good step is left. False when nothing was done.

        Args:
            how: called with descriptor, size of the file and ``size``.
        """
        folders = committed_folders(self._directory)
        good = [key for key in sorted(folders) if key not in self._damaged]
        if len(good) < 2:
            return False
        # The newest half of the time, because that is the one that will be asked for.
        key = max(good, key=lambda key: (key.split("-")[1], key)) if pick < 0.5 else good[int(pick * len(good))]
        folder = folders[key]
        try:
            names = sorted(os.listdir(folder))
            # Half of the damages hit the state, which is nearly all of a step.
            name = "shard-00000.shard" if size < 0.5 else names[int(size * len(names))]
            fd = os.open(folder / name, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return False  # deleted just now
        try:
            if not (folder / name).exists() or not os.path.samestat(os.fstat(fd), os.stat(folder / name)):
                return False  # the file is another step's by now; as long as it is open, it cannot become one
            self._damaged.add(key)
            self._ledger.write("damage", keys=[key], file=name, head=name == "shard-00000.shard")
            how(fd, os.fstat(fd).st_size, (size * 7919) % 1)
        except FileNotFoundError:
            return False
        finally:
            os.close(fd)
        return True

    def remove(self, pick: float, size: float) -> bool:
        """Removes a file of a committed step."""
        folders = committed_folders(self._directory)
        good = [key for key in sorted(folders) if key not in self._damaged]
        if len(good) < 2:
            return False
        key = good[int(pick * len(good))]
        folder = folders[key]
        with suppress(FileNotFoundError):
            names = sorted(os.listdir(folder))
            self._damaged.add(key)
            self._ledger.write("damage", keys=[key], file=names[int(size * len(names))], removed=True)
            os.unlink(folder / names[int(size * len(names))])
            return True
        return False


def flip_bits(fd: int, nbytes: int, where: float) -> None:
    """One to eight bits, at a few places."""
    for number in range(1 + int(where * 8)):
        at = int((where + number * 0.137) % 1 * nbytes)
        byte = os.pread(fd, 1, at)
        if byte:
            os.pwrite(fd, bytes([byte[0] ^ 1 << number % 8]), at)


def cut(fd: int, nbytes: int, where: float) -> None:
    os.ftruncate(fd, int(nbytes * where))


def blank(fd: int, nbytes: int, where: float) -> None:
    """Zeros in place of a disk block."""
    at = int(where * nbytes) // 4096 * 4096
    os.pwrite(fd, bytes(min(4096, nbytes - at)), at)
