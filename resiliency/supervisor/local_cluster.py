"""``resiliency run --nnodes 3 --spares 1``: a supervisor and the hosts of a job on one machine.

For CI, a workstation, and trying out what happens when a host is lost. Each host is a host monitor with a process
group, a name (``RESILIENCY_NODE``), an agent and a local folder of its own, and is what it would be on a machine of its
own; the supervisor is the one of a cluster. They speak over loopback, with tokens made for this run.

A host that is lost stays away until this process gets SIGUSR2: then the one that was lost last is started again, as a
machine that was repaired.
"""

from __future__ import annotations

import fcntl
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
from resiliency.supervisor.launcher_process import find_launcher
from resiliency.supervisor.monitor_state import StateFolder

__all__ = ["LocalCluster", "run_local_cluster"]

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_RETURN = signal.SIGUSR2
#: For the supervisor to listen.
_LISTEN_TIMEOUT_S = 30.0
#: For hosts to end by themselves after the job has, or after a signal, before they are killed.
_END_TIMEOUT_S = 40.0
#: Of the supervisor; quick, as nothing of it crosses a network.
_SETTINGS = {"heartbeat_polling_period_s": 0.5, "heartbeat_timeout_s": 2.0, "dwell_s": 5.0}
#: Settings of the supervisor that are this module's affair.
_OURS = frozenset(
    "listen state shared_token monitor_tokens operator_token tls events workload workloads name replicas min_replicas"
    " num_dp_replicas max_num_dp_replicas min_num_dp_replicas hosts_per_replica num_nodes_per_dp ranks_per_host"
    " workers_per_host enable_workload_scaling".split()
)


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
        supervisor: further settings, as at the top level of ``supervisor.yaml``.
        state_dir: that the supervisor and the monitors keep their state in; "": one that is removed at the end.
    """

    hosts: int
    min_hosts: int
    spares: int
    ranks_per_host: int
    script: tuple[str, ...]
    launcher_words: tuple[str, ...] = ()
    workload: Mapping[str, Any] = field(default_factory=dict)
    supervisor: Mapping[str, Any] = field(default_factory=dict)
    state_dir: str = ""

    def __post_init__(self) -> None:
        if self.spares < 0:
            raise ConfigError(f"--spares {self.spares}: pass 0 or more hosts")
        for name in sorted(_OURS & set(self.supervisor)):
            raise ConfigError(f"--supervisor-set {name}: hosts on one machine have it set already; leave it out")


@dataclass
class _Process:
    """Attributes: number: of the host; None: the supervisor."""

    name: str
    number: int | None
    popen: subprocess.Popen[bytes]
    pidfd: int


class _Returns:
    """SIGUSR2, as something that can be waited for with processes."""

    def __init__(self) -> None:
        self.fd, self._end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def __enter__(self) -> _Returns:
        self._before = signal.signal(_RETURN, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(_RETURN, self._before)
        os.close(self.fd)
        os.close(self._end)

    def _note(self, number: int, frame: FrameType | None) -> None:
        with suppress(BlockingIOError):  # thousands are waiting
            os.write(self._end, b".")

    def take(self) -> int:
        """How often it has come since this was asked last."""
        with suppress(BlockingIOError):
            return len(os.read(self.fd, 4096))
        return 0


def run_local_cluster(cluster: LocalCluster) -> int:
    """Runs the job and returns its exit status: that of ``resiliency supervisor run --until-ended``.

    Raises:
        ConfigError: another job has the state folder.
    """
    kept = bool(cluster.state_dir)
    folder = Path(cluster.state_dir or tempfile.mkdtemp(prefix="resiliency-local-"))
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    running: list[_Process] = []
    asked: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        _signal_all(running, number)

    lock = _begin_anew(cluster, folder)
    try:
        with _handled_by(forward), _Returns() as returns:
            return _run(cluster, folder, running, asked, returns)
    finally:
        _end(running)
        for number in range(cluster.hosts + cluster.spares):
            _end_launcher(folder, number)
        os.close(lock)
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)


def _begin_anew(cluster: LocalCluster, folder: Path) -> int:
    """Removes what an earlier job has left in the folder: its state says that it is completed, or which epoch its hosts
    have come to, and is not about this one. Returns: a descriptor that has the folder's lock.

    Raises:
        ConfigError: another job runs there.
    """
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(f"another job runs with --state-dir {folder}; pass a folder of its own") from None
    for number in range(cluster.hosts + cluster.spares):
        _end_launcher(folder, number)
        shutil.rmtree(folder / f"host-{number}", ignore_errors=True)
    for path in (folder / "address", *folder.glob("supervisor.db*")):
        path.unlink(missing_ok=True)
    return lock


def _run(cluster: LocalCluster, folder: Path, running: list[_Process], asked: list[int], returns: _Returns) -> int:
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
    lost: list[int] = []
    while True:
        _wait_for_any(running, None, returns.fd)
        for one in [one for one in running if one.popen.poll() is not None]:
            running.remove(one)
            os.close(one.pidfd)
            code = one.popen.returncode
            if one.number is not None:
                lost.append(one.number)
                if code and not asked:
                    again = f"; kill -USR2 {os.getpid()} starts it again"
                    logger.warning("%s (process %d) has ended, with %d%s", one.name, one.popen.pid, code, again)
            elif code >= 0 or asked:
                return 128 + asked[0] if asked else code
            else:
                # Training goes on without it. What it had begun is in its file.
                logger.warning("the supervisor was ended by %s; it is started again", signal.Signals(-code).name)
                running.append(_start_supervisor(cluster, folder, address))
        for _ in range(returns.take() if not asked else 0):
            if lost:
                running.append(_start_host(cluster, folder, lost.pop(), address))
            else:
                logger.warning("no host is lost that could be started again")


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
        "events": environment().events_dir or str(folder / "events"),
        **_SETTINGS,
        **cluster.supervisor,
        "workloads": [
            {
                "name": environment().run,  # as ranks call it in their events
                "replicas": cluster.hosts,
                "min_replicas": cluster.min_hosts,
                "ranks_per_host": cluster.ranks_per_host,
                **cluster.workload,
            }
        ],
    }
    path = folder / "supervisor.yaml"
    path.write_text(json.dumps(settings, indent=2))  # which is YAML, too
    words = ["supervisor", "run", "-f", str(path), "--until-ended", "--address-file", str(folder / "address")]
    return _start("supervisor", None, words, {})


def _host_name(number: int) -> str:
    return f"{environment().node}-{number}"


def _start_host(cluster: LocalCluster, folder: Path, number: int, address: str) -> _Process:
    name = _host_name(number)
    variables = {"RESILIENCY_NODE": name}
    if local := all_variables().get("RESILIENCY_LOCAL_DIR"):
        variables["RESILIENCY_LOCAL_DIR"] = os.path.join(local, f"host-{number}")
    words = ["host-monitor", "--supervisor", f"http://{address}", "--token-file", str(folder / "monitor-token")]
    words += ["--host", name, "--address", "127.0.0.1", "--nproc-per-node", str(cluster.ranks_per_host)]
    words += ["--state-dir", str(folder / f"host-{number}"), "--exit-when-completed", "--insecure-plain-http"]
    if cluster.launcher_words:
        words.append(f"--launcher-args={shlex.join(cluster.launcher_words)}")
    return _start(name, number, [*words, "--", *cluster.script], variables)


def _start(name: str, number: int | None, words: Sequence[str], variables: Mapping[str, str]) -> _Process:
    package = os.path.dirname(os.path.dirname(os.path.abspath(resiliency.__file__)))
    popen = subprocess.Popen(
        [sys.executable, "-m", "resiliency.cli", *words],
        env=child_environment(package) | dict(variables),
        start_new_session=True,
    )
    logger.info("%s is process %d", name, popen.pid)
    return _Process(name, number, popen, os.pidfd_open(popen.pid))


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


def _wait_for_any(processes: Sequence[_Process], timeout_s: float | None, *fds: int) -> None:
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
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


def _end_launcher(folder: Path, number: int) -> None:
    """Of a host whose monitor was killed, and has left it to the next one. There is none any more."""
    name = _host_name(number)
    found = find_launcher(StateFolder(str(folder / f"host-{number}"), name).socket_name)
    if found is None:
        return
    with suppress(ProcessLookupError):
        pidfd = os.pidfd_open(found.pid)
        try:
            logger.info("%s has no monitor any more; its launcher, process %d, is ended", name, found.pid)
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
            if not poll.poll(_END_TIMEOUT_S * 1000):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)


@contextmanager
def _handled_by(handler: object) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in _SIGNALS}  # type: ignore[arg-type]
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
