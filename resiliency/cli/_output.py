"""What a command prints arrives whole, or its exit status says that it has not."""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

__all__ = ["whole_output"]

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


@contextmanager
def whole_output() -> Iterator[None]:
    """For a command that prints.

    Under PYTHONUNBUFFERED, as containers set it, Python writes a text with one system call and drops what that did not
    take: of a disk with 8 KiB left a JSON document got 8 KiB, and the status was 0.

    Raises:
        SystemExit: with 1, after a sentence on standard error, when the output cannot be written; without one, when
            nobody reads it any more.
    """
    before = sys.stdout
    if isinstance(getattr(before, "buffer", None), io.RawIOBase):
        fd = os.dup(before.fileno())
        sys.stdout = open(fd, "w", encoding=before.encoding, errors=before.errors, buffering=1)
    output = sys.stdout  # Typer puts another in its place, which hides that nobody reads, when it has seen that
    try:
        try:
            yield
        finally:
            output.flush()
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _has_no_reader(output):
            _drop(output)  # as after ``| head``: nobody is there who would read a sentence about it
            raise SystemExit(1) from None
        if error.errno not in _FULL or error.filename is not None:
            raise
        print(f"resiliency: what this command prints cannot be written: {error.strerror}", file=sys.stderr)
        _drop(output)
        raise SystemExit(1) from None
    finally:
        if output is not before:
            output.close()
            sys.stdout = before


def _has_no_reader(output: TextIO) -> bool:
    """The other end of the pipe is closed; a connection of the command itself may break, too."""
    poll = select.poll()
    poll.register(output.fileno(), 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _drop(output: TextIO) -> None:
    """What is left in its buffer, which the end of the interpreter would try to write again."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, output.fileno())
    os.close(nothing)
