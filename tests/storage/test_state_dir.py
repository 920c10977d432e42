"""The engine's folder keeps itself out of git, and still goes when nothing else is in it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from resiliency.checkpoint.options import LocalTierOptions
from resiliency.storage.catalog import find_runs, scan
from resiliency.storage.manifest import META_DIR
from resiliency.storage.state_dir import make_state_dir, remove_state_dir
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.checkpoints import RUN, make_checkpointer, make_lightning_state, make_series, save_steps
from tests.tidying import drop_folders

GIT = {
    **os.environ,
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
    "GIT_CEILING_DIRECTORIES": "/",
}


def test_git_takes_the_files_under_the_users_names_and_nothing_else(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=tmp_path, env=GIT, check=True, capture_output=True, text=True).stdout

    save_steps(tmp_path / "checkpoints", 1, 2)
    assert (tmp_path / "checkpoints" / META_DIR).is_dir()
    git("init", "--quiet")
    git("add", "checkpoints/")
    assert git("ls-files").split() == ["checkpoints/step=1.ckpt", "checkpoints/step=2.ckpt"]
    assert git("status", "--porcelain", "--untracked-files=all").split() == [
        "A",
        "checkpoints/step=1.ckpt",
        "A",
        "checkpoints/step=2.ckpt",
    ]


def test_it_is_no_run_and_no_step(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    assert (tmp_path / META_DIR / ".gitignore").read_text() == "*\n"
    assert find_runs(LocalTier(tmp_path)) == [RUN]
    (listing,) = scan(LocalTier(tmp_path), RUN)
    assert not listing.problems and ".gitignore" not in listing.sizes


def test_it_goes_with_the_folder_of_the_last_run(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, run="a", name="a.ckpt")
    save_steps(tmp_path, 1, run="b", name="b.ckpt")
    with open(tmp_path / META_DIR / ".gitignore") as before:
        assert drop_folders(LocalTier(tmp_path), "a") == ""
        assert sorted(os.listdir(tmp_path / META_DIR)) == [".gitignore", "b"]
        assert os.path.samestat(os.fstat(before.fileno()), os.stat(before.name)), "it was gone for a moment"
    assert drop_folders(LocalTier(tmp_path), "b") == ""
    assert sorted(os.listdir(tmp_path)) == ["a.ckpt", "b.ckpt"]


def test_a_folder_for_the_time_of_a_job_goes_whole(tmp_path: Path) -> None:
    local = LocalTierOptions(directory=str(tmp_path / "c"), only_files=True)
    with make_checkpointer(local) as checkpointer:
        checkpointer.save(1, make_lightning_state(1), names=["step=1.ckpt"])
        assert (tmp_path / "c" / META_DIR / ".gitignore").exists()
    assert os.listdir(tmp_path / "c") == ["step=1.ckpt"]


def test_it_is_not_sent_to_another_tier(tmp_path: Path) -> None:
    series = make_series(tmp_path, steps=(1,), world_size=1)
    assert [path.parents[1] for path in tmp_path.rglob(".gitignore")] == [series.root / "local"]


def test_a_job_that_begins_while_the_folder_goes_keeps_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meta = tmp_path / META_DIR
    meta.mkdir()
    make_state_dir(str(tmp_path))
    real = os.rmdir

    def rmdir(path: str) -> None:
        (meta / "another").mkdir()
        make_state_dir(str(tmp_path))
        (meta / ".gitignore").unlink()  # the job has looked before it went
        real(path)

    monkeypatch.setattr(os, "rmdir", rmdir)
    remove_state_dir(str(meta))
    assert sorted(os.listdir(meta)) == [".gitignore", "another"]


def test_a_users_own_file_there_stays_and_is_not_replaced(tmp_path: Path) -> None:
    meta = tmp_path / META_DIR
    meta.mkdir()
    (meta / ".gitignore").write_text("logs/\n")
    make_state_dir(str(tmp_path))
    assert (meta / ".gitignore").read_text() == "logs/\n"
    (meta / ".gitignore").unlink()
    (meta / "mine").touch()
    remove_state_dir(str(meta))
    assert os.listdir(meta) == ["mine"], "a file that was deleted by the user comes back"


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    remove_state_dir(str(tmp_path / "missing"))
    assert not (tmp_path / "missing").exists()
