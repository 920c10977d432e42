"""Finds the largest attempt and line of a run, from which the next ones are numbered. No torch."""

from __future__ import annotations

import os

from resiliency.regular_file import opened
from resiliency.storage.catalog import step_folders
from resiliency.storage.tiers._keys import partial_name
from resiliency.storage.tiers.base import Tier

#: Bytes that are read of a file with a number; a longer text is no number.
_MOST_BYTES = 64

__all__ = ["attempt_file", "largest_of_steps", "read_attempt", "write_attempt"]


def attempt_file(folder: str) -> str:
    """Path of the file with the number of the last attempt that was started, in the folder of a run."""
    return os.path.join(folder, "attempt")


def read_attempt(folder: str) -> int:
    """Number of the last attempt that was started in the folder of a run, even if it saved nothing; 0 when unknown."""
    try:
        with opened(attempt_file(folder)) as file:
            return int(file.read(_MOST_BYTES))
    except (OSError, ValueError):
        return 0


def write_attempt(folder: str, attempt: int) -> None:
    """Writes the number of the attempt that is starting, unless a later attempt's number is there.

    Once it is written agents of earlier attempts record, commit and delete nothing. So only the agent of the new
    attempt writes it, after it has claimed the number (:mod:`resiliency.storage.claims`).

    Raises:
        OSError: the file cannot be written. Once a step is saved, the name of its folder has the attempt too.
    """
    if read_attempt(folder) >= attempt:
        return
    path = attempt_file(folder)
    temp = os.path.join(folder, partial_name())
    os.makedirs(folder, exist_ok=True)
    with open(temp, "w", encoding="ascii") as file:
        file.write(str(attempt))
    os.replace(temp, path)  # atomically, because agents read it while they work


def largest_of_steps(tier: Tier, run: str) -> tuple[int, int]:
    """The largest attempt and the largest line of the steps on a tier; 0 for none. Blocks: one listing.

    Raises:
        UnsupportedFormat: the run holds steps that another version of the format wrote.
        TierError: the tier cannot be listed.
    """
    steps = step_folders(tier, run)
    return max((step.attempt for step in steps), default=0), max((step.line for step in steps), default=0)
