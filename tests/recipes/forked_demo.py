"""The demo, and the launchers that it starts, as forks of the tests' zygote.

It starts three launchers, and those hosts, ranks and fork servers: 26 interpreters, of which most import torch. What an
interpreter of its own has that these have not is tested in tests/launch where commands are started "not forked".
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from recipes.quickstart import demo, launch
from resiliency.cli.main import main
from resiliency.runtime.command_line import show_command_line
from tests.launch.forked_commands import COMMAND, prepare_commands
from tests.launch.ready_zygote import Child, end_as_interpreter, keep_only, take_environment


def run(*, words: list[str], output: str, environment: dict[str, str], cwd: str) -> None:
    """``python -m recipes.quickstart.demo`` with these words. Its status is that of the worker."""
    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(cwd)
    take_environment(environment, script=cwd)
    names = ("DEVNULL", "STDOUT", "TimeoutExpired")
    launch.subprocess = SimpleNamespace(Popen=_popen, **{name: getattr(subprocess, name) for name in names})  # type: ignore[attr-defined]
    sys.argv = [demo.__file__, *words]
    end_as_interpreter(lambda: sys.exit(demo.main()))


def _popen(
    words: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    stdin: int,
    stdout: IO[bytes],
    stderr: int,
    start_new_session: bool,
) -> Child:
    """Of the one launcher that runs. The demo's threads draw its screen; what they may hold is not used in the fork."""
    assert words[: len(COMMAND)] == COMMAND and start_new_session
    assert (stdin, stderr) == (subprocess.DEVNULL, subprocess.STDOUT)
    pid = os.fork()
    if pid == 0:
        end_as_interpreter(lambda: _run_command(words[len(COMMAND) :], env, cwd, stdout.fileno()))
    return Child(pid)


def _run_command(words: Sequence[str], environment: Mapping[str, str], cwd: Path, output: int) -> Any:
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    keep_only([nothing, output, output], [0, 1, 2])
    for number, name in ((1, "stdout"), (2, "stderr")):
        setattr(sys, name, os.fdopen(os.dup(number), "w", buffering=1))
    os.chdir(cwd)
    take_environment(environment, script=str(cwd))
    prepare_commands(words)
    show_command_line([*COMMAND, *words])
    sys.exit(main(list(words)))
