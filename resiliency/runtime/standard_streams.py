"""Keeps the numbers of the standard streams from other files."""

from __future__ import annotations

import os

__all__ = ["occupy_standard_streams"]


def occupy_standard_streams() -> None:
    """Opens the null device in the place of standard streams that are closed, as daemons do.

    Otherwise the next files to be opened get their numbers, and a ``print`` writes into a checkpoint.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            os.set_inheritable(opened, True)
