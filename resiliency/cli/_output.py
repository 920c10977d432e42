"""Makes a command exit with status 1 when its output could not be written whole."""

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
    """A context for a command that prints.

    It replaces unbuffered output. Under PYTHONUNBUFFERED, which containers often set, Python writes a text with one
    system call and drops what that did not take: on a disk with 8 KiB left, 8 KiB of a JSON document were written, and
    the exit status was 0.

    Raises:
        SystemExit: with status 1. When the output cannot be written, a sentence goes to standard error first; when the
            reader has closed the pipe, none does.
    """
    before = sys.stdout
    if isinstance(getattr(before, "buffer", None), io.RawIOBase):
        fd = os.dup(before.fileno())
        sys.stdout = open(fd, "w", encoding=before.encoding, errors=before.errors, buffering=1)
    output = sys.stdout  # kept, because Typer replaces sys.stdout once it has seen a closed pipe
    try:
        try:
            yield
        finally:
            output.flush()
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _has_no_reader(output):
            _drop(output)  # as after ``| head``: the user has closed the pipe, which needs no message
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
    """True when the other end of the output's pipe is closed. A BrokenPipeError alone does not show that, because a
    connection of the command may raise it, too."""
    poll = select.poll()
    poll.register(output.fileno(), 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _drop(output: TextIO) -> None:
    """Sends what is left in the buffer of ``output`` to /dev/null, because the interpreter would try to write it again
    when it ends."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, output.fileno())
    os.close(nothing)
