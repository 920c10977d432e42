"""Steps that are one file each: the run's folder can go, and comes back from the files with nothing lost."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from resiliency.checkpoint.options import LocalTierOptions
from resiliency.errors import CorruptShard, NoCheckpointFound
from resiliency.inspection import survey
from resiliency.inspection.by_path import load_path, locate
from resiliency.inspection.verify import check_step
from resiliency.storage.manifest import META_DIR
from resiliency.storage.shard_file import IDENTITY_BYTES
from resiliency.storage.single_files import find_single_files, read_single_file, restore_folders
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.checkpoints import (
    RUN,
    differences,
    flip_bits,
    make_checkpointer,
    make_lightning_state,
    save_steps,
    step_dir,
    step_dirs,
)
from tests.storage.joining import unjoined
from tests.tidying import drop_folders


def picture(folder: Path) -> dict[str, Any]:
    """Inode and bytes of all files of the steps, and of the names."""
    found = [path for step in step_dirs(folder).values() for path in step.iterdir()]
    return {
        str(path): (path.stat().st_ino if path.suffix in (".ckpt", ".shard") else 0, path.read_bytes())
        for path in found
    }


def test_a_folder_that_was_dropped_comes_back_as_it_was(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    before = picture(tmp_path)
    assert len(before) == 9
    assert drop_folders(LocalTier(tmp_path), RUN) == ""
    assert sorted(os.listdir(tmp_path)) == ["step=1.ckpt", "step=2.ckpt", "step=3.ckpt"]
    assert restore_folders(LocalTier(tmp_path), RUN) == 3
    assert picture(tmp_path) == before
    assert restore_folders(LocalTier(tmp_path), RUN) == 0


def test_names_in_folders_come_back_too(tmp_path: Path) -> None:
    """A metric called "val/loss" in a file name makes a folder."""
    save_steps(tmp_path, 1, 2, name="val/loss={step}-val/acc=0.5.ckpt")
    save_steps(tmp_path, 3, name="val/{step}.ckpt")
    before = picture(tmp_path)
    assert drop_folders(LocalTier(tmp_path), RUN) == ""
    assert os.listdir(tmp_path) == ["val"]
    assert restore_folders(LocalTier(tmp_path), RUN) == 3
    assert picture(tmp_path) == before


def test_an_older_step_whose_file_was_deleted_is_gone_afterwards(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    (tmp_path / "step=1.ckpt").unlink()
    (tmp_path / "step=2.ckpt").rename(tmp_path / "kept.ckpt")
    assert drop_folders(LocalTier(tmp_path), RUN) == ""
    assert sorted(os.listdir(tmp_path)) == ["kept.ckpt", "step=3.ckpt"]
    assert restore_folders(LocalTier(tmp_path), RUN) == 1


def test_a_step_whose_other_link_was_deleted_is_still_its_file(tmp_path: Path) -> None:
    """A script that deletes old files below the folder, hidden or not, may delete one of the two."""
    save_steps(tmp_path, 1, 2, 3)
    for step in (1, 2):
        (step_dir(tmp_path, RUN, step) / "shard-00000.shard").unlink()
    (tmp_path / "step=1.ckpt").unlink()
    shutil.copy(tmp_path / "step=3.ckpt", tmp_path / "step=1.ckpt")  # not this step
    assert drop_folders(LocalTier(tmp_path), RUN) == ""
    assert sorted(os.listdir(tmp_path)) == ["step=1.ckpt", "step=2.ckpt", "step=3.ckpt"]
    assert restore_folders(LocalTier(tmp_path), RUN) == 2


def test_several_processes_may_bring_it_back_at_once(tmp_path: Path) -> None:
    save_steps(tmp_path, *range(1, 9))
    before = picture(tmp_path)
    drop_folders(LocalTier(tmp_path), RUN)
    threads = [threading.Thread(target=restore_folders, args=(LocalTier(tmp_path), RUN)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert picture(tmp_path) == before


def save_unjoined(folder: Path, step: int) -> None:
    with unjoined():
        save_steps(folder, step, world_size=2)


KEPT = {
    "two ranks": lambda folder: save_unjoined(folder, 1),
    "a name three folders below": lambda folder: save_steps(folder, 1, name="a/b/c/{step}.ckpt"),
    "a name in a folder with another ending": lambda folder: save_steps(folder, 1, name="a/{step}.pt"),
    "a name in a hidden folder": lambda folder: save_steps(folder, 1, name="a/.b/{step}.ckpt"),
    "the newest's name that was deleted": lambda folder: (save_steps(folder, 1, 2), (folder / "step=2.ckpt").unlink()),
    "the only name that was deleted": lambda folder: (save_steps(folder, 1), (folder / "step=1.ckpt").unlink()),
    "a name that is another file": lambda folder: (
        save_steps(folder, 1),
        shutil.copy(folder / "step=1.ckpt", folder / "x"),
        os.replace(folder / "x", folder / "step=1.ckpt"),
    ),
    "a damaged manifest": lambda folder: (
        save_steps(folder, 1),
        flip_bits(step_dir(folder, RUN, 1) / "manifest.json", [(20, 21)]),
    ),
}


@pytest.mark.parametrize("case", KEPT)
def test_a_folder_that_holds_more_than_the_files_stays(tmp_path: Path, case: str) -> None:
    KEPT[case](tmp_path)
    before = picture(tmp_path)
    assert drop_folders(LocalTier(tmp_path), RUN) != ""
    assert picture(tmp_path) == before


def test_other_runs_stay(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, name="a{step}.ckpt")
    save_steps(tmp_path, 1, name="b{step}.ckpt", run="other")
    assert drop_folders(LocalTier(tmp_path), RUN) == ""
    assert sorted(os.listdir(tmp_path / META_DIR)) == [".gitignore", "other"]
    assert [file.name for file in find_single_files(str(tmp_path), RUN)] == ["a1.ckpt"]
    assert restore_folders(LocalTier(tmp_path), RUN) == 1
    assert len(step_dirs(tmp_path, "other")) == 1


def test_a_drop_that_was_killed_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_steps(tmp_path, 1, 2)
    before = picture(tmp_path)

    def killed(path: Any, **_: Any) -> None:
        (next(iter((Path(path) / "steps").iterdir())) / "manifest.json").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            drop_folders(LocalTier(tmp_path), RUN)
    assert restore_folders(LocalTier(tmp_path), RUN) == 2
    assert picture(tmp_path) == before


def test_a_file_is_a_step_only_under_its_own_name(tmp_path: Path) -> None:
    save_steps(tmp_path / "a", 1, 2)
    save_steps(tmp_path / "b", 5)
    drop_folders(LocalTier(tmp_path / "a"), RUN)
    (tmp_path / "a" / "step=1.ckpt").rename(tmp_path / "a" / "mine.ckpt")
    shutil.copy(tmp_path / "b" / "step=5.ckpt", tmp_path / "a" / "copy.ckpt")
    assert restore_folders(LocalTier(tmp_path / "a"), RUN) == 1
    assert [step.step for step in step_dirs(tmp_path / "a")] == [2]
    # They can be loaded all the same, and are checked by the record they hold.
    for name, step in (("mine.ckpt", 1), ("copy.ckpt", 5)):
        located = locate(str(tmp_path / "a" / name))
        assert located is not None and located.is_checked
        state, own = load_path(located)
        assert differences(state, make_lightning_state(step)) == []
        assert own["rng"].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("at", [0, 5, 40, 100, IDENTITY_BYTES - 500])
def test_a_file_whose_first_bytes_are_damaged_is_no_stock_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, at: int
) -> None:
    save_steps(tmp_path, 1)
    drop_folders(LocalTier(tmp_path), RUN)
    path = tmp_path / "step=1.ckpt"
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(b"\xff")
    with pytest.raises(CorruptShard, match=r"step=1\.ckpt: its first 1024 bytes are damaged"):
        locate(str(path))
    assert find_single_files(str(tmp_path)) == []
    assert "step=1.ckpt is not counted as a checkpoint: " in caplog.text
    stock = path.with_name("stock.ckpt")
    torch.save({"x": torch.ones(3)}, stock)
    assert locate(str(stock)) is None and read_single_file(str(stock)) is None


def test_a_damaged_file_is_not_brought_back_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_steps(tmp_path, 1, 2)
    drop_folders(LocalTier(tmp_path), RUN)
    flip_bits(tmp_path / "step=2.ckpt", [(-600, -599)])
    (tmp_path / "notes.txt").write_text("x")
    os.mkfifo(tmp_path / "pipe.ckpt")
    with caplog.at_level(logging.WARNING):
        assert restore_folders(LocalTier(tmp_path), RUN) == 1
    assert [step.step for step in step_dirs(tmp_path)] == [1]
    (said,) = [record.getMessage() for record in caplog.records]
    assert "step=2.ckpt" in said and "is not counted as a checkpoint" in said


def test_a_file_system_without_hard_links_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, 1)
    drop_folders(LocalTier(tmp_path), RUN)

    def refused(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refused)
        assert restore_folders(LocalTier(tmp_path), RUN) == 0
    assert "ckpt_path=" in caplog.text
    assert not step_dirs(tmp_path)
    assert restore_folders(LocalTier(tmp_path), RUN) == 1


def test_an_engine_takes_up_what_another_left_as_files(tmp_path: Path) -> None:
    options = LocalTierOptions(directory=str(tmp_path), only_files=True)
    for step in (1, 2):
        with make_checkpointer(options) as checkpointer:
            assert [known.step for known, _ in checkpointer.steps()] == list(range(step - 1, 0, -1))
            checkpointer.save(step, make_lightning_state(step), names=[f"step={step}.ckpt"])
        assert sorted(os.listdir(tmp_path)) == [f"step={number}.ckpt" for number in range(1, step + 1)]
    with make_checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.load()
        assert restored is not None and restored.id.attempt == 2
        assert differences(restored.state, make_lightning_state(2)) == []
    assert META_DIR in os.listdir(tmp_path)  # this one did not ask for it


@pytest.mark.parametrize("reason", ["finished", "exception", "nothing"])
def test_the_folder_goes_when_the_job_has_ended_in_order(tmp_path: Path, reason: str) -> None:
    checkpointer = make_checkpointer(LocalTierOptions(directory=str(tmp_path), only_files=True))
    ticket = checkpointer.save(1, make_lightning_state(1), names=["a.ckpt"])
    assert ticket is not None
    ticket.wait()
    checkpointer.flush()
    if reason == "nothing":
        checkpointer._parts().session.client.send = lambda message: None  # type: ignore[method-assign]
    checkpointer.close(reason=reason)
    assert sorted(os.listdir(tmp_path)) == ([META_DIR] if reason == "nothing" else []) + ["a.ckpt"]


def test_a_folder_of_files_is_listed_and_verified(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    drop_folders(LocalTier(tmp_path), RUN)
    target = survey.find(str(tmp_path))
    assert survey.runs_of([target]) == [RUN]
    views = survey.survey(survey.label_tiers([target]), RUN)
    assert [(view.id.step, view.state, view.names) for view in views] == [
        (1, survey.StepState.COMMITTED, ("step=1.ckpt",)),
        (2, survey.StepState.COMMITTED, ("step=2.ckpt",)),
    ]
    assert [check_step(view) for view in views] == [[], []]
    flip_bits(tmp_path / "step=2.ckpt", [(70_000, 70_001)])
    (finding,) = check_step(views[1])
    assert finding.bad and finding.path == f"{tmp_path}/step=2.ckpt"
    named = survey.find(str(tmp_path / "step=1.ckpt"))
    assert (named.run, named.step, named.name) == (RUN, views[0].id, "step=1.ckpt")
    newest = locate(str(tmp_path))
    assert newest is not None and newest.id.step == 2
    assert os.listdir(tmp_path).count(META_DIR) == 0, "looking changes nothing"
    (tmp_path / "step=1.ckpt").unlink()
    (tmp_path / "step=2.ckpt").unlink()
    with pytest.raises(NoCheckpointFound):
        survey.find(str(tmp_path / "step=1.ckpt"))
