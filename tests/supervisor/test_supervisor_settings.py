"""supervisor.yaml: nothing in it is ignored, and an older library's names mean what they say there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from resiliency.errors import ConfigError
from resiliency.supervisor.auth import Authority
from resiliency.supervisor.settings import HookSettings, SupervisorSettings, read_settings


def read(folder: Path, **values: Any) -> SupervisorSettings:
    path = folder / "supervisor.yaml"
    path.write_text(yaml.safe_dump({"workload": {"name": "job"}, **values}))
    return read_settings(str(path))


def test_the_older_names_mean_what_they_say(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        heartbeat_polling_period_s=15,
        heartbeat_timeout_s=30,
        pod_termination_threshold_s=60,
        jobset_downtime_threshold_s=180,
        workers_per_host=8,
        num_dp_replicas=4,
        num_nodes_per_dp=2,
        min_num_dp_replicas=2,
        max_num_dp_replicas=6,
        max_in_job_restarts=1,
        max_workload_restarts=0,
        enable_workload_scaling=True,
        enable_fault_injection=True,
        fault_injection_period_s=600,
    )
    (spec,) = found.workloads
    assert (found.sensor.period_s, found.sensor.timeout_s) == (15, 30)
    assert (spec.stop_timeout_s, spec.start_timeout_s, spec.ranks_per_host) == (60, 180, 8)
    assert (spec.replicas, spec.hosts_per_replica, spec.min_replicas, spec.scale_up) == (6, 2, 2, True)
    assert (spec.max_in_job_restarts, spec.max_workload_restarts) == (1, 0)
    assert (found.enable_fault_injection, found.fault_injection_period_s) == (True, 600)


def test_without_scaling_a_job_has_one_size(tmp_path: Path) -> None:
    (spec,) = read(tmp_path, num_dp_replicas=4, enable_workload_scaling=False).workloads
    assert (spec.replicas, spec.min_replicas, spec.scale_up) == (4, 4, False)


def test_a_workload_says_otherwise_than_all(tmp_path: Path) -> None:
    jobs = [{"name": "a"}, {"name": "b", "replicas": 3, "ranks_per_host": 2}]
    path = tmp_path / "s.yaml"
    path.write_text(yaml.safe_dump({"workloads": jobs, "num_dp_replicas": 3, "workers_per_host": 8}))
    assert [spec.ranks_per_host for spec in read_settings(str(path)).workloads] == [8, 2]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"heartbeat_timout_s": 3}, "did you mean heartbeat_timeout_s"),
        ({"workload": {"name": "job", "replicas": 2, "min_replica": 1}}, "did you mean min_replicas"),
        ({"sensor_address": "x"}, "no process of its own"),
        ({"job_namespace": "x"}, "Kubernetes"),
        ({}, "how many data-parallel replicas"),
        ({"replicas": "two"}, "replicas='two': pass a whole number"),
        ({"replicas": True}, "pass a whole number"),
        ({"replicas": 0}, "pass 1 or more"),
        ({"replicas": 2, "num_dp_replicas": 3}, "two names of one thing"),
        ({"num_dp_replicas": 4, "max_num_dp_replicas": 2}, "less than"),
        ({"num_dp_replicas": 4, "max_num_dp_replicas": 6, "enable_workload_scaling": False}, "never reached"),
        ({"num_dp_replicas": 4, "min_num_dp_replicas": 2, "enable_workload_scaling": False}, "never reached"),
        ({"replicas": 1, "heartbeat_timeout_s": 1}, "more than one period"),
        ({"replicas": 1, "fault_injection_period_s": 10}, "does nothing without"),
        ({"replicas": 1, "hook": {"command": []}}, "pass command, the words of a program, or signal"),
        ({"replicas": 1, "hook": {"signal": "KILL"}}, "no signal that a process can handle"),
        ({"replicas": 1, "hook": {"signal": "usr9"}}, "no signal that a process can handle"),
        ({"replicas": 1, "hook": {"command": ["x"], "timeout": 1}}, "timeout"),
        ({"replicas": 1, "listen": "7600"}, "pass HOST:PORT"),
        ({"replicas": 1, "dry_run": "perhaps"}, "dry_run"),
        ({"replicas": 1, "workloads": [{"name": "x"}]}, "either"),
        ({"workload": None, "workloads": [{"name": "x", "replicas": 1}] * 2}, "two workloads"),
        ({"replicas": 1, "cluster": "k8s"}, "cluster='k8s'"),
        ({"replicas": 1, "kubernetes": {"lease": "x"}}, "does nothing without `cluster: kubernetes`"),
        ({"replicas": 1, "cluster": "kubernetes", "kubernetes": "x"}, "`kubernetes:` is a mapping"),
        (
            {"replicas": 1, "cluster": "kubernetes", "kubernetes": {"audiense": "x"}},
            "unknown key 'kubernetes.audiense'",
        ),
        ({"replicas": 1, "cluster": "kubernetes", "kubernetes": {"quarantine_s": 0}}, "kubernetes.quarantine_s=0"),
        ({"replicas": 1, "cluster": "kubernetes", "kubernetes": {"lease": ""}}, "kubernetes.lease=''"),
        ({"replicas": 1, "cluster": "kubernetes", "kubernetes": {"audience": ""}}, "kubernetes.audience=''"),
        ({"replicas": 1, "cluster": "kubernetes", "kubernetes": {"namespace": 5}}, "kubernetes.namespace=5"),
        ({"replicas": 1, "cluster": "kubernetes", "replicated_job_name": "x"}, "Kubernetes"),
        (
            {"replicas": 1, "cluster": "kubernetes", "job_namespace": "a", "kubernetes": {"workload_namespace": "b"}},
            "job_namespace and kubernetes.workload_namespace are one thing",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_a_sentence(tmp_path: Path, values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read(tmp_path, **values)


def test_paths_are_meant_from_the_files_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/my home")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = read(
        tmp_path,
        replicas=1,
        state="here/s.db",
        shared_token="token",
        monitor_tokens="/t",
        operator_token="~/operator",
        events="a log",
        tls={"cert": "c.pem", "key": "~/k.pem"},
        policy="my policy.py:Mine",
        hook={"command": ["./resized.sh", "./argument"]},
    )
    assert (found.state, found.shared_token) == (f"{tmp_path}/here/s.db", f"{tmp_path}/token")
    assert (found.monitor_tokens, found.operator_token) == ("/t", "/my home/operator")
    assert (found.events, found.policy) == (f"{tmp_path}/a log", f"{tmp_path}/my policy.py:Mine")
    assert found.tls is not None and (found.tls.cert, found.tls.key) == (f"{tmp_path}/c.pem", "/my home/k.pem")
    assert found.hook is not None and found.hook.command == [f"{tmp_path}/resized.sh", "./argument"]
    in_path = read(tmp_path, replicas=1, hook={"command": "logger"}).hook
    assert in_path is not None and in_path.command == ["logger"]


def test_kubernetes_has_settings_of_its_own_and_the_guides_names_of_a_namespace(tmp_path: Path) -> None:
    plain = read(tmp_path, replicas=1, cluster="kubernetes").kubernetes
    assert (plain.lease, plain.audience, plain.workload_namespace) == ("resiliency-supervisor",) * 2 + ("",)
    for name in ("job_namespace", "workload_namespace"):
        found = read(tmp_path, replicas=1, cluster="kubernetes", **{name: "jobs"}, kubernetes={"token_file": "token"})
        assert found.kubernetes.workload_namespace == "jobs"
        assert (found.kubernetes.token_file, found.kubernetes.ca_file) == (f"{tmp_path}/token", "")


def test_pods_prove_who_they_are_and_operators_need_a_token_all_the_same(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="operator_token"):
        Authority.of(read(tmp_path, replicas=1, cluster="kubernetes"))
    (tmp_path / "operator").write_text("c" * 20)
    (tmp_path / "operator").chmod(0o600)
    authority = Authority.of(read(tmp_path, replicas=1, cluster="kubernetes", operator_token="operator"))
    for header in ("", "Bearer x", "Bearer " + "c" * 20):
        assert authority.monitor_patterns(header, None) == []
    assert authority.allows_operator("Bearer " + "c" * 20) and not authority.allows_operator("Bearer x")
    assert [Authority.token_of(header) for header in ("Bearer x y", "bearer x ", "Basic x", "")] == ["x y", "x", "", ""]


def test_nothing_listens_without_authentication_unless_told_to(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--insecure-no-authentication"):
        Authority.of(read(tmp_path, replicas=1))
    assert Authority.of(read(tmp_path, replicas=1, insecure_no_authentication=True)).insecure


def test_token_files_are_bound_to_names_and_are_secret(tmp_path: Path) -> None:
    tokens, operator = tmp_path / "tokens", tmp_path / "operator"
    tokens.write_text("node-* aaaaaaaaaaaaaaaaaaaa  # the rack\nspare bbbbbbbbbbbbbbbbbbbb\n")
    operator.write_text("cccccccccccccccccccc\n")
    for path in (tokens, operator):
        path.chmod(0o600)
    found = read(tmp_path, replicas=1, monitor_tokens="tokens", operator_token="operator")
    authority = Authority.of(found)
    patterns = authority.monitor_patterns("Bearer aaaaaaaaaaaaaaaaaaaa", None)
    assert patterns == ["node-*"] and authority.may_speak_for(patterns, "node-1")
    assert not authority.may_speak_for(patterns, "spare") and not authority.may_speak_for(patterns, "node-1\n")
    assert authority.monitor_patterns("Bearer x", None) == authority.monitor_patterns("", None) == []
    assert authority.allows_operator("Bearer cccccccccccccccccccc")
    basic = "Basic OmNjY2NjY2NjY2NjY2NjY2NjY2Nj"  # :cccccccccccccccccccc
    assert authority.allows_operator(basic, to_look=True) and not authority.allows_operator(basic)
    assert not authority.allows_operator("Bearer aaaaaaaaaaaaaaaaaaaa")
    tokens.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        Authority.of(found)


def test_a_signal_is_named_as_people_do(tmp_path: Path) -> None:
    for name in ("USR1", "sigusr1", "SIGUSR1"):
        hook = HookSettings(signal=name)
        assert (hook.signal, hook.number, hook.command) == ("SIGUSR1", 10, [])
    assert HookSettings(command=["x"]).number == 0


def test_a_cluster_is_chosen_by_its_name(tmp_path: Path) -> None:
    assert read(tmp_path, replicas=1).cluster == "none"
    with pytest.raises(ConfigError, match="cluster='swarm': no such backend; there are: none"):
        read(tmp_path, replicas=1, cluster="swarm")
