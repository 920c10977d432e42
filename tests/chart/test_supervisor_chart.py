"""The supervisor's chart: what it makes of values, and what it refuses."""

from __future__ import annotations

import json
import runpy
import ssl
import subprocess
import sys
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest
import yaml

from resiliency.supervisor.policy import load_policy
from resiliency.supervisor.settings import read_settings
from tests.chart.rendering import CHARTS, Helm, Json, containers, one, pods

POLICY = """
class Careful:
    def event_policy(self, situation):
        return None
"""
#: Values -> how often each kind is made, where that differs from what the defaults make.
CASES: dict[str, tuple[Json, dict[str, int]]] = {
    "defaults": ({}, {}),
    "one replica": ({"replicaCount": 1}, {"Deployment": 1, "Service": 1, "PodDisruptionBudget": 0}),
    "no watchdog": ({"host_daemon": {"enabled": False}}, {"DaemonSet": 0, "ServiceAccount": 1}),
    "a certificate of one's own": (
        {"tls": {"existingSecret": "mine", "ca": "-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n"}},
        {"Secret": 1},
    ),
    "a certificate that all trust": ({"tls": {"existingSecret": "mine"}}, {"Secret": 1, "ConfigMap": 1}),
    "a token of one's own": ({"operatorToken": {"existingSecret": "mine"}}, {"Secret": 1}),
    "observed": (
        {"serviceMonitor": {"enabled": True, "labels": {"release": "p"}}, "prometheusRule": {"enabled": True}},
        {"ServiceMonitor": 1, "PrometheusRule": 1},
    ),
    "no network policy": ({"networkPolicy": {"enabled": False}}, {"NetworkPolicy": 0}),
    "the old chart's names": (
        {
            "job_namespace": "jobs", "replicated_job_name": "host", "workload_container_name": "host", "useA3high": "yes",
            "host_daemon": {"port": 60010}, "enable_fault_injection": True, "fault_injection_period_s": 60,
            "min_num_dp_replicas": 2, "max_num_dp_replicas": 8,
        },
        {},
    ),
    "everything": (
        {
            "policy": POLICY, "policy_class": "Careful", "hook": {"command": ["/hooks/resized.sh"]}, "dry_run": True,
            "image": {"repository": "r/i", "tag": "t"}, "imagePullSecrets": [{"name": "s"}], "replicaCount": 3,
            "listen": "$(POD_IP):8443", "nodeSelector": {"pool": "cpu"}, "affinity": {"nodeAffinity": {}},
            "tolerations": [{"key": "k", "operator": "Exists"}], "priorityClassName": "high",
            "podAnnotations": {"a": "b"}, "volumes": [{"name": "hooks", "configMap": {"name": "hooks"}}],
            "volumeMounts": [{"name": "hooks", "mountPath": "/hooks"}], "watchdogs": ["xid", "my.module:Class"],
            "tls": {"dnsNames": ["supervisor.example"], "ipAddresses": ["10.0.0.7"]},
            "networkPolicy": {"from": [{"podSelector": {}}]}, "block_label": "rack", "swap_stragglers": True,
            "host_daemon": {"driverDir": "/home/kubernetes/bin/nvidia", "nodeSelector": {"gpu": "yes"}, "runtimeClassName": "nvidia"},
        },
        {"Deployment": 3, "Service": 3},
    ),
}  # fmt: skip
USUAL = {
    "Deployment": 2, "Service": 2, "DaemonSet": 1, "ConfigMap": 3, "Secret": 2, "ServiceAccount": 2, "ClusterRole": 1,
    "ClusterRoleBinding": 1, "Role": 2, "RoleBinding": 2, "Lease": 1, "NetworkPolicy": 1, "PodDisruptionBudget": 1, "Pod": 2,
    "ServiceMonitor": 0, "PrometheusRule": 0,
}  # fmt: skip
#: Values that are refused -> what the message must name.
REFUSED: list[tuple[Json, str]] = [
    ({"num_dp_replica": 4}, "num_dp_replica"),
    ({"host_daemon": {"enable": True}}, "enable"),
    ({"hook": {"comand": ["x"]}}, "comand"),
    ({"num_dp_replicas": "four"}, "num_dp_replicas"),
    ({"num_nodes_per_dp": 0}, "num_nodes_per_dp"),
    ({"lease_s": 0.1}, "lease_s"),
    ({"watchdogs": []}, "watchdogs"),
    ({"listen": "7600"}, "listen"),
    ({"heartbeat_timeout_s": 5}, "heartbeat_timeout_s: 5 is not more than heartbeat_polling_period_s=5"),
    ({"min_num_dp_replicas": 5}, "min_num_dp_replicas: 5 is more than num_dp_replicas=4"),
    ({"max_num_dp_replicas": 3}, "max_num_dp_replicas: 3 is less than num_dp_replicas=4"),
    ({"enable_workload_scaling": False, "min_num_dp_replicas": 2}, "min_num_dp_replicas: 2 is never reached"),
    ({"enable_workload_scaling": False, "max_num_dp_replicas": 6}, "max_num_dp_replicas: 6 is never reached"),
    ({"enable_workload_scaling": False, "scale_up": True}, "scale_up: true contradicts enable_workload_scaling"),
    ({"fault_injection_period_s": 60}, "fault_injection_period_s: does nothing without enable_fault_injection"),
    ({"job_namespace": "a", "workload_namespace": "b"}, "job_namespace: a and workload_namespace=b"),
    ({"replicated_job_name": "workload"}, "replicated_job_name: workload is not what"),
    ({"workload_container_name": "train"}, "workload_container_name: train is not what"),
    ({"tls": {"existingSecret": "mine", "dnsNames": ["a"]}}, "tls.dnsNames"),
    ({"tls": {"ca": "x"}}, "tls.ca: belongs to tls.existingSecret"),
    ({"policy": "x = 1"}, "policy: has no class Policy"),
    ({"actuator": {"port": 60080}}, "actuator: the supervisor is one process"),
    ({"sensor": {}}, "sensor: the supervisor is one process"),
    ({"controller": {}}, "controller: the supervisor is one process"),
    ({"project": "p"}, "project: no project of Google Cloud"),
    ({"enable_standalone_mode": False}, "enable_standalone_mode: outside of Kubernetes"),
    ({"enable_topology_aware_scheduling": True}, "enable_topology_aware_scheduling: spares of the same block"),
    ({"verbosity": 1}, "verbosity: the log has one level"),
    ({"log_to_stderr": True}, "log_to_stderr: the log always goes"),
    ({"watchdog_interval_s": 10}, "watchdog_interval_s: each watchdog has its own"),
    ({"watchdog_notification_cooldown_s": 10}, "watchdog_notification_cooldown_s: the same code"),
]


def settings_of(objects: list[Json], folder: Path) -> Any:
    """What the supervisor reads."""
    files = next(each["data"] for each in objects if each["kind"] == "ConfigMap" and "supervisor.yaml" in each["data"])
    for name, text in files.items():
        (folder / name).write_text(text)
    return read_settings(str(folder / "supervisor.yaml"))


def test_lint(helm: Helm) -> None:
    done = helm.lint("supervisor")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("case", CASES)
def test_values_become_objects(helm: Helm, case: str, tmp_path: Path) -> None:
    values, differs = CASES[case]
    objects = helm.render("supervisor", values)
    counts = {kind: sum(each["kind"] == kind for each in objects) for kind in USUAL}
    assert counts == USUAL | differs
    assert {each["kind"] for each in objects} <= USUAL.keys()
    for pod in pods(objects):
        volumes = [each["name"] for each in pod["spec"]["volumes"]]
        assert len(set(volumes)) == len(volumes)
        for container in containers(pod):
            assert {each["name"] for each in container["volumeMounts"]} <= set(volumes)
            assert all(isinstance(each, str) for each in [*container["command"], *container.get("args", [])])
    assert settings_of(objects, tmp_path).cluster == "kubernetes"


@pytest.mark.parametrize(("values", "said"), REFUSED, ids=[json.dumps(values) for values, _ in REFUSED])
def test_what_cannot_work_is_refused_with_its_name(helm: Helm, values: Json, said: str) -> None:
    assert said in helm.refusal("supervisor", values)


def test_each_refused_name_is_tried_above() -> None:
    names = yaml.safe_load((CHARTS / "supervisor" / "refused.yaml").read_text())
    assert names.keys() <= {key for values, _ in REFUSED for key in values}


def test_the_schema_is_that_of_the_settings() -> None:
    made = runpy.run_path(str(CHARTS / "make_schema.py"))["text"]()
    written = (CHARTS / "supervisor" / "values.schema.json").read_text()
    assert made == written, "run: python helm/make_schema.py"


def test_every_setting_reaches_the_supervisor(helm4: Helm, tmp_path: Path) -> None:
    schema = json.loads((CHARTS / "supervisor" / "values.schema.json").read_text())
    given = {key: one["default"] for key, one in schema["properties"].items() if "default" in one}
    given |= {"num_dp_replicas": 4, "enable_fault_injection": True, "events": "/events", "healthy_s": 1234567}
    found = settings_of(helm4.render("supervisor", given), tmp_path)
    defaults = settings_of(helm4.render("supervisor"), tmp_path)
    assert len(given) > 30
    assert found.workloads[0].healthy_s == 1234567
    assert (found.events, found.enable_fault_injection) == ("/events", True)
    # What the chart does not say is as in the library, and what it says is, too.
    assert found.sensor == defaults.sensor
    assert found.straggler == defaults.straggler


def test_the_guides_names_mean_what_the_guide_says(helm4: Helm, tmp_path: Path) -> None:
    values = {
        "workload_name": "llama", "workload_namespace": "jobs", "num_dp_replicas": 3, "num_nodes_per_dp": 5,
        "min_num_dp_replicas": 2, "workers_per_host": 4, "heartbeat_polling_period_s": 15, "heartbeat_timeout_s": 30,
        "max_in_job_restarts": 7, "max_workload_restarts": 1, "pod_termination_threshold_s": 60,
        "jobset_downtime_threshold_s": 180, "node_quarantine_s": 60, "quarantine_s": 20,
    }  # fmt: skip
    found = settings_of(helm4.render("supervisor", values), tmp_path)
    (workload,) = found.workloads
    assert (workload.name, workload.replicas, workload.hosts_per_replica, workload.min_replicas) == ("llama", 3, 5, 2)
    assert (workload.ranks_per_host, workload.max_in_job_restarts, workload.max_workload_restarts) == (4, 7, 1)
    assert (workload.stop_timeout_s, workload.start_timeout_s) == (60, 180)
    assert (found.sensor.period_s, found.sensor.timeout_s, found.sensor.quarantine_s) == (15, 30, 20)
    assert (found.kubernetes.workload_namespace, found.kubernetes.quarantine_s) == ("jobs", 60)
    assert found.kubernetes.lease == "pretrain-supervisor"
    assert found.kubernetes.watchdog_account == "pretrain-supervisor-node"


def test_a_jobset_is_made_anew_only_where_the_values_say_so(helm4: Helm) -> None:
    objects = helm4.render("supervisor", {"renewJobSet": True})
    rules = [rule for each in objects if each["kind"] == "Role" for rule in each["rules"]]
    (verbs,) = [rule["verbs"] for rule in rules if rule["resources"] == ["jobsets"]]
    assert {"create", "delete"} <= set(verbs)


def test_the_supervisor_may_be_in_the_namespace_of_the_job(helm4: Helm) -> None:
    objects = helm4.render("supervisor", {"workload_namespace": "sup"})
    names = [(each["kind"], each["metadata"]["name"], each["metadata"].get("namespace")) for each in objects]
    assert len(names) == len(set(names)) and "DaemonSet" in {kind for kind, *_ in names}
    accounts = [each["metadata"]["name"] for each in objects if each["kind"] == "ServiceAccount"]
    assert "pretrain-supervisor-node" in accounts


def test_rights_are_those_that_are_used(helm4: Helm) -> None:
    objects = helm4.render("supervisor", {"workload_namespace": "jobs"}, name="supervisor")
    rules = {
        (each["kind"], each["metadata"].get("namespace", "")): {
            (rule["apiGroups"][0], *rule["resources"], *rule.get("resourceNames", ())): " ".join(rule["verbs"])
            for rule in each["rules"]
        }
        for each in objects
        if each["kind"] in ("Role", "ClusterRole")
    }
    assert rules == {
        ("ClusterRole", ""): {
            ("", "nodes"): "get list watch patch",
            ("authentication.k8s.io", "tokenreviews"): "create",
        },
        ("Role", "jobs"): {
            ("", "pods"): "get list watch delete",
            ("batch", "jobs"): "get list watch patch",
            ("jobset.x-k8s.io", "jobsets"): "get list watch patch",
            ("policy", "poddisruptionbudgets"): "list",
            ("", "events"): "create",
        },
        ("Role", "sup"): {
            ("coordination.k8s.io", "leases"): "create",
            ("coordination.k8s.io", "leases", "supervisor"): "get patch",
        },
    }
    bindings = [each for each in objects if each["kind"].endswith("Binding")]
    assert all(
        each["subjects"] == [{"kind": "ServiceAccount", "name": "supervisor", "namespace": "sup"}] for each in bindings
    )
    mounted = [pod["spec"].get("automountServiceAccountToken") for pod in pods(objects)]
    assert sorted(mounted) == [False, False, True, True, True]


def test_two_releases_share_no_object(helm4: Helm) -> None:
    def names(namespace: str, name: str) -> set[tuple[str, str, str]]:
        objects = helm4.render("supervisor", {"workload_namespace": "jobs"}, name=name, namespace=namespace)
        return {(each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"]) for each in objects}

    assert not names("sup", "a") & names("sup", "b")
    shared = names("sup", "a") & names("other", "a")
    # Both give the hosts of one namespace their authority under the release's name.
    assert shared == {("ConfigMap", "jobs", "a-supervisor-ca")}


def test_the_certificate_holds_for_every_address_of_monitors(helm4: Helm, tmp_path: Path) -> None:
    objects = helm4.render("supervisor", {"tls": {"dnsNames": ["s.example"]}, "replicaCount": 3}, name="supervisor")
    secret = one(objects, "Secret", "supervisor-tls")["data"]
    for name, text in secret.items():
        (tmp_path / name).write_bytes(b64decode(text))
    bundles = [each["data"]["ca.crt"] for each in objects if each["metadata"]["name"] == "supervisor-ca"]
    assert bundles == [b64decode(secret["ca.crt"]).decode()] * 2
    daemon = next(pods([one(objects, "DaemonSet")]))
    (urls,) = (each for each in daemon["spec"]["containers"][0]["args"] if each.startswith("--supervisor="))
    names = [url.removeprefix("https://").rpartition(":")[0] for url in urls.removeprefix("--supervisor=").split(",")]
    assert names == ["supervisor-0.sup", "supervisor-1.sup", "supervisor-2.sup"]
    for name in [*names, "supervisor-1.sup.svc", "localhost", "127.0.0.1", "s.example"]:
        shake_hands(tmp_path, name)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(tmp_path, "supervisor-3.sup")


def shake_hands(folder: Path, name: str) -> None:
    """TLS between a server with the chart's certificate, and a client that trusts its authority, as strictly as Python
    3.13 does."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    trusting = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    trusting.verify_flags |= ssl.VERIFY_X509_STRICT
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(back, there, server_hostname=name)
    server = serving.wrap_bio(there, back, server_side=True)
    for _ in range(4):
        for side in client, server:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert client.version() is not None


def test_the_policy_is_one_that_can_be_loaded(helm4: Helm, tmp_path: Path) -> None:
    objects = helm4.render("supervisor", {"policy": POLICY, "policy_class": "Careful"})
    where = settings_of(objects, tmp_path).policy
    assert where == "/etc/resiliency/policy.py:Careful"
    assert type(load_policy(f"{tmp_path}/policy.py:Careful")).__name__ == "Careful"
    mounts = containers(next(pods([one(objects, "Deployment", "pretrain-supervisor-0")])))[0]["volumeMounts"]
    assert {"name": "config", "mountPath": "/etc/resiliency/policy.py", "subPath": "policy.py"} in mounts


def test_a_changed_setting_restarts_the_supervisors_and_nothing_else_does(helm4: Helm) -> None:
    def checksum(values: Json) -> str:
        deployment = one(helm4.render("supervisor", values), "Deployment", "pretrain-supervisor-0")
        text: str = deployment["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
        return text

    assert checksum({}) == checksum({"host_daemon": {"enabled": False}})
    assert checksum({}) != checksum({"heartbeat_timeout_s": 20})
    assert checksum({}) != checksum({"policy": "class Policy: pass"})


def test_an_eviction_takes_one_supervisor_at_a_time(helm4: Helm) -> None:
    objects = helm4.render("supervisor")
    budget = one(objects, "PodDisruptionBudget")["spec"]
    assert budget["minAvailable"] == 1
    for deployment in (each for each in objects if each["kind"] == "Deployment"):
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert budget["selector"]["matchLabels"].items() <= labels.items()
        # A supervisor that stands by is as Ready as the one that leads: else no roll-out would ever end.
        assert containers(deployment["spec"]["template"])[0]["readinessProbe"]["httpGet"]["path"] == "/healthz"


def test_its_commands_have_the_flags_that_the_chart_passes(helm4: Helm) -> None:
    objects = helm4.render("supervisor", CASES["everything"][0])
    for pod in pods(objects):
        (container,) = pod["spec"]["containers"]
        assert container["command"][0] == "resiliency"
        words = [*container["command"][1:], *container.get("args", [])]
        verbs = [each for each in words if not each.startswith("-")][: 2 if "supervisor" in words else 1]
        done = subprocess.run(
            [sys.executable, "-m", "resiliency.cli", *verbs, "--help"], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        missing = [each for each in words if each.startswith("-") and each.partition("=")[0] not in done.stdout]
        assert not missing


def test_the_notes_say_what_is_next_and_that_there_is_no_jobset(helm4: Helm) -> None:
    words = "install", "supervisor", str(CHARTS / "supervisor"), "-n", "sup", "--dry-run=client"
    said = subprocess.run([helm4.program, *words], capture_output=True, text=True, timeout=60).stdout
    assert "This cluster has no JobSet" in said
    assert "kubectl -n sup exec deploy/supervisor-0 -- resiliency supervisor status" in said
    assert "waits for 8 hosts in namespace default" in said
