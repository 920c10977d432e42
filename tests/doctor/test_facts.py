"""What is found on this very machine."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

import pytest

from resiliency.doctor import facts
from resiliency.doctor.facts import examine_folder, examine_host, examine_remote


def test_this_host_is_described() -> None:
    host = examine_host({"RESILIENCY_RUN": "a", "PATH": "b"})
    assert host.python == sys.version_info[:3]
    assert host.packages["torch"] == importlib.metadata.version("torch")
    assert "nemo-toolkit" not in host.packages
    assert 0 < host.cores <= (os.cpu_count() or 1)
    assert 2**28 < host.memory_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert host.kernel >= (3, 10) and host.open_files > 0 and host.lacks == {}
    assert host.variables == ("RESILIENCY_RUN",)
    assert 0 < host.ephemeral[0] < host.ephemeral[1] < 65536 and host.name_seconds >= 0


def test_limits_of_a_container_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory").write_text("1073741824\n")
    (tmp_path / "cpu").write_text("50000 100000\n")
    monkeypatch.setattr(facts, "_CGROUP_MEMORY", (str(tmp_path / "memory"),))
    monkeypatch.setattr(facts, "_CGROUP_CPU", str(tmp_path / "cpu"))
    host = examine_host({})
    assert (host.memory_bytes, host.cores) == (2**30, 0.5)
    (tmp_path / "memory").write_text("max\n")
    (tmp_path / "cpu").write_text("max 100000\n")
    unlimited = examine_host({})
    assert unlimited.memory_bytes > 2**30 and unlimited.cores >= 1


def test_what_the_kernel_refuses_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", refused)
    assert examine_host({}).lacks == {"pidfd": "Operation not permitted"}


def test_a_folder_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    folder = examine_folder(str(tmp_path))
    assert folder.problem == "" and folder.hard_links and folder.fsync_s is not None and folder.free_bytes > 0
    assert list(tmp_path.iterdir()) == []
    wanted = tmp_path / "not" / "there"
    assert examine_folder(str(wanted)).problem == "" and not wanted.parent.exists()


def test_a_file_in_place_of_the_folder_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert str(tmp_path / "file") in examine_folder(str(tmp_path / "file")).problem


def test_a_folder_without_links_or_fsync_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refused)
    monkeypatch.setattr(os, "fsync", refused)
    folder = examine_folder(str(tmp_path))
    assert (folder.problem, folder.hard_links, folder.fsync_s) == ("", False, None)


def test_a_tier_is_tried_with_an_object_that_is_gone_afterwards(tmp_path: Path) -> None:
    remote = examine_remote(f"file://{tmp_path}/tier")
    assert remote.problem == "" and remote.seconds > 0
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "there").mkdir()
    assert examine_remote(str(tmp_path / "there")).problem == "" and list(tmp_path.rglob("*")) == [tmp_path / "there"]
    assert "nowhere" in examine_remote("nowhere://bucket").problem
