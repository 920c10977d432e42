"""Models that change a weight in forward, as ``nn.Embedding(max_norm=...)`` does, in plain Lightning.

What is committed equals what a witness beside our callback has copied at the same moment, and the best model is there.
"""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resiliency.checkpoint.snapshot import Snapshot
from tests.callbacks.harness import ALL_LATE, EITHER, content, differences, make_trainer, names, ours, stock

PL = "lightning.pytorch"
ROWS = 20_000


def embedding_net(namespace: str) -> Any:
    lightning = importlib.import_module(namespace)

    class Net(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(ROWS, 32, max_norm=1.0)
            self.seen = 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen += 1
            self.log("score", torch.tensor(float(self.seen)))
            return self.embedding(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=100.0)

    torch.manual_seed(5)
    return Net()


def rows(batches: int = 6) -> DataLoader[Any]:
    torch.manual_seed(6)
    return DataLoader(TensorDataset(torch.randint(0, ROWS, (batches * 512, 8))), batch_size=512)


def witness(namespace: str) -> Any:
    """Copies the weights where our callback saves."""

    def take(self: Any, trainer: Any, module: Any, *args: Any) -> None:
        weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
        self.taken[f"step={trainer.global_step}.ckpt"] = weights

    members = {"__init__": lambda self: setattr(self, "taken", {}), "on_train_batch_end": take}
    return type("Witness", (importlib.import_module(f"{namespace}.callbacks").Checkpoint,), members)()


def check(folder: Path, taken: dict[str, Any], expected: set[str]) -> None:
    assert names(folder) == expected
    for name in expected:
        assert differences(taken[name], dict(content(folder / name)["state_dict"])) == [], name


@pytest.mark.parametrize("namespace", EITHER)
def test_an_embedding_with_max_norm_loses_no_checkpoint(
    namespace: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The stock class keeps these checkpoints; that the weight changes is seen in the steps before the first one."""
    seen, settings = witness(namespace), {"every_n_train_steps": 2, "save_top_k": -1, "filename": "{step}"}
    kept = stock(namespace)(dirpath=tmp_path / "stock", **settings)
    make_trainer(namespace, [kept], root=tmp_path).fit(embedding_net(namespace), rows())
    mine = ours(namespace, tmp_path / "ours", options=ALL_LATE, **settings)
    with caplog.at_level(logging.INFO, logger="resiliency"):
        make_trainer(namespace, [seen, mine], root=tmp_path).fit(embedding_net(namespace), rows())
    assert "copied at once" in caplog.text and "given up" not in caplog.text
    check(tmp_path / "ours", seen.taken, names(tmp_path / "stock"))


@pytest.mark.parametrize("lazy_too_early", [True, False])
def test_the_best_model_that_was_copied_before_the_change_is_kept(
    lazy_too_early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save of the first step, of which nothing is known yet. ``lazy_too_early``: with the change during its copy."""
    seen = witness(PL)
    copied = importlib.import_module(f"{PL}.callbacks").Callback()
    work = Snapshot.work
    if lazy_too_early:
        monkeypatch.setattr(
            Snapshot,
            "work",
            lambda self, helping=False: work(self, helping=True) if helping else self.copied.wait(60) and False,
        )
    else:

        def wait_for_the_copy(*args: Any) -> None:
            pending = mine._saver.engine and mine._saver.engine._opened.saves.in_flight
            if pending and pending.snapshot is not None:
                assert pending.snapshot.copied.wait(20)

        copied.on_train_batch_start = wait_for_the_copy
    mine = ours(
        PL,
        tmp_path / "ours",
        options=ALL_LATE,
        every_n_train_steps=1,
        save_top_k=1,
        monitor="score",
        mode="min",
        filename="{step}",
    )
    make_trainer(PL, [seen, mine, copied], root=tmp_path, max_epochs=1).fit(embedding_net(PL), rows())
    if lazy_too_early:
        assert names(tmp_path / "ours") == set()  # the file is gone; nothing stands under the name that is not whole
        return
    assert Path(mine.best_model_path).name == "step=1.ckpt" and Path(mine.best_model_path).is_file()
    check(tmp_path / "ours", seen.taken, {"step=1.ckpt"})


def test_a_model_that_changes_nothing_is_still_copied_late(tmp_path: Path) -> None:
    late = []
    net = embedding_net(PL)
    net.embedding.max_norm = None
    mine = ours(PL, tmp_path / "ours", options=ALL_LATE, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    probe = importlib.import_module(f"{PL}.callbacks").Callback()
    probe.on_train_batch_start = lambda *args: late.append(mine._saver.engine is not None and mine._saver.session.lazy)
    make_trainer(PL, [mine, probe], root=tmp_path).fit(net, rows())
    assert late[-1]
