"""A script that sets its seeds trains the same model with our callback as with the stock class, validation or not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.callbacks.harness import EITHER, content, differences, loader, make_net, make_trainer, names, ours, stock
from tests.rings import few

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice about workers


def drawing(namespace: str) -> Any:
    """A module that draws random numbers in training and in validation."""
    net = make_net(namespace, dropout=0.3)
    net.validation_step = lambda batch, batch_idx: net.log(
        "val_loss", net.layers(batch[0]).square().mean() * torch.rand(()) * random.random()
    )
    return net


@pytest.mark.parametrize("namespace", EITHER)
@pytest.mark.parametrize("settings", [{"num_sanity_val_steps": 2}, {"val_check_interval": 2}], ids=str)
def test_a_run_with_validation_is_that_of_the_stock_class(
    namespace: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    found = []
    saving: dict[str, Any] = {"monitor": "val_loss", "save_top_k": -1, "filename": "{epoch}-{step}-{val_loss:.5f}"}
    for make in (stock, ours):
        folder = tmp_path / "run"
        callback = stock(namespace)(folder, **saving) if make is stock else ours(namespace, folder, **saving)
        trainer = make_trainer(namespace, [callback], root=tmp_path, max_epochs=3, **settings)
        net, train, validation = drawing(namespace), loader(shuffle=True), loader(batches=2)
        torch.manual_seed(1)
        random.seed(1)
        trainer.fit(net, train, validation)
        states = {name: content(folder / name)["state_dict"] for name in sorted(names(folder))}
        found.append((states, torch.get_rng_state(), random.getstate()))
        folder.rename(tmp_path / f"run-{len(found)}")
    assert len(found[0][0]) >= 3
    assert differences(*found) == []


@pytest.mark.parametrize("sanity", few([0, 2], [2]))
def test_a_resumed_run_with_persistent_validation_workers_goes_on_exactly(sanity: int, tmp_path: Path) -> None:
    """Their first iteration draws a seed, later ones do not; a restart has a first one again."""

    def train(folder: Path, ckpt: Path | None = None) -> dict[str, Any]:
        validation = torch.utils.data.DataLoader(
            loader(batches=2).dataset, batch_size=3, num_workers=1, persistent_workers=True
        )
        callback = ours("lightning.pytorch", folder, save_top_k=-1, filename="{epoch}")
        settings = {"num_sanity_val_steps": sanity, "max_epochs": 3}
        trainer = make_trainer("lightning.pytorch", [callback], root=folder, **settings)
        net, batches = drawing("lightning.pytorch"), loader(shuffle=True)
        torch.manual_seed(1 if ckpt is None else 2)
        random.seed(1 if ckpt is None else 2)
        trainer.fit(net, batches, validation, ckpt_path=ckpt)
        state: dict[str, Any] = content(folder / "epoch=2.ckpt")["state_dict"]
        return state

    whole = train(tmp_path / "whole")
    assert differences(whole, train(tmp_path / "resumed", tmp_path / "whole" / "epoch=0.ckpt")) == []
