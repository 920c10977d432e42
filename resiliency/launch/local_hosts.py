"""``resiliency run --nnodes 3 --local-hosts``: runs the hosts of a job as launchers on one machine.

For CI, a workstation and tests. Each host has its own process group, name (``RESILIENCY_NODE``), agent and local
folder, and behaves as on a machine of its own: its launcher meets the others through a store. This process serves the
store, so that no host depends on another one for it.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from torch._C._distributed_c10d import TCPStore

import resiliency
from resiliency.runtime.exit_codes import PREEMPTED
from resiliency.runtime.processes import end_with_parent, wait_for_any
from resiliency.settings import all_variables, child_environment, environment, set_variable

__all__ = ["LOCAL_HOST_VARIABLE", "become_local_host", "exit_status", "run_local_hosts"]

logger = logging.getLogger(__name__)

#: Environment variable of a launcher started as one of several on a machine: the process id of its starter.
LOCAL_HOST_VARIABLE = "RESILIENCY_LOCAL_HOST"
_LOCAL_DIR = "RESILIENCY_LOCAL_DIR"
#: Seconds for hosts to end by themselves after the job has lost a host that it needs, and again after each signal to
#: them; torch gives ranks 30 s.
_END_TIMEOUT_S = 40.0
#: Settings of torch's rendezvous. By default it waits 30 s for more hosts than it needs, and notices a lost one after
#: 15 s; these hosts start together and use no network.
_CONFIGURATION = "is_host=0,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass
class _Host:
    name: str
    process: subprocess.Popen[bytes]
    pidfd: int


def become_local_host() -> None:
    """Makes this launcher, one of several on a machine, end together with the process that started it."""
    parent = all_variables()[LOCAL_HOST_VARIABLE]
    set_variable(LOCAL_HOST_VARIABLE, None)  # ranks may start jobs of their own
    end_with_parent(signal.SIGTERM)
    if str(os.getppid()) != parent:  # the starter has ended before end_with_parent took effect
        os.kill(os.getpid(), signal.SIGTERM)


def exit_status(codes: Sequence[int], *, fewest: int, asked: int | None) -> int:
    """The exit status of a job, from those of its hosts. Pure.

    :data:`PREEMPTED` when any host has it, because ranks save and leave together; else 128 and ``asked`` if that is
    set; 0 when as many hosts succeeded as the job needs; else the code of the first host that failed without a signal,
    1 if there is none.

    Args:
        fewest: the least number of hosts that the job needs.
        codes: return codes in the order in which hosts ended; negative when a signal ended the host.
        asked: the signal with which this process was told to end all hosts; None: it was not.
    """
    if PREEMPTED in codes:
        return PREEMPTED
    if asked is not None:
        return 128 + asked
    if codes.count(0) >= fewest:
        return 0
    failed = [code for code in codes if code]
    by_itself = [code for code in failed if 0 < code < 128]
    return (by_itself or [1])[0]


def run_local_hosts(words: Sequence[str], *, hosts: tuple[int, int]) -> int:
    """Runs the job and returns its exit status. Blocks: until all hosts have ended. Thread: main, it sets signal
    handlers.

    Args:
        words: the command line after ``run``.
        hosts: the least number of hosts that the job needs, and the number to start.
    """
    fewest, count = hosts
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{store.port}", "--rdzv-conf", _CONFIGURATION]
    meeting += ["--rdzv-id", f"local-{secrets.token_hex(4)}", "--local-addr", "127.0.0.1"]
    running = [_start(number, [*meeting, *words]) for number in range(count)]
    asked: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        _signal_all(running, number)

    with _handled_by(forward):
        codes = _wait(running, fewest, asked)
    return exit_status(codes, fewest=fewest, asked=asked[0] if asked else None)


def _start(number: int, words: Sequence[str]) -> _Host:
    name = f"{environment().node}-{number}"
    package = os.path.dirname(os.path.dirname(os.path.abspath(resiliency.__file__)))
    variables = child_environment(package) | {"RESILIENCY_NODE": name, LOCAL_HOST_VARIABLE: str(os.getpid())}
    if folder := all_variables().get(_LOCAL_DIR):
        variables[_LOCAL_DIR] = os.path.join(folder, f"host-{number}")
    process = subprocess.Popen(
        [sys.executable, "-m", "resiliency.cli", "run", *words], env=variables, start_new_session=True
    )
    logger.info("%s is process %d", name, process.pid)
    return _Host(name, process, os.pidfd_open(process.pid))


def _wait(running: list[_Host], fewest: int, asked: Sequence[int]) -> list[int]:
    """Return codes in the order in which hosts ended, each of which is removed from ``running``. Blocks: until all
    ended."""
    codes: list[int] = []
    deadline: float | None = None
    killed = False
    while running:
        wait_for_any([host.pidfd for host in running], None if deadline is None else deadline - time.monotonic())
        for host in [host for host in running if host.process.poll() is not None]:
            running.remove(host)
            os.close(host.pidfd)
            codes.append(host.process.returncode)
            if codes[-1] and not asked:
                _say_lost(host, len(running), fewest)
        lost = any(codes) and len(running) < fewest
        if (lost or asked) and deadline is None:
            # A launcher that gives up tells the others; one that was killed cannot, so they are told here.
            if not asked and any(code < 0 for code in codes):
                _signal_all(running, signal.SIGTERM)
            deadline = time.monotonic() + _END_TIMEOUT_S
        if deadline is not None and time.monotonic() >= deadline and running:
            number = signal.SIGKILL if killed else signal.SIGTERM
            logger.warning("%s still runs; it gets %s", ", ".join(host.name for host in running), number.name)
            _signal_all(running, number)
            killed, deadline = True, time.monotonic() + _END_TIMEOUT_S
    return codes


def _say_lost(host: _Host, left: int, fewest: int) -> None:
    code = host.process.returncode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"has failed with status {code}"
    if left >= fewest:
        what = f"the job goes on with {left}"
    else:
        others = "the other one ends" if left == 1 else f"the other {left} end"
        what = f"the job needs {fewest} hosts, so {others}" if left else "it was the last one"
    logger.error("%s (process %d) %s; %s", host.name, host.process.pid, how, what)


def _signal_all(hosts: Sequence[_Host], number: int) -> None:
    for host in hosts:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(host.pidfd, number)


@contextmanager
def _handled_by(handler: object) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in _SIGNALS}  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
