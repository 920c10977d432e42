"""What is said of a host, and what is to be done there."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import resiliency
from resiliency.doctor.facts import Folder, HostFacts, Remote
from resiliency.doctor.mounts import Mount
from resiliency.doctor.rules import (
    KNOWN_VARIABLES,
    HostFinding,
    Verdict,
    judge_folder,
    judge_host,
    judge_ports,
    judge_ramdisk,
    judge_remote,
)

GIB = 1024**3
GOOD = HostFacts(
    python=(3, 12, 4),
    kernel=(6, 18),
    packages={"torch": "2.13.0+cpu", "lightning": "2.6.6"},
    cores=8,
    memory_bytes=64 * GIB,
    open_files=65536,
    locked_bytes=None,
    lacks={},
    name_seconds=0.001,
    ephemeral=(32768, 60999),
    clock_synchronised=True,
    gpu_driver="",
    variables=("RESILIENCY_RUN",),
)
DISK = Folder(path="/ckpts", mount=Mount(point="/", kind="xfs"), free_bytes=100 * GIB, fsync_s=0.002)
SHM = Folder(path="/dev/shm", mount=Mount(point="/dev/shm", kind="tmpfs"), free_bytes=32 * GIB, fsync_s=0.0)


def told(findings: Any) -> list[HostFinding]:
    return [one for one in findings if one.verdict is not Verdict.OK]


def test_nothing_is_told_of_a_good_host() -> None:
    findings = [
        *judge_host(GOOD),
        *judge_folder(DISK, GOOD, state_bytes=GIB),
        *judge_ramdisk(SHM, GOOD, state_bytes=GIB),
        judge_remote(Remote(address="gs://b", seconds=0.2)),
        judge_ports(GOOD, 29500, free=True),
    ]
    assert told(findings) == []
    assert all(one.remedy == "" for one in findings)
    assert {"Python", "torch", "lightning", "kernel", "cores", "limits", "clock", "names", "variables"} <= {
        one.check for one in findings
    }


@pytest.mark.parametrize(
    ("changes", "check", "verdict", "words"),
    [
        ({"python": (3, 9, 1)}, "Python", Verdict.BROKEN, "3.10"),
        ({"python": (3, 10, 14)}, "Python", Verdict.NOTE, "gh-112275"),
        ({"python": (3, 11, 9)}, "Python", Verdict.NOTE, "gh-112275"),
        ({"packages": {"lightning": "2.6.6"}}, "torch", Verdict.BROKEN, "install torch"),
        ({"packages": {"torch": "2.5.1", "lightning": "2.6.6"}}, "torch", Verdict.BROKEN, "2.6"),
        ({"packages": {"torch": "2.13.0"}}, "Lightning", Verdict.WARNING, "pip install lightning"),
        ({"packages": {"torch": "2.6.0", "lightning": "2.3.3"}}, "lightning", Verdict.BROKEN, "2.4"),
        ({"packages": {"torch": "2.6.0", "lightning": "2.6.2"}}, "lightning", Verdict.BROKEN, "#21691"),
        ({"packages": {"torch": "2.6.0", "pytorch-lightning": "2.6.3"}}, "pytorch-lightning", Verdict.BROKEN, "2.6.6"),
        ({"packages": {"torch": "2.6.0", "lightning": "2.6.5"}}, "lightning", Verdict.WARNING, "2.6.6"),
        ({"lacks": {"pidfd": "not permitted"}}, "kernel", Verdict.WARNING, "not permitted"),
        ({"lacks": {"memfd": "x"}}, "kernel", Verdict.WARNING, "hang"),
        ({"lacks": {"abstract sockets": "x"}}, "kernel", Verdict.WARNING, "Lightning"),
        ({"cores": 1.5}, "cores", Verdict.WARNING, "2 cores"),
        ({"open_files": 256}, "limits", Verdict.WARNING, "ulimit -n"),
        ({"gpu_driver": "NVRM 1", "locked_bytes": 65536}, "limits", Verdict.NOTE, "ulimit -l"),
        ({"clock_synchronised": False}, "clock", Verdict.WARNING, "chrony"),
        ({"name_seconds": 5.0}, "names", Verdict.WARNING, "RES_OPTIONS"),
        ({"variables": ("RESILIENCY_RUNN",)}, "variables", Verdict.WARNING, "misspelt"),
    ],
)
def test_what_is_wrong_is_told_with_what_to_do(
    changes: dict[str, Any], check: str, verdict: Verdict, words: str
) -> None:
    (finding,) = told(judge_host(replace(GOOD, **changes)))
    assert (finding.check, finding.verdict) == (check, verdict)
    assert words in f"{finding.found} {finding.remedy}" and finding.remedy


@pytest.mark.parametrize(
    "changes",
    [
        {"python": (3, 10, 15)},
        {"python": (3, 11, 10)},
        {"packages": {"torch": "2.6.0", "lightning": "2.5.6"}},
        {"packages": {"torch": "2.14.0.dev20261101+cu130", "lightning": "2.7.0.dev0"}},
        {"locked_bytes": 65536},
        {"clock_synchronised": None},
        {"cores": 2},
    ],
)
def test_what_works_is_not_told_of(changes: dict[str, Any]) -> None:
    assert told(judge_host(replace(GOOD, **changes))) == []


def test_both_lightnings_and_nvrx_are_noted() -> None:
    packages = {**GOOD.packages, "pytorch-lightning": "2.6.6", "nvidia-resiliency-ext": "0.4.1"}
    notes = told(judge_host(replace(GOOD, packages=packages)))
    assert [one.verdict for one in notes] == [Verdict.NOTE, Verdict.NOTE]
    assert "share no classes" in notes[0].found and "0.4.1" in notes[1].found


def of_kind(kind: str, **changes: Any) -> Folder:
    return replace(DISK, mount=Mount(point="/", kind=kind), **changes)


@pytest.mark.parametrize(
    ("folder", "verdict", "words"),
    [
        (replace(DISK, problem="Permission denied: /ckpts"), Verdict.BROKEN, "Permission denied"),
        (replace(DISK, free_bytes=2 * GIB), Verdict.BROKEN, "3.0 GiB are needed"),
        (of_kind("tmpfs"), Verdict.WARNING, "ever durable"),
        (replace(DISK, hard_links=False), Verdict.WARNING, "hard links"),
        (replace(DISK, fsync_s=None), Verdict.WARNING, "fsync fails"),
        (replace(DISK, fsync_s=0.3), Verdict.NOTE, "300 ms"),
        (of_kind("btrfs"), Verdict.NOTE, "written, not mapped"),
        (of_kind("overlay"), Verdict.NOTE, "written, not mapped"),
    ],
)
def test_a_folder_that_costs_something_is_told_of(folder: Folder, verdict: Verdict, words: str) -> None:
    (finding,) = told(judge_folder(folder, GOOD, state_bytes=GIB))
    assert finding.verdict is verdict and words in f"{finding.found} {finding.remedy}" and finding.remedy


def test_ext4_has_huge_pages_on_a_new_kernel_only() -> None:
    assert told(judge_folder(of_kind("ext4"), GOOD, state_bytes=0)) == []
    (finding,) = told(judge_folder(of_kind("ext4"), replace(GOOD, kernel=(6, 15)), state_bytes=0))
    assert finding.verdict is Verdict.NOTE and "6.16" in finding.found


def test_whether_other_hosts_see_a_folder_is_told() -> None:
    (shared,) = judge_folder(of_kind("nfs4"), GOOD, state_bytes=0)
    (own,) = judge_folder(DISK, GOOD, state_bytes=0)
    assert "other hosts may see" in shared.found and "of this host" in own.found


@pytest.mark.parametrize(
    ("folder", "memory", "state", "verdict", "words"),
    [
        (of_kind("ext4", path="/dev/shm"), 64, 1, Verdict.NOTE, "is no ramdisk (ext4)"),
        (replace(SHM, problem="no such folder"), 64, 1, Verdict.NOTE, "no such folder"),
        (replace(SHM, free_bytes=64 * 1024**2), 64, 0, Verdict.WARNING, "--shm-size"),
        (replace(SHM, free_bytes=2 * GIB), 64, 1, Verdict.WARNING, "3.0 GiB"),
        (SHM, 3, 1, Verdict.WARNING, "raise its limit"),
    ],
)
def test_a_ramdisk_that_is_too_small_is_told_of(
    folder: Folder, memory: int, state: int, verdict: Verdict, words: str
) -> None:
    host = replace(GOOD, memory_bytes=memory * GIB)
    (finding,) = told(judge_ramdisk(folder, host, state_bytes=state * GIB))
    assert finding.verdict is verdict and words in f"{finding.found} {finding.remedy}"


def test_ports_and_tiers() -> None:
    assert judge_ports(GOOD, 29500, free=False).verdict is Verdict.BROKEN
    assert judge_ports(GOOD, 40000, free=True).verdict is Verdict.WARNING
    broken = judge_remote(Remote(address="gs://b", problem="no bucket b"))
    assert broken.verdict is Verdict.BROKEN and broken.found == "no bucket b"


def test_each_variable_of_the_library_is_known() -> None:
    """One that a new version reads would else be called misspelt."""
    folder = Path(resiliency.__file__).parent
    read = {
        name
        for path in folder.rglob("*.py")
        if "doctor" not in path.parts
        for name in re.findall(r"\bRESILIENCY_[A-Z_]*[A-Z]\b", path.read_text())
    }
    assert read and read - KNOWN_VARIABLES == set()
