"""Renders the charts, and looks into what came out."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.tools import REPOSITORY

__all__ = ["CHARTS", "Helm", "Json", "containers", "one", "pods"]

Json = dict[str, Any]
CHARTS = REPOSITORY / "helm"


@dataclass(frozen=True)
class Helm:
    """One version of Helm, which asks no cluster."""

    program: Path
    home: Path

    def lint(self, chart: str, files: Sequence[Path] = ()) -> subprocess.CompletedProcess[str]:
        return self.run("lint", str(CHARTS / chart), "--strict", *_given(files))

    def template(
        self, chart: str, values: Mapping[str, Any], name: str, namespace: str, files: Sequence[Path] = ()
    ) -> subprocess.CompletedProcess[str]:
        words = "template", name, str(CHARTS / chart), "-n", namespace, "--kube-version", "1.34.0"
        return self.run(*words, *_given([*files, Path("-")]), input=json.dumps(values))

    def render(
        self,
        chart: str,
        values: Mapping[str, Any] | None = None,
        *,
        name: str = "pretrain",
        namespace: str = "sup",
        files: Sequence[Path] = (),
    ) -> list[Json]:
        """The objects of a chart, which must all be whole; ``values`` come after those of ``files``."""
        done = self.template(chart, values or {}, name, namespace, files)
        assert done.returncode == 0, done.stderr
        found = [each for each in yaml.safe_load_all(done.stdout) if each]
        for each in found:
            assert each["apiVersion"] and each["kind"] and each["metadata"]["name"], each
        return found

    def refusal(self, chart: str, values: Mapping[str, Any], *, name: str = "pretrain", namespace: str = "sup") -> str:
        """Why a chart does not take the values."""
        done = self.template(chart, values, name, namespace)
        assert done.returncode != 0, f"it was rendered: {done.stdout}"
        return done.stderr

    def run(self, *words: str, input: str = "", cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        environment = {"HOME": str(self.home), "PATH": os.defpath}
        return subprocess.run(
            [self.program, *words], env=environment, input=input, cwd=cwd, capture_output=True, text=True, timeout=60
        )


def _given(files: Sequence[Path]) -> list[str]:
    return [word for file in files for word in ("-f", str(file))]


def one(objects: list[Json], kind: str, name: str = "") -> Json:
    """The object of a kind, or that of this name."""
    found = [each for each in objects if each["kind"] == kind and name in ("", each["metadata"]["name"])]
    assert len(found) == 1, [(each["kind"], each["metadata"]["name"]) for each in objects]
    return found[0]


def pods(objects: list[Json]) -> Iterator[Json]:
    """The pods that objects make, with their metadata."""
    for each in objects:
        if each["kind"] == "Pod":
            yield each
        elif each["kind"] in ("Deployment", "DaemonSet"):
            yield each["spec"]["template"]
        elif each["kind"] == "JobSet":
            yield from (job["template"]["spec"]["template"] for job in each["spec"]["replicatedJobs"])


def containers(pod: Json) -> list[Json]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]
