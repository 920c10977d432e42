"""Process 1 of a pod, with monitors that are real processes and do what a test tells them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from resiliency.cli.pod import main
from tests.patience import PATIENCE

T = TypeVar("T")

#: SIGUSR1: the job is completed. SIGUSR2: it cannot work. SIGTERM: it ends in good order.
MONITOR = """
import os, signal, subprocess, sys, time
folder, *words = sys.argv[1:]
if os.path.exists(f"{folder}/slow"):
    open(f"{folder}/slow").read()  # a fifo: until the test writes
if "uploads" in words:
    subprocess.Popen([sys.executable, "-ISc", f"open({folder + '/uploaded'!r}).read()"])
if "orphans" in words:
    subprocess.run(["sh", "-c", "(sleep 0.1; exit 3) & (sleep 0.2) &"])
signals = {signal.SIGTERM: 0, signal.SIGUSR1: 0, signal.SIGUSR2: 2}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
with open(f"{folder}/started", "a") as file:
    file.write(f"{time.monotonic()}\\n")
number = signal.sigwait(signals)
with open(f"{folder}/told", "a") as file:
    file.write(f"{signal.Signals(number).name}\\n")
sys.exit(signals[number])
"""
POD = """
import logging, sys
from resiliency.monitor.pod import run_pod
logging.basicConfig(level=logging.INFO)
sys.exit(run_pod(sys.argv[2:], drain_s=float(sys.argv[1])))
"""


def until(condition: Callable[[], T], within_s: float = 30.0) -> T:
    end_s = time.monotonic() + PATIENCE * within_s
    while not (found := condition()):
        assert time.monotonic() < end_s, f"not within {within_s} s"
        time.sleep(0.005)
    return found


class Pod:
    """Attributes: process: its process 1."""

    def __init__(self, folder: Path, *words: str, drain_s: float = 60.0, as_init: bool = False) -> None:
        self.folder = folder
        script = folder / "monitor.py"
        script.write_text(MONITOR)
        pod = [sys.executable, "-c", POD, str(drain_s), sys.executable, "-IS", str(script), str(folder), *words]
        before = ["unshare", "--pid", "--fork", "--kill-child"] if as_init else []
        with open(folder / "log", "ab") as log:
            self._popen = subprocess.Popen([*before, *pod], stderr=log)
        self.process = psutil.Process(self._popen.pid)
        if as_init:
            self.process = until(self.process.children)[0]

    def children(self) -> list[psutil.Process]:
        return self.process.children(recursive=True)

    def starts(self) -> list[float]:
        """When each monitor was ready, in monotonic seconds."""
        started = self.folder / "started"
        return [float(line) for line in started.read_text().splitlines()] if started.exists() else []

    def told(self) -> list[str]:
        told = self.folder / "told"
        return told.read_text().split() if told.exists() else []

    def monitor(self, number: int = 1) -> psutil.Process:
        """The one that was started as the so-many-th, once it is ready."""
        until(lambda: len(self.starts()) >= number)
        (found,) = (each for each in self.process.children() if "monitor.py" in " ".join(each.cmdline()))
        return found

    def ends(self) -> int:
        return self._popen.wait(60)

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def close(self) -> None:
        for each in [*self.children(), self.process] if self.process.is_running() else []:
            each.kill()
        self._popen.wait(30)


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Callable[..., Pod]]:
    made: list[Pod] = []

    def make(*words: str, **values: float) -> Pod:
        made.append(Pod(tmp_path, *words, **values))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()


AS_INIT = pytest.mark.parametrize(
    "as_init",
    [
        False,
        pytest.param(
            True, marks=pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root")
        ),
    ],
)


@AS_INIT
def test_a_monitor_that_dies_is_started_again_less_and_less_soon(pod: Callable[..., Pod], as_init: bool) -> None:
    made = pod(as_init=as_init)
    for number in range(1, 4):
        made.monitor(number).kill()
    assert made.monitor(4).is_running()
    starts = made.starts()
    gaps = [later - earlier for earlier, later in zip(starts, starts[1:], strict=False)]
    assert all(gap >= least for gap, least in zip(gaps, (0.2, 0.4, 0.8), strict=True))
    assert made.log().count("the host monitor has ended with signal 9; ranks go on") == 3
    made.monitor(4).send_signal(signal.SIGUSR1)
    assert made.ends() == 0


@AS_INIT
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_it_passes_on_that_it_is_told_to_end_and_does_not_say_that_the_job_is_completed(
    pod: Callable[..., Pod], as_init: bool, number: signal.Signals, status: int
) -> None:
    """An exit status of 0 would complete the JobSet. The monitor itself ends with 0."""
    made = pod(as_init=as_init)
    made.monitor()
    made.process.send_signal(number)
    assert made.ends() == status and made.told() == ["SIGTERM"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGUSR1, 0), (signal.SIGUSR2, 2)])
def test_it_ends_as_its_monitor_does_when_the_job_is_completed_or_the_monitor_cannot_work(
    pod: Callable[..., Pod], number: int, status: int
) -> None:
    made = pod()
    made.monitor().send_signal(number)
    assert made.ends() == status and len(made.starts()) == 1


@AS_INIT
def test_a_signal_while_the_monitor_is_down_reaches_the_next_one(pod: Callable[..., Pod], as_init: bool) -> None:
    made = pod(as_init=as_init)
    made.monitor().kill()
    until(lambda: "has ended with signal 9" in made.log())
    made.process.send_signal(signal.SIGTERM)
    assert made.ends() == 143 and made.told() == ["SIGTERM"] and len(made.starts()) == 2


def test_a_signal_that_comes_before_the_monitor_can_heed_it_is_not_lost(
    pod: Callable[..., Pod], tmp_path: Path
) -> None:
    """It has no handler yet: it would die of it, and its launcher would not be told to save."""
    os.mkfifo(tmp_path / "slow")
    made = pod()
    until(lambda: any("monitor.py" in " ".join(each.cmdline()) for each in made.process.children()))
    made.process.send_signal(signal.SIGTERM)
    until(lambda: "told to end (SIGTERM)" in made.log())
    with open(tmp_path / "slow", "w"):
        pass
    assert made.ends() == 143 and made.told() == ["SIGTERM"] and len(made.starts()) == 1


@AS_INIT
def test_what_others_have_left_behind_is_reaped(pod: Callable[..., Pod], as_init: bool) -> None:
    made = pod("orphans", as_init=as_init)
    monitor = made.monitor()
    until(lambda: made.children() == [monitor])
    monitor.send_signal(signal.SIGUSR1)
    assert made.ends() == 0


@AS_INIT
def test_it_waits_for_what_is_uploaded_after_the_job(pod: Callable[..., Pod], as_init: bool, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "uploaded")
    made = pod("uploads", as_init=as_init)
    made.monitor().send_signal(signal.SIGUSR1)
    until(lambda: "waits for checkpoints to be uploaded, up to 60 s" in made.log())
    (upload,) = made.children()
    made.process.send_signal(signal.SIGTERM)  # the other pods of the JobSet are done
    assert made.process.is_running() and upload.is_running()
    with open(tmp_path / "uploaded", "w"):
        pass
    assert made.ends() == 0 and not upload.is_running()


@AS_INIT
@pytest.mark.parametrize(("number", "status"), [(signal.SIGUSR1, 0), (signal.SIGTERM, 143)])
def test_it_does_not_wait_for_ever(
    pod: Callable[..., Pod], as_init: bool, number: int, status: int, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "uploaded")
    made = pod("uploads", as_init=as_init, drain_s=0.1)
    monitor = made.monitor()
    (upload,) = (each for each in made.children() if each != monitor)
    if number == signal.SIGTERM:
        made.process.send_signal(number)
    else:
        monitor.send_signal(number)
    assert made.ends() == status and "processes of the job still run 0 s after its end" in made.log()
    if as_init:
        until(lambda: not upload.is_running())  # the kernel has ended it
    else:
        upload.kill()


def test_the_real_monitor_hears_of_the_end_whenever_that_is_said(tmp_path: Path) -> None:
    """Right after its start, when it has no handler yet."""
    words = ["--supervisor", "http://127.0.0.1:1", "--insecure-plain-http", "--host", "a", "--watch-only"]
    command = [*words, "--watchdog", "none", "--state-dir", str(tmp_path), "--"]
    with subprocess.Popen([sys.executable, "-m", "resiliency.cli", "pod", *command]) as popen:
        try:
            process = psutil.Process(popen.pid)
            until(process.children)
            process.send_signal(signal.SIGTERM)
            assert popen.wait(60) == 143
        finally:
            popen.kill()


def test_arguments_are_those_of_the_monitor_and_a_script_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import resiliency.monitor.pod as pod_module

    given: list[object] = []
    monkeypatch.setattr(pod_module, "run_pod", lambda *words, **values: given.append((words, values)) or 7)
    words = ["--drain-timeout", "5", "--supervisor", "https://a:1", "--", "train.py", "--drain-timeout", "9", "--", "x"]
    assert main(words) == 7
    rest = ["--supervisor", "https://a:1", "--", "train.py", "--drain-timeout", "9", "--", "x"]
    own = [sys.executable, "-m", "resiliency.cli", "host-monitor", "--exit-when-completed"]
    assert given == [(([*own, *rest],), {"drain_s": 5.0})]
    with pytest.raises(SystemExit) as ended:
        main(["--supervisor", "https://a:1"])
    assert ended.value.code == 2 and "behind --" in capsys.readouterr().err
