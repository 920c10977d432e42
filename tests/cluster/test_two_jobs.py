"""Two jobs of one namespace under one supervisor: the second waits for the end of the first, and begins by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.client import wait_for
from tests.cluster.release import Release
from tests.cluster.rig import Rig

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]
LONG = 100_000


class Jobs:
    """Jobs that are submitted one after the other, each with a folder of its own."""

    def __init__(self, rig: Rig, folder: Path, *, steps: int) -> None:
        self._folder = folder
        self.release = Release(rig, self.folder("train"), hosts=2, spares=0, steps=steps, more_nodes=2)

    def folder(self, name: str) -> Path:
        made = self._folder / name
        made.mkdir(exist_ok=True)
        return made

    def submit(self, name: str, *, steps: int, script: str = "") -> None:
        more = {}
        if script:
            more = {"script": self._folder / f"{name}.py"}
            more["script"].write_text(script)
        self.release.submit(name, self.folder(name), steps=steps, **more)

    def trained(self, name: str) -> bool:
        """Whether ranks of its pods have made a step."""
        return (self.folder(name) / "steps").exists()

    def trains(self, name: str) -> bool:
        """Whether it trains now, on its own hosts alone."""
        return self._looked()["state"] == "running" and self.has_places(name)

    def has_places(self, name: str) -> bool:
        return {_job_of(host) for host in self._looked()["hosts"]} == {name}

    def _looked(self) -> dict:
        workload = self.release.status()["workloads"][0]
        assert len({_job_of(host) for host in workload["hosts"]}) <= 1, f"two jobs are mixed: {workload}"
        return workload

    def waits(self, name: str) -> bool:
        """Whether its hosts are ready, and status says so, and for the end of whom."""
        status = self.release.status()
        ready = [each for each in status["hosts"] if _job_of(each["name"]) == name and each["state"] == "ready"]
        reason = self._looked()["reason"]
        if len(ready) < 2 or "wait for the end of" not in reason:
            raise OSError(f"{len(ready)} hosts of {name} are ready: {reason!r}")
        assert f"hosts of {name} (" in reason
        return True

    def until_it_waits(self, name: str, behind: str) -> None:
        wait_for(f"{name} waits", lambda: self.waits(name), timeout_s=180)
        assert self.trains(behind) and not self.trained(name)

    def until_it_trains(self, name: str) -> None:
        wait_for(f"{name} trains", lambda: self.trains(name) and self.trained(name), timeout_s=180)

    def until_condition(self, name: str, kind: str) -> None:
        wait_for(f"{name} is {kind}", lambda: self._looked() and self.release.has_condition(kind, name), timeout_s=180)

    def remove(self, name: str) -> None:
        self.release.cluster.helm("uninstall", name, "-n", self.release.jobs)


def _job_of(host: str) -> str:
    return host.rpartition("-host-")[0]


def test_a_job_that_waits_begins_when_the_one_before_has_completed_or_was_deleted(rig: Rig, tmp_path: Path) -> None:
    jobs = Jobs(rig, tmp_path, steps=1500)
    jobs.until_it_trains("train")
    jobs.submit("second", steps=LONG)
    jobs.until_it_waits("second", behind="train")
    jobs.until_condition("train", "Completed")
    jobs.until_it_trains("second")
    jobs.remove("train")

    jobs.submit("third", steps=20)
    jobs.until_it_waits("third", behind="second")
    jobs.remove("second")
    jobs.until_it_trains("third")
    jobs.until_condition("third", "Completed")


def test_a_job_that_waits_begins_when_the_one_before_was_given_up(rig: Rig, tmp_path: Path) -> None:
    jobs = Jobs(rig, tmp_path, steps=20)
    jobs.until_condition("train", "Completed")
    jobs.submit("broken", steps=1, script="import module_that_nobody_has\n")
    wait_for("broken is begun", lambda: jobs.has_places("broken"), timeout_s=120)
    jobs.submit("last", steps=LONG)
    jobs.until_condition("broken", "Failed")
    assert not jobs.trained("last")
    jobs.until_it_trains("last")
