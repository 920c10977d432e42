"""Checkpoints of format 3, whose shard files end with ".ckpt": loaded, listed, checked, sent, deleted and gone on from.

The sample has a run "pretrain" of two ranks with replicated steps 10 and 20, a run "sharded" with a sharded step 10,
and a single file each of the runs "alone" (one rank) and "together" (two ranks). A step stays in its format for ever.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from resiliency.agent._fence import Fence
from resiliency.agent.step_sender import send_step
from resiliency.checkpoint.coordinator import Coordinator
from resiliency.checkpoint.options import LocalTierOptions, RemoteTierOptions
from resiliency.cli.ckpt import app
from resiliency.errors import CorruptShard, UnsupportedFormat
from resiliency.inspection import survey
from resiliency.inspection.by_path import load_path, locate
from resiliency.storage.archive import read_directory
from resiliency.storage.catalog import scan, step_prefix
from resiliency.storage.format_version import FORMAT_VERSION
from resiliency.storage.manifest import MANIFEST, META_DIR, Manifest, ShardRecord, gather_records, shard_file
from resiliency.storage.names import read_name
from resiliency.storage.single_files import find_single_files, restore_folders
from resiliency.storage.stage import Stage
from resiliency.storage.stock import is_stock
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.checkpoints import (
    QUICK,
    copy_to_memory,
    differences,
    make_checkpointer,
    make_flat_state,
    run_ranks,
    save_steps,
    step_dir,
)
from tests.storage.samples.make_format_5 import per_rank, state
from tests.tidying import drop_folders

SAMPLE = Path(__file__).parent / "samples" / "format-3"
NAMES = {"step=10.ckpt": 10, "step=20.ckpt": 20, "last.ckpt": 20, "sharded=10.ckpt": 10}
SINGLE = {"alone=10.ckpt": 10, "together=10.ckpt": 10}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A copy of the sample in which names are links, as when it was written."""
    root = Path(shutil.copytree(SAMPLE, tmp_path / "old"))
    for step, names in ((10, ["step=10.ckpt"]), (20, ["step=20.ckpt", "last.ckpt"])):
        for name in names:
            os.remove(root / name)
            os.link(step_dir(root, "pretrain", step) / "shard-00000.ckpt", root / name)
    return root


def wanted(run: str, step: int) -> dict[str, Any]:
    found = state(step)
    return found | {"model": dict(found["model"])} if run == "sharded" else found


def load(path: str | Path, step: int, rank: int = 0) -> None:
    located = locate(str(path))
    assert located is not None and located.id.step == step and located.is_checked
    found, own = load_path(located, rank=rank)
    assert differences(found, wanted(located.run, step)) == []
    assert differences(own, per_rank(step, rank)) == []


def shards(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix in (".ckpt", ".shard"))


# -- reading ----------------------------------------------------------------------------------------------------------


def test_records_and_manifests_are_written_again_as_they_are() -> None:
    """Their check sums cover the version."""
    for path in SAMPLE.glob(".resiliency/*/steps/*/shard-*.json"):
        record = ShardRecord.from_dict(json.loads(path.read_text()), where="x")
        assert record.version == 3 and record.file == f"shard-{record.rank:05d}.ckpt"
        again = ShardRecord.from_dict(record.to_dict(), where="x")
        assert again == record and record.to_dict()["version"] == 3
    for path in SAMPLE.glob(f".resiliency/*/steps/*/{MANIFEST}"):
        manifest = Manifest.from_json(path.read_text(), where="x")
        assert manifest.version == 3 and Manifest.from_json(manifest.to_json(), where="x") == manifest


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("remote", [False, True])
def test_every_name_and_folder_loads_with_a_check(old: Path, rank: int, remote: bool) -> None:
    root = copy_to_memory(old) if remote else str(old)
    for name, step in NAMES.items():
        load(f"{root}/{name}", step, rank)
    for run, step in (("pretrain", 10), ("pretrain", 20), ("sharded", 10)):
        load(f"{root}/{step_dir(old, run, step).relative_to(old)}", step, rank)
    load(f"{root}/together=10.ckpt", 10, rank)
    load(f"{root}/alone=10.ckpt", 10)


def test_copies_elsewhere_load_too(old: Path, tmp_path: Path) -> None:
    shutil.copytree(old / "sharded=10.ckpt", tmp_path / "else" / "s.ckpt")
    shutil.copy(old / "together=10.ckpt", tmp_path / "else" / "t.ckpt")
    for rank in range(2):
        load(tmp_path / "else" / "s.ckpt", 10, rank)
        load(tmp_path / "else" / "t.ckpt", 10, rank)


def test_a_sharded_name_is_ours() -> None:
    assert not is_stock(str(SAMPLE / "sharded=10.ckpt")) and not is_stock(str(SAMPLE / "step=10.ckpt"))


@pytest.mark.parametrize("command", ["ls", "verify", "inspect"])
def test_the_command_line_finds_nothing_wrong(old: Path, command: str) -> None:
    result = CliRunner().invoke(app, [command, str(old / ".resiliency" / "pretrain"), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    if command == "verify":
        assert found["good"] and [step["step"] for step in found["steps"]] == [10, 20] and not found["findings"]
    if command == "ls":
        (step, _) = found["runs"]["pretrain"]
        assert step["nbytes"] == sum(
            (step_dir(old, "pretrain", 10) / f"shard-0000{n}.ckpt").stat().st_size for n in (0, 1)
        )


def test_bytes_of_shards_are_counted_where_no_record_can_be_read(old: Path) -> None:
    folder = step_dir(old, "pretrain", 10)
    for path in folder.glob("*.json"):
        path.unlink()
    tiers = [survey.LabeledTier("local", LocalTier(old))]
    assert survey.survey(tiers, "pretrain")[0].nbytes == sum(path.stat().st_size for path in folder.iterdir())


# -- going on ---------------------------------------------------------------------------------------------------------


def go_on(folder: Path, run: str, *, world_size: int = 2, loaded: int, name: str, **options: Any) -> None:
    """Loads the newest step and saves step 30."""

    def work(rank: int, coordinator: Coordinator) -> None:
        local = LocalTierOptions(directory=str(folder), **options)
        one = replace(QUICK, agent="process") if options.get("only_files") and world_size > 1 else QUICK
        with make_checkpointer(local, coordinator if world_size > 1 else None, run=run, options=one) as checkpointer:
            restored = checkpointer.load()
            assert restored is not None and restored.step == loaded
            assert differences(restored.state, wanted(run, loaded)) == []
            assert differences(restored.per_rank, per_rank(loaded, rank)) == []
            ticket = checkpointer.save(30, state(30), per_rank=per_rank(30, rank), names=[name])
            assert ticket is not None
            ticket.wait(Stage.COMMITTED)
            checkpointer.flush()

    run_ranks(world_size, work)


def test_a_job_goes_on_from_them_in_this_format_and_leaves_them_as_they_are(old: Path) -> None:
    before = {path: path.read_bytes() for path in old.glob(".resiliency/pretrain/steps/*/*")}
    go_on(old, "pretrain", loaded=20, name="step=30.ckpt", keep=None)
    assert {path: path.read_bytes() for path in before} == before
    assert shards(step_dir(old, "pretrain", 30)) == ["shard-00000.shard", "shard-00001.shard"]
    assert shards(step_dir(old, "pretrain", 20)) == ["shard-00000.ckpt", "shard-00001.ckpt"]
    load(old / "step=30.ckpt", 30, 1)
    load(old / "step=20.ckpt", 20, 1)


def test_a_name_moves_from_a_step_of_format_3_to_a_newer_one(old: Path) -> None:
    go_on(old, "pretrain", loaded=20, name="last.ckpt", keep=None)
    load(old / "last.ckpt", 30)
    assert os.path.samefile(old / "last.ckpt", step_dir(old, "pretrain", 30) / "shard-00000.shard")


def test_a_sharded_name_that_moves_keeps_no_shard_of_before(old: Path) -> None:
    tier = LocalTier(old)
    identity = read_name(tier, "sharded=10.ckpt")
    assert identity is not None and identity.version == 3
    (old / "sharded=10.ckpt" / "shard-00000.shard").write_bytes((old / "alone=10.ckpt").read_bytes())  # half moved
    assert read_name(tier, "sharded=10.ckpt") == identity
    save_steps(old, 30, run="sharded", world_size=2, sharded=True, name="sharded=10.ckpt")
    moved = [".metadata", "__0_0.distcp", "__1_0.distcp", MANIFEST]
    assert sorted(os.listdir(old / "sharded=10.ckpt")) == moved
    located = locate(str(old / "sharded=10.ckpt"))
    assert located is not None and located.id.step == 30
    found, _ = load_path(located)
    assert differences(found, make_flat_state(30, world_size=2)) == []


def test_they_are_deleted_when_newer_ones_replace_them(old: Path) -> None:
    go_on(old, "pretrain", loaded=20, name="step=30.ckpt", keep=1, keep_named=False)
    names = sorted(path.name for path in old.glob("*.ckpt"))
    assert names == ["alone=10.ckpt", "sharded=10.ckpt", "step=30.ckpt", "together=10.ckpt"]
    (folder,) = (old / META_DIR / "pretrain" / "steps").iterdir()
    assert shards(folder) == ["shard-00000.shard", "shard-00001.shard"]


def test_the_command_line_prunes_them(old: Path) -> None:
    words = ["prune", str(old / META_DIR / "pretrain"), "--keep", "1", "--yes"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    (folder,) = (old / META_DIR / "pretrain" / "steps").iterdir()
    assert folder == step_dir(old, "pretrain", 20) and not (old / "step=10.ckpt").exists()


def test_they_are_fetched_from_a_remote_tier_as_they_are(old: Path, tmp_path: Path) -> None:
    def work(rank: int, coordinator: Coordinator) -> None:
        remotes = [RemoteTierOptions(address=str(old))]
        with make_checkpointer(tmp_path / "new", coordinator, run="pretrain", remotes=remotes) as checkpointer:
            restored = checkpointer.load()
            assert restored is not None and restored.step == 20
            assert differences(restored.state, state(20)) == []

    run_ranks(2, work)
    folder = step_dir(tmp_path / "new", "pretrain", 20)
    assert shards(folder) == ["shard-00000.ckpt", "shard-00001.ckpt"]
    assert json.loads((folder / "shard-00001.json").read_text())["version"] == 3


def test_they_are_sent_to_a_remote_tier_as_they_are(old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = next(one for one in scan(LocalTier(old), "pretrain") if one.id.step == 20)
    assert listing.manifest is not None
    monkeypatch.setattr(Fence, "check", lambda self: None)
    folder, remote = step_dir(old, "pretrain", 20), LocalTier(tmp_path / "remote")
    assert send_step(
        remote,
        "pretrain",
        listing.id,
        listing.manifest.shards,
        world_size=2,
        path=lambda file: str(folder / file),
        fence=Fence.__new__(Fence),
        refused=lambda name, why: pytest.fail(f"{name}: {why}"),
    )
    assert shards(Path(remote.root, step_prefix("pretrain", listing.id))) == ["shard-00000.ckpt", "shard-00001.ckpt"]
    load(tmp_path / "remote" / "last.ckpt", 20, 1)


# -- single files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("run", "world_size"), [("alone", 1), ("together", 2)])
def test_a_single_file_gets_its_folder_back_and_loses_it_again(tmp_path: Path, run: str, world_size: int) -> None:
    name = f"{run}=10.ckpt"
    shutil.copy(SAMPLE / name, tmp_path / name)
    tier = LocalTier(tmp_path)
    (found,) = find_single_files(str(tmp_path))
    assert (found.manifest.version, found.manifest.run) == (3, run)
    assert restore_folders(tier, run) == 1
    folder = step_dir(tmp_path, run, 10)
    assert shards(folder) == [shard_file(rank, 3) for rank in range(world_size)]
    assert scan(tier, run)[0].faults() == {} and scan(tier, run)[0].committed
    assert drop_folders(tier, run) == ""
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize(("run", "world_size"), [("alone", 1), ("together", 2)])
def test_a_job_that_takes_over_a_single_file_leaves_two(tmp_path: Path, run: str, world_size: int) -> None:
    name = f"{run}=10.ckpt"
    shutil.copy(SAMPLE / name, tmp_path / name)
    go_on(tmp_path, run, world_size=world_size, loaded=10, name="new.ckpt", only_files=True, keep=None)
    assert sorted(os.listdir(tmp_path)) == sorted([name, "new.ckpt"])
    assert (tmp_path / name).read_bytes() == (SAMPLE / name).read_bytes()
    versions = {file.name: file.manifest.version for file in find_single_files(str(tmp_path))}
    assert versions == {name: 3, "new.ckpt": FORMAT_VERSION}
    for rank in range(world_size):
        load(tmp_path / name, 10, rank)
        load(tmp_path / "new.ckpt", 30, rank)


def test_a_folder_stays_whose_step_has_a_copy_in_the_place_of_its_name(tmp_path: Path) -> None:
    shutil.copy(SAMPLE / "alone=10.ckpt", tmp_path)
    assert restore_folders(LocalTier(tmp_path), "alone") == 1
    shutil.copy(tmp_path / "alone=10.ckpt", tmp_path / "copy")
    os.replace(tmp_path / "copy", tmp_path / "alone=10.ckpt")
    assert drop_folders(LocalTier(tmp_path), "alone") != ""
    assert shards(step_dir(tmp_path, "alone", 10)) == ["shard-00000.ckpt"]


def test_the_other_link_of_each_file_is_removed_in_the_order_of_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the times of change of the names stay in that order."""
    shutil.copy(SAMPLE / "alone=10.ckpt", tmp_path)
    restore_folders(LocalTier(tmp_path), "alone")
    save_steps(tmp_path, 30, run="alone", name="new.ckpt")
    seen: list[str] = []
    monkeypatch.setattr("resiliency.storage.single_files.unlink_in_order", lambda paths, copies: seen.extend(paths))
    assert drop_folders(LocalTier(tmp_path), "alone") == ""
    assert [os.path.basename(path) for path in seen] == ["shard-00000.ckpt", "shard-00000.shard"]


def test_the_entry_of_another_ranks_shard_is_named_as_its_version_names_shards() -> None:
    for version in (3, 4):
        data = (SAMPLE.parent / f"format-{version}" / "together=10.ckpt").read_bytes()
        entries = read_directory(lambda start, end, data=data: data[start:end], len(data), where="x")
        names = [name for name in entries if name.startswith("resiliency/shard-")]
        assert names == [f"resiliency/{shard_file(1, version)}"]


# -- what does not belong together ------------------------------------------------------------------------------------


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "the manifest's": lambda data: data.update(version=4),
    "one record's": lambda data: data["shards"].__setitem__(
        1, replace(ShardRecord.from_dict(data["shards"][1], where="x"), version=4).to_dict()
    ),
}


@pytest.mark.parametrize("which", CHANGES)
def test_records_of_different_versions_are_no_step(which: str, old: Path) -> None:
    data = json.loads((step_dir(old, "pretrain", 10) / MANIFEST).read_text())
    CHANGES[which](data)
    with pytest.raises(CorruptShard, match="not all shards of one step") as caught:
        Manifest.from_json(json.dumps(data), where="x")
    assert not isinstance(caught.value, UnsupportedFormat)
    if which == "one record's":
        assert gather_records([ShardRecord.from_dict(item, where="x") for item in data["shards"]]) is None


def test_a_file_whose_identity_and_record_differ_in_the_version_is_damaged(tmp_path: Path) -> None:
    data = (SAMPLE / "alone=10.ckpt").read_bytes()
    (tmp_path / "x.ckpt").write_bytes(data[:1024].replace(b'"version":3', b'"version":4') + data[1024:])
    with pytest.raises(CorruptShard, match="its record is of another file"):
        locate(str(tmp_path / "x.ckpt"))
