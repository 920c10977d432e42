"""Which paths the engine can keep: whatever is said to be one of its names is one it takes."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from resiliency.callbacks.checkpointing.names import engine_name
from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.storage.stock import is_stock
from tests.callbacks.harness import EMBEDDED, names

KEPT = {
    "/d/step=1.ckpt": "step=1.ckpt",
    "/d/a/b.ckpt": "a/b.ckpt",
    "/d/a//b.ckpt": "a/b.ckpt",
    "/d/./c.ckpt": "c.ckpt",
    "/d/a/../e.ckpt": "e.ckpt",
    "/d/with space.ckpt": "with space.ckpt",
    f"/d/{'x' * 250}.ckpt": f"{'x' * 250}.ckpt",
}
NOT_KEPT = [
    "/e/step=1.ckpt",
    "/dd/step=1.ckpt",
    "/d",
    "/d/",
    "/d/../step=1.ckpt",
    "/d/a/../../step=1.ckpt",
    "/d/.hidden.ckpt",
    "/d/a/.hidden.ckpt",
    "/d/.a/b.ckpt",
    "/d/.resiliency/x.ckpt",
    "/d/a/.resiliency/x.ckpt",
    "/d/line\nbreak.ckpt",
    f"/d/{'x' * 251}.ckpt",
    f"/d/{'ü' * 126}.ckpt",
    "/d/\udcff.ckpt",
]


@pytest.mark.parametrize("dirpath", ["/d", "/d/"])
def test_paths_below_dirpath_have_a_name_others_have_none(dirpath: str) -> None:
    assert {path: engine_name(path, dirpath) for path in KEPT} == KEPT
    assert [path for path in NOT_KEPT if engine_name(path, dirpath) is not None] == []
    assert engine_name("gs://bucket/job/step=1.ckpt", "gs://bucket/job") == "step=1.ckpt"


def test_the_engine_takes_every_such_name(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, options=EMBEDDED) as checkpointer:
        assert checkpointer.save(1, {"x": torch.zeros(1)}, names=list(KEPT.values())) is not None
    assert names(tmp_path) == set(KEPT.values())


def test_a_pipe_at_the_place_of_a_checkpoint_is_looked_at_without_waiting(tmp_path: Path) -> None:
    """Somebody makes one under the name of a checkpoint that is to be removed: opened to be read it waits for ever."""
    pipe = tmp_path / "step=1.ckpt"
    os.mkfifo(pipe)
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(is_stock(str(pipe))), daemon=True)
    thread.start()
    thread.join(10)
    waited = thread.is_alive()
    if waited:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    assert not waited and found == [True]
