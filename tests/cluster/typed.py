"""Runs the commands of a page in bash, with functions of a test in the place of programs that are not on this machine."""

from __future__ import annotations

import json
import os
import socketserver
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

__all__ = ["Program", "Refused", "run_typed"]

#: Gets the arguments, and returns what is printed.
Program = Callable[[list[str]], str]


class Refused(Exception):
    """What a program writes to its standard error, before it ends with 1."""


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
            except Exception as error:
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
                said = (late.stdout or b"").decode()
                raise AssertionError(f"not within {timeout_s} s:\n{said}") from None
            finally:
                server.shutdown()
                thread.join()
    assert done.returncode == 0, f"it ended with {done.returncode}:\n{done.stdout}"
    return done.stdout
