"""What the charts and recipes make, against the schemas of each version of Kubernetes that is promised. Strict: a field that
a version does not know is an error, which its API server would drop without a word."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.chart.rendering import Helm, Json
from tests.chart.test_gke_recipe import CASES as RECIPE
from tests.chart.test_gke_recipe import files
from tests.chart.test_supervisor_chart import CASES as SUPERVISORS
from tests.chart.test_workload_chart import CASES as WORKLOADS
from tests.cluster.tools import REPOSITORY

VERSIONS = [f"1.{minor}" for minor in range(30, 37)]
#: Kinds that Kubernetes does not have itself. The rig's API server knows JobSet, see ``test_on_a_server.py``.
OTHERS = {"JobSet", "ServiceMonitor", "PrometheusRule"}

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def schemas() -> Any:
    """The package with the schemas, which reads a version's file once and not for each object."""
    package = pytest.importorskip("kubernetes_validate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(package.utils, "schema_contents", cache(package.utils.schema_contents))
        yield package


@pytest.fixture(scope="module")
def objects(tools: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Json]:
    """All that is made of the tests' values, each different object once; of a JobSet its Jobs."""
    helm4 = Helm(tools / "helm", tmp_path_factory.mktemp("home"))
    found = helm4.render("gcs-fuse", {"bucket": "b"})
    for values, _ in SUPERVISORS.values():
        found += helm4.render("supervisor", values)
    for values, _ in WORKLOADS.values():
        found += helm4.render("workload", values)
    for case, (chart, _) in RECIPE.items():
        found += helm4.render(chart, files=files(case))
    for case in "supervisor", "workload":
        found += helm4.render(case, files=[REPOSITORY / "recipes" / "kind" / f"{case}-values.yaml"])
    known = [each for each in found if each["kind"] not in OTHERS]
    jobs = [job for each in found if each["kind"] == "JobSet" for job in _jobs(each)]
    return list({json.dumps(each, sort_keys=True): each for each in known + jobs}.values())


def _jobs(jobset: Json) -> Iterator[Json]:
    for each in jobset["spec"]["replicatedJobs"]:
        metadata = {"name": f"{jobset['metadata']['name']}-{each['name']}-0"}
        yield {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": each["template"]["spec"]}


def test_each_promised_version_has_schemas(schemas: Any) -> None:
    assert {f"{version}.0" for version in VERSIONS} <= set(schemas.utils.all_versions())


@pytest.mark.parametrize("version", VERSIONS)
def test_a_version_knows_every_field(version: str, schemas: Any, objects: list[Json]) -> None:
    assert len(objects) > 100
    assert {"Job", "Deployment", "DaemonSet", "Lease", "NetworkPolicy"} <= {each["kind"] for each in objects}
    for each in objects:
        assert schemas.validate(each, version, strict=True) == version
    with pytest.raises(schemas.ValidationError):
        schemas.validate({**objects[0], "nobody": "knows this"}, version, strict=True)
