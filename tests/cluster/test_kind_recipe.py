"""``recipes/kind``: its page is run from top to bottom, on nodes that are processes instead of containers of Docker."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.rendering import one
from tests.cluster.client import wait_for
from tests.cluster.rig import ProcessNode, Rig
from tests.cluster.tools import REPOSITORY, find_tools
from tests.cluster.typed import Program, check_build, run_typed
from tests.docs.blocks import blocks_of

RECIPE = REPOSITORY / "recipes" / "kind"
NAMESPACES = {"resiliency-system": "system", "default": "jobs"}
#: Of the pods, which share this machine's network.
VARIABLES = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


class Laptop:
    """What the programs of the page would do.

    Args:
        clone: the folder in which they are run.
    """

    def __init__(self, rig: Rig, clone: Path) -> None:
        self.rig, self.cluster, self.clone = rig, rig.cluster, clone
        self.system, self.jobs = rig.namespace("system"), rig.namespace("jobs")
        self.nodes: dict[str, ProcessNode] = {}
        self.shared = Path()
        self.built: set[str] = set()
        self.loaded: set[str] = set()
        self.reports: list[str] = []

    @property
    def programs(self) -> dict[str, Program]:
        return {"docker": self.docker, "kind": self.kind, "helm": self.helm, "kubectl": self.kubectl}

    # -- containers ---------------------------------------------------------------------------------------------------

    def kind(self, words: list[str]) -> str:
        match words:
            case ["create", "cluster", "--config", file]:
                self._make_nodes(yaml.safe_load((self.clone / file).read_text()))
            case ["load", "docker-image", *images, "--name", "resiliency"]:
                assert set(images) <= self.built, f"{images} are not built"
                self.loaded |= set(images)
            case ["delete", "cluster", "--name", "resiliency"]:
                pass
            case _:
                raise NotImplementedError(words)
        return ""

    def _make_nodes(self, found: dict[str, Any]) -> None:
        assert (found["kind"], found["apiVersion"], found["name"]) == (
            "Cluster",
            "kind.x-k8s.io/v1alpha4",
            "resiliency",
        )
        assert [each["role"] for each in found["nodes"]] == ["control-plane", *["worker"] * 4]
        (mount,) = {tuple(mount.values()) for each in found["nodes"] for mount in each["extraMounts"]}
        folder, seen = mount
        assert seen == "/shared"
        self.shared = self.clone / folder
        assert self.shared.stat().st_mode & 0o777 == (self.shared / "events").stat().st_mode & 0o777 == 0o777
        for number, each in enumerate(found["nodes"]):
            first = each["role"] == "control-plane"
            labels = {"node-role.kubernetes.io/control-plane": ""} if first else {}
            node = self.rig.node(f"node-{number}", gpus=0, labels=labels)
            self.nodes[node.name] = node
            if first:
                self.cluster.kubectl("taint", "node", node.name, "node-role.kubernetes.io/control-plane:NoSchedule")

    def docker(self, words: list[str]) -> str:
        match words:
            case ["build", *rest]:
                self.built.add(check_build(rest, self.clone, self.built))
            case ["kill", node]:
                wait_for("training", lambda: self._workload()["step"] > 8)
                self.nodes[node].kill()
                wait_for("training on a spare", lambda: self._has_recovered(node))
            case ["start", node]:
                self.nodes[node].reboot()
            case ["run", "--rm", "-v", mount, image, "resiliency", *command]:
                assert image in self.built
                folder, _, seen = mount.partition(":")
                command = [re.sub(rf"^{seen}\b", folder, word) for word in command]
                done = [sys.executable, "-m", "resiliency.cli", *command]
                self.reports.append(subprocess.run(done, check=True, capture_output=True, text=True).stdout)
                return self.reports[-1]
            case _:
                raise NotImplementedError(words)
        return ""

    # -- the cluster --------------------------------------------------------------------------------------------------

    def helm(self, words: list[str]) -> str:
        if "oci://registry.k8s.io/jobset/charts/jobset" in words:  # which this cluster has already
            version = words[words.index("--version") + 1]
            assert (find_tools() / f"jobset-{version}.tgz").exists()
            return ""
        return self.cluster.helm(*self._here(words), timeout_s=180)

    def kubectl(self, words: list[str]) -> str:
        words = self._here(words)
        if "exec" in words:
            own, command = words[: words.index("--")], words[words.index("--") + 1 :]
            return self._exec(own[-1].removeprefix("deploy/"), command)
        return self.cluster.kubectl(*words, timeout_s=310)

    def _exec(self, deployment: str, command: list[str]) -> str:
        found = self.cluster.get(f"/apis/apps/v1/namespaces/{self.system}/deployments/{deployment}")["spec"]["selector"]
        selector = ",".join(f"{key}={value}" for key, value in found["matchLabels"].items())
        pod = self.cluster.pods(self.system, selector)[0]
        return self.nodes[pod["spec"]["nodeName"]].run_in(self.system, pod["metadata"]["name"], *command)

    def _here(self, words: list[str]) -> list[str]:
        """With the namespaces of this test, and values that fit nodes which are processes."""
        words = [word for word in words if word != "--create-namespace"]
        if "-n" not in words:
            end = words.index("--") if "--" in words else len(words)
            words[end:end] = ["-n", "default"]
        namespace = words.index("-n") + 1
        words[namespace] = getattr(self, NAMESPACES[words[namespace]])
        if "-f" in words:
            file = words.index("-f") + 1
            values = yaml.safe_load((self.clone / words[file]).read_text())
            words[file] = str(self.clone / f"{Path(words[file]).name}-here.json")
            Path(words[file]).write_text(json.dumps(self._fitted(values)))
        return words

    def _fitted(self, values: dict[str, Any]) -> dict[str, Any]:
        """Pods see the files of this machine and have addresses in its network; else the values are as they stand."""
        image = values["image"] if "image" in values else values["workload"]["image"]
        name = image if isinstance(image, str) else f"{image['repository']}:{image['tag']}"
        assert name in self.loaded, f"{name} is not in the nodes: {self.loaded}"
        text = json.dumps(values).replace('"path": "/shared"', f'"path": "{self.shared}"')
        here: dict[str, Any] = json.loads(text.replace('"/work/', f'"{REPOSITORY}/'))
        if "workload" not in here:
            return {**here, "listen": "$(POD_IP):7600", "workload_namespace": self.jobs}
        here["workload"]["env"] += [{"name": name, "value": value} for name, value in VARIABLES.items()]
        addresses = [f"https://supervisor-{number}.{self.system}:7600" for number in range(2)]
        return {**here, "infrastructure": {"supervisor_address": ",".join(addresses)}}

    def _workload(self) -> dict[str, Any]:
        found: dict[str, Any] = self._status()["workloads"][0]
        return found

    def _status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._exec("supervisor-0", ["resiliency", "supervisor", "status", "--json"]))
        return found

    def _has_recovered(self, node: str) -> bool:
        status = self._status()
        places = {each["machine"] for each in status["hosts"] if each["node_rank"] is not None}
        over = not any(each["open"] for each in status["incidents"])
        return node not in places and len(places) == 3 and over and status["workloads"][0]["state"] == "running"


@pytest.mark.long
@pytest.mark.timeout(400)
def test_the_page_works_from_the_first_command_to_the_last(rig: Rig, tmp_path: Path) -> None:
    clone = tmp_path / "clone"
    clone.mkdir()
    for each in REPOSITORY.iterdir():
        (clone / each.name).symlink_to(each)
    blocks = [block.text for block in blocks_of((RECIPE / "README.md").read_text())]
    laptop = Laptop(rig, clone)

    said = run_typed("\n".join(blocks), clone, laptop.programs, timeout_s=380)

    print(said)
    assert "hot_swap helped" in said
    (report,) = laptop.reports
    assert "Host lost" in report and "hot swap of" in report
    assert laptop.loaded == {"resiliency:kind", "resiliency-train:kind"}
    for namespace in laptop.system, laptop.jobs:
        assert laptop.cluster.helm("list", "-q", "-n", namespace) == ""


def test_jobset_takes_the_values_that_keep_it_off_the_workers(tools: Path, tmp_path: Path) -> None:
    (chart,) = tools.glob("jobset-*.tgz")
    words = ["template", "jobset", str(chart), "-f", str(RECIPE / "jobset-values.yaml")]
    done = subprocess.run([tools / "helm", *words], env={"HOME": str(tmp_path), "PATH": os.defpath}, capture_output=True, text=True, check=True)  # fmt: skip
    controller = one([each for each in yaml.safe_load_all(done.stdout) if each], "Deployment")
    pod = controller["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"node-role.kubernetes.io/control-plane": ""}
    assert pod["tolerations"][0]["key"] == "node-role.kubernetes.io/control-plane"
