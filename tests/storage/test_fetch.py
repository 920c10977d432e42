"""A shard on its way: whole or not there, and nothing of a killed restore stays."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from resiliency.errors import CorruptShard
from resiliency.storage.catalog import scan, step_prefix
from resiliency.storage.fetch import fetch_shard, remove_dead_fetches
from resiliency.storage.manifest import META_DIR
from resiliency.storage.stage import Stage
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.checkpoints import make_checkpointer, make_state

KILLED = """
import os, signal, sys
from resiliency.storage import fetch
from resiliency.storage.catalog import scan
from resiliency.storage.tiers.local import LocalTier
class Dying(LocalTier):
    def read_range(self, key, start, end):
        os.kill(os.getpid(), signal.SIGKILL)
source = Dying(sys.argv[1])
(step,) = scan(source, "run")
fetch.fetch_shard(source, "run", step.id, 0, LocalTier(sys.argv[2]), node="here")
"""


@pytest.fixture
def source(tmp_path: Path) -> LocalTier:
    with make_checkpointer(tmp_path / "source", run="run") as checkpointer:
        ticket = checkpointer.save(1, make_state(1))
        assert ticket is not None
        ticket.wait(Stage.DURABLE)
    return LocalTier(tmp_path / "source")


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_what_arrives_is_what_was_there(source: LocalTier, tmp_path: Path) -> None:
    (step,) = scan(source, "run")
    prefix = step_prefix("run", step.id)
    fetch_shard(source, "run", step.id, 0, LocalTier(tmp_path / "to"), node="here")
    assert files(tmp_path / "to") == [f"{prefix}shard-00000.json", f"{prefix}shard-00000.shard"]
    assert (tmp_path / "to" / prefix / "shard-00000.shard").read_bytes() == source.read(f"{prefix}shard-00000.shard")


def test_damage_on_the_way_leaves_nothing(source: LocalTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (step,) = scan(source, "run")
    real = LocalTier.read_range
    monkeypatch.setattr(
        LocalTier, "read_range", lambda self, key, start, end: real(self, key, start, end)[:-1] + b"\x55"
    )
    with pytest.raises(CorruptShard, match=r"bytes 0 to \d+ do not match"):
        fetch_shard(source, "run", step.id, 0, LocalTier(tmp_path / "to"), node="here")
    assert files(tmp_path / "to") == []


def test_a_killed_restore_leaves_nothing_for_long(source: LocalTier, tmp_path: Path) -> None:
    to = tmp_path / "to"
    died = subprocess.run([sys.executable, "-c", KILLED, source.root, str(to)], timeout=60, check=False)
    assert died.returncode == -9
    (left,) = [path for path in (to / ".resiliency/run/fetch").iterdir()]
    of_another_host = left.parent / "elsewhere-1-00000000"
    of_a_living = left.parent / f"here-{os.getpid()}-00000000"
    for folder in (of_another_host, of_a_living):
        folder.mkdir()
    assert remove_dead_fetches(str(to / META_DIR / "run"), "here") == 1
    assert not left.exists() and of_another_host.exists() and of_a_living.exists()


def test_the_agent_sweeps_at_its_start(source: LocalTier, tmp_path: Path) -> None:
    with make_checkpointer(tmp_path / "source", run="run") as checkpointer:
        node = checkpointer.session.node
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, timeout=60, check=True
    )
    left = tmp_path / "source/.resiliency/run/fetch" / f"{node}-{int(dead.stdout)}-00000000"
    left.mkdir(parents=True)
    (left / "shard-00000.shard").write_bytes(b"half")
    stale = tmp_path / "source" / f".resiliency-{'0' * 32}.partial"
    stale.write_bytes(b"half")
    os.utime(stale, (time.time() - 7200,) * 2)
    with make_checkpointer(tmp_path / "source", run="run") as checkpointer:
        assert checkpointer.flush(Stage.DURABLE, tier="local")
    assert not left.exists() and not stale.exists()
