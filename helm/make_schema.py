"""Makes ``helm/supervisor/values.schema.json`` from the supervisor's settings: python helm/make_schema.py

Each setting of ``supervisor.yaml`` that has a meaning on Kubernetes can stand at the top level of the values, with the
guide's name where it has one. So a setting that is new, renamed or of another type needs no change here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from resiliency.supervisor import settings
from resiliency.supervisor.model import WorkloadSpec
from resiliency.supervisor.sensor import SensorSettings

CHART = Path(__file__).parent / "supervisor"
#: Settings that the chart fills in itself, or that have no meaning on Kubernetes.
_CHARTS_OWN = {
    *("name", "listen", "state", "workloads", "cluster", "kubernetes", "sensor", "hang", "straggler", "tls", "policy"),
    *("monitor_tokens", "shared_token", "operator_token", "insecure_no_authentication"),
}
_TEXT: dict[str, Any] = {"type": "string"}
_FLAG: dict[str, Any] = {"type": "boolean"}
_MAPPING: dict[str, Any] = {"type": "object"}
_LIST: dict[str, Any] = {"type": "array"}
_NAME: dict[str, Any] = {"type": "string", "pattern": "^[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?$"}
_NAMESPACE: dict[str, Any] = {"type": "string", "pattern": "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"}
_TEXTS: dict[str, Any] = {"type": "array", "items": _TEXT}


def _closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


#: What is about the chart's objects.
_CHART_KEYS: dict[str, Any] = {
    "global": _MAPPING,
    "workload_name": _NAME,
    "workload_namespace": _NAMESPACE,
    "job_namespace": _NAMESPACE,
    "replicated_job_name": _TEXT,
    "workload_container_name": _TEXT,
    "useA3high": {"enum": ["yes", "no", True, False]},
    "policy": _TEXT,
    "policy_class": {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*$"},
    "block_label": _TEXT,
    "node_quarantine_s": {"type": "number", "minimum": 60},
    "renewJobSet": {"type": "boolean"},
    "image": _closed(
        repository={"type": "string", "minLength": 1},
        tag=_TEXT,
        pullPolicy={"enum": ["Always", "IfNotPresent", "Never"]},
    ),
    "imagePullSecrets": _LIST,
    "replicaCount": {"type": "integer", "minimum": 1, "maximum": 5},
    "listen": {"type": "string", "pattern": "^.+:[0-9]{1,5}$"},
    "resources": _MAPPING,
    "nodeSelector": _MAPPING,
    "tolerations": _LIST,
    "affinity": _MAPPING,
    "priorityClassName": _TEXT,
    "podAnnotations": _MAPPING,
    "volumes": _LIST,
    "volumeMounts": _LIST,
    "tls": _closed(existingSecret=_TEXT, ca=_TEXT, dnsNames=_TEXTS, ipAddresses=_TEXTS),
    "operatorToken": _closed(existingSecret=_TEXT),
    "networkPolicy": _closed(**{"enabled": _FLAG, "from": _LIST}),
    "podDisruptionBudget": _closed(enabled=_FLAG),
    "serviceMonitor": _closed(enabled=_FLAG, interval=_TEXT, labels=_MAPPING),
    "prometheusRule": _closed(enabled=_FLAG, labels=_MAPPING),
    "host_daemon": _closed(
        enabled=_FLAG,
        image=_TEXT,
        port={"type": "integer", "minimum": 0, "maximum": 65535},
        nodeSelector=_MAPPING,
        driverDir=_TEXT,
        runtimeClassName=_TEXT,
        resources=_MAPPING,
    ),
    "watchdogs": {"type": "array", "minItems": 1, "items": {"type": "string", "pattern": "^[A-Za-z0-9_.:-]+$"}},
}


def schema() -> dict[str, Any]:
    """The schema of the supervisor chart's values."""
    properties = dict(sorted(_settings().items()))
    # They pass, so that templates/_validate.tpl can refuse them with the reason.
    properties |= dict.fromkeys(yaml.safe_load((CHART / "refused.yaml").read_text()), {})
    made = _closed(**properties, **_CHART_KEYS)
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values of the supervisor chart", **made}


def _settings() -> dict[str, Any]:
    everything = TypeAdapter(settings.SupervisorSettings).json_schema()
    definitions = everything["$defs"]
    workload = _described(definitions["WorkloadSpec"]["properties"], WorkloadSpec)
    sensor = _described(definitions["SensorSettings"]["properties"], SensorSettings)
    guides = {ours: name for name, ours in reversed((settings._WORKLOAD_NAMES | settings._SENSOR_NAMES).items())}
    found = _described(everything["properties"], settings.SupervisorSettings) | workload | sensor
    for group in ("HangSettings", "StragglerSettings"):
        found |= definitions[group]["properties"]
    found["hook"] = definitions["HookSettings"] | {"description": "Run before hosts are told the places of a plan."}
    found |= {"num_dp_replicas": found.pop("replicas"), "enable_workload_scaling": {"type": "boolean"}}
    found["max_num_dp_replicas"] = found["num_dp_replicas"]
    return {guides.get(key, key): _bounded(key, one) for key, one in found.items() if key not in _CHARTS_OWN}


def _described(properties: dict[str, Any], source: type) -> dict[str, Any]:
    """The same with the texts of the docstring's "Attributes:"."""
    section = (source.__doc__ or "").partition("Attributes:")[2]
    texts: dict[str, str] = {}
    for names, text in re.findall(r"^ {8}([\w, ]+): (.*(?:\n {12}.*)*)", section, re.MULTILINE):
        texts |= dict.fromkeys(re.split(", ?", names), " ".join(text.split()))
    return {
        key: one | ({"description": f"{texts[key][:1].upper()}{texts[key][1:]}"} if key in texts else {})
        for key, one in properties.items()
    }


def _bounded(key: str, one: dict[str, Any]) -> dict[str, Any]:
    """Without titles; dataclasses say of their numbers only in code that they are not negative."""
    kept = {name: value for name, value in one.items() if name != "title"}
    if isinstance(kept.get("properties"), dict):
        kept["properties"] = {name: _bounded(name, each) for name, each in kept["properties"].items()}
    if kept.get("type") in ("number", "integer") and not {"minimum", "exclusiveMinimum"} & kept.keys():
        counts = key in ("replicas", "hosts_per_replica", "min_replicas", "ranks_per_host") or key.endswith(
            "dp_replicas"
        )
        kept["minimum"] = 1 if counts else 0
    return kept


def text() -> str:
    """The file's content."""
    return json.dumps(schema(), indent=2) + "\n"


if __name__ == "__main__":
    (CHART / "values.schema.json").write_text(text())
