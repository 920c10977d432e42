"""A save that was copied during a step is committed before that step ends, which may take minutes."""

from __future__ import annotations

import importlib
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.callbacks.harness import ALL_LATE, EITHER, loader, make_net, make_trainer, ours


@pytest.mark.parametrize("namespace", EITHER)
def test_a_late_save_is_committed_in_the_middle_of_the_next_step(namespace: str, tmp_path: Path) -> None:
    callback: Any = ours(namespace, tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}", options=ALL_LATE)
    before_the_fence: dict[int, bool] = {}

    class Watcher(importlib.import_module(f"{namespace}.callbacks").Callback):  # type: ignore[misc]
        def on_before_backward(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step:  # the forward was long enough for the copy; our own hook comes next
                assert callback._saver.engine._opened.saves.in_flight.snapshot.copied.wait(20)

        def on_after_backward(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step:
                path, deadline = tmp_path / f"step={trainer.global_step}.ckpt", time.monotonic() + 20
                while not path.exists() and time.monotonic() < deadline:
                    threading.Event().wait(0.01)
                before_the_fence[trainer.global_step] = path.exists() and callback._saver.engine.pending

    make_trainer(namespace, [Watcher(), callback], root=tmp_path, max_steps=3).fit(make_net(namespace), loader())
    assert before_the_fence == {1: True, 2: True}
