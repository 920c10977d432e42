"""Which step a fit goes on from: after a rollback, and with two callbacks that save to two folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from resiliency.inspection.by_path import locate
from tests.callbacks.harness import EITHER, EMBEDDED, loader, make_net, make_trainer, names, ours

PL = "lightning.pytorch"


def callback(namespace: str, folder: Path, every: int, **more: Any) -> Any:
    settings = {"every_n_train_steps": every, "save_top_k": -1, "filename": "{step}", "auto_resume": True}
    return ours(namespace, folder, options=EMBEDDED, **(settings | more))


def fit(namespace: str, root: Path, callbacks: list[Any], *, until: int, ckpt_path: Any = None) -> int:
    """Trains up to a step; returns the step it went on from."""
    trainer = make_trainer(namespace, callbacks, root=root, max_epochs=-1, max_steps=until)
    net = make_net(namespace)
    began: list[int] = []
    net.on_train_start = lambda: began.append(trainer.global_step)
    trainer.fit(net, loader(), ckpt_path=ckpt_path)
    return began[0]


@pytest.mark.parametrize("namespace", EITHER)
def test_a_restart_after_a_rollback_goes_on_from_what_was_saved_after_it(namespace: str, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    assert fit(namespace, tmp_path, [callback(namespace, folder, 2)], until=8) == 0
    older = str(folder / "step=2.ckpt")
    assert fit(namespace, tmp_path, [callback(namespace, folder, 2)], until=4, ckpt_path=older) == 2
    assert fit(namespace, tmp_path, [callback(namespace, folder, 2)], until=6) == 4
    assert fit(namespace, tmp_path, [callback(namespace, folder, 2)], until=7, ckpt_path="last") == 6
    assert {"step=6.ckpt", "step=8.ckpt"} <= names(folder)


def test_of_two_folders_the_one_with_the_later_step_is_taken_whatever_its_attempt(tmp_path: Path) -> None:
    """The first folder has seen more starts, of which the second knows nothing."""
    rare, often = tmp_path / "rare", tmp_path / "often"
    fit(PL, tmp_path, [callback(PL, rare, 4)], until=8)
    fit(PL, tmp_path, [callback(PL, rare, 4)], until=8, ckpt_path=str(rare / "step=4.ckpt"))
    # From here on both, and they are the same training.
    assert fit(PL, tmp_path, [callback(PL, rare, 4), callback(PL, often, 1)], until=14) == 8
    (found_rare, found_often) = (locate(str(folder / ".resiliency" / "default")) for folder in (rare, often))
    assert found_rare is not None and found_often is not None
    assert (found_rare.id.step, found_often.id.step) == (12, 14)
    assert found_rare.id.attempt > found_often.id.attempt and found_rare.id.line == found_often.id.line
    assert fit(PL, tmp_path, [callback(PL, rare, 4), callback(PL, often, 1)], until=15) == 14


def test_a_rollback_counts_in_both_folders(tmp_path: Path) -> None:
    rare, often = tmp_path / "rare", tmp_path / "often"
    fit(PL, tmp_path, [callback(PL, rare, 4), callback(PL, often, 1)], until=9)
    older = str(often / "step=2.ckpt")
    assert fit(PL, tmp_path, [callback(PL, rare, 4), callback(PL, often, 1)], until=3, ckpt_path=older) == 2
    assert fit(PL, tmp_path, [callback(PL, rare, 4), callback(PL, often, 1)], until=4) == 3
