"""The newest checkpoint is also the one that was changed last, as scripts look for it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from resiliency.checkpoint.options import LocalTierOptions
from resiliency.storage import change_times
from resiliency.storage.change_times import unlink_in_order
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.checkpoints import RUN, make_checkpointer, make_state, save_steps
from tests.tidying import drop_folders


def by_change(folder: Path) -> list[str]:
    return sorted((path.name for path in folder.glob("*.ckpt")), key=lambda name: (folder / name).stat().st_ctime_ns)


def test_when_the_folder_goes_files_are_changed_in_the_order_of_their_steps(tmp_path: Path) -> None:
    steps = [f"step={step}.ckpt" for step in range(1, 13)]
    save_steps(tmp_path, *range(1, 13))
    assert drop_folders(LocalTier(tmp_path), RUN) == ""
    assert by_change(tmp_path) == steps
    times = [(tmp_path / name).stat().st_ctime_ns for name in steps]
    assert len(set(times)) == len(steps), "files with one time are listed in any order"


def test_a_name_that_goes_on_leaves_the_older_step_the_older_one(tmp_path: Path) -> None:
    """As last.ckpt does: the file that had it before changes in that moment, too."""
    with make_checkpointer(LocalTierOptions(directory=str(tmp_path), keep=None)) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, make_state(step), names=[f"step={step}.ckpt", "last.ckpt"]).wait()
    times = {name: (tmp_path / f"step={name}.ckpt").stat().st_ctime_ns for name in (1, 2, 3)}
    assert times[1] < times[2] < times[3]


def test_only_the_newest_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(40):
        (tmp_path / f"{number:02d}").touch()
        os.link(tmp_path / f"{number:02d}", tmp_path / f"{number:02d}.ckpt")
    asked: list[int] = []
    monkeypatch.setattr(change_times, "_change_after", lambda fd, last: asked.append(last) or last + 1)
    unlink_in_order(str(tmp_path / f"{number:02d}") for number in (*range(40), 99))
    assert asked == list(range(15)) and len(by_change(tmp_path)) == len(os.listdir(tmp_path)) == 40


def test_a_clock_that_stands_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / "x").touch()
    os.utime(tmp_path / "x", ns=(1, 2))
    with (tmp_path / "x").open() as file:
        began = time.monotonic()
        change_times._change_after(file.fileno(), 1 << 62)
    assert time.monotonic() - began < 5
    assert (tmp_path / "x").stat().st_mtime_ns == 2, "the time at which it was written stays"
