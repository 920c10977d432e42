"""The only reader of ``os.environ``: every variable the library reads is named here.

Variables are read when :func:`environment` is called, never at import.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field

from resiliency.errors import ConfigError
from resiliency.paths import absolute_path

__all__ = [
    "ATTEMPT_VARIABLE",
    "JOB_VARIABLE",
    "LAUNCHER_VARIABLE",
    "REPLICAS_BEFORE_VARIABLE",
    "REPLICAS_VARIABLE",
    "STARTS_VARIABLE",
    "Environment",
    "Launch",
    "all_variables",
    "child_environment",
    "environment",
    "kubernetes_service",
    "lightning_seed",
    "package_root",
    "replace_variables",
    "set_variable",
]

#: Address at which ranks reach ``resiliency run``, see :mod:`resiliency.launch.rank_links`.
LAUNCHER_VARIABLE = "RESILIENCY_LAUNCHER"
#: How often ``resiliency run`` has started this host's ranks before. Torch's own restart count omits restarts after a
#: host joined or left.
STARTS_VARIABLE = "RESILIENCY_LAUNCHER_STARTS"
#: A supervisor's facts about a job: its name; the generation of its ranks, which counts as the attempt, from 1; the
#: number of data parallel replicas in this generation and in the previous one.
JOB_VARIABLE = "RESILIENCY_JOB"
ATTEMPT_VARIABLE = "RESILIENCY_ATTEMPT"
REPLICAS_VARIABLE = "RESILIENCY_REPLICAS"
REPLICAS_BEFORE_VARIABLE = "RESILIENCY_REPLICAS_BEFORE"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What the launchers of this process say about its job.

    Attributes:
        job: launcher -> its name for the job, for each launcher that gives one. Plain strings, which are stored with a
            checkpoint.
        restarts: launchers that say that this process is a restart of the job.
    """

    job: Mapping[str, str] = field(default_factory=dict)
    restarts: frozenset[str] = frozenset()

    def continues(self, writer: Mapping[str, str]) -> bool:
        """True when this process is a restart of the job whose ``job`` was ``writer``."""
        return any(name in self.restarts and writer.get(name) == job for name, job in self.job.items())


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What the process environment says about this process and its job. Folders are absolute.

    Attributes:
        run: name of the run (``RESILIENCY_RUN`` or ``JOB_IDENTIFIER``); "default" when neither is set.
        rank: global rank (``RANK``), 0 when unset.
        world_size: number of ranks (``WORLD_SIZE``), 1 when unset.
        local_rank: rank among those of this host (``LOCAL_RANK``, else ``SLURM_LOCALID``, else ``RANK`` modulo
            ``LOCAL_WORLD_SIZE``); None when none of them is set.
        node: name of this host, which is the failure domain (``RESILIENCY_NODE``, else ``NODE_NAME``, else the host
            name).
        restart: restart count set by the launcher (``TORCHELASTIC_RESTART_COUNT``), 0 when unset.
        start: how often ``resiliency run`` has started this host's ranks before; "" without it. It changes when this
            process begins another attempt, and then whatever a new process counts from zero must be reset.
        keeps_store: the launcher keeps the process group's store across restarts (``TORCHELASTIC_USE_AGENT_STORE``).
        events_dir: folder for event logs (``RESILIENCY_EVENTS_DIR``), None: below the checkpoint directory.
        heartbeat_dir: folder for heartbeats (``RESILIENCY_HEARTBEAT_DIR``), None: no heartbeat files, see
            :mod:`resiliency.runtime.heartbeat_files`.
        rank_monitor: a rank monitor of NVRx's ``ft_launcher`` waits for this rank (``FT_RANK_MONITOR_IPC_SOCKET``).
        local_dir: folder of the fast local tier (``RESILIENCY_LOCAL_DIR``), None: chosen by the caller.
        file_tracking: True when ``GOODPUT_USE_FILE_TRACKING`` is set (to anything, as the older library reads it).
        supervisor: comma-separated addresses of the supervisor (``RESILIENCY_SUPERVISOR``); "": none is set.
        launch: names of the job and whether this is a restart of it, according to the launchers, see :func:`_launch`.
        faults: fault points to trip, for tests (``RESILIENCY_FAULTS``), see :mod:`resiliency.faultpoints`.
    """

    run: str
    rank: int
    world_size: int
    local_rank: int | None
    node: str
    restart: int
    start: str
    keeps_store: bool
    events_dir: str | None
    heartbeat_dir: str | None
    rank_monitor: bool
    local_dir: str | None
    file_tracking: bool
    supervisor: str
    launch: Launch
    faults: str

    @property
    def wants_log(self) -> bool:
        """True when somebody will read the event log: a launcher runs the job, or the folder for the log was set."""
        return self.events_dir is not None or bool(self.launch.job)


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"environment variable {name}={text!r} is not a whole number; unset it or fix the launcher"
        ) from None


def _local_rank(env: Mapping[str, str]) -> int | None:
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        if env.get(name):
            return _integer(env, name, 0)
    ranks = _integer(env, "LOCAL_WORLD_SIZE", 0)
    return _integer(env, "RANK", 0) % ranks if ranks > 0 else None


def _launch(env: Mapping[str, str]) -> Launch:
    """The job's names and restarts, from torchrun, SLURM, JobSet, this library's own variables and ``JOB_IDENTIFIER``.

    A job gets its ``JOB_IDENTIFIER`` once, so two processes with the same identifier belong to the same job.
    """
    attempt = _integer(env, ATTEMPT_VARIABLE, 0)  # counted from 1; 0: not set
    own_job = env.get(JOB_VARIABLE) or env.get("RESILIENCY_RUN") or "default"
    known = {
        "torchrun": (
            _torchrun_job(env),
            _integer(env, "TORCHELASTIC_RESTART_COUNT", 0) > 0 or _integer(env, STARTS_VARIABLE, 0) > 0,
        ),
        "slurm": (env.get("SLURM_JOB_ID", ""), _integer(env, "SLURM_RESTART_COUNT", 0) > 0),
        "jobset": (
            env.get("JOBSET_UID") or env.get("JOBSET_NAME", ""),
            _integer(env, "JOBSET_RESTART_ATTEMPT", 0) > 0,
        ),
        "resiliency": (own_job if attempt > 0 else "", attempt > 1),
        "identifier": (env.get("JOB_IDENTIFIER", ""), True),
    }
    return Launch(
        job={name: job for name, (job, _) in known.items() if job},
        restarts=frozenset(name for name, (job, restarted) in known.items() if job and restarted),
    )


def _torchrun_job(env: Mapping[str, str]) -> str:
    """torchrun's id of the run. Without ``--rdzv-id`` the id is "none" for every run; then the folder of the run's logs
    is added, which torchrun makes anew at each start and keeps across restarts.
    """
    run = env.get("TORCHELASTIC_RUN_ID", "")
    log = re.fullmatch(r"(.+)/attempt_\d+/\d+/error\.json", env.get("TORCHELASTIC_ERROR_FILE", ""))
    return f"none in {log[1]}" if run == "none" and log else run


def environment(env: Mapping[str, str] | None = None) -> Environment:
    """Reads the process environment once.

    Args:
        env: mapping to read instead of ``os.environ`` (tests).

    Raises:
        ConfigError: a variable that must be a whole number is not.
    """
    source = os.environ if env is None else env
    return Environment(
        run=source.get("RESILIENCY_RUN") or source.get("JOB_IDENTIFIER") or "default",
        rank=_integer(source, "RANK", 0),
        world_size=_integer(source, "WORLD_SIZE", 1),
        local_rank=_local_rank(source),
        node=source.get("RESILIENCY_NODE") or source.get("NODE_NAME") or socket.gethostname(),
        restart=_integer(source, "TORCHELASTIC_RESTART_COUNT", 0),
        start=source.get(STARTS_VARIABLE, ""),
        keeps_store=source.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True",
        events_dir=absolute_path(source.get("RESILIENCY_EVENTS_DIR", "")) or None,
        heartbeat_dir=absolute_path(source.get("RESILIENCY_HEARTBEAT_DIR", "")) or None,
        rank_monitor=bool(source.get("FT_RANK_MONITOR_IPC_SOCKET")),
        local_dir=absolute_path(source.get("RESILIENCY_LOCAL_DIR", "")) or None,
        file_tracking="GOODPUT_USE_FILE_TRACKING" in source,
        supervisor=source.get("RESILIENCY_SUPERVISOR", ""),
        launch=_launch(source),
        faults=source.get("RESILIENCY_FAULTS", ""),
    )


def kubernetes_service() -> str:
    """``HOST:PORT`` of the API server as a pod of Kubernetes is told; "" in no pod."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    return f"{f'[{host}]' if ':' in host else host}:{port}" if host else ""


def lightning_seed() -> int:
    """The seed that Lightning gives to the samplers it makes (``PL_GLOBAL_SEED``), 0 when unset."""
    return _integer(os.environ, "PL_GLOBAL_SEED", 0)


def all_variables() -> dict[str, str]:
    """A copy of all environment variables, to pass to another process."""
    return dict(os.environ)


def replace_variables(values: Mapping[str, str]) -> None:
    """Replaces all environment variables of this process, for its C libraries, too."""
    os.environ.clear()
    os.environ.update(values)


def set_variable(name: str, value: str | None) -> None:
    """Sets a variable that another library reads; None removes it."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def package_root() -> str:
    """The folder that this copy of the package is imported from."""
    return os.path.dirname(os.path.dirname(os.path.realpath(__file__)))


def child_environment() -> dict[str, str]:
    """The environment for a helper process: this process's own, with this copy of the package importable."""
    env = dict(os.environ)
    paths = [package_root(), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return env
