"""What the supervisor and the hosts of a local cluster are told. With real processes: tests/e2e/test_local_cluster.py."""

from __future__ import annotations

import os
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from resiliency.cli import run as run_command
from resiliency.cli.host_monitor import _parser as monitor_parser
from resiliency.errors import ConfigError
from resiliency.supervisor.settings import read_settings
from resiliency.testing.hosts import local_cluster
from resiliency.testing.hosts.local_cluster import LocalCluster
from resiliency.testing.hosts.local_network import LocalNetwork
from resiliency.testing.hosts.local_processes import SignalCount, wait_for_any


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


def test_the_supervisor_writes_where_ranks_do_and_calls_the_job_as_they_do(
    started: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RESILIENCY_RUN", "small")
    monkeypatch.setenv("RESILIENCY_EVENTS_DIR", str(tmp_path / "log"))
    local_cluster._start_supervisor(cluster(), tmp_path, None, "127.0.0.1:0")
    settings = read_settings(started[0][started[0].index("-f") + 1])
    (spec,) = settings.workloads
    assert (spec.name, settings.events) == ("small", str(tmp_path / "log"))
    assert (spec.replicas, spec.min_replicas, spec.ranks_per_host, spec.dwell_s) == (3, 2, 2, 5.0)
    monkeypatch.delenv("RESILIENCY_EVENTS_DIR")
    local_cluster._start_supervisor(cluster(), tmp_path, None, "127.0.0.1:0")
    assert read_settings(str(tmp_path / "supervisor.yaml")).events == str(tmp_path / "events")


def test_its_settings_can_be_set(started: list[list[str]], tmp_path: Path) -> None:
    given = {"heartbeat_timeout_s": 7, "dwell_s": 2.5, "hang_floor_s": 3, "max_in_job_restarts": 9}
    local_cluster._start_supervisor(cluster(supervisor=given), tmp_path, None, "127.0.0.1:0")
    settings = read_settings(str(tmp_path / "supervisor.yaml"))
    assert (settings.sensor.timeout_s, settings.sensor.period_s, settings.hang.hang_floor_s) == (7, 0.5, 3)
    assert (settings.workloads[0].dwell_s, settings.workloads[0].max_in_job_restarts) == (2.5, 9)
    with pytest.raises(ConfigError, match="--supervisor-set listen: hosts on one machine have it set already"):
        cluster(supervisor={"listen": "0.0.0.0:1"})


def test_a_setting_is_read_as_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    read = [run_command._setting(parser, text) for text in ("dwell_s=2", "dry_run=true", "policy=p.py:P", "state=")]
    assert read == [("dwell_s", 2), ("dry_run", True), ("policy", "p.py:P"), ("state", None)]
    with pytest.raises(SystemExit):
        run_command._setting(parser, "dwell_s")
    assert "pass NAME=VALUE" in capsys.readouterr().err


def test_what_the_user_names_is_meant_from_where_the_command_was_given(
    started: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not from the state folder, where the supervisor's file lies."""
    (tmp_path / "state").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RESILIENCY_EVENTS_DIR", "log")
    given = cluster(supervisor={"policy": "p.py:P", "hook": {"command": ["./h.sh"]}})
    local_cluster._start_supervisor(given, tmp_path / "state", None, "127.0.0.1:0")
    settings = read_settings(str(tmp_path / "state" / "supervisor.yaml"))
    assert (settings.events, settings.policy) == (f"{tmp_path}/log", f"{tmp_path}/p.py:P")
    assert settings.hook is not None and settings.hook.command == [f"{tmp_path}/h.sh"]


def test_flags_of_launchers_reach_them_as_they_are(started: list[list[str]], tmp_path: Path) -> None:
    flags = ("--leave-timeout", "5", "--log-dir", "/a folder/of mine", "-r", "3", "--no-standby")
    local_cluster._start_host(cluster(launcher_words=flags), tmp_path, None, 0, "127.0.0.1:7600")
    assert started[0][0] == "host-monitor"
    args = monitor_parser().parse_args(started[0][1:])
    assert tuple(word for each in args.launcher_args for word in shlex.split(each)) == flags
    assert args.script == ["--", "a.py"] and args.nproc_per_node == "2"


def test_a_signal_to_bring_a_host_back_is_counted_and_ends_a_wait() -> None:
    with SignalCount(signal.SIGUSR2) as returns:
        assert returns.take() == 0
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGUSR2)
        wait_for_any([], 10.0, returns.fd)
        assert 1 <= returns.take() <= 2  # equal signals that wait are one
        assert returns.take() == 0
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


@pytest.mark.parametrize(
    "words", [["--network-namespaces"], ["--state-dir", "here"], ["--supervisor-set", "dwell_s=2"]]
)
def test_what_only_a_supervised_job_has_is_refused_without_one(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_command.main([*words, "train.py"])
    assert f"{words[0]} needs --spares: without it there is no supervisor" in capsys.readouterr().err


@pytest.mark.namespaces
def test_a_host_with_a_network_of_its_own_is_told_its_address_interface_and_cable(
    started: list[list[str]], tmp_path: Path
) -> None:
    network = LocalNetwork(2)
    try:
        local_cluster._start_host(cluster(), tmp_path, network, 1, f"{network.address}:7600")
        args = monitor_parser().parse_args(started[0][1:])
        assert args.address == network.address_of(1) and args.cable == f"{network.fds[0]}:host1"
        assert network.variables_of("h-1")["GLOO_SOCKET_IFNAME"] == "eth0"
    finally:
        network.close()
