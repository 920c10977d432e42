"""After a job each name of a step is a file of its own, as with stock Lightning, and nothing is lost by it."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from resiliency.checkpoint.options import LocalTierOptions
from resiliency.storage.manifest import META_DIR, shard_file
from resiliency.storage.single_files import restore_folders
from resiliency.storage.tiers.local import LocalTier
from resiliency.storage.unlink_hardlinks import unlink_hardlinks
from resiliency.testing.checkpoints import RUN, differences, make_checkpointer, make_state, step_dirs
from tests.tidying import drop_folders

NAMES = ["best.ckpt", "last.ckpt", "val/loss=0.5.ckpt"]


def save(folder: Path, *steps: int, names: list[str] = NAMES) -> None:
    """Saves steps whose names stay at the last of them, but for "step=N.ckpt"."""
    with make_checkpointer(LocalTierOptions(directory=str(folder), keep=None)) as checkpointer:
        for step in steps:
            checkpointer.save(step, make_state(step), names=[f"step={step}.ckpt", *names]).wait()


def inodes(folder: Path, names: list[str]) -> list[int]:
    return [(folder / name).stat().st_ino for name in names]


def test_each_name_gets_a_file_with_the_same_bytes_times_and_mode(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    (tmp_path / "step=2.ckpt").chmod(0o640)
    os.utime(tmp_path / "step=2.ckpt", ns=(5_000_000_000, 7_000_000_000))
    names = ["step=2.ckpt", *NAMES]
    assert len(set(inodes(tmp_path, names))) == 1
    assert drop_folders(LocalTier(tmp_path), RUN) == ""
    assert len(set(inodes(tmp_path, names))) == 4 and not (tmp_path / META_DIR).exists()
    assert {(tmp_path / name).stat().st_nlink for name in ["step=1.ckpt", *names]} == {1}
    assert len({(tmp_path / name).read_bytes() for name in names}) == 1
    assert {(tmp_path / name).stat().st_mtime_ns for name in names} == {7_000_000_000}
    assert {(tmp_path / name).stat().st_mode & 0o777 for name in names} == {0o640}
    for name in names:
        assert differences(torch.load(tmp_path / name), make_state(2)) == []


def test_what_a_script_writes_into_one_name_is_not_in_the_other(tmp_path: Path) -> None:
    save(tmp_path, 1)
    drop_folders(LocalTier(tmp_path), RUN)
    torch.save({"stripped": torch.ones(3)}, tmp_path / "last.ckpt")
    assert differences(torch.load(tmp_path / "best.ckpt"), make_state(1)) == []
    shutil.copyfile(tmp_path / "best.ckpt", tmp_path / "val/loss=0.5.ckpt")  # refuses when both are one file


def test_of_the_newest_step_every_file_is_newer_than_those_before(tmp_path: Path) -> None:
    """As scripts look for the newest: max(files, key=os.path.getctime)."""
    with make_checkpointer(LocalTierOptions(directory=str(tmp_path), keep=None)) as checkpointer:
        for step in range(1, 6):
            checkpointer.save(step, make_state(step), names=[f"step={step}.ckpt", f"top-{step}.ckpt"]).wait()
    drop_folders(LocalTier(tmp_path), RUN)
    times = {path.name: path.stat().st_ctime_ns for path in tmp_path.glob("*.ckpt")}
    assert len(times) == 10
    for step in range(1, 5):
        older = [times[f"step={step}.ckpt"], times[f"top-{step}.ckpt"]]
        assert max(older) < min(times[f"step={step + 1}.ckpt"], times[f"top-{step + 1}.ckpt"])


def test_a_job_goes_on_from_them_and_its_steps_replace_them(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    drop_folders(LocalTier(tmp_path), RUN)
    with make_checkpointer(LocalTierOptions(directory=str(tmp_path), keep=None)) as checkpointer:
        restored = checkpointer.load()
        assert restored is not None and restored.step == 2
        checkpointer.delete("step=2.ckpt", "best.ckpt", "val/loss=0.5.ckpt")
        checkpointer.save(3, make_state(3), names=["step=3.ckpt", "last.ckpt"]).wait()
    assert drop_folders(LocalTier(tmp_path), RUN) == ""
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=1.ckpt", "step=3.ckpt", "val"]  # it may be the user's
    for name in ("last.ckpt", "step=3.ckpt"):
        assert differences(torch.load(tmp_path / name), make_state(3)) == []


def test_a_step_whose_first_file_was_changed_is_restored_from_another(tmp_path: Path) -> None:
    save(tmp_path, 1)
    drop_folders(LocalTier(tmp_path), RUN)
    torch.save({"stripped": 1}, tmp_path / "best.ckpt")
    with make_checkpointer(LocalTierOptions(directory=str(tmp_path))) as checkpointer:
        restored = checkpointer.load()
        assert restored is not None and differences(restored.state, make_state(1)) == []


def test_a_later_job_leaves_the_copies_as_they_are(tmp_path: Path) -> None:
    save(tmp_path, 1)
    drop_folders(LocalTier(tmp_path), RUN)
    names = ["step=1.ckpt", *NAMES]
    before = inodes(tmp_path, names)
    assert restore_folders(LocalTier(tmp_path), RUN) == 1
    assert drop_folders(LocalTier(tmp_path), RUN) == ""
    assert inodes(tmp_path, names) == before and not (tmp_path / META_DIR).exists()


def test_names_of_a_step_whose_link_in_the_folder_was_deleted_are_separated_too(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (next(iter(step_dirs(tmp_path).values())) / shard_file(0)).unlink()
    assert drop_folders(LocalTier(tmp_path), RUN) == ""
    assert len(set(inodes(tmp_path, ["step=1.ckpt", *NAMES]))) == 4


@pytest.mark.parametrize("how", ["another file", "written into"])
def test_what_a_program_puts_there_meanwhile_stays(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    real = shutil.copy2

    def copy(source: str, target: str) -> None:
        real(source, target)
        if how == "another file":
            (tmp_path / "new").write_bytes(b"of another program")
            os.replace(tmp_path / "new", tmp_path / "last.ckpt")
        else:
            (tmp_path / "last.ckpt").write_bytes(b"of another program")  # in place, as torch.save does

    monkeypatch.setattr(shutil, "copy2", copy)
    through = tmp_path / "through"
    through.mkdir()
    names = [str(tmp_path / name) for name in ("best.ckpt", "last.ckpt")]
    assert unlink_hardlinks(names, through=str(through)) == []
    assert (tmp_path / "last.ckpt").read_bytes() == b"of another program" and os.listdir(through) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_on_a_full_disk_the_names_stay_one_file_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    save(tmp_path, 1, names=["last.ckpt"])

    def full(*_: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(shutil, "copy2", full)
    with caplog.at_level(logging.INFO):
        assert drop_folders(LocalTier(tmp_path), RUN) == ""
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=1.ckpt"]
    assert len(set(inodes(tmp_path, ["step=1.ckpt", "last.ckpt"]))) == 1
    assert "stay one file, because there is no room for a second" in caplog.text


@pytest.mark.parametrize("what", ["the staging folder", "a name"])
def test_when_something_is_gone_meanwhile_the_steps_stay_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    save(tmp_path, 1, 2)
    real = shutil.copy2

    def copy(source: str, target: str) -> None:
        if what == "a name":
            os.unlink(source)
        else:
            shutil.rmtree(os.path.dirname(target))  # as a later job's agent does
        real(source, target)

    monkeypatch.setattr(shutil, "copy2", copy)
    before = step_dirs(tmp_path)
    assert drop_folders(LocalTier(tmp_path), RUN).startswith("a later job has begun, or somebody deletes checkpoints")
    assert step_dirs(tmp_path) == before and len(before) == 2
    for name in ("step=1.ckpt", "step=2.ckpt", *NAMES[1 if what == "a name" else 0 :]):
        assert (tmp_path / name).is_file()


def test_a_kill_between_two_copies_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, 2)
    real, copied = shutil.copy2, []

    def copy(source: str, target: str) -> None:
        if copied:
            raise KeyboardInterrupt
        copied.append(source)
        real(source, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shutil, "copy2", copy)
        drop_folders(LocalTier(tmp_path), RUN)
    assert len(copied) == 1 and len(step_dirs(tmp_path)) == 2
    restore_folders(LocalTier(tmp_path), RUN)
    assert drop_folders(LocalTier(tmp_path), RUN) == ""
    assert sorted(os.listdir(tmp_path)) == ["best.ckpt", "last.ckpt", "step=1.ckpt", "step=2.ckpt", "val"]
    names = ["step=2.ckpt", *NAMES]
    assert len(set(inodes(tmp_path, names))) == 4
    for name in names:
        assert differences(torch.load(tmp_path / name), make_state(2)) == []


def test_links_and_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"1")
    os.link(tmp_path / "one", tmp_path / "two")
    os.symlink("one", tmp_path / "link")
    (tmp_path / "other").write_bytes(b"1")
    paths = [str(tmp_path / name) for name in ("one", "link", "other", "two")]
    before = (tmp_path / "other").stat().st_ino
    assert unlink_hardlinks(paths, through=str(tmp_path)) == [str(tmp_path / "two")]
    assert os.readlink(tmp_path / "link") == "one" and (tmp_path / "other").stat().st_ino == before
