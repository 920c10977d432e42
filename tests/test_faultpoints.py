"""Fault points trip when and where they were told to, and are free otherwise."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import resiliency
from resiliency import faultpoints
from resiliency.errors import ConfigError


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    faultpoints.arm("")


def trips(name: str, passages: int = 5, rank: int | None = None) -> list[int]:
    found = []
    for passage in range(1, passages + 1):
        try:
            faultpoints.hit(name, rank=rank)
        except OSError:
            found.append(passage)
    return found


@pytest.mark.parametrize(
    ("text", "passages"),
    [
        ("save.begin:error", [1]),
        ("save.begin:error@3", [3]),
        ("save.begin:error@*", [1, 2, 3, 4, 5]),
        ("save.fill:error", []),
        ("", []),
    ],
)
def test_when(text: str, passages: list[int]) -> None:
    faultpoints.arm(text)
    assert trips("save.begin") == passages


def test_where() -> None:
    faultpoints.arm("save.begin:error@*,rank=1")
    assert (
        trips("save.begin", 2, rank=0) == []
        and trips("save.begin", 2, rank=1) == [1, 2]
        and trips("save.begin", 2) == [1, 2]
    )


def test_several() -> None:
    faultpoints.arm(" save.begin:error@2 ; save.fill:full ;")
    assert trips("save.begin") == [2] and trips("save.fill") == [1]


@pytest.mark.parametrize(("action", "code"), [("error", errno.EIO), ("full", errno.ENOSPC)])
def test_errors(action: str, code: int) -> None:
    faultpoints.arm(f"save.begin:{action}")
    with pytest.raises(OSError, match="save.begin") as caught:
        faultpoints.hit("save.begin")
    assert caught.value.errno == code


def test_delay() -> None:
    faultpoints.arm("save.begin:delay=0.2")
    began = time.monotonic()
    faultpoints.hit("save.begin")
    assert 0.2 <= time.monotonic() - began < 2


@pytest.mark.parametrize(
    "text",
    [
        "nonsense:kill",
        "save.begin",
        "save.begin:explode",
        "save.begin:error@x",
        "save.begin:delay=x",
        "save.begin:error,rank=x",
    ],
)
def test_scripts_that_mean_nothing_are_refused_when_armed(text: str) -> None:
    with pytest.raises(ConfigError):
        faultpoints.arm(text)
    assert trips("save.begin") == []


@pytest.mark.parametrize("action", ["kill", "stop"])
def test_signals_reach_this_process_only_when_told(action: str) -> None:
    script = "from resiliency import faultpoints; print('before', flush=True); faultpoints.hit('save.begin'); print('after', flush=True)"
    env = {
        **os.environ,
        "RESILIENCY_FAULTS": f"save.begin:{action}",
        "PYTHONPATH": str(Path(resiliency.__file__).parents[1]),
    }
    process = subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "before\n"
        if action == "kill":
            assert process.wait(10) == -signal.SIGKILL
            return
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
        assert process.stdout.readline() == "after\n" and process.wait(10) == 0


def test_every_known_point_is_passed_somewhere_and_every_passed_point_is_known() -> None:
    package = Path(resiliency.__file__).parent
    passed = {name for path in package.rglob("*.py") for name in re.findall(r'\bhit\(\s*"([^"]+)"', path.read_text())}
    assert passed == set(faultpoints.KNOWN)
