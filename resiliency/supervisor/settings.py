"""Reads ``supervisor.yaml`` and checks it key by key. Needs pydantic and pyyaml (extra ``supervisor``).

Nothing in the file is ignored. An unknown key is refused with the most similar known one. Names of an older library
(``num_dp_replicas``, ``heartbeat_timeout_s``, ...) have the meaning that it gives them, and those that cannot
mean anything here are refused with the reason.
"""

from __future__ import annotations

import difflib
import os
import signal
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from resiliency.errors import ConfigError
from resiliency.paths import absolute_path
from resiliency.supervisor.clusters.registry import CLUSTERS
from resiliency.supervisor.model import WorkloadSpec
from resiliency.supervisor.sensor import SensorSettings

__all__ = [
    "HangSettings",
    "HookSettings",
    "KubernetesSettings",
    "SupervisorSettings",
    "TlsSettings",
    "absolute_paths",
    "read_settings",
    "split_address",
]

#: An older library's name of a workload's setting -> ours. Some are computed together, see :func:`_replicas`.
_WORKLOAD_NAMES = {
    "workers_per_host": "ranks_per_host",
    "num_nodes_per_dp": "hosts_per_replica",
    "min_num_dp_replicas": "min_replicas",
    "pod_termination_threshold_s": "stop_timeout_s",
    "container_termination_threshold_s": "stop_timeout_s",
    "jobset_downtime_threshold_s": "start_timeout_s",
    "workload_downtime_threshold_s": "start_timeout_s",
}
_REPLICA_NAMES = ("num_dp_replicas", "max_num_dp_replicas", "enable_workload_scaling")
_SENSOR_NAMES = {"heartbeat_polling_period_s": "period_s", "heartbeat_timeout_s": "timeout_s"}

_NO_KUBERNETES = (
    "is about Kubernetes, and means nothing here (the namespace does with `cluster: kubernetes`); leave it out"
)
_NO_PARTS = "is the address of a part that is no process of its own here: monitors connect to `listen`; leave it out"
#: Names of an older library and its chart that cannot mean anything here, and why.
_MEANINGLESS = {
    "job_namespace": _NO_KUBERNETES,
    "workload_namespace": _NO_KUBERNETES,
    "replicated_job_name": _NO_KUBERNETES,
    "workload_container_name": _NO_KUBERNETES,
    "container_name": _NO_KUBERNETES,
    "job_name": _NO_KUBERNETES + "; a workload's name is `name`",
    "orchestrator": _NO_KUBERNETES,
    "sensor_address": _NO_PARTS,
    "actuator_address": _NO_PARTS,
    "controller_address": _NO_PARTS,
    "host_daemon_port": "is the port of a server on each host; a monitor here listens on none; leave it out",
    "num_grpc_threads": "has nothing to count here: the supervisor is one thread, and speaks no gRPC; leave it out",
    "port": "is given as part of `listen`, as in 0.0.0.0:7600",
    "project": "is a project of Google Cloud, which this supervisor asks for nothing; leave it out",
    "watchdogs": "are the host monitor's: pass them as `resiliency host-monitor --watchdog NAME`",
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TlsSettings(_Strict):
    """The server's certificate and key.

    Attributes:
        client_ca: monitors and operators must show a certificate signed by this one.
    """

    cert: str
    key: str
    client_ca: str = ""


class HookSettings(_Strict):
    """The user's signal and program, sent and run before hosts are told the places of a plan.

    Attributes:
        command: words of the program's command line, without a shell; empty: there is no program.
        signal: sent to the ranks that still run, before the program, for example SIGUSR1; "": none. Ranks must handle
            it.
        timeout_s: seconds after which the program is killed and the plan goes on.
    """

    command: list[str] = Field(default_factory=list)
    signal: str = ""
    timeout_s: float = Field(default=60.0, gt=0)

    @property
    def number(self) -> int:
        """Number of the signal; 0 when there is none."""
        return signal.Signals[self.signal].value if self.signal else 0

    @field_validator("signal")
    @classmethod
    def _one_that_can_be_handled(cls, value: str) -> str:
        name = value.upper() if value.upper().startswith("SIG") or not value else f"SIG{value.upper()}"
        if name and (name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP")):
            raise ValueError(f"{value!r} is no signal that a process can handle; pass one, as SIGUSR1")
        return name

    @model_validator(mode="after")
    def _does_something(self) -> HookSettings:
        if not self.command and not self.signal:
            raise ValueError("pass command, the words of a program, or signal, or both")
        return self

    @field_validator("command", mode="before")
    @classmethod
    def _one_word(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class HangSettings(_Strict):
    """A rank hangs when it was quiet for ``hang_steps`` times its longest step, and for at least ``hang_floor_s``."""

    hang_steps: float = Field(default=3.0, ge=1)
    hang_floor_s: float = Field(default=30.0, ge=0)


class StragglerSettings(_Strict):
    """A rank is a straggler when its own work takes more than ``straggler_factor`` times the median of all ranks in
    three consecutive windows of ``straggler_window_s``. With a factor of 0 stragglers are not looked for."""

    straggler_factor: float = Field(default=1.5, ge=0)
    straggler_window_s: float = Field(default=30.0, gt=0)

    @field_validator("straggler_factor")
    @classmethod
    def _more_than_the_median(cls, value: float) -> float:
        if 0 < value <= 1:
            raise ValueError("half of all ranks take longer than the median: pass more than 1, or 0 to look for none")
        return value


class KubernetesSettings(_Strict):
    """Where the hosts of the jobs are, with ``cluster: kubernetes``.

    Attributes:
        workload_namespace: of the jobs' pods; "": the supervisor's own.
        lease: name of the Lease that the leader holds, in the supervisor's own namespace.
        audience: that the hosts' projected tokens are made for.
        watchdog_account: ServiceAccount of the machines' watchdogs, in the supervisor's own namespace; "": any account
            there, when the hosts are in another namespace.
        block_label: label of nodes that names their failure domain.
        quarantine_s: for how long a node is kept out after its first failure; each further one doubles it. A cluster
            takes up to a minute to notice that a node is dead, and until then calls it ready. ``kubectl uncordon`` ends
            a quarantine.
        server, token_file, ca_file, namespace: the API server, and as whom it is asked; "": as this pod's
            ServiceAccount.
    """

    workload_namespace: str = ""
    lease: str = Field(default="resiliency-supervisor", min_length=1)
    audience: str = Field(default="resiliency-supervisor", min_length=1)
    watchdog_account: str = ""
    block_label: str = "cloud.google.com/gce-topology-block"
    quarantine_s: float = Field(default=300.0, ge=60)
    server: str = ""
    token_file: str = ""
    ca_file: str = ""
    namespace: str = ""


class SupervisorSettings(_Strict):
    """The whole file. Relative paths in it start from its folder, and are absolute here.

    Attributes:
        workloads: at least one.
        monitor_tokens: file of lines ``HOST-PATTERN TOKEN``.
        shared_token: file with one token for all monitors.
        operator_token: file with the token of those who may look, drain and stop.
        cluster: that the hosts belong to. "kubernetes": hosts are pods, which prove who they are by their tokens; the
            leader holds a Lease, and a state file that is lost costs nothing but history.
        events: folder for the event log; "": none is written.
        lease_s: a leader that has not renewed its lease for this many seconds is replaced.
        handshake_timeout_s: seconds that a client has to say who it is.
        most_connections: at the same time.
    """

    listen: str = "127.0.0.1:7600"
    state: str = "supervisor.db"
    workloads: list[WorkloadSpec] = Field(min_length=1)
    cluster: str = "none"
    kubernetes: KubernetesSettings = KubernetesSettings()
    sensor: SensorSettings = SensorSettings()
    hang: HangSettings = HangSettings()
    straggler: StragglerSettings = StragglerSettings()
    monitor_tokens: str = ""
    shared_token: str = ""
    operator_token: str = ""
    insecure_no_authentication: bool = False
    tls: TlsSettings | None = None
    policy: str = ""
    hook: HookSettings | None = None
    dry_run: bool = False
    events: str = ""
    most_plans: int = Field(default=12, ge=1)
    lease_s: float = Field(default=5.0, ge=0.5)
    handshake_timeout_s: float = Field(default=10.0, gt=0)
    most_connections: int = Field(default=20_000, ge=1)
    enable_fault_injection: bool = False
    fault_injection_period_s: float = Field(default=3600.0, gt=0)

    @field_validator("workloads")
    @classmethod
    def _names_differ(cls, value: list[WorkloadSpec]) -> list[WorkloadSpec]:
        names = [spec.name for spec in value]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two workloads are named {twice[0]!r}; give each a name of its own")
        return value

    @field_validator("cluster")
    @classmethod
    def _one_that_is_known(cls, value: str) -> str:
        if value not in CLUSTERS:
            raise ValueError(f"no such backend; there are: {', '.join(CLUSTERS)}")
        return value

    @field_validator("listen")
    @classmethod
    def _address(cls, value: str) -> str:
        split_address(value)
        return value


def split_address(text: str) -> tuple[str, int]:
    """Splits ``host:port``.

    Raises:
        ConfigError: the text is not of that form.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"address {text!r}: pass HOST:PORT with a port up to 65535, as 0.0.0.0:7600")
    return host.strip("[]"), int(port)


def read_settings(path: str, changes: Mapping[str, Any] | None = None) -> SupervisorSettings:
    """Reads the file.

    Args:
        changes: settings of the command line, which take precedence; paths in them start from the current folder.

    Raises:
        ConfigError: the file cannot be read, or a setting cannot work; the error names the key.
    """
    try:
        with open(path, encoding="utf-8") as file:
            data = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; pass the supervisor's file with -f") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: pass a mapping with `workloads`, see docs/supervisor.md")
    folder = os.path.dirname(os.path.abspath(path))
    try:
        return _settings(data, folder, dict(changes or {}))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def absolute_paths(values: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """The same settings, in which relative paths start from ``folder`` and are absolute. Values of a wrong type stay as
    they are, for :class:`SupervisorSettings` to refuse."""

    def absolute(value: Any) -> Any:
        return absolute_path(value, folder) if isinstance(value, str) else value

    made = dict(values)
    if isinstance(made.get("kubernetes"), dict):
        files = {"token_file", "ca_file"}
        made["kubernetes"] = {key: absolute(each) if key in files else each for key, each in made["kubernetes"].items()}
    for key in ("state", "monitor_tokens", "shared_token", "operator_token", "events"):
        if key in made:
            made[key] = absolute(made[key])
    if isinstance(made.get("tls"), dict):
        made["tls"] = {key: absolute(value) for key, value in made["tls"].items()}
    if isinstance(made.get("policy"), str):
        path, colon, name = made["policy"].rpartition(":")
        made["policy"] = absolute(path) + colon + name
    if isinstance(made.get("hook"), dict) and made["hook"].get("command"):
        command = made["hook"]["command"]
        first, *others = command if isinstance(command, list) else [command]
        if isinstance(first, str) and os.sep in first:  # as in a shell: a word without a slash is looked up in PATH
            first = absolute(first)
        made["hook"] = {**made["hook"], "command": [first, *others]}
    return made


def _settings(data: dict[Any, Any], folder: str, changes: dict[str, Any]) -> SupervisorSettings:
    top = _with_kubernetes_names(data)
    _refuse_meaningless(top)
    own = set(SupervisorSettings.model_fields)
    sensor = {field.name for field in fields(SensorSettings)}
    groups = {"hang": set(HangSettings.model_fields), "straggler": set(StragglerSettings.model_fields)}
    grouped = set().union(*groups.values())
    workload_keys = {field.name for field in fields(WorkloadSpec)} | {*_WORKLOAD_NAMES, *_REPLICA_NAMES}
    sensor_flat = sensor - {"period_s", "timeout_s"}
    known = (
        (own - {"sensor", *groups}) | grouped | sensor_flat | {*_SENSOR_NAMES, "workload"} | (workload_keys - {"name"})
    )
    _refuse_unknown(top, known, "")
    values = absolute_paths({key: top[key] for key in own & top.keys() if key != "workloads"}, folder)
    values |= {name: {key: top[key] for key in keys & top.keys()} for name, keys in groups.items()}
    values["sensor"] = {
        **{_SENSOR_NAMES[key]: _number(key, top[key]) for key in _SENSOR_NAMES if key in top},
        **{key: _number(key, top[key]) for key in sensor_flat & top.keys()},
    }
    shared = {key: top[key] for key in (workload_keys - {"name"}) & top.keys()}
    values["workloads"] = [_workload(one, shared, workload_keys) for one in _workloads(top)]
    values |= absolute_paths({key: value for key, value in changes.items() if value is not None}, os.getcwd())
    values.setdefault("state", os.path.join(folder, "supervisor.db"))
    if "fault_injection_period_s" in top and not values.get("enable_fault_injection"):
        raise ConfigError("fault_injection_period_s does nothing without enable_fault_injection: true")
    try:
        return SupervisorSettings(**values)
    except ValidationError as error:
        raise ConfigError(_sentence(error)) from error


def _with_kubernetes_names(data: Mapping[Any, Any]) -> dict[Any, Any]:
    """The same settings; on Kubernetes the older library's names of a namespace are that of the workloads."""
    top = dict(data)
    own = top.get("kubernetes", {})
    if top.get("cluster") != "kubernetes":
        if "kubernetes" in top:
            raise ConfigError("`kubernetes:` does nothing without `cluster: kubernetes`; add that, or leave it out")
        return top
    if not isinstance(own, dict):
        raise ConfigError("`kubernetes:` is a mapping, see docs/kubernetes.md")
    own = dict(own)
    for name in ("workload_namespace", "job_namespace"):
        if name in top:
            value = top.pop(name)
            if own.setdefault("workload_namespace", value) != value:
                raise ConfigError(f"{name} and kubernetes.workload_namespace are one thing, and differ; keep one")
    top["kubernetes"] = own
    return top


def _workloads(top: dict[Any, Any]) -> list[Any]:
    one, several = top.get("workload"), top.get("workloads")
    if (one is None) == (several is None):
        raise ConfigError("pass either `workload:` with one job, or `workloads:` with a list of them")
    found = [one] if one is not None else several
    if not isinstance(found, list) or not found or not all(isinstance(each, dict) for each in found):
        raise ConfigError("`workloads` is a list of mappings, each with a `name`")
    return found


def _workload(data: dict[Any, Any], shared: dict[str, Any], known: set[str]) -> WorkloadSpec:
    where = f"workload {data.get('name', '(without a name)')!r}: "
    _refuse_meaningless(data, where)
    _refuse_unknown(data, known, where)
    # A workload's own setting takes precedence over the one for all workloads, whichever of its names either uses.
    said = _ours(data, where)
    values = {**_ours(shared, where), **said}
    if not isinstance(values.get("name"), str) or not values["name"]:
        raise ConfigError("each workload needs a `name`, a word that its hosts and events know it by")
    values = _replicas(values, where)
    kinds = {field.name: field.type for field in fields(WorkloadSpec)}
    for key, value in values.items():
        _check_kind(where + key, value, str(kinds[key]))
    return WorkloadSpec(**values)


def _ours(data: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """The same settings under our names."""
    found: dict[str, Any] = {}
    given: dict[str, str] = {}
    for key, value in data.items():
        name = _WORKLOAD_NAMES.get(key, key)
        if name in found and found[name] != value:
            raise ConfigError(f"{where}{given[name]} and {key} are two names of one thing, and differ; keep one")
        found[name], given[name] = value, key
    return found


def _replicas(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Sets ``replicas`` to the maximum: a job of ``num_dp_replicas`` that may grow is one that was shrunk."""
    usual, most = values.pop("num_dp_replicas", None), values.pop("max_num_dp_replicas", None)
    scaling = values.pop("enable_workload_scaling", None)
    if usual is not None and "replicas" in values and values["replicas"] != usual:
        raise ConfigError(f"{where}replicas and num_dp_replicas are two names of one thing, and differ; keep one")
    for name, value in (("num_dp_replicas", usual), ("max_num_dp_replicas", most)):
        if value is not None:
            _check_kind(where + name, value, "int")
    if scaling is not None:
        _check_kind(where + "enable_workload_scaling", scaling, "bool")
    size = values.get("replicas", usual)
    if most is not None:
        if size is not None and most < size:
            raise ConfigError(f"{where}max_num_dp_replicas={most} is less than num_dp_replicas={size}")
        if scaling is False and size is not None and most > size:
            raise ConfigError(f"{where}max_num_dp_replicas={most} is never reached with enable_workload_scaling: false")
        size = most
    if size is None:
        raise ConfigError(f"{where}say how many data-parallel replicas it has: replicas (or num_dp_replicas)")
    values["replicas"] = size
    if scaling is False:
        if values.get("min_replicas", size) != size:
            raise ConfigError(
                f"{where}min_replicas={values['min_replicas']} is never reached with enable_workload_scaling: false"
            )
        if values.get("scale_up"):
            raise ConfigError(f"{where}scale_up: true contradicts enable_workload_scaling: false; keep one")
        values.update(min_replicas=size, scale_up=False)
    return values


def _refuse_meaningless(data: Mapping[Any, Any], where: str = "") -> None:
    for key in data:
        if isinstance(key, str) and key.lower() in _MEANINGLESS:
            raise ConfigError(f"{where}{key} {_MEANINGLESS[key.lower()]}")


def _refuse_unknown(data: Mapping[Any, Any], known: set[str], where: str) -> None:
    for key in data:
        if key in known:
            continue
        near = difflib.get_close_matches(str(key), sorted(known), n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else f"; there are: {', '.join(sorted(known))}"
        raise ConfigError(f"{where}unknown key {key!r}{hint}")


def _check_kind(where: str, value: Any, kind: str) -> None:
    good = {
        "int": isinstance(value, int) and not isinstance(value, bool),
        "float": isinstance(value, (int, float)) and not isinstance(value, bool),
        "bool": isinstance(value, bool),
        "str": isinstance(value, str),
    }[kind]
    if not good:
        word = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}[kind]
        raise ConfigError(f"{where}={value!r}: pass {word}")


def _number(key: str, value: Any) -> float:
    _check_kind(key, value, "float")
    return float(value)


def _sentence(error: ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown key {place!r}"
    said = f"={first['input']!r:.100}" if not isinstance(first["input"], dict) else ""
    message = first["msg"].removeprefix("Value error, ")
    return f"{place}{said}: {message}"
