"""The workload's chart: what it makes of values, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from recipes.pretrain.flags import parse
from tests.chart.rendering import Helm, Json, containers, one, pods

IMAGE: Json = {"image": "registry/train:1"}
#: Beside the JobSet.
USUAL = {"ServiceAccount", "PodDisruptionBudget", "NetworkPolicy"}
CASES: dict[str, tuple[Json, set[str]]] = {
    "defaults": ({"workload": IMAGE}, USUAL),
    "no supervisor": (
        {"workload": IMAGE, "infrastructure": {"use_supervisor": False, "max_in_job_restarts": 9, "max_workload_restarts": 2}},
        USUAL,
    ),
    "bare": (
        {
            "workload": {**IMAGE, "serviceAccount": {"create": False, "name": "mine"}, "ram_disk": ""},
            "infrastructure": {"supervisor_ca": ""}, "networkPolicy": {"enabled": False}, "podDisruptionBudget": {"enabled": False},
        },
        set(),
    ),
    "a bucket": ({"workload": IMAGE, "infrastructure": {"enable_gcsfuse": True, "gcsfuse_bucket": "b"}}, USUAL),
    "a claim": ({"workload": IMAGE, "infrastructure": {"enable_gcsfuse": True, "pvc": "c"}}, USUAL),
    "multi-tier": ({"workload": IMAGE, "infrastructure": {"enable_multi_tier_checkpointing": True}}, USUAL),
    "a queue": ({"workload": IMAGE, "infrastructure": {"kueue_queue": "q", "topology_key": "rack"}}, USUAL),
    "everything": (
        {
            "workload": {
                **IMAGE, "imagePullSecrets": [{"name": "s"}], "script": ["-m", "recipes.pretrain.train"],
                "flags": "--model 36M\n  --max-steps 200", "workingDir": "/work", "env": [{"name": "A", "value": "b"}],
                "num_dp_replicas": 2, "num_nodes_per_dp": 3, "spares": 2, "gpus_per_node": 4, "workers_per_host": 2,
                "checkpointing": {"local_ckpt_interval": 5, "persistent_ckpt_interval": 100, "persistent_ckpt_dir": "gs://b/f"},
                "enable_tensorboard": True, "ram_disk": "10Gi", "save_timeout_s": 60, "drain_timeout_s": 9,
                "launcher_args": ["--log-dir", "/pod/state/logs", "-r", "3"], "watchdogs": ["disk"],
                "resources": {"limits": {"memory": "1Ti"}, "requests": {"cpu": "8"}}, "nodeSelector": {"a": "b"},
                "tolerations": [{"operator": "Exists"}], "affinity": {"nodeAffinity": {}}, "priorityClassName": "high",
                "podSecurityContext": {"fsGroup": 1}, "securityContext": {"privileged": True}, "labels": {"x": "y"},
                "podLabels": {"x": "z"}, "podAnnotations": {"p": "q"},
                "initContainers": [{"name": "i", "image": "i", "volumeMounts": []}], "volumes": [{"name": "v", "emptyDir": {}}],
                "volumeMounts": [{"name": "v", "mountPath": "/v"}], "serviceAccount": {"annotations": {"iam": "x"}},
            },
            "infrastructure": {"topology_key": "rack", "host_daemon_port": 60010},
            "networkPolicy": {"restrictEgress": True, "egress": [{"ports": [{"port": 443}]}]},
        },
        USUAL,
    ),
}  # fmt: skip
REFUSED: list[tuple[Json, Json, str]] = [
    ({"flag": "--x"}, {}, "flag"),
    ({"num_dp_replicas": 0}, {}, "num_dp_replicas"),
    ({"checkpointing": {"local_ckpt_interval": 0}}, {}, "local_ckpt_interval"),
    ({"ram_disk": "lots"}, {}, "ram_disk"),
    ({}, {"supervisor": True}, "supervisor"),
    ({}, {"supervisor_address": "http://s:7600"}, "supervisor_address"),
    ({"image": ""}, {}, "workload.image: name an image"),
    ({"gpus_per_node": 0}, {}, "workload.workers_per_host: say how many ranks"),
    ({"flags": "--text 'a b'"}, {}, "workload.flags: has quotes"),
    ({"checkpointing": {"persistent_ckpt_interval": 5}}, {}, "persistent_ckpt_interval: needs persistent_ckpt_dir"),
    ({"checkpointing": {"local_ckpt_interval": 5}, "ram_disk": ""}, {}, "local_ckpt_interval: needs local_ckpt_dir"),
    ({"checkpointing": {"persistent_ckpt_dir": "/x"}}, {}, "persistent_ckpt_dir: does nothing"),
    ({"checkpointing": {"local_ckpt_dir": "/x"}}, {}, "local_ckpt_dir: does nothing"),
    (
        {"checkpointing": {"local_ckpt_interval": 5}, "flags": ["--local-ckpt-dir=/x"]},
        {},
        "workload.flags: has --local-ckpt-dir=/x",
    ),
    ({}, {"max_in_job_restarts": 3}, "infrastructure.max_in_job_restarts: the supervisor decides"),
    ({}, {"max_workload_restarts": 3}, "infrastructure.max_workload_restarts: the supervisor decides"),
    ({}, {"supervisor_address": ""}, "infrastructure.supervisor_address: name all"),
    ({"spares": 1}, {"use_supervisor": False}, "workload.spares: nobody gives them ranks"),
    ({}, {"gcsfuse_bucket": "b"}, "infrastructure.gcsfuse_bucket: is not mounted without"),
    ({}, {"enable_gcsfuse": True}, "infrastructure.enable_gcsfuse: name the bucket"),
    ({"hostNetwork": True}, {}, "networkPolicy.enabled: does not hold"),
]


def pod_of(objects: list[Json]) -> Json:
    (pod,) = pods(objects)
    return pod


def command_of(objects: list[Json]) -> list[str]:
    words: list[str] = pod_of(objects)["spec"]["containers"][0]["command"]
    return words


def test_lint(helm: Helm) -> None:
    done = helm.lint("workload")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("case", CASES)
def test_values_become_objects(helm: Helm, case: str) -> None:
    values, others = CASES[case]
    objects = helm.render("workload", values)
    assert {each["kind"] for each in objects} == {"JobSet", *others}
    pod = pod_of(objects)
    volumes = [each["name"] for each in pod["spec"]["volumes"]]
    assert len(set(volumes)) == len(volumes)
    for container in containers(pod):
        assert {each["name"] for each in container["volumeMounts"]} <= set(volumes)
    assert all(isinstance(word, str) for word in command_of(objects))
    assert pod["spec"]["automountServiceAccountToken"] is False
    for each in objects:
        if selector := each["spec"].get("selector") if each["kind"] == "PodDisruptionBudget" else None:
            assert selector["matchLabels"].items() <= pod["metadata"]["labels"].items()


@pytest.mark.parametrize(
    ("workload", "infrastructure", "said"), REFUSED, ids=[json.dumps(each[:2]) for each in REFUSED]
)
def test_what_cannot_work_is_refused_with_its_name(helm: Helm, workload: Json, infrastructure: Json, said: str) -> None:
    assert said in helm.refusal("workload", {"workload": IMAGE | workload, "infrastructure": infrastructure})


def test_a_name_that_makes_pods_with_too_long_names_is_refused(helm4: Helm) -> None:
    assert "is too long" in helm4.refusal("workload", {"workload": IMAGE}, name="a" * 50)


@pytest.mark.parametrize("name", ["llama3.1", "7b", "2026"])
@pytest.mark.parametrize("chart", ["workload", "supervisor"])
def test_a_name_that_no_jobset_or_service_can_have_is_refused(helm4: Helm, chart: str, name: str) -> None:
    values = {"workload": IMAGE} if chart == "workload" else {}
    assert f"the name of the release, {name}, is no name" in helm4.refusal(chart, values, name=name)


def test_a_lost_host_is_replaced_alone_and_the_job_ends_with_its_first_host(helm4: Helm) -> None:
    objects = helm4.render(
        "workload", {"workload": {**IMAGE, "num_dp_replicas": 2, "num_nodes_per_dp": 3, "spares": 2}}
    )
    spec = one(objects, "JobSet")["spec"]
    (hosts,) = spec["replicatedJobs"]
    job = hosts["template"]["spec"]
    assert (hosts["name"], hosts["replicas"]) == ("host", 8)
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (1, 1, "Indexed")
    assert (job["backoffLimit"], job["podReplacementPolicy"]) == (2**31 - 1, "TerminatingOrFailed")
    assert "podFailurePolicy" not in job
    assert job["template"]["spec"]["restartPolicy"] == "OnFailure"
    assert spec["successPolicy"] == {"operator": "Any", "targetReplicatedJobs": ["host"]}
    assert spec["failurePolicy"] == {"maxRestarts": 0, "rules": [{"name": "given_up", "action": "FailJobSet"}]}
    assert spec["network"]["publishNotReadyAddresses"] is True
    budget = one(objects, "PodDisruptionBudget")["spec"]
    assert (budget["minAvailable"], budget["unhealthyPodEvictionPolicy"]) == (6, "AlwaysAllow")
    (container,) = pod_of(objects)["spec"]["containers"]
    (state,) = (each["mountPath"] for each in container["volumeMounts"] if each["name"] == "state")
    assert container["readinessProbe"]["exec"]["command"] == ["test", "-f", f"{state}/ready"]
    assert container["command"][container["command"].index("--state-dir") + 1] == state


def test_a_host_proves_who_it_is_and_may_save(helm4: Helm) -> None:
    pod = pod_of(helm4.render("workload", {"workload": IMAGE}))["spec"]
    (container,) = pod["containers"]
    words = container["command"]
    assert words[:2] == ["resiliency", "pod"]
    assert words[words.index("--supervisor") + 1].count("https://supervisor-") == 2
    (token,) = (each["projected"] for each in pod["volumes"] if each["name"] == "token")
    assert token["defaultMode"] == 0o400
    assert token["sources"][0]["serviceAccountToken"]["audience"] == "resiliency-supervisor"
    assert pod["terminationGracePeriodSeconds"] > int(words[words.index("--stop-timeout") + 1])
    ram = {"name": "local", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}}
    assert ram in pod["volumes"]
    assert {"name": "RESILIENCY_LOCAL_DIR", "value": "/pod/ram"} in container["env"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "8"}}


def test_flags_reach_the_script(helm4: Helm) -> None:
    words = command_of(helm4.render("workload", CASES["everything"][0]))
    script = words[words.index("--") + 1 :]
    assert script[:2] == ["-m", "recipes.pretrain.train"]
    assert script[2:6] == ["--model", "36M", "--max-steps", "200"]
    flags = parse(script[2:])
    assert (flags.local_ckpt_dir, flags.local_ckpt_interval) == ("/pod/ram", 5)
    assert (flags.persistent_ckpt_dir, flags.persistent_ckpt_interval) == ("gs://b/f", 100)
    assert flags.enable_tensorboard
    as_list = {"workload": {**IMAGE, "flags": ["--name", "two words", "$(POD_NAME)"]}}
    assert command_of(helm4.render("workload", as_list))[-3:] == ["--name", "two words", "$(POD_NAME)"]


def test_without_a_supervisor_all_pods_start_again_together(helm4: Helm) -> None:
    objects = helm4.render("workload", CASES["no supervisor"][0], name="llama")
    spec = one(objects, "JobSet")["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    assert spec["replicatedJobs"][0]["replicas"] == 8
    assert spec["successPolicy"]["operator"] == "All"
    assert spec["failurePolicy"] == {"maxRestarts": 2}
    assert (job["backoffLimit"], job["template"]["spec"]["restartPolicy"]) == (0, "Never")
    words = command_of(objects)
    assert words[:2] == ["resiliency", "run"]
    given = dict(zip(words, words[1:], strict=False))
    assert (given["--nnodes"], given["--max-restarts"]) == ("8", "9")
    assert given["--rdzv-endpoint"] == "llama-host-0-0.llama:29500"


@pytest.mark.parametrize("case", ["everything", "no supervisor"])
def test_its_command_has_the_flags_that_the_chart_passes(helm4: Helm, case: str) -> None:
    words = command_of(helm4.render("workload", CASES[case][0]))
    own = words[2 : words.index("--") if "--" in words else -1]
    said = ""
    for verb in ("pod", "host-monitor") if words[1] == "pod" else ("run",):
        command = [sys.executable, "-m", "resiliency.cli", verb, "--help"]
        said += subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert [word for word in own if word.startswith("--") and word.partition("=")[0] not in said] == []


def test_jobs_reach_their_own_pods_only(helm4: Helm) -> None:
    (rule,) = one(helm4.render("workload", {"workload": IMAGE}), "NetworkPolicy")["spec"]["ingress"]
    assert rule == {
        "from": [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "resiliency-host", "app.kubernetes.io/instance": "pretrain"}}}]
    }  # fmt: skip
    closed = one(helm4.render("workload", CASES["everything"][0]), "NetworkPolicy")["spec"]
    assert closed["policyTypes"] == ["Ingress", "Egress"]
    assert closed["egress"][-1] == {"ports": [{"port": 443}]}
    assert {"port": 53, "protocol": "UDP"} in closed["egress"][1]["ports"]


def test_volumes_are_where_values_say(helm4: Helm) -> None:
    def mounts(case: str) -> dict[str, Json]:
        pod = pod_of(helm4.render("workload", CASES[case][0]))
        volumes = {each["name"]: each for each in pod["spec"]["volumes"]}
        annotated = pod["metadata"].get("annotations", {}).get("gke-gcsfuse/volumes")
        found = {each["mountPath"]: volumes[each["name"]] for each in pod["spec"]["containers"][0]["volumeMounts"]}
        return found | {"annotated": annotated}

    bucket = mounts("a bucket")
    assert bucket["/gcs"]["csi"]["volumeAttributes"]["bucketName"] == "b"
    assert bucket["annotated"] == "true"
    claim = mounts("a claim")
    assert claim["/data"]["persistentVolumeClaim"] == {"claimName": "c"}
    assert claim["annotated"] == "true"
    assert mounts("multi-tier")["/local"]["csi"] == {"driver": "multitier-checkpoint.csi.storage.gke.io"}
    assert mounts("defaults")["annotated"] is None


def test_a_queue_of_kueue_gets_the_topology(helm4: Helm) -> None:
    objects = helm4.render("workload", CASES["a queue"][0])
    assert one(objects, "JobSet")["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    assert pod_of(objects)["metadata"]["annotations"] == {"kueue.x-k8s.io/podset-preferred-topology": "rack"}
    assert "affinity" not in pod_of(objects)["spec"]
