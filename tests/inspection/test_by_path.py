"""A path means one step of ours, or is not ours; everything is checked before it is handed out."""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from resiliency.errors import ConfigError, CorruptShard, NoCheckpointFound
from resiliency.inspection.by_path import load_path, locate
from resiliency.testing.checkpoints import (
    RUN,
    Series,
    differences,
    flip_bits,
    make_checkpointer,
    make_series,
    make_state,
    step_dirs,
)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Series:
    return make_series(tmp_path_factory.mktemp("series") / "s", steps=(10, 20))


@pytest.fixture
def series(pristine: Series, tmp_path: Path) -> Series:
    return pristine.copy_to(tmp_path / "s")


def step_of(path: str | Path, rank: int = 0) -> int:
    located = locate(str(path))
    assert located is not None
    state, per_rank = load_path(located, rank=rank)
    step = located.listing.id.step
    assert differences(state, make_state(step)) == [] and differences(per_rank, Series.per_rank(step, rank)) == []
    return step


@pytest.mark.parametrize("tier", [0, 1])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_a_step_folder_a_folder_and_a_run_are_loaded(series: Series, tier: int, rank: int) -> None:
    root = series.tiers[tier]
    folder = next(path for step, path in step_dirs(root).items() if step.step == 10)
    assert step_of(root / "step=10.ckpt", rank) == 10
    assert step_of(folder, rank) == 10 and step_of(f"{folder}/", rank) == 10
    assert step_of(root, rank) == 20
    assert step_of(root / ".resiliency" / RUN, rank) == 20


def test_paths_that_are_not_ours_locate_nothing(tmp_path: Path, series: Series) -> None:
    torch.save({"a": 1}, tmp_path / "stock.ckpt")
    (series.local_dir / "text.ckpt").write_text("hello")
    torch.save({"a": 1}, series.local_dir / "stock.ckpt")
    for path in (
        tmp_path / "stock.ckpt",
        tmp_path / "nothing",
        tmp_path / "no" / "folder.ckpt",
        series.local_dir / "text.ckpt",
        series.local_dir / "stock.ckpt",
    ):
        assert locate(str(path)) is None


def test_a_name_whose_file_is_gone_is_found_by_the_manifests(series: Series) -> None:
    (series.local_dir / "step=10.ckpt").unlink()
    assert step_of(series.local_dir / "step=10.ckpt") == 10


def test_a_name_whose_step_is_gone_says_so(series: Series) -> None:
    shutil.rmtree(next(path for step, path in step_dirs(series.local_dir).items() if step.step == 10))
    with pytest.raises(NoCheckpointFound, match="step 10") as caught:
        locate(str(series.local_dir / "step=10.ckpt"))
    assert "ckpt ls" in str(caught.value)


@pytest.mark.parametrize("tier", [0, 1])
def test_damage_is_refused_with_the_file_and_the_bytes(series: Series, tier: int) -> None:
    root = series.tiers[tier]
    folder = next(path for step, path in step_dirs(root).items() if step.step == 20)
    flip_bits(folder / "shard-00001.safetensors", [(-10, -4)])
    located = locate(str(root))
    assert located is not None
    with pytest.raises(CorruptShard, match="shard-00001") as caught:
        load_path(located)
    assert caught.value.ranges and "shard-00001" in caught.value.path
    assert step_of(root / "step=10.ckpt") == 10


def test_several_runs_must_be_told_apart(tmp_path: Path) -> None:
    for run in ("one", "two"):
        with make_checkpointer(tmp_path, run=run) as checkpointer:
            ticket = checkpointer.save(1, make_state(1))
            assert ticket is not None
            ticket.wait(timeout=timedelta(seconds=20))
    with pytest.raises(ConfigError, match="one, two"):
        locate(str(tmp_path))
    located = locate(str(tmp_path), run="two")
    assert located is not None and located.run == "two"


def test_only_tensors_whose_key_passes_are_loaded(series: Series) -> None:
    located = locate(str(series.local_dir))
    assert located is not None
    state, _ = load_path(located, keys=lambda key: key.startswith("model/weight"))
    assert differences(state["model"]["weight"], make_state(20)["model"]["weight"]) == []
    assert state["model"]["half"].numel() == 0 and state["loops"] == make_state(20)["loops"]


def test_a_rank_the_step_does_not_have_gets_no_per_rank_part(series: Series) -> None:
    located = locate(str(series.local_dir))
    assert located is not None
    state, per_rank = load_path(located, rank=7)
    assert per_rank is None and differences(state, make_state(20)) == []


def test_reading_leaves_the_files_as_they_are(series: Series) -> None:
    def listing() -> dict[Path, tuple[int, int]]:
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in series.root.rglob("*")}

    before = listing()
    for tier in series.tiers:
        located = locate(str(tier))
        assert located is not None
        state, _ = load_path(located)
        state["model"]["weight"].fill_(0)
    assert listing() == before
