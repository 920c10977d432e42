"""Runs the commands of a page in bash, with functions of a test in the place of programs that are not on this machine."""

from __future__ import annotations

import argparse
import json
import os
import re
import socketserver
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

__all__ = ["Program", "check_build", "run_typed"]

#: Gets the arguments, and returns what is printed. An error is printed, and the program ends with 1.
Program = Callable[[list[str]], str]

#: Passes its name and arguments to the test, and prints the answer.
_STAND_IN = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as end:
    end.connect({address!r})
    file = end.makefile("rw")
    print(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]), file=file, flush=True)
    out, error = json.loads(file.readline())
sys.stdout.write(out)
sys.exit(error or 0)
"""


def run_typed(script: str, folder: Path, programs: Mapping[str, Program], *, timeout_s: float) -> str:
    """What bash prints for ``script`` in ``folder``, the commands included.

    Args:
        programs: by name; each call is made on another thread, one at a time.

    Raises:
        AssertionError: a command did not end with 0, or the time is over; has what was printed.
    """

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            name, *arguments = json.loads(self.rfile.readline())
            try:
                answer = programs[name](arguments), ""
            except Exception as error:  # whatever the test's function says ends the script
                answer = "", f"{name}: {error!r}\n"
            self.wfile.write(json.dumps(answer).encode() + b"\n")

    with tempfile.TemporaryDirectory() as made:  # whose path is short enough for a socket
        address = f"{made}/socket"
        for name in programs:
            Path(made, name).write_text(_STAND_IN.format(python=sys.executable, address=address))
            Path(made, name).chmod(0o755)
        with socketserver.UnixStreamServer(address, Handler) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                done = subprocess.run(
                    ["bash", "-euxo", "pipefail", "-c", script], cwd=folder, env={**os.environ, "PATH": f"{made}:{os.environ['PATH']}"},
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s,
                )  # fmt: skip
            except subprocess.TimeoutExpired as late:
                raise AssertionError(f"not within {timeout_s} s: {late.stdout!r}") from None
            finally:
                server.shutdown()
                thread.join()
    assert done.returncode == 0, f"it ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def check_build(words: list[str], folder: Path, built: Collection[str]) -> str:
    """Compares the arguments of ``docker build`` with the files in ``folder``, its stages and variables with the Dockerfile,
    and an image below it that is of no registry with those that are built; returns the new image's name."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    for flag in ("-t", "--target", "--build-arg"):
        parser.add_argument(flag)
    parser.add_argument("-f")
    parser.add_argument("context")
    given = parser.parse_args(words)
    context = folder / given.context
    text = (folder / given.f if given.f else context / "Dockerfile").read_text()
    if given.target:
        assert f" AS {given.target}\n" in text, given
    bases = re.findall(r"^FROM ([^$\s]+)", text, re.MULTILINE)
    if given.build_arg:
        name, _, base = given.build_arg.partition("=")
        assert f"ARG {name}=" in text, given
        bases.append(base)
    assert all("/" in base or base in built for base in bases), f"{bases} are not built"
    for copied in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        missing = [each for each in copied.split() if not (context / each).exists()]
        assert not missing, missing
    return str(given.t)
