"""Steps of several ranks that are one file each: all is in it, every changed byte is noticed, folders go and come back."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from resiliency import faultpoints
from resiliency.checkpoint.coordinator import Coordinator
from resiliency.errors import CorruptShard
from resiliency.inspection import survey
from resiliency.inspection.by_path import load_path, locate
from resiliency.inspection.contents import read_contents
from resiliency.inspection.verify import check_step
from resiliency.storage.archive import ArchiveEntry, read_directory
from resiliency.storage.manifest import META_DIR
from resiliency.storage.own_record import OWN_RECORD, read_own_manifest, shard_entry
from resiliency.storage.shard_file import IDENTITY_BYTES, RANK_STATE, read_identity
from resiliency.storage.single_files import find_single_files, read_single_file, restore_folders
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.checkpoints import (
    RUN,
    copy_to_memory,
    differences,
    flip_bits,
    make_checkpointer,
    make_lightning_state,
    run_ranks,
    save_steps,
    step_dir,
)
from tests.storage.joining import join_steps, save_joined, unjoined
from tests.storage.test_single_files import picture
from tests.tidying import drop_folders


def entries(path: Path) -> dict[str, ArchiveEntry]:
    data = path.read_bytes()
    return read_directory(lambda start, end: data[start:end], len(data), where=str(path))


def check_own(own: Any, rank: int) -> None:
    assert differences(own, {"rng": torch.arange(5) + rank}) == []


@pytest.mark.parametrize("world_size", [2, 5])
def test_the_file_holds_what_lay_beside_it_and_is_the_same_to_torch(tmp_path: Path, world_size: int) -> None:
    save_steps(tmp_path, 1, world_size=world_size)
    path = tmp_path / "step=1.ckpt"
    before, state, inode = path.read_bytes(), torch.load(path, weights_only=True), path.stat().st_ino
    (step,) = join_steps(tmp_path)
    assert path.stat().st_ino == inode and path.read_bytes()[: len(before)] == before, "bytes were changed"
    assert read_single_file(str(path)) == step
    for rank in range(1, world_size):
        entry = entries(path)[shard_entry(rank)]
        other = (step_dir(tmp_path, RUN, 1) / f"shard-{rank:05d}.shard").read_bytes()
        assert path.read_bytes()[entry.start : entry.end] == other
    for mmap in (False, True):
        assert differences(torch.load(path, mmap=mmap), state) == []
    assert join_steps(tmp_path) == [step], "it may be done again"


def test_what_is_added_is_little_and_a_large_part_stays_in_its_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resiliency.agent.join._MOST_BYTES", 1_000)
    with unjoined():
        save_steps(tmp_path, 1, world_size=2)
    before = (tmp_path / "step=1.ckpt").read_bytes()
    join_steps(tmp_path)
    assert (tmp_path / "step=1.ckpt").read_bytes() == before
    assert drop_folders(LocalTier(tmp_path), RUN) != ""
    monkeypatch.setattr("resiliency.agent.join._MOST_BYTES", 1 << 20)
    join_steps(tmp_path)
    assert 0 < (tmp_path / "step=1.ckpt").stat().st_size - len(before) < 8_000


def test_every_changed_byte_behind_the_storages_is_noticed(tmp_path: Path) -> None:
    (step,) = save_joined(tmp_path, 1)
    path = tmp_path / "step=1.ckpt"
    data = bytearray(path.read_bytes())
    identity = read_identity(bytes(data[:IDENTITY_BYTES]), where="x")
    assert identity is not None
    unnoticed = []
    for at in range(step.shards[0].sections[-1], len(data)):
        data[at] ^= 0x21
        try:
            read_own_manifest(identity, lambda start, end: bytes(data[start:end]), len(data), where="x")
            unnoticed.append(at)
        except CorruptShard:
            continue
        finally:
            data[at] ^= 0x21
    # The last digit of a float that is not needed to tell it from its neighbours.
    own = entries(path)[OWN_RECORD]
    assert len(unnoticed) <= 4 and all(own.start <= at < own.end for at in unnoticed)


DAMAGED = {
    "another rank's shard": (shard_entry(1), shard_entry(1)),
    "the records": (OWN_RECORD, ""),
    "what rank 0 has for itself": (RANK_STATE, ""),
    "a storage": ("data/0", ""),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_copy_with_a_damaged_entry_is_refused_with_its_name(tmp_path: Path, case: str) -> None:
    entry, said = DAMAGED[case]
    save_joined(tmp_path / "a", 1)
    copy = tmp_path / "copy.ckpt"
    shutil.copy(tmp_path / "a" / "step=1.ckpt", copy)
    shutil.rmtree(tmp_path / "a")
    start = entries(copy)[entry].start
    flip_bits(copy, [(start + 50, start + 51)])
    with pytest.raises(CorruptShard, match=rf"copy\.ckpt: .*{said}"):
        located = locate(str(copy))
        assert located is not None
        load_path(located, rank=1)


@pytest.mark.parametrize("where", ["folder", "bucket"])
def test_a_copy_elsewhere_has_what_every_rank_had(tmp_path: Path, where: str) -> None:
    save_joined(tmp_path / "a", 1, world_size=3)
    (tmp_path / "b").mkdir()
    shutil.copy(tmp_path / "a" / "step=1.ckpt", tmp_path / "b" / "mine.ckpt")
    shutil.rmtree(tmp_path / "a")
    path = str(tmp_path / "b" / "mine.ckpt") if where == "folder" else f"{copy_to_memory(tmp_path / 'b')}/mine.ckpt"
    located = locate(path)
    assert located is not None and located.is_checked and located.world_size == 3
    for rank in range(3):
        state, own = load_path(located, rank=rank)
        assert differences(state, make_lightning_state(1, world_size=3)) == []
        check_own(own, rank)
    assert load_path(located, rank=3)[1] is None


def test_a_folder_that_was_dropped_comes_back_as_it_was(tmp_path: Path) -> None:
    save_joined(tmp_path, 1, 2, world_size=3)
    before = picture(tmp_path)
    # What lies in the folder alone is made anew.
    own = {path: value[1] for path, value in before.items() if not path.endswith("shard-00000.shard")}
    assert drop_folders(LocalTier(tmp_path), RUN) == ""
    assert sorted(os.listdir(tmp_path)) == ["step=1.ckpt", "step=2.ckpt"]
    assert restore_folders(LocalTier(tmp_path), RUN) == 2
    after = picture(tmp_path)
    assert after.keys() == before.keys()
    assert {path: value[1] for path, value in after.items() if path in own} == own
    first = {path: value for path, value in before.items() if path not in own}
    assert {path: after[path] for path in first} == first, "the large files are linked"


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_any_number_of_ranks_goes_on_from_the_files_as_from_the_folder(tmp_path: Path, ranks: int) -> None:
    save_joined(tmp_path, 1, 2)

    def work(rank: int, coordinator: Coordinator) -> Any:
        with make_checkpointer(tmp_path, coordinator) as checkpointer:
            return checkpointer.load()

    from_folder = run_ranks(ranks, work)
    assert drop_folders(LocalTier(tmp_path), RUN) == ""
    for rank, (one, other) in enumerate(zip(from_folder, run_ranks(ranks, work), strict=True)):
        assert (one.id, one.world_size, one.names) == (other.id, 2, other.names)
        assert differences([one.state, one.per_rank], [other.state, other.per_rank]) == []
        if rank < 2:
            check_own(other.per_rank, rank)
        else:
            assert other.per_rank is None


def test_a_folder_of_files_is_listed_verified_and_looked_into(tmp_path: Path) -> None:
    save_joined(tmp_path, 1, 2)
    assert drop_folders(LocalTier(tmp_path), RUN) == ""
    target = survey.find(str(tmp_path))
    views = survey.survey(survey.label_tiers([target]), RUN)
    assert [(view.id.step, view.state, view.needed, view.names) for view in views] == [
        (1, survey.StepState.COMMITTED, 2, ("step=1.ckpt",)),
        (2, survey.StepState.COMMITTED, 2, ("step=2.ckpt",)),
    ]
    assert [check_step(view) for view in views] == [[], []]
    listing = views[0].copies[0].listing
    for rank, record in listing.records.items():
        contents = read_contents(target.tier, RUN, record, key=listing.key(record), single=True)
        assert contents.rank == rank and contents.own is not None
    path = tmp_path / "step=2.ckpt"
    start = entries(path)["data/0"].start
    flip_bits(path, [(start, start + 1)])
    (finding,) = check_step(views[1])
    assert finding.bad and finding.path == str(path)
    assert META_DIR not in os.listdir(tmp_path), "looking changes nothing"


def test_a_damaged_shard_of_another_rank_costs_its_step_and_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_joined(tmp_path, 1, 2)
    drop_folders(LocalTier(tmp_path), RUN)
    path = tmp_path / "step=2.ckpt"
    start = entries(path)[shard_entry(1)].start
    flip_bits(path, [(start + 50, start + 51)])
    assert restore_folders(LocalTier(tmp_path), RUN) == 1
    assert "step=2.ckpt" in caplog.text and shard_entry(1) in caplog.text


@pytest.mark.parametrize("point", ["agent.drop.begin", "agent.drop.renamed", "agent.drop.removed"])
def test_a_drop_that_was_cut_off_loses_nothing(tmp_path: Path, point: str) -> None:
    save_joined(tmp_path, 1, 2)
    before = {path: value[1] for path, value in picture(tmp_path).items()}
    faultpoints.arm(f"{point}:error")
    try:
        with pytest.raises(OSError, match="fault injected"):
            drop_folders(LocalTier(tmp_path), RUN)
    finally:
        faultpoints.arm("")
    assert [file.manifest.id.step for file in find_single_files(str(tmp_path), RUN)] == [1, 2]
    restore_folders(LocalTier(tmp_path), RUN)
    assert {path: value[1] for path, value in picture(tmp_path).items()} == before


def test_another_file_put_there_while_it_is_taken_up_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_joined(tmp_path, 1, 2)
    drop_folders(LocalTier(tmp_path), RUN)
    link = os.link

    def exchanged(source: str, target: str) -> None:
        if source.endswith("step=2.ckpt"):
            Path(source).unlink()
            Path(source).write_bytes(b"x" * 100)
        link(source, target)

    monkeypatch.setattr(os, "link", exchanged)
    assert restore_folders(LocalTier(tmp_path), RUN) == 1
    assert "step=2.ckpt" in caplog.text
