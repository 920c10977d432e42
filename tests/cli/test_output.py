"""What a command prints arrives whole, or its exit status says that it has not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from resiliency.cli._output import whole_output
from resiliency.settings import child_environment

PRINTS = """
import sys
from resiliency.cli._output import whole_output
with whole_output():
    sys.stdout.write("a" * int(sys.argv[1]))
"""
#: What Typer puts in the place of an output that has broken.
HIDING = """
import contextlib
class Hiding:
    def __init__(self, wrapped):
        self.wrapped = wrapped
    def flush(self):
        with contextlib.suppress(BrokenPipeError):
            self.wrapped.flush()
    def __getattr__(self, name):
        return getattr(self.wrapped, name)
"""
SAID = "resiliency: what this command prints cannot be written: {}\n"


def printed(size: int, output: Path, *, unbuffered: bool, most: int | None = None) -> subprocess.CompletedProcess[str]:
    """A process that prints; a file may grow to ``most`` bytes, as on a disk with so much room."""
    limit = ["prlimit", f"--fsize={most}"] if most is not None else []
    with open(output, "wb") as file:
        return subprocess.run(
            [*limit, sys.executable, "-c", PRINTS, str(size)],
            stdout=file,
            stderr=subprocess.PIPE,
            env=child_environment() | {"PYTHONUNBUFFERED": "1" if unbuffered else ""},
            text=True,
            timeout=60,
        )


@pytest.mark.parametrize("unbuffered", [True, False])
def test_what_does_not_fit_is_said_and_no_success(unbuffered: bool, tmp_path: Path) -> None:
    """Python drops what one system call did not take of a text, where the output has no buffer."""
    done = printed(100_000, Path("/dev/full"), unbuffered=unbuffered)
    assert (done.returncode, done.stderr) == (1, SAID.format(os.strerror(28)))
    done = printed(100_000, tmp_path / "out", unbuffered=unbuffered, most=8192)
    assert (done.returncode, done.stderr) == (1, SAID.format(os.strerror(27)))


def test_what_fits_is_there(tmp_path: Path) -> None:
    done = printed(100_000, tmp_path / "out", unbuffered=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out").read_text() == "a" * 100_000


@pytest.mark.parametrize("unbuffered", [True, False])
@pytest.mark.parametrize("ended", ["returns", "exits", "exits by Typer"])
def test_a_reader_that_has_seen_enough_gets_no_traceback(unbuffered: bool, ended: str) -> None:
    """``resiliency goodput report --help | head``."""
    end = {"returns": "pass", "exits": "sys.exit(1)", "exits by Typer": "sys.stdout = Hiding(sys.stdout); sys.exit(1)"}[
        ended
    ]
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"{HIDING}{PRINTS}    {end}\n", "100"],
            stdout=write,
            stderr=subprocess.PIPE,
            env=child_environment() | {"PYTHONUNBUFFERED": "1" if unbuffered else ""},
            text=True,
            timeout=60,
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_connection_that_breaks_within_a_command_is_an_error() -> None:
    with pytest.raises(BrokenPipeError), whole_output():
        raise BrokenPipeError("of a socket")
