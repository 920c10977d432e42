"""Faults that are put in: what they do, to whom, and that they are undone."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from resiliency.cli.inject import main
from resiliency.errors import ConfigError
from resiliency.monitor.watchdogs.ecc import EccWatchdog
from resiliency.monitor.watchdogs.xid import XidWatchdog
from resiliency.testing.hosts.inject import Fault, Injector, Target, moments


class Ranks(Target):
    """Ranks that the test has made."""

    def ranks(self) -> dict[int, int]:
        return self.known

    known: dict[int, int] = {}


@pytest.fixture
def ranks():
    processes = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    target = Ranks()
    object.__setattr__(target, "known", {at: each.pid for at, each in enumerate(processes)})
    yield target, processes
    for each in processes:
        each.kill()
        each.wait()


def state(process: subprocess.Popen) -> str:
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_kill_and_stop_hit_the_rank_that_is_named(ranks) -> None:
    target, (first, second) = ranks
    said: list[str] = []
    Injector(target, said.append, dry_run=True).inject(Fault(kind="kill", rank=1))
    assert second.poll() is None and said == [f"would kill rank 1: SIGKILL to process {second.pid}"]
    Injector(target, said.append).inject(Fault(kind="kill", rank=1))
    assert second.wait(10) == -signal.SIGKILL and first.poll() is None
    Injector(target, said.append).inject(Fault(kind="stop", rank=0))
    assert first.wait(10) == -signal.SIGTERM
    with pytest.raises(ConfigError, match="is gone|does not run"):
        Injector(target, said.append).inject(Fault(kind="kill", rank=0))


def test_a_hang_ends_after_its_time_and_without_one_stays(ranks) -> None:
    target, (first, second) = ranks
    Injector(target, print).inject(Fault(kind="hang", rank=0))
    assert os.waitid(os.P_PID, first.pid, os.WSTOPPED).si_status == signal.SIGSTOP
    Injector(target, print).inject(Fault(kind="hang", rank=1, seconds=0.1))
    assert state(first) == "T" != state(second)


def test_a_slow_rank_runs_again_afterwards(ranks) -> None:
    target, (first, _) = ranks
    seen = set()
    injecting = threading.Thread(target=Injector(target, print).inject, args=[Fault(kind="slow", rank=0, seconds=0.5)])
    injecting.start()
    while injecting.is_alive():
        seen.add(state(first))
        injecting.join(0.02)
    assert "T" in seen and state(first) != "T"


def test_equal_seeds_choose_alike(ranks) -> None:
    target, _ = ranks

    def chosen(seed: int) -> list[str]:
        said: list[str] = []
        injector = Injector(target, said.append, seed=seed, dry_run=True)
        for _ in range(16):
            injector.inject(Fault(kind="kill"))
        return said

    assert chosen(3) == chosen(3) != chosen(4)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
def test_a_process_of_another_user_is_left_alone() -> None:
    other = subprocess.Popen(["sleep", "600"], user=65534)
    try:
        target = Ranks()
        object.__setattr__(target, "known", {0: other.pid})
        with pytest.raises(ConfigError, match="another user"):
            Injector(target, print).inject(Fault(kind="kill"))
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_xid_and_ecc_reach_the_watchdogs_that_read_there(tmp_path: Path) -> None:
    source = str(tmp_path / "kernel")
    watchdog = XidWatchdog(source)
    assert watchdog.look() == []
    Injector(Target(), print).inject(Fault(kind="xid", code=79, source=source))
    (found,) = watchdog.look()
    assert found.device == "0000:3b:00" and "XID 79" in found.detail
    watchdog.close()
    counters = str(tmp_path / "counters")
    ecc = EccWatchdog(counters)
    assert ecc.look() == []
    for count in (1, 3):
        Injector(Target(), print).inject(Fault(kind="ecc", count=count, source=counters))
    (found,) = ecc.look()
    assert found.detail.startswith("4 memory errors")


def test_a_filled_disk_is_emptied_again(tmp_path: Path) -> None:
    sizes = []

    class Watching(Injector):
        def _wait(self, seconds: float) -> None:
            sizes.extend(each.stat().st_size for each in tmp_path.iterdir())

    Watching(Target(), print).inject(
        Fault(kind="disk-full", folder=str(tmp_path), seconds=0.1, most_bytes=3 * 1024 * 1024 + 1)
    )
    assert sizes == [3 * 1024 * 1024 + 1] and not list(tmp_path.iterdir())


@pytest.mark.parametrize("ending", ["ckpt", "shard"])
def test_one_bit_of_one_committed_file_is_flipped_and_only_with_yes(tmp_path: Path, capsys, ending: str) -> None:
    step = tmp_path / ".resiliency" / "run" / "step"
    step.mkdir(parents=True)
    shard = step / f"shard-00000.{ending}"
    shard.write_bytes(bytes(1000))
    arguments = ["corrupt", "--folder", str(tmp_path), "--seed", "5"]
    with pytest.raises(SystemExit):
        main(arguments)
    assert main([*arguments, "--yes"]) == 1, "the step is not committed"
    (step / "manifest.json").write_text("{}")
    assert main([*arguments, "--dry-run"]) == 0 and shard.read_bytes() == bytes(1000)
    assert main([*arguments, "--yes"]) == 0
    changed = [each for each in shard.read_bytes() if each]
    assert len(changed) == 1 and changed[0].bit_count() == 1
    assert "would corrupt" in capsys.readouterr().out


def test_faults_that_lack_something_are_refused() -> None:
    for fields, said in [
        ({"kind": "melt"}, "there are kill, stop"),
        ({"kind": "corrupt"}, "--folder"),
        ({"kind": "slow"}, "--for"),
        ({"kind": "slow", "seconds": 1, "duty": 1.5}, "--duty"),
    ]:
        with pytest.raises(ConfigError, match=said):
            Fault(**fields)
    with pytest.raises(ConfigError, match="--state-dir"):
        Target().ranks()
    with pytest.raises(ConfigError, match="xid needs --state-dir .* or --source"):
        Injector(Target(), print).inject(Fault(kind="xid"))
    with pytest.raises(ConfigError, match="no monitor"):
        Target(state_dir="/nowhere", host="h").ranks()


@pytest.mark.parametrize("failed", [0, 1, 2])
def test_the_exit_status_is_1_when_one_of_several_faults_could_not_be_put_in(
    monkeypatch: pytest.MonkeyPatch, failed: int
) -> None:
    """It was that of the last fault: a soak whose other faults had all failed counted as done."""
    tried = []

    def inject(self: Injector, fault: Fault) -> None:
        tried.append(fault)
        if len(tried) == failed:
            raise ConfigError("no ranks run here")

    monkeypatch.setattr(Injector, "inject", inject)
    assert main(["kill", "--count", "2", "--heartbeats", "/nowhere"]) == (1 if failed else 0)
    assert len(tried) == 2, "the others are put in all the same"


def test_moments() -> None:
    assert list(moments(at_s=2, every_s=0, count=0)) == [2]
    assert list(moments(at_s=1, every_s=3, count=3)) == [1, 4, 7]
    endless = moments(at_s=0, every_s=1, count=0)
    assert [next(endless) for _ in range(5)] == [0, 1, 2, 3, 4]
