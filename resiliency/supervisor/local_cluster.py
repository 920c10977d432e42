"""``resiliency run --nnodes 3 --spares 1``: a supervisor and the hosts of a job on one machine.

For CI, a workstation, and trying out what happens when a host is lost. Each host is a host monitor with a process
group, a name (``RESILIENCY_NODE``), an agent and a local folder of its own, and is what it would be on a machine of its
own; the supervisor is the one of a cluster. They speak over loopback, with tokens made for this run.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import resiliency
from resiliency.errors import ConfigError
from resiliency.settings import all_variables, child_environment, environment

__all__ = ["LocalCluster", "run_local_cluster"]

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
#: For the supervisor to listen.
_LISTEN_TIMEOUT_S = 30.0
#: For hosts to end by themselves after the job has, or after a signal, before they are killed.
_END_TIMEOUT_S = 40.0
_PERIOD_S, _TIMEOUT_S = 0.5, 2.0


@dataclass(frozen=True, kw_only=True)
class LocalCluster:
    """
    Attributes:
        hosts: at full size.
        min_hosts: that the job can do with.
        spares: hosts beside them.
        ranks_per_host: ranks of each host.
        launcher_words: flags of ``resiliency run`` for each host's launcher.
        script: the script and its arguments, or ``-m MODULE ARGS``.
        workload: settings of it, see :class:`~resiliency.supervisor.model.WorkloadSpec`.
        state_dir: that the supervisor and the monitors keep their state in; "": one that is removed at the end.
    """

    hosts: int
    min_hosts: int
    spares: int
    ranks_per_host: int
    script: tuple[str, ...]
    launcher_words: tuple[str, ...] = ()
    workload: Mapping[str, Any] = field(default_factory=dict)
    state_dir: str = ""

    def __post_init__(self) -> None:
        if self.spares < 0:
            raise ConfigError(f"--spares {self.spares}: pass 0 or more hosts")


@dataclass
class _Process:
    name: str
    popen: subprocess.Popen[bytes]
    pidfd: int


def run_local_cluster(cluster: LocalCluster) -> int:
    """Runs the job and returns its exit status: that of ``resiliency supervisor run --until-ended``."""
    kept = bool(cluster.state_dir)
    folder = Path(cluster.state_dir or tempfile.mkdtemp(prefix="resiliency-local-"))
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    running: list[_Process] = []
    asked: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        _signal_all(running, number)

    try:
        with _handled_by(forward):
            return _run(cluster, folder, running, asked)
    finally:
        _end(running)
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)


def _run(cluster: LocalCluster, folder: Path, running: list[_Process], asked: list[int]) -> int:
    supervisor = _start_supervisor(cluster, folder, "127.0.0.1:0")
    running.append(supervisor)
    address = _address_of(supervisor, folder / "address", asked)
    if address is None:
        return 128 + asked[0] if asked else 1
    for number in range(cluster.hosts + cluster.spares):
        running.append(_start_host(cluster, folder, number, address))
    logger.info(
        "%d hosts and %d spares on this machine; resiliency supervisor status -s http://%s --token-file %s",
        cluster.hosts,
        cluster.spares,
        address,
        folder / "operator-token",
    )
    while True:
        _wait_for_any(running, None)
        for one in [one for one in running if one.popen.poll() is not None]:
            running.remove(one)
            os.close(one.pidfd)
            code = one.popen.returncode
            if one is not supervisor:
                if not asked:
                    logger.warning("%s (process %d) has ended, with %d", one.name, one.popen.pid, code)
            elif code >= 0 or asked:
                return 128 + asked[0] if asked else code
            else:
                # Training goes on without it. What it had begun is in its file.
                logger.warning("the supervisor was ended by %s; it is started again", signal.Signals(-code).name)
                supervisor = _start_supervisor(cluster, folder, address)
                running.append(supervisor)


def _start_supervisor(cluster: LocalCluster, folder: Path, listen: str) -> _Process:
    for name in ("monitor-token", "operator-token"):
        path = folder / name
        if not path.exists():
            path.touch(mode=0o600)
            path.write_text(secrets.token_hex(16))
    settings = {
        "listen": listen,
        "state": str(folder / "supervisor.db"),
        "shared_token": str(folder / "monitor-token"),
        "operator_token": str(folder / "operator-token"),
        "events": str(folder / "events"),
        "heartbeat_polling_period_s": _PERIOD_S,
        "heartbeat_timeout_s": _TIMEOUT_S,
        "workloads": [
            {
                "name": "local",
                "replicas": cluster.hosts,
                "min_replicas": cluster.min_hosts,
                "ranks_per_host": cluster.ranks_per_host,
                "dwell_s": 5.0,
                **cluster.workload,
            }
        ],
    }
    path = folder / "supervisor.yaml"
    path.write_text(json.dumps(settings, indent=2))  # which is YAML, too
    words = ["supervisor", "run", "-f", str(path), "--until-ended", "--address-file", str(folder / "address")]
    return _start("supervisor", words, {})


def _start_host(cluster: LocalCluster, folder: Path, number: int, address: str) -> _Process:
    name = f"{environment().node}-{number}"
    variables = {"RESILIENCY_NODE": name}
    if local := all_variables().get("RESILIENCY_LOCAL_DIR"):
        variables["RESILIENCY_LOCAL_DIR"] = os.path.join(local, f"host-{number}")
    words = ["host-monitor", "--supervisor", f"http://{address}", "--token-file", str(folder / "monitor-token")]
    words += ["--host", name, "--address", "127.0.0.1", "--nproc-per-node", str(cluster.ranks_per_host)]
    words += ["--state-dir", str(folder / f"host-{number}"), "--exit-when-completed", "--insecure-plain-http"]
    if cluster.launcher_words:
        words.append(f"--launcher-args={shlex.join(cluster.launcher_words)}")
    return _start(name, [*words, "--", *cluster.script], variables)


def _start(name: str, words: Sequence[str], variables: Mapping[str, str]) -> _Process:
    package = os.path.dirname(os.path.dirname(os.path.abspath(resiliency.__file__)))
    popen = subprocess.Popen(
        [sys.executable, "-m", "resiliency.cli", *words],
        env=child_environment(package) | dict(variables),
        start_new_session=True,
    )
    logger.info("%s is process %d", name, popen.pid)
    return _Process(name, popen, os.pidfd_open(popen.pid))


def _address_of(supervisor: _Process, path: Path, asked: Sequence[int]) -> str | None:
    """Where it listens; None: it has ended, or is to."""
    deadline = time.monotonic() + _LISTEN_TIMEOUT_S
    while not asked and supervisor.popen.poll() is None:
        with suppress(FileNotFoundError):
            if text := path.read_text().strip():
                return text
        if time.monotonic() >= deadline:
            logger.error("the supervisor does not listen after %.0f s; see its lines above", _LISTEN_TIMEOUT_S)
            return None
        _wait_for_any([supervisor], 0.05)  # the file is renamed into its place; its end is seen at once
    return None


def _wait_for_any(processes: Sequence[_Process], timeout_s: float | None) -> None:
    poll = select.poll()
    for one in processes:
        poll.register(one.pidfd, select.POLLIN)
    poll.poll(None if timeout_s is None else timeout_s * 1000)


def _signal_all(processes: Sequence[_Process], number: int) -> None:
    for one in processes:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(one.pidfd, number)


def _end(running: list[_Process]) -> None:
    """Ends what still runs."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if number is signal.SIGTERM:
            _signal_all(running, number)
        else:
            for one in running:  # with what it has started
                with suppress(ProcessLookupError):
                    os.killpg(one.popen.pid, number)
        deadline = time.monotonic() + _END_TIMEOUT_S
        while running and time.monotonic() < deadline:
            _wait_for_any(running, deadline - time.monotonic())
            for one in [one for one in running if one.popen.poll() is not None]:
                running.remove(one)
                os.close(one.pidfd)


@contextmanager
def _handled_by(handler: object) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in _SIGNALS}  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
