"""Something odd in place of a file of the newest step: a job loads, finds and saves all the same, and never hangs."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import pytest

from resiliency.errors import ResiliencyError
from resiliency.inspection.by_path import load_path, locate
from resiliency.storage.attempts import attempt_file
from resiliency.storage.manifest import META_DIR
from resiliency.storage.stage import Stage
from resiliency.testing.checkpoints import (
    RUN,
    Series,
    differences,
    make_checkpointer,
    make_series,
    make_state,
    step_dirs,
)
from tests.checkpoint.test_failures import SOON
from tests.storage.test_odd_files import KINDS, at_once, put


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> Series:
    return make_series(tmp_path_factory.mktemp("odd") / "s", steps=(10, 20), world_size=1, remote=False)


#: File of the newest step -> the step that is loaded when it is no file.
PLACES = {
    "shard-00000.shard": 10,
    "shard-00000.json": 20,  # the manifest has a copy
    "manifest.json": 20,  # the records have a copy
    "all json": 10,
    "attempt": 20,
    "name": 20,
}


def odd(series: Series, place: str, kind: str) -> Path:
    (folder,) = [path for step, path in step_dirs(series.local_dir).items() if step.step == 20]
    name = next(path for path in series.local_dir.iterdir() if path.name != ".resiliency" and "20" in path.name)
    targets = {
        "attempt": [Path(attempt_file(str(series.local_dir / META_DIR / RUN)))],
        "name": [name],
        "all json": [folder / "shard-00000.json", folder / "manifest.json"],
    }.get(place, [folder / place])
    for target in targets:
        if target.is_dir():
            shutil.rmtree(target)
        put(kind, target)
    return name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_a_job_goes_on_with_something_odd_in_place_of_a_file(
    series: Series, tmp_path: Path, place: str, kind: str
) -> None:
    copy = series.copy_to(tmp_path / "copy")
    name = odd(copy, place, kind)

    def job() -> int:
        with make_checkpointer(copy.local_dir) as checkpointer:
            restored = checkpointer.load()
            assert restored is not None and differences(restored.state, make_state(restored.step)) == []
            ticket = checkpointer.save(30, make_state(30), names=["new.ckpt"])
            assert ticket is not None
            ticket.wait(Stage.DURABLE, timeout=SOON)
            return restored.step

    assert at_once(job) == PLACES[place]
    located = at_once(lambda: locate(str(copy.local_dir)))
    assert located.id.step == 30
    assert differences(load_path(located)[0], make_state(30)) == []
    if place == "name":
        with contextlib.suppress(ResiliencyError):  # a folder is nobody's, anything else is refused with its name
            found = at_once(lambda: locate(str(name)))
            assert found is None or (isinstance(found, ResiliencyError) and str(name) in str(found)), found


def test_a_step_folder_replaced_by_a_fifo_hides_no_other_step(series: Series, tmp_path: Path) -> None:
    copy = series.copy_to(tmp_path / "copy")
    (folder,) = [path for step, path in step_dirs(copy.local_dir).items() if step.step == 20]
    shutil.rmtree(folder)
    os.mkfifo(folder)

    def load() -> int:
        with make_checkpointer(copy.local_dir) as checkpointer:
            restored = checkpointer.load()
            assert restored is not None
            return restored.step

    assert at_once(load) == 10
