"""A wrong byte in any file of a sharded step: its values are never loaded wrong, and an older step takes its place.

Of the shards every byte counts. The files beside them (records, manifest, ``.metadata``, ``meta.pt``) are written from
what the shards hold, so that the step may be loaded in spite of the damage.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from resiliency.checkpoint.checkpointer import Restored
from resiliency.checkpoint.coordinator import Coordinator
from resiliency.checkpoint.dcp import load_folder
from resiliency.checkpoint.options import LocalTierOptions
from resiliency.errors import ResiliencyError
from resiliency.inspection.by_path import locate_and_load
from resiliency.testing.checkpoints import (
    copy_folder,
    differences,
    flip_bits,
    make_checkpointer,
    make_write_plan,
    run_ranks,
    step_dirs,
)
from tests.rings import few

SHARDS = ("__0_0.distcp", "__1_0.distcp")
BESIDE = ("manifest.json", ".metadata", "meta.pt", "shard-00000.json", "shard-00001.json")


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.arange(24.0).reshape(8, 3) + step, "b": torch.full((4,), step, dtype=torch.int16), "step": step}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2 of two ranks."""
    folder = tmp_path_factory.mktemp("saved") / "tier"

    def work(rank: int, coordinator: Coordinator) -> None:
        with _open(folder, coordinator) as checkpointer:
            for step in (1, 2):
                plan = make_write_plan(state_of(step), rank=rank, world_size=2)
                beside = {"meta.pt": {"step": step}} if rank == 0 else None
                checkpointer.save(step, plan, names=[f"{step}.ckpt"], beside=beside)
                checkpointer.flush()

    run_ranks(2, work)
    return folder


def _open(folder: Path, coordinator: Coordinator) -> Any:
    return make_checkpointer(LocalTierOptions(directory=str(folder), keep=None), coordinator)


def _load(folder: Path) -> list[Restored | None]:
    def work(rank: int, coordinator: Coordinator) -> Restored | None:
        checkpointer = _open(folder, coordinator)
        try:
            found: Restored | None = checkpointer.load()
            return found
        finally:
            checkpointer.close(flush=False)

    return run_ranks(2, work)


def _newest(folder: Path) -> Path:
    return max(step_dirs(folder).items())[1]


def _places(file: Path, every: str) -> list[int]:
    """The first and the last byte and some between them, or all."""
    size = file.stat().st_size
    return list(range(size)) if every == "all" else sorted({0, size - 1, *Random(size).sample(range(size), 10)})


def test_these_are_the_files_of_a_sharded_step(saved: Path) -> None:
    assert {path.name for path in _newest(saved).iterdir()} == {*SHARDS, *BESIDE}
    assert [one is not None and one.step for one in _load(saved)] == [2, 2]


@pytest.mark.parametrize("which", few(["some", "all"], ["some"]))
@pytest.mark.parametrize("name", [*SHARDS, *BESIDE])
def test_a_wrong_byte_is_never_loaded(
    name: str, which: str, saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy_folder(saved, tmp_path / "tier")
    file = _newest(tmp_path / "tier") / name
    for place in _places(file, which):
        caplog.clear()
        flip_bits(file, [(place, place + 1)])
        restored = _load(tmp_path / "tier")
        flip_bits(file, [(place, place + 1)])
        for one in restored:
            assert one is not None and one.step == (1 if name in SHARDS else 2), f"byte {place}"
            assert differences(one.state, state_of(one.step)) == []
        assert name not in SHARDS or str(file) in caplog.text, f"byte {place}: the file is not named"


@pytest.mark.parametrize("which", few(["some", "all"], ["some"]))
@pytest.mark.parametrize("name", [*SHARDS, "manifest.json", ".metadata", "meta.pt"])
@pytest.mark.parametrize("load", [lambda path: locate_and_load(str(path))[1], load_folder], ids=["engine", "dcp"])
def test_a_folder_with_a_wrong_byte_is_refused_by_name_or_loaded_right(
    load: Any, name: str, which: str, saved: Path, tmp_path: Path
) -> None:
    """By its path and elsewhere, where there is no other step to take."""
    copy_folder(saved / "2.ckpt", tmp_path / "2.ckpt")
    file = tmp_path / "2.ckpt" / name
    for place in _places(file, which):
        flip_bits(file, [(place, place + 1)])
        try:
            found = load(tmp_path / "2.ckpt")
        except ResiliencyError as error:
            assert name in str(error), f"byte {place}"
        else:
            assert differences(found, state_of(2)) == [], f"byte {place}"
        flip_bits(file, [(place, place + 1)])
