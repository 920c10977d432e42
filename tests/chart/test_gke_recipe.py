"""``recipes/gke_llama3_70b``: what its values make, whether its numbers agree, and what its page types."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.nemo_llama3_70b.flags import make_parser, problems, settle
from recipes.pretrain.models import CONFIGURATIONS, parameters_of
from tests.chart.rendering import CHARTS, Helm, Json, one, pods
from tests.chart.test_on_a_server import assert_taken, namespaces
from tests.cluster.client import Cluster
from tests.cluster.tools import REPOSITORY
from tests.cluster.typed import check_build, run_typed
from tests.docs.blocks import blocks_of

__all__ = ["namespaces"]

RECIPE = REPOSITORY / "recipes" / "gke_llama3_70b"
README = (RECIPE / "README.md").read_text()
#: Chart -> its values, in the order of the command line.
CASES = {
    "supervisor": ("supervisor", ["supervisor-values"]),
    "workload": ("workload", ["workload-values"]),
    "workload on A3 Ultra": ("workload", ["workload-values", "a3-ultra-values"]),
    "workload with multi-tier": ("workload", ["workload-values", "multi-tier-values"]),
    "workload with NeMo": ("workload", ["workload-values", "nemo-values"]),
    "gcs-fuse": ("gcs-fuse", ["gcs-fuse-values"]),
}
#: Bytes of a parameter in a checkpoint of mixed precision: bfloat16 weights, float32 weights, and two moments of Adam.
BYTES = 2 + 4 + 4 + 4


def files(case: str) -> list[Path]:
    return [RECIPE / f"{name}.yaml" for name in CASES[case][1]]


def values(name: str) -> Json:
    found: Json = yaml.safe_load((RECIPE / f"{name}.yaml").read_text())
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_values_pass_lint_and_are_rendered(helm: Helm, case: str) -> None:
    chart, _ = CASES[case]
    done = helm.lint(chart, files(case))
    assert done.returncode == 0, done.stdout
    assert helm.render(chart, files=files(case))


def test_the_server_knows_every_field(helm4: Helm, control_plane: Cluster, namespaces: tuple[str, str]) -> None:
    own, jobs = namespaces
    claim = values("events-claim")
    found = [{**claim, "metadata": {**claim["metadata"], "namespace": jobs}}]
    for number, (case, (chart, _)) in enumerate(CASES.items()):
        given: Json = {"workload_namespace": jobs} if chart == "supervisor" else {}
        there = own if chart == "supervisor" else jobs
        found += helm4.render(chart, given, files=files(case), name=f"r{number}", namespace=there)
    known = [each for each in found if each["kind"] != "Pod"]  # which wait for their ServiceAccounts
    assert {"JobSet", "PersistentVolume", "PersistentVolumeClaim", "DaemonSet"} <= {each["kind"] for each in known}
    assert_taken(control_plane, known)


@pytest.mark.parametrize("case", CASES)
def test_every_value_is_one_that_the_chart_knows(case: str) -> None:
    chart, names = CASES[case]
    schema = json.loads((CHARTS / chart / "values.schema.json").read_text())
    for name in names:
        assert list(_unknown(values(name), schema)) == []
    assert list(_unknown({"nobody": 1}, schema)) == ["nobody"]


def _unknown(value: Any, schema: Json) -> list[str]:
    """Names of values that a schema does not list, where it lists any."""
    listed = schema.get("properties")
    if not isinstance(value, dict) or listed is None:
        return []
    found = [key for key in value if key not in listed]
    return found + [each for key in value.keys() & listed.keys() for each in _unknown(value[key], listed[key])]


def test_the_numbers_agree(helm4: Helm) -> None:
    ours, theirs = values("workload-values")["workload"], values("supervisor-values")
    flags = dict(re.findall(r"--(\S+) ([^-\s]\S*)", ours["flags"]))
    for size in "num_dp_replicas", "num_nodes_per_dp":
        assert ours[size] == theirs[size]
    assert ours["gpus_per_node"] == theirs["workers_per_host"]
    of_a_replica = [int(flags[f"{axis}-parallel"]) for axis in ("tensor", "pipeline", "context")]
    assert of_a_replica[0] * of_a_replica[1] * of_a_replica[2] == ours["num_nodes_per_dp"] * ours["gpus_per_node"]
    for replicas in range(theirs["min_num_dp_replicas"], theirs["num_dp_replicas"] + 1):
        assert int(flags["global-batch"]) % replicas == 0, f"the batch cannot be divided by {replicas}"

    nodes = ours["num_dp_replicas"] * ours["num_nodes_per_dp"] + ours["spares"]
    objects = helm4.render("workload", files=files("workload"), name="llama3-70b", namespace="default")
    (hosts,) = one(objects, "JobSet")["spec"]["replicatedJobs"]
    assert hosts["replicas"] == nodes
    for said in f"--num-nodes {nodes} ", f"ready}}'={nodes} ", f"{nodes} machines", f"{nodes * 8} GPUs":
        assert said in README, said
    assert one(objects, "ServiceAccount")["metadata"]["name"] == re.findall(r"sa/(\S+)\"", README)[0]
    spare = ours["spares"] / (nodes - ours["spares"])
    lost = 1 / ours["num_dp_replicas"]
    assert f"{spare:.1%}".replace("%", " %") in README and f"{lost:.1%}".replace("%", " %") in README
    assert 24 * spare / lost == 6  # hours a day


@pytest.mark.parametrize("case", ["workload", "workload on A3 Ultra"])
def test_the_ram_disk_holds_what_the_fewest_hosts_keep(helm4: Helm, case: str) -> None:
    supervisor = values("supervisor-values")
    fewest = supervisor["min_num_dp_replicas"] * supervisor["num_nodes_per_dp"]
    of_a_host = parameters_of(CONFIGURATIONS["70B"]) * BYTES / fewest
    assert round(of_a_host / 1e9) == 41  # as the file says
    (pod,) = pods(helm4.render("workload", files=files(case), name="llama3-70b", namespace="default"))
    (disk,) = (each["emptyDir"] for each in pod["spec"]["volumes"] if each["name"] == "local")
    size = int(disk["sizeLimit"].removesuffix("Gi")) * 2**30
    assert size >= 3 * of_a_host
    requested = int(pod["spec"]["containers"][0]["resources"]["requests"]["memory"].removesuffix("Gi")) * 2**30
    assert requested > size
    configured = values("checkpoint-configuration")["spec"]
    assert configured["inMemoryVolumeSize"] == disk["sizeLimit"]


def test_multi_tier_replaces_the_ram_disk(helm4: Helm) -> None:
    (pod,) = pods(helm4.render("workload", files=files("workload with multi-tier")))
    (volume,) = (each for each in pod["spec"]["volumes"] if each["name"] == "local")
    assert volume["csi"] == {"driver": "multitier-checkpoint.csi.storage.gke.io"}
    (container,) = pod["spec"]["containers"]
    assert "/local" in container["command"]


def test_the_flags_for_nemo_are_those_of_its_recipe(helm4: Helm) -> None:
    (pod,) = pods(helm4.render("workload", files=files("workload with NeMo")))
    (container,) = pod["spec"]["containers"]
    arguments = container["command"][container["command"].index("recipes.nemo_llama3_70b.train") + 1 :]
    ours, theirs = values("workload-values")["workload"], values("supervisor-values")
    for replicas in range(theirs["min_num_dp_replicas"], theirs["num_dp_replicas"] + 1):
        ranks = replicas * ours["num_nodes_per_dp"] * ours["gpus_per_node"]
        args = settle(make_parser().parse_args(arguments), launched_ranks=ranks)
        assert problems(args, launched_ranks=ranks) == []
        assert args.ranks == ranks
    assert "/checkpoints" in {mount["mountPath"] for mount in container["volumeMounts"]}
    assert not [each for each in pod["spec"]["volumes"] if each["name"] == "local"]


def test_what_the_page_types_names_files_and_values_that_are_there(helm4: Helm, tmp_path: Path) -> None:
    for each in REPOSITORY.iterdir():
        (tmp_path / each.name).symlink_to(each)
    (tmp_path / "my-training").mkdir()
    (tmp_path / "my-training" / "train.py").touch()
    built: set[str] = set()
    pushed: set[str] = set()
    installed: dict[str, list[Json]] = {}
    asked: list[str] = []

    def docker(words: list[str]) -> str:
        if words[0] == "build":
            built.add(check_build(words[1:], tmp_path, built))
        else:
            pushed.add(words[1])
            assert words[0] == "push" and words[1] in built
        return ""

    def helm(words: list[str]) -> str:
        if words[0] == "install" and words[1] != "jobset":
            rest = [word for word in words[1:] if word not in ("--wait", "--create-namespace")]
            done = helm4.run("template", *rest, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            installed[words[1]] = [each for each in yaml.safe_load_all(done.stdout) if each]
        return ""

    def kubectl(words: list[str]) -> str:
        if words[0] == "apply":
            assert (tmp_path / words[words.index("-f") + 1]).exists()
        return json.dumps({"hosts": [{"node_rank": 1, "machine": "gke-1"}]}) if "--json" in words else "pod/one"

    def gcloud(words: list[str]) -> str:
        asked.append(" ".join(words))
        return "123"

    script = "\n".join(block.text for block in blocks_of(README) if block.info == ("bash",))
    run_typed(script, tmp_path, {"docker": docker, "helm": helm, "kubectl": kubectl, "gcloud": gcloud}, timeout_s=60)

    assert installed.keys() == {"training-data", "supervisor", "llama3-70b"}
    for release in "supervisor", "llama3-70b":
        images = {each["image"] for pod in pods(installed[release]) for each in pod["spec"]["containers"]}
        assert images <= pushed, f"{release}: {images} are not among {pushed}"
    (pod,) = pods(installed["llama3-70b"])
    assert "gs://my-project-llama3-70b/llama3-70b" in pod["spec"]["containers"][0]["command"]
    assert one(installed["training-data"], "PersistentVolume")["spec"]["csi"]["volumeHandle"] == "my-project-llama3-70b"
    claims = {
        each["persistentVolumeClaim"]["claimName"] for each in pod["spec"]["volumes"] if "persistentVolumeClaim" in each
    }
    assert claims == {"events", one(installed["training-data"], "PersistentVolumeClaim")["metadata"]["name"]}
    assert "compute instances reset gke-1 --zone us-east5-a" in asked
    assert {path.name for path in RECIPE.glob("*.yaml")} <= set(re.findall(r"[\w-]+\.yaml", README))
