"""The page of memory in which a rank says how far it is, and which others read, whatever the rank does or does not do.

Four words of eight bytes. Each is stored and loaded by one aligned access, so that a reader sees each of them whole
without a lock; what must be seen together (the step, the phase and the attempt they belong to) is in one word.
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
#: What follows them on the page is the affair of whoever made it.
WORDS_BYTES = 8 * _WORDS
#: Of the page: number of beats, monotonic nanoseconds of the last sign of life, the longest time between two beats in
#: nanoseconds, and where the rank is.
_BEATS, _LAST, _LONGEST, _PLACE = range(_WORDS)

#: Where a rank is: from the lowest bit, whether it is watched, its phase, its attempt, and its step plus one.
_PHASE_AT, _ATTEMPT_AT, _STEP_AT = 1, 8, 24
MOST_ATTEMPT, _MOST_STEP = (1 << 16) - 1, (1 << 40) - 2


class Phase(enum.IntEnum):
    """What a rank does. The numbers are on pages: they never change their meaning."""

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
    """What a rank has written.

    Attributes:
        beats: since its attempt began.
        last_s: monotonic seconds of the last sign of life, a beat or another phase; 0: none yet.
        longest_s: the longest time between two beats, without the first few.
        watched: it is to beat again.
        phase: what it does.
        attempt: of its job, as its launcher counts; at most 65535.
        step: optimizer steps done; -1: it has not said.
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
        """Of a mapping, while the rank writes."""
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
        # Native words: an assignment is one store. struct.pack_into clears its bytes first, and writes one at a time
        # when it is told the order of bytes.
        self._words = memoryview(page)[:WORDS_BYTES].cast("Q")

    def write(self, *, beats: int, last_ns: int, longest_ns: int, place: int) -> None:
        words = self._words
        words[_BEATS] = beats
        words[_LAST] = last_ns
        words[_LONGEST] = longest_ns
        words[_PLACE] = place

    def close(self) -> None:
        """Idempotent."""
        self._words.release()
        self._page.close()


def place_word(*, step: int, phase: Phase, attempt: int, watched: bool) -> int:
    """Where a rank is, as one word."""
    shown = max(-1, min(step, _MOST_STEP)) + 1
    return shown << _STEP_AT | min(attempt, MOST_ATTEMPT) << _ATTEMPT_AT | int(phase) << _PHASE_AT | watched


class SaveWords:
    """Three words behind those of the rank, on the page that a launcher shares with it: the step after which the
    launcher wants a save, the newest step that is committed, and whether the rank looks for what is wanted. Each has
    one writer. Thread: one.

    Args:
        page: a mapping that may be written; this object keeps it open.
    """

    _WANTED, _COMMITTED, _LOOKS = 256, 257, 258

    def __init__(self, page: mmap.mmap) -> None:
        self._words = memoryview(page)[: 8 * (self._LOOKS + 1)].cast("Q")

    def want(self, step: int) -> None:
        """Of the launcher: the rank saves when it has done this many optimizer steps; -1: nothing is wanted."""
        self._words[self._WANTED] = step + 1

    def wanted(self) -> int:
        """Of the rank: -1 when nothing was wanted yet."""
        self._words[self._LOOKS] = 1
        return int(self._words[self._WANTED]) - 1

    def committed(self, step: int) -> None:
        """Of the rank: the save after this many optimizer steps is committed."""
        self._words[self._COMMITTED] = step + 1

    def newest_committed(self) -> int:
        """Of the launcher: -1 when there is none yet."""
        return int(self._words[self._COMMITTED]) - 1

    @property
    def is_looked_for(self) -> bool:
        """Of the launcher: the rank has something that saves when it is asked to."""
        return bool(self._words[self._LOOKS])


class WorkWords:
    """Two words more on that page: what the rank's own work took, as far as it measures it, and in how many optimizer
    steps; both since its attempt began. They are not read together: a reader may find a step less than was summed.

    Args:
        page: a mapping that may be written; this object keeps it open.
    """

    _OWN, _STEPS = 264, 265

    def __init__(self, page: mmap.mmap) -> None:
        self._words = memoryview(page)[: 8 * (self._STEPS + 1)].cast("Q")

    def write(self, *, own_ns: int, steps: int) -> None:
        """Of the rank."""
        self._words[self._OWN] = own_ns
        self._words[self._STEPS] = steps

    def read(self) -> tuple[float, int]:
        """Of the launcher: seconds, and steps; 0 steps when the rank measures none."""
        return self._words[self._OWN] / 1e9, int(self._words[self._STEPS])
