"""A path means one step of ours, or is not ours; everything is checked before it is handed out."""

from __future__ import annotations

import datetime
import os
import pickle
import shutil
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch

from resiliency.checkpoint.coordinator import Coordinator
from resiliency.checkpoint.read_plan import plan_new
from resiliency.errors import ConfigError, CorruptShard, NoCheckpointFound
from resiliency.inspection import by_path
from resiliency.inspection.by_path import NameMoved, load_path, locate, locate_and_load
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.checkpoints import (
    RUN,
    Series,
    copy_folder,
    copy_to_memory,
    differences,
    flip_bits,
    make_checkpointer,
    make_flat_state,
    make_series,
    make_state,
    run_ranks,
    save_steps,
    step_dir,
    step_dirs,
)
from tests.storage.joining import unjoined


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Series:
    with unjoined():
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


@pytest.mark.parametrize("tier", [0, 1])
def test_a_name_whose_step_is_gone_is_loaded_and_said_to_be_unchecked(
    series: Series, tier: int, caplog: pytest.LogCaptureFixture
) -> None:
    root = series.tiers[tier]
    shutil.rmtree(next(path for step, path in step_dirs(root).items() if step.step == 10))
    assert step_of(root / "step=10.ckpt") == 10
    assert "without a check of its bytes" in caplog.text and "step 10" in caplog.text


@pytest.mark.parametrize("remote", [False, True])
def test_a_copy_elsewhere_is_recognised_and_said_to_be_unchecked(
    series: Series, tmp_path: Path, caplog: pytest.LogCaptureFixture, remote: bool
) -> None:
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(series.local_dir / "step=10.ckpt", tmp_path / "elsewhere" / "mine.ckpt")
    path = (
        f"{copy_to_memory(tmp_path / 'elsewhere')}/mine.ckpt" if remote else str(tmp_path / "elsewhere" / "mine.ckpt")
    )
    assert step_of(path) == 10
    assert "without a check of its bytes" in caplog.text
    located = locate(path)
    assert located is not None and not located.is_checked and located.world_size == 2
    assert load_path(located, rank=1)[1] is None  # what rank 1 had is in another file


def test_a_copy_elsewhere_may_hold_what_a_checkpoint_may_hold(tmp_path: Path) -> None:
    """Dates, paths and the like, which torch's restricted unpickler refuses where nobody allows them."""
    state = {"path": PurePosixPath("a/b"), "date": datetime.date(2024, 2, 29), "x": torch.ones(3)}
    own = {"began": datetime.timedelta(hours=1)}

    def work(rank: int, coordinator: Coordinator) -> None:  # of two, so that the file does not hold its digests
        with make_checkpointer(tmp_path / "c", coordinator) as checkpointer:
            ticket = checkpointer.save(1, state, per_rank=own, names=["1.ckpt"])
            assert ticket is not None
            ticket.wait()
            restored = checkpointer.load()
            assert restored is not None and restored.per_rank == own

    with unjoined():
        run_ranks(2, work)
    shutil.copy(tmp_path / "c" / "1.ckpt", tmp_path / "copy.ckpt")
    located = locate(str(tmp_path / "copy.ckpt"))
    assert located is not None and not located.is_checked
    found, found_own = load_path(located)
    assert differences(found, state) == [] and found_own == own


@pytest.mark.parametrize("checked", [True, False])
def test_a_name_that_moves_on_after_it_was_looked_up_gives_the_step_it_was_or_says_so(
    series: Series, checked: bool
) -> None:
    """As last.ckpt beside a job that saves: never parts of two steps, and no damage is reported where none is."""
    name = series.local_dir / "last.ckpt"
    if not checked:
        shutil.copytree(series.local_dir, series.local_dir.parent / "moved")
        shutil.rmtree(series.local_dir / ".resiliency")
    os.link(series.local_dir / "step=10.ckpt", name)
    located = locate(str(name))
    assert located is not None and located.is_checked is checked
    name.unlink()
    os.link(series.local_dir / "step=20.ckpt", name)
    if checked:
        state, own = load_path(located)
        assert differences(state, make_state(10)) == [] and own is not None
    else:
        with pytest.raises(NoCheckpointFound, match="look it up again"):
            load_path(located)
        assert step_of(name) == 20


def test_a_name_that_moves_on_while_it_is_read_is_no_damage(series: Series, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first step is deleted meanwhile, as with save_top_k=1 or on a ramdisk."""
    name = series.local_dir / "last.ckpt"
    os.link(series.local_dir / "step=10.ckpt", name)
    located = locate(str(name))
    assert located is not None and located.is_checked
    now = locate

    def moved_on(path: str, **further: Any) -> Any:
        found = now(path, **further)
        if located.id == (found and found.id):
            name.unlink()
            os.link(series.local_dir / "step=20.ckpt", name)
            shutil.rmtree(step_dir(series.local_dir, RUN, 10))
        return found

    monkeypatch.setattr(by_path, "locate", moved_on)
    found = locate_and_load(str(name), rank=1)
    assert found is not None and found[0].id.step == 20
    assert differences(found[1:], (make_state(20), Series.per_rank(20, 1))) == []
    with pytest.raises(NameMoved, match="look it up again"):
        load_path(located)
    flip_bits(name, [(5000, 5001)])
    with pytest.raises(CorruptShard, match=r"last\.ckpt"):
        locate_and_load(str(name))
    assert locate_and_load(str(series.root / "nothing.ckpt")) is None


@pytest.mark.parametrize("place", [".", f".resiliency/{RUN}"])
@pytest.mark.parametrize("deleted", ["looked up", "opened"])
def test_a_step_that_is_deleted_while_its_folder_is_read_is_no_damage(
    series: Series, monkeypatch: pytest.MonkeyPatch, place: str, deleted: str
) -> None:
    """As beside a job that keeps one step: the newer one is taken."""
    newer, aside = step_dir(series.local_dir, RUN, 20), series.root / "aside"
    newer.rename(aside)

    def saves_and_deletes() -> None:
        if aside.exists():
            aside.rename(newer)
            shutil.rmtree(step_dir(series.local_dir, RUN, 10))

    original = {"looked up": by_path.survey.one_step, "opened": by_path.ShardReader}[deleted]

    def meanwhile(*args: Any, **further: Any) -> Any:
        if deleted == "opened":
            saves_and_deletes()
            return original(*args, **further)
        found = original(*args, **further)
        saves_and_deletes()
        return found

    monkeypatch.setattr(
        *((by_path.survey, "one_step") if deleted == "looked up" else (by_path, "ShardReader")), meanwhile
    )
    found = locate_and_load(str(series.local_dir / place), rank=1)
    assert found is not None and found[0].id.step == 20
    assert differences(found[1:], (make_state(20), Series.per_rank(20, 1))) == []
    flip_bits(newer / "shard-00000.shard", [(5000, 5001)])
    with pytest.raises(CorruptShard, match="do not match"):
        locate_and_load(str(series.local_dir / place))


def test_a_step_that_is_deleted_while_a_folder_is_listed_is_not_called_damaged(
    series: Series, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A newer one than that which is taken: the one after it is durable by then."""
    newest, aside = step_dir(series.local_dir, RUN, 20), series.root / "aside"
    read = LocalTier.read

    def meanwhile(tier: LocalTier, key: str) -> bytes:
        if newest.name in key and not aside.exists():
            newest.rename(aside)
        return read(tier, key)

    with monkeypatch.context() as patch:
        patch.setattr(LocalTier, "read", meanwhile)
        assert step_of(series.local_dir) == 10
    assert aside.exists() and "damaged" not in caplog.text
    aside.rename(newest)
    (newest / "manifest.json").write_text("{")
    (newest / "shard-00000.json").write_text("{")
    assert step_of(series.local_dir) == 10
    assert "is damaged" in caplog.text


def test_a_copy_beside_its_step_is_checked(series: Series, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copy(series.local_dir / "step=10.ckpt", series.local_dir / "best.ckpt")
    assert step_of(series.local_dir / "best.ckpt") == 10 and not caplog.text
    flip_bits(series.local_dir / "best.ckpt", [(5000, 5001)])
    with pytest.raises(CorruptShard, match=r"best\.ckpt"):
        step_of(series.local_dir / "best.ckpt")
    assert step_of(series.local_dir / "step=10.ckpt") == 10


@pytest.mark.parametrize("tier", [0, 1])
def test_a_name_damaged_into_that_of_another_step_is_refused(series: Series, tier: int) -> None:
    """One bit makes a 2 of the 1 of step 10 in what the file says of itself."""
    path = series.tiers[tier] / "step=10.ckpt"
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data.replace(b'"step":10', b'"step":20', 1))
    with pytest.raises(CorruptShard, match=r"step=10\.ckpt"):
        step_of(path)


def test_a_cut_copy_is_refused(series: Series, tmp_path: Path) -> None:
    data = (series.local_dir / "step=10.ckpt").read_bytes()
    (tmp_path / "cut.ckpt").write_bytes(data[:-1000])
    with pytest.raises(CorruptShard, match=r"cut\.ckpt"):
        locate(str(tmp_path / "cut.ckpt"))


def test_the_file_of_another_rank_is_no_checkpoint_alone(series: Series, tmp_path: Path) -> None:
    folder = next(path for step, path in step_dirs(series.local_dir).items() if step.step == 10)
    shutil.copy(folder / "shard-00001.shard", tmp_path / "one.ckpt")
    with pytest.raises(NoCheckpointFound, match="shard 1 of 2"):
        locate(str(tmp_path / "one.ckpt"))


@pytest.fixture(scope="module")
def pristine_sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    save_steps(folder, 1, 2, world_size=2, sharded=True)
    return folder


@pytest.fixture
def sharded(pristine_sharded: Path, tmp_path: Path) -> Path:
    copy_folder(pristine_sharded, tmp_path / "s")
    return tmp_path / "s"


def sharded_step_of(path: str | Path, rank: int = 1) -> int:
    located = locate(str(path))
    assert located is not None and located.is_checked
    state, per_rank = load_path(located, rank=rank)
    assert differences(state, make_flat_state(located.id.step, world_size=2)) == []
    assert torch.equal(per_rank["rng"], torch.arange(5) + rank)
    return located.id.step


@pytest.mark.parametrize("remote", [False, True])
def test_a_sharded_step_is_loaded_by_its_folders(sharded: Path, remote: bool) -> None:
    folder = step_dir(sharded, RUN, 1).relative_to(sharded)
    root = copy_to_memory(sharded) if remote else str(sharded)
    assert sharded_step_of(f"{root}/step=1.ckpt") == 1 and sharded_step_of(f"{root}/step=1.ckpt/", 0) == 1
    assert sharded_step_of(f"{root}/{folder}") == 1
    assert sharded_step_of(root) == 2


def test_a_copy_of_a_folder_with_records_beside_its_shards_is_recognised(sharded: Path, tmp_path: Path) -> None:
    """The step's own folder; the first name in it is that of a record."""
    shutil.copytree(step_dir(sharded, RUN, 1), tmp_path / "else" / "mine.ckpt")
    assert sharded_step_of(tmp_path / "else" / "mine.ckpt") == 1


@pytest.mark.parametrize("remote", [False, True])
def test_a_copy_of_a_sharded_steps_folder_is_checked_by_its_manifest(
    sharded: Path, tmp_path: Path, remote: bool
) -> None:
    shutil.copytree(sharded / "step=1.ckpt", tmp_path / "else" / "mine.ckpt")
    root = copy_to_memory(tmp_path / "else") if remote else str(tmp_path / "else")
    assert sharded_step_of(f"{root}/mine.ckpt") == 1
    flip_bits(tmp_path / "else" / "mine.ckpt" / "__1_0.distcp", [(1_000_000, 1_000_001)])
    root = copy_to_memory(tmp_path / "else") if remote else str(tmp_path / "else")
    with pytest.raises(CorruptShard, match=r"mine\.ckpt/__1_0"):
        sharded_step_of(f"{root}/mine.ckpt")
    (tmp_path / "else" / "mine.ckpt" / "manifest.json").unlink()
    with pytest.raises(NoCheckpointFound, match="shard 0 of 2"):
        locate(str(tmp_path / "else" / "mine.ckpt"))


def test_a_name_of_another_run_is_not_the_wanted_runs(series: Series, tmp_path: Path) -> None:
    shutil.copy(series.local_dir / "step=10.ckpt", tmp_path / "mine.ckpt")
    for path in (series.local_dir / "step=10.ckpt", tmp_path / "mine.ckpt"):
        assert locate(str(path), run=RUN) is not None
        with pytest.raises(NoCheckpointFound, match="run 'run', not of 'other'"):
            locate(str(path), run="other")


class Own:
    """A class of the user's own."""


def test_objects_of_own_classes_are_refused_with_what_to_do(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, what={"w": torch.ones(3), "own": Own()})
    located = locate(str(tmp_path / "step=1.ckpt"))
    assert located is not None
    with pytest.raises(pickle.UnpicklingError, match="add_safe_globals"):
        load_path(located)
    assert isinstance(load_path(located, allow_pickle=True)[0]["own"], Own)
    with torch.serialization.safe_globals([Own]):
        assert isinstance(load_path(located)[0]["own"], Own)


@pytest.mark.parametrize("tier", [0, 1])
@pytest.mark.parametrize("shard", [0, 1])
def test_damage_is_refused_with_the_file_and_the_bytes(series: Series, tier: int, shard: int) -> None:
    root = series.tiers[tier]
    folder = next(path for step, path in step_dirs(root).items() if step.step == 20)
    flip_bits(folder / f"shard-0000{shard}.shard", [(-200, -194)])
    located = locate(str(root))
    assert located is not None
    with pytest.raises(CorruptShard, match=f"shard-0000{shard}") as caught:
        load_path(located, rank=1)
    assert caught.value.ranges and f"shard-0000{shard}" in caught.value.path
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
    state, _ = load_path(located, planner=plan_new(lambda key: key.startswith("model/weight")))
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
