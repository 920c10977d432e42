"""The page of memory on which a rank shows its progress, and which others can read whatever state the rank is in.

It begins with four words of eight bytes. Each word is stored and loaded by one aligned access, so that a reader never
sees half of a new value, without a lock; values that must be read together (step, phase and attempt) share one word.
"""

from __future__ import annotations

import enum
import mmap
from dataclasses import dataclass

__all__ = [
    "MOST_ATTEMPT",
    "PAGE_BYTES",
    "WORDS_BYTES",
    "Page",
    "PageWriter",
    "Phase",
    "SaveWords",
    "WorkWords",
    "place_word",
]

PAGE_BYTES = mmap.PAGESIZE
_WORDS = 4
#: Bytes of the four words; whoever makes the page decides what follows them.
WORDS_BYTES = 8 * _WORDS
#: Word indices: number of beats, monotonic nanoseconds of the last sign of life, longest time between two beats in
#: nanoseconds, and the place (step, phase, attempt, watched) of the rank.
_BEATS, _LAST, _LONGEST, _PLACE = range(_WORDS)

#: Bit positions in the place word: bit 0 says whether the rank is watched, then follow phase, attempt, and step plus
#: one.
_PHASE_AT, _ATTEMPT_AT, _STEP_AT = 1, 8, 24
MOST_ATTEMPT, _MOST_STEP = (1 << 16) - 1, (1 << 40) - 2


class Phase(enum.IntEnum):
    """What a rank does. The numbers are written to pages, so they never change their meaning."""

    STARTING = 0
    SETUP = 1
    LOADING = 2
    TRAINING = 3
    SAVING = 4
    VALIDATION = 5
    TESTING = 6
    PREDICTION = 7
    ENDED = 8
    FAILED = 9
    #: A number that this version does not know.
    OTHER = 127

    def __str__(self) -> str:
        return self.name.lower()

    @classmethod
    def _missing_(cls, value: object) -> Phase:
        return cls.OTHER


@dataclass(frozen=True, kw_only=True)
class Page:
    """The decoded words of a heartbeat page.

    Attributes:
        beats: number of beats since the rank's attempt began.
        last_s: monotonic seconds of the last sign of life, a beat or a change of phase; 0: none yet.
        longest_s: longest time between two beats in seconds, without the first few.
        watched: more beats are expected.
        phase: what the rank does.
        attempt: attempt of its job, as its launcher counts; capped at 65535.
        step: optimizer steps done; -1: not said yet.
    """

    beats: int
    last_s: float
    longest_s: float
    watched: bool
    phase: Phase = Phase.STARTING
    attempt: int = 0
    step: int = -1

    @classmethod
    def read(cls, page: mmap.mmap) -> Page:
        """Reads the words of a mapping; the rank may write meanwhile."""
        with memoryview(page) as whole, whole[:WORDS_BYTES].cast("Q") as words:
            beats, last, longest, place = words[_BEATS], words[_LAST], words[_LONGEST], words[_PLACE]
        return cls(
            beats=beats,
            last_s=last / 1e9,
            longest_s=longest / 1e9,
            watched=bool(place & 1),
            phase=Phase(place >> _PHASE_AT & 0x7F),
            attempt=place >> _ATTEMPT_AT & MOST_ATTEMPT,
            step=(place >> _STEP_AT) - 1,
        )


class PageWriter:
    """Writes a page. Thread: one.

    Args:
        page: a mapping that may be written; this object keeps it open.
    """

    def __init__(self, page: mmap.mmap) -> None:
        self._page = page
        # Native words: each assignment is one store. struct.pack_into clears the bytes first, and with an explicit byte
        # order it writes them one at a time.
        self._words = memoryview(page)[:WORDS_BYTES].cast("Q")

    def write(self, *, beats: int, last_ns: int, longest_ns: int, place: int) -> None:
        words = self._words
        words[_BEATS] = beats
        words[_LAST] = last_ns
        words[_LONGEST] = longest_ns
        words[_PLACE] = place

    def close(self) -> None:
        """Unmaps the page. Idempotent."""
        self._words.release()
        self._page.close()


def place_word(*, step: int, phase: Phase, attempt: int, watched: bool) -> int:
    """Packs step, phase, attempt and watched into the place word."""
    shown = max(-1, min(step, _MOST_STEP)) + 1
    return shown << _STEP_AT | min(attempt, MOST_ATTEMPT) << _ATTEMPT_AT | int(phase) << _PHASE_AT | watched


class SaveWords:
    """Three further words on the page that a rank shares with its launcher: the step after which the launcher wants a
    save, the newest committed step, and whether the rank asks for wanted saves. Each word has one writer. Thread: one.

    Args:
        page: a mapping that may be written; this object keeps it open.
    """

    _WANTED, _COMMITTED, _LOOKS = 256, 257, 258

    def __init__(self, page: mmap.mmap) -> None:
        self._words = memoryview(page)[: 8 * (self._LOOKS + 1)].cast("Q")

    def want(self, step: int) -> None:
        """Launcher: the rank is to save after this many optimizer steps; -1: no save is wanted."""
        self._words[self._WANTED] = step + 1

    def wanted(self) -> int:
        """Rank: the step to save after; -1: none is wanted. Also records that this rank asks."""
        self._words[self._LOOKS] = 1
        return int(self._words[self._WANTED]) - 1

    def committed(self, step: int) -> None:
        """Rank: records that the save after this many optimizer steps is committed."""
        self._words[self._COMMITTED] = step + 1

    def newest_committed(self) -> int:
        """Launcher: the newest committed optimizer step; -1: none yet."""
        return int(self._words[self._COMMITTED]) - 1

    @property
    def is_looked_for(self) -> bool:
        """Launcher: True when the rank has asked for wanted saves, so that it will save when told to."""
        return bool(self._words[self._LOOKS])


class WorkWords:
    """Two further words on that page: the seconds of the rank's own work since its attempt began, as far as it measures
    them, and the number of optimizer steps they cover. The words are read one after the other, so a reader may see a
    step count that does not yet include the last time added.

    Args:
        page: a mapping that may be written; this object keeps it open.
    """

    _OWN, _STEPS = 264, 265

    def __init__(self, page: mmap.mmap) -> None:
        self._words = memoryview(page)[: 8 * (self._STEPS + 1)].cast("Q")

    def write(self, *, own_ns: int, steps: int) -> None:
        """Rank: stores both words."""
        self._words[self._OWN] = own_ns
        self._words[self._STEPS] = steps

    def read(self) -> tuple[float, int]:
        """Launcher: (seconds of own work, steps); 0 steps when the rank does not measure it."""
        return self._words[self._OWN] / 1e9, int(self._words[self._STEPS])
