"""``resiliency run --nnodes 3 --spares 1``: a supervisor and the hosts of a job on one machine.

For CI, a workstation, and trying out what happens when a host is lost. Each host is a host monitor with a process
group, a name (``RESILIENCY_NODE``), an agent and a local folder of its own, and works as it would on a machine of its
own; the supervisor is the one of a cluster. They talk over loopback, with tokens made for this run; or each host has a
network namespace of its own, see :mod:`resiliency.testing.hosts.local_network`.

A host that is lost stays away until this process gets SIGUSR2: then the host that was lost last is started again, like
a machine that was repaired. A monitor that was killed alone leaves its launcher running, and the next monitor takes the
launcher over.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import secrets
import shlex
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from resiliency.errors import AgentError, ConfigError
from resiliency.monitor.launcher_process import find_launcher
from resiliency.monitor.state import StateFolder
from resiliency.paths import absolute_path
from resiliency.settings import environment
from resiliency.supervisor.client import OperatorClient
from resiliency.supervisor.settings import absolute_paths, read_settings
from resiliency.testing.hosts.local_network import LocalNetwork
from resiliency.testing.hosts.local_processes import (
    LocalProcess,
    SignalCount,
    end_all,
    end_tree,
    handled_by,
    signal_all,
    start,
    wait_for_any,
)

__all__ = ["LocalCluster", "run_local_cluster"]

logger = logging.getLogger(__name__)

_RETURN = signal.SIGUSR2
#: Seconds until the supervisor must listen.
_LISTEN_TIMEOUT_S = 30.0
#: Settings of the supervisor: short times, because no message crosses a network.
_SETTINGS = {"heartbeat_polling_period_s": 0.5, "heartbeat_timeout_s": 2.0, "dwell_s": 5.0}
#: Settings of the supervisor that this module sets itself.
_OURS = frozenset(
    "listen state shared_token monitor_tokens operator_token tls events workload workloads name replicas min_replicas"
    " num_dp_replicas max_num_dp_replicas min_num_dp_replicas hosts_per_replica num_nodes_per_dp ranks_per_host"
    " workers_per_host enable_workload_scaling".split()
)
#: When to ask the supervisor whether it is frozen because a host has ended, in heartbeat timeouts after that end.
_LOOKS = (3.0, 6.0, 15.0)
#: Seconds that a supervisor has to end by itself when no host is left.
_NO_HOSTS_S = 15.0
#: Seconds that a launcher without a monitor has to end by itself.
_LAUNCHER_END_S = 10.0
_GAVE_UP = 3


@dataclass(frozen=True, kw_only=True)
class LocalCluster:
    """What to run.

    Attributes:
        hosts: number of hosts at full size.
        min_hosts: fewest hosts that the job can run with.
        spares: number of hosts beside those.
        ranks_per_host: ranks of each host.
        launcher_words: flags of ``resiliency run`` for each host's launcher.
        script: the script and its arguments, or ``-m MODULE ARGS``.
        workload: settings of it, see :class:`~resiliency.supervisor.model.WorkloadSpec`.
        supervisor: further settings, as at the top level of ``supervisor.yaml``.
        state_dir: folder for the state of the supervisor and the monitors; "": a temporary one, removed at the end.
        network_namespaces: each host has a network namespace of its own.
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
    network_namespaces: bool = False

    def __post_init__(self) -> None:
        if self.spares < 0:
            raise ConfigError(f"--spares {self.spares}: pass 0 or more hosts")
        for name in sorted(_OURS & set(self.supervisor)):
            raise ConfigError(f"--supervisor-set {name}: hosts on one machine have it set already; leave it out")


def run_local_cluster(cluster: LocalCluster) -> int:
    """Runs the job. Returns the exit status of ``resiliency supervisor run --until-ended``, or 3 when no host is left.
    Blocks: until the job has ended.

    Raises:
        ConfigError: a setting cannot work, or another run uses the state folder.
    """
    folder = Path(absolute_path(cluster.state_dir) or tempfile.mkdtemp(prefix="resiliency-local-"))
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        lock = _locked(folder)
        try:
            return _LocalRun(cluster, folder).run()
        finally:
            os.close(lock)
    finally:
        if not cluster.state_dir:
            shutil.rmtree(folder, ignore_errors=True)


def _locked(folder: Path) -> int:
    """Locks the folder, and returns the descriptor that holds the lock.

    Raises:
        ConfigError: another run holds it.
    """
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise ConfigError(f"--state-dir {folder}: another run uses it; pass another folder, or end that one") from None
    return fd


class _LocalRun:
    """One run. Thread: the main one, because it handles signals."""

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        self._timeout_s = read_settings(str(_write_settings(cluster, folder, "127.0.0.1:0"))).sensor.timeout_s
        self._running: list[LocalProcess] = []
        self._asked: list[int] = []
        self._lost: list[int] = []
        self._drained: set[int] = set()
        #: When to ask whether the supervisor is frozen, and by when a host must be back when none is left (monotonic
        #: seconds).
        self._looks: list[float] = []
        self._no_hosts_until: float | None = None
        self._address = ""
        self._network = LocalNetwork(cluster.hosts + cluster.spares) if cluster.network_namespaces else None

    def run(self) -> int:
        try:
            with handled_by(self._forward), SignalCount(_RETURN) as returns:
                return self._run(returns)
        finally:
            end_all(self._running)
            for number in range(self._cluster.hosts + self._cluster.spares):
                _end_launcher(self._folder, number)
            if self._network is not None:
                self._network.close()

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._asked.append(number)
        signal_all(self._running, number)

    def _run(self, returns: SignalCount) -> int:
        # An address file of an earlier run names a port where nothing listens any more.
        (self._folder / "address").unlink(missing_ok=True)
        listen = "127.0.0.1:0" if self._network is None else f"{self._network.address}:0"
        supervisor = _start_supervisor(self._cluster, self._folder, self._network, listen, "--begin-again")
        self._running.append(supervisor)
        address = _address_of(supervisor, self._folder / "address", self._asked)
        if address is None:
            return 128 + self._asked[0] if self._asked else 1
        self._address = address
        for number in range(self._cluster.hosts + self._cluster.spares):
            self._running.append(_start_host(self._cluster, self._folder, self._network, number, self._address))
        logger.info(
            "%d hosts and %d spares on this machine; resiliency supervisor status -s http://%s --token-file %s",
            self._cluster.hosts,
            self._cluster.spares,
            address,
            self._folder / "operator-token",
        )
        while True:
            wait_for_any(self._running, self._wait_s(), returns.fd)
            for one in [one for one in self._running if one.popen.poll() is not None]:
                self._running.remove(one)
                os.close(one.pidfd)
                code = one.popen.returncode
                if one.number is not None:
                    self._host_ended(one, one.number, code)
                elif code >= 0 or self._asked:
                    return 128 + self._asked[0] if self._asked else code
                else:
                    # Training goes on without the supervisor, and its state file holds what it had begun.
                    logger.warning("the supervisor was ended by %s; it is started again", signal.Signals(-code).name)
                    self._running.append(_start_supervisor(self._cluster, self._folder, self._network, address))
            for _ in range(returns.take() if not self._asked else 0):
                self._bring_back()
            if self._is_over():
                logger.error("no host is left, and none comes back")
                return _GAVE_UP
            self._look()

    def _wait_s(self) -> float | None:
        times = [*self._looks[:1], *filter(None, [self._no_hosts_until])]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _is_over(self) -> bool:
        return self._no_hosts_until is not None and time.monotonic() >= self._no_hosts_until and not self._asked

    def _host_ended(self, one: LocalProcess, number: int, code: int) -> None:
        now = time.monotonic()
        if self._network is not None:  # its monitor may have pulled the cable before it ended
            with suppress(OSError):
                self._network.cable_of(number).plug_in()
        if code and not self._asked:
            again = f"; kill -USR2 {os.getpid()} starts it again"
            logger.warning("%s (process %d) has ended, with %d%s", one.name, one.popen.pid, code, again)
            self._lost.append(number)
            self._looks = sorted({*self._looks, *(now + after * self._timeout_s for after in _LOOKS)})
        if not any(each.number is not None for each in self._running):
            self._no_hosts_until = now + _NO_HOSTS_S

    def _bring_back(self) -> None:
        if not self._lost:
            logger.warning("no host is lost that could be started again")
            return
        number = self._lost.pop()
        self._no_hosts_until = None
        if number in self._drained:
            self._drained.discard(number)
            self._tell(_host_name(number), "uncordon")
        self._running.append(_start_host(self._cluster, self._folder, self._network, number, self._address))

    def _look(self) -> None:
        """Tells a frozen supervisor which hosts are gone, because it cannot tell lost hosts from a lost network. Ends
        their launchers too, because their monitors are not started again. Blocks: up to 10 s for a request."""
        if not self._looks or time.monotonic() < self._looks[0]:
            return
        del self._looks[0]
        try:
            if not self._client().get("/v1/status", hosts=0)["frozen"]:
                return
        except AgentError as error:
            logger.warning("cannot ask the supervisor whether it waits for lost hosts: %s", error)
            return
        for number in self._lost:
            _end_launcher(self._folder, number)
            if number not in self._drained and self._tell(_host_name(number), "drain", reason="its process has ended"):
                self._drained.add(number)

    def _tell(self, host: str, what: str, **values: str) -> bool:
        try:
            logger.warning("%s", self._client().post(f"/v1/hosts/{host}/{what}", **values)["done"])
        except AgentError as error:
            logger.warning("the supervisor was not told to %s %s: %s", what, host, error)
            return False
        return True

    def _client(self) -> OperatorClient:
        token = (self._folder / "operator-token").read_text().strip()
        return OperatorClient(f"http://{self._address}", token=token)


def _host_name(number: int) -> str:
    return re.sub("[^A-Za-z0-9._-]", "-", f"{environment().node}-{number}").lstrip("._-")


def _end_launcher(folder: Path, number: int) -> None:
    """Ends the launcher that a killed monitor has left running for its successor, because there will be none. Blocks:
    until it has ended, a little over ten seconds at most."""
    found = find_launcher(StateFolder(str(folder / f"host-{number}"), _host_name(number)).socket_name)
    if found is not None:
        logger.warning("the launcher of %s (process %d) is ended: its monitor is gone", _host_name(number), found.pid)
        end_tree(found.pid, _LAUNCHER_END_S)


def _start_supervisor(
    cluster: LocalCluster, folder: Path, network: LocalNetwork | None, listen: str, *flags: str
) -> LocalProcess:
    path = _write_settings(cluster, folder, listen)
    words = ["supervisor", "run", "-f", str(path), "--until-ended", "--address-file", str(folder / "address"), *flags]
    return start("supervisor", None, words, {}, () if network is None else network.fds)


def _write_settings(cluster: LocalCluster, folder: Path, listen: str) -> Path:
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
        **absolute_paths(cluster.supervisor, os.getcwd()),  # given on the command line, not in the file's folder
        "workloads": [
            {
                "name": environment().run,  # the name that ranks write in their events
                "replicas": cluster.hosts,
                "min_replicas": cluster.min_hosts,
                "ranks_per_host": cluster.ranks_per_host,
                **cluster.workload,
            }
        ],
    }
    path = folder / "supervisor.yaml"
    path.write_text(json.dumps(settings, indent=2))  # JSON is valid YAML
    return path


def _start_host(
    cluster: LocalCluster, folder: Path, network: LocalNetwork | None, number: int, address: str
) -> LocalProcess:
    name = _host_name(number)
    variables = {"RESILIENCY_NODE": name}
    if local := environment().local_dir:
        variables["RESILIENCY_LOCAL_DIR"] = os.path.join(local, f"host-{number}")
    words = ["host-monitor", "--supervisor", f"http://{address}", "--token-file", str(folder / "monitor-token")]
    words += ["--host", name, "--nproc-per-node", str(cluster.ranks_per_host)]
    words += ["--state-dir", str(folder / f"host-{number}"), "--exit-when-completed", "--insecure-plain-http"]
    if network is None:
        words += ["--address", "127.0.0.1"]
    else:
        variables |= network.variables_of(name)
        words += ["--address", network.address_of(number), "--cable", network.cable_of(number).words()]
    if cluster.launcher_words:
        words.append(f"--launcher-args={shlex.join(cluster.launcher_words)}")
    with nullcontext() if network is None else network.inside(number):
        fds = () if network is None else network.fds
        return start(name, number, [*words, "--", *cluster.script], variables, fds)


def _address_of(supervisor: LocalProcess, path: Path, asked: Sequence[int]) -> str | None:
    """The address where the supervisor listens; None when it has ended or was told to end, or does not listen in
    time."""
    deadline = time.monotonic() + _LISTEN_TIMEOUT_S
    while not asked and supervisor.popen.poll() is None:
        with suppress(FileNotFoundError):
            if text := path.read_text().strip():
                return text
        if time.monotonic() >= deadline:
            logger.error("the supervisor does not listen after %.0f s; see its lines above", _LISTEN_TIMEOUT_S)
            return None
        wait_for_any([supervisor], 0.05)  # the file appears whole, by a rename; the end of a process is noticed at once
    return None
