"""What the supervisor and the hosts of a local cluster are told. With real processes: tests/e2e/test_local_cluster.py."""

from __future__ import annotations

from typing import Any

import pytest

from resiliency.cli import run as run_command
from resiliency.testing.hosts import local_cluster
from resiliency.testing.hosts.local_cluster import LocalCluster


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Words of the commands that would have been started."""
    seen: list[list[str]] = []
    monkeypatch.setattr(local_cluster, "start", lambda name, number, words, *_: seen.append(list(words)))
    return seen


def cluster(**changes: Any) -> LocalCluster:
    return LocalCluster(
        **{"hosts": 3, "min_hosts": 2, "spares": 1, "ranks_per_host": 2, "script": ("a.py",), **changes}
    )


@pytest.mark.parametrize(
    "words", [["--network-namespaces"], ["--state-dir", "here"], ["--supervisor-set", "dwell_s=2"]]
)
def test_what_only_a_supervised_job_has_is_refused_without_one(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_command.main([*words, "train.py"])
    assert f"{words[0]} needs --spares: without it there is no supervisor" in capsys.readouterr().err
