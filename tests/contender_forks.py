"""Contenders of a benchmark as forks of a process that has imported torch, which each of them else does for seconds."""

from __future__ import annotations

import ctypes
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import IO, Any

from benchmarks import _process
from benchmarks._memory import MARK
from resiliency.errors import Timeout
from resiliency.settings import replace_variables
from resiliency.testing.zygote import Zygote
from tests.agent_forks import VARIABLE

#: Of ``/proc/self/stat`` behind the name: where the kernel reads the environment from, see proc(5).
_ENV_START, _ENV_END = 50 - 3, 51 - 3


def fork_contenders(monkeypatch: Any, zygote: Zygote) -> None:
    """Contenders that are started in this test are forks of the zygote."""

    def popen(words: Sequence[str], *, stdout: IO[bytes], env: Mapping[str, str], cwd: Any, **_: Any) -> _Contender:
        assert words[:2] == [sys.executable, "-m"]
        # Their agents are started by themselves, and carry the mark as theirs do.
        given = {name: value for name, value in env.items() if name != VARIABLE}
        arguments = {"words": list(words[2:]), "output": stdout.name, "environment": given, "cwd": str(cwd)}
        return _Contender(zygote, arguments)

    fields = {name: getattr(subprocess, name) for name in ("DEVNULL", "STDOUT", "TimeoutExpired")}
    monkeypatch.setattr(_process, "subprocess", SimpleNamespace(Popen=popen, **fields))


class _Contender:
    """As much of ``subprocess.Popen`` as is asked of it."""

    def __init__(self, zygote: Zygote, arguments: Mapping[str, Any]) -> None:
        self._worker = zygote.start(f"{__name__}:run", arguments)
        self.pid = self._worker.pid

    def wait(self, timeout: float = 60.0) -> int:
        try:
            return self._worker.wait(timeout_s=timeout)
        except Timeout as error:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout) from error


def run(*, words: list[str], output: str, environment: dict[str, str], cwd: str) -> None:
    """``python -m`` with these words, in a fork. Ends without exit handlers, as a contender does."""
    with open(output, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(cwd)
    replace_variables(environment)
    _show_mark(environment[MARK])
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def _show_mark(mark: str) -> None:
    """In the environment that others see, which is that of the process that was forked; nobody needs the rest of it."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    start, end = int(fields[_ENV_START]), int(fields[_ENV_END])
    text = f"{MARK}={mark}\0".encode()
    assert 0 < len(text) < end - start
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)
