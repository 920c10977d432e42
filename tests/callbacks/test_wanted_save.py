"""A save that the launcher wants after a step, as before a planned restart: all ranks are told the step ahead of it."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import pytest

from resiliency.callbacks.heartbeat import build as heartbeat_callback
from resiliency.runtime import heartbeat
from resiliency.runtime.heartbeat_page import PAGE_BYTES, PageWriter, SaveWords, WorkWords
from tests.callbacks.harness import EITHER, NAMESPACES, loader, make_net, make_trainer, ours


@pytest.fixture
def saves(monkeypatch: pytest.MonkeyPatch) -> SaveWords:
    """The launcher's side of this process's page."""
    page = mmap.mmap(-1, PAGE_BYTES)
    own = heartbeat.Heartbeat("")
    own._pages.append(PageWriter(page))
    own._saves, own._work = SaveWords(page), WorkWords(page)
    monkeypatch.setattr(heartbeat, "_own", {os.getpid(): own})
    return SaveWords(page)


def at_batch_end(namespace: str, action: Any) -> Any:
    """A callback that is called before the checkpoint callback, with the steps done."""
    base: Any = __import__(namespace, fromlist=["Callback"]).Callback

    class AtBatchEnd(base):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            action(trainer.global_step)

    return AtBatchEnd()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("namespace", EITHER)
def test_the_step_that_is_wanted_is_saved_and_said_to_be_committed(
    namespace: str, accumulate: int, saves: SaveWords, tmp_path: Path
) -> None:
    def tell(step: int) -> None:
        if step == 1:
            saves.want(3)

    checkpoint = ours(namespace, tmp_path / "c", every_n_train_steps=100, save_top_k=0)
    trainer = make_trainer(
        namespace,
        [at_batch_end(namespace, tell), checkpoint],
        root=tmp_path,
        max_steps=6,
        accumulate_grad_batches=accumulate,
    )
    trainer.fit(make_net(namespace), loader(batches=12))
    assert saves.newest_committed() == 3
    assert [path.name for path in (tmp_path / "c").glob("*.ckpt")] == [], "a save without a name has none"

    resumed = ours(namespace, tmp_path / "c", auto_resume=True, every_n_train_steps=100, save_top_k=0)
    steps: list[int] = []
    again = make_trainer(namespace, [at_batch_end(namespace, steps.append), resumed], root=tmp_path, max_steps=6)
    again.fit(make_net(namespace), loader(batches=12))
    assert steps[0] == 4, "it did not resume from the save that was wanted"


@pytest.mark.parametrize("wanted", [0, 99], ids=["of the past", "beyond the end"])
def test_a_step_that_is_never_done_is_not_saved(wanted: int, saves: SaveWords, tmp_path: Path) -> None:
    def tell(step: int) -> None:
        if step == 2:
            saves.want(wanted)

    checkpoint = ours(NAMESPACES[0], tmp_path / "c", every_n_train_steps=100, save_top_k=0)
    trainer = make_trainer(NAMESPACES[0], [at_batch_end(NAMESPACES[0], tell), checkpoint], root=tmp_path, max_steps=4)
    trainer.fit(make_net(NAMESPACES[0]), loader(batches=12))
    assert saves.newest_committed() == -1


def test_of_two_callbacks_one_saves_and_one_that_saves_weights_alone_does_not(saves: SaveWords, tmp_path: Path) -> None:
    def tell(step: int) -> None:
        if step == 1:
            saves.want(2)

    made = [
        ours(NAMESPACES[0], tmp_path / name, every_n_train_steps=every, save_top_k=0, save_weights_only=every == 100)
        for name, every in {"weights": 100, "a": 101, "b": 102}.items()
    ]
    callbacks = [at_batch_end(NAMESPACES[0], tell), heartbeat_callback(NAMESPACES[0])(), *made]
    make_trainer(NAMESPACES[0], callbacks, root=tmp_path, max_steps=4).fit(make_net(NAMESPACES[0]), loader(batches=12))
    found = {name for name in ("weights", "a", "b") if list((tmp_path / name).rglob("shard-*.shard"))}
    assert found == {"a"} and saves.newest_committed() == 2
