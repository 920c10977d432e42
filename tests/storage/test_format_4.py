"""Steps of format 4, whose shards of sharded steps had names of their own: they are read, kept, and replaced."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from resiliency.inspection.by_path import load_path, locate
from resiliency.storage.manifest import MANIFEST
from resiliency.testing.checkpoints import differences, make_checkpointer, make_flat_state, save_steps, step_dir
from tests.storage.samples.make_format_5 import per_rank, state

SAMPLE = Path(__file__).parent / "samples" / "format-4"


@pytest.fixture
def old(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAMPLE, tmp_path / "old"))


def wanted(run: str, step: int) -> dict[str, Any]:
    found = state(step)
    return found if run != "sharded" else {**found, "model": dict(found["model"])}


@pytest.mark.parametrize(("run", "step"), [("pretrain", 20), ("sharded", 10)])
def test_a_job_goes_on_from_them(old: Path, run: str, step: int) -> None:
    with make_checkpointer(old, run=run) as checkpointer:
        restored = checkpointer.load()
        assert restored is not None and restored.step == step
        assert differences(restored.state, wanted(run, step)) == []
        assert differences(restored.per_rank, per_rank(step, 0)) == []
        checkpointer.save(30, {"step": 30}, names=["step=30.ckpt"])
    files = sorted(os.listdir(step_dir(old, run, step)))
    ranks = range(2)
    assert files == sorted([MANIFEST, *(f"shard-{rank:05d}.{end}" for rank in ranks for end in ("json", "shard"))])


@pytest.mark.parametrize(
    ("name", "run", "step"),
    [
        ("sharded=10.ckpt", "sharded", 10),
        ("alone=10.ckpt", "alone", 10),
        ("together=10.ckpt", "together", 10),
    ],
)
def test_each_name_loads_with_a_check_also_from_a_copy_elsewhere(old: Path, name: str, run: str, step: int) -> None:
    for path in (old / name, old.parent / name):
        if not path.exists():
            (shutil.copytree if (old / name).is_dir() else shutil.copy)(old / name, path)
        located = locate(str(path))
        assert located is not None and located.id.step == step and located.is_checked
        found, _ = load_path(located)
        assert differences(found, wanted(run, step)) == []


def test_a_sharded_name_that_moves_keeps_no_shard_of_before(old: Path) -> None:
    save_steps(old, 30, run="sharded", world_size=2, sharded=True, name="sharded=10.ckpt")
    moved = [".metadata", "__0_0.distcp", "__1_0.distcp", MANIFEST]
    assert sorted(os.listdir(old / "sharded=10.ckpt")) == moved
    located = locate(str(old / "sharded=10.ckpt"))
    assert located is not None and located.id.step == 30
    assert differences(load_path(located)[0], make_flat_state(30, world_size=2)) == []
