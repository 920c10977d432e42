"""Small trainings with the stock callback or ours, and a strict comparison of what they leave behind."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from resiliency.callbacks.model_checkpoint import build
from resiliency.checkpoint.options import CheckpointerOptions
from resiliency.inspection.by_path import load_path, locate
from resiliency.inspection.survey import listings
from resiliency.storage.manifest import META_DIR
from resiliency.storage.tiers.local import LocalTier

NAMESPACES = ("lightning.pytorch", "pytorch_lightning")
#: For tests of what does not differ between the two.
EITHER = (NAMESPACES[0], pytest.param(NAMESPACES[1], marks=pytest.mark.nightly))
EMBEDDED = CheckpointerOptions(agent="embedded")
#: Copies everything late, however small, so that a copy taken too late shows.
ALL_LATE = CheckpointerOptions(agent="embedded", lazy_bytes=1)
BATCHES = 6


def stock(namespace: str) -> type[Any]:
    found: type[Any] = importlib.import_module(f"{namespace}.callbacks").ModelCheckpoint
    return found


def make_net(
    namespace: str, *, manual: str = "", width: int = 8, dropout: float = 0.0, hparams: Mapping[str, Any] | None = None
) -> Any:
    """A module with dropout, BatchNorm, Adam and a scheduler. ``manual``: "wrapped" or "raw" optimizer, stepped by hand."""
    lightning = importlib.import_module(namespace)

    class Net(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self, **kwargs: Any) -> None:
            super().__init__()
            self.save_hyperparameters(dict(hparams or {}))
            self.layers = nn.Sequential(
                nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(dropout), nn.Linear(width, 1)
            )
            self.automatic_optimization = not manual
            self.ran = 0  # batches this object was trained on

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.ran += 1
            loss = self.layers(batch[0]).square().mean()
            self.log("train_loss", loss)
            self.log("wave", torch.tensor(float((7 * (batch_idx + 3 * self.current_epoch)) % 5)))
            if manual:
                optimizer = self.optimizers(use_pl_optimizer=manual == "wrapped")
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.layers(batch[0]).square().mean())
            self.log("val_wave", torch.tensor(float((3 * self.trainer.global_step) % 7)))

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("weights", sum(p.double().abs().sum() for p in self.parameters()).float())

        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layers(batch[0])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
            if manual:
                return optimizer
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"},
            }

    torch.manual_seed(5)
    return Net()


def loader(*, batches: int = BATCHES, shuffle: bool = False) -> DataLoader[Any]:
    data = torch.sin(torch.arange(batches * 3 * 4, dtype=torch.float32)).reshape(-1, 4)
    return DataLoader(TensorDataset(data), batch_size=3, shuffle=shuffle)


def make_trainer(namespace: str, callbacks: Iterable[Any], *, root: Path, **settings: Any) -> Any:
    lightning = importlib.import_module(namespace)
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "max_epochs": 2,
    }
    return lightning.Trainer(default_root_dir=root, callbacks=list(callbacks), **(quiet | settings))


def ours(namespace: str, dirpath: Path | str | None, **arguments: Any) -> Any:
    """Our callback; the agent's work is done in this process unless ``options`` say otherwise."""
    return build(namespace)(dirpath=dirpath, **({"options": EMBEDDED} | arguments))


# -- what is on disk ------------------------------------------------------------------------------------------------------


def names(directory: Path) -> set[str]:
    """Names of checkpoints as ``ls`` sees them, ours or stock."""
    found = set()
    for folder, folders, files in os.walk(directory):
        folders[:] = [name for name in folders if name != META_DIR]
        found |= {os.path.relpath(os.path.join(folder, name), directory) for name in files if name.endswith(".ckpt")}
    return found


def below(directory: Path) -> list[str]:
    """All files and folders below a directory; another rank may delete some meanwhile, at which ``rglob`` raises."""
    walk = os.walk(directory)
    return sorted(
        os.path.relpath(os.path.join(at, name), directory) for at, *within in walk for name in sum(within, [])
    )


def content(path: Path, *, rank: int = 0) -> dict[str, Any]:
    """A checkpoint's content, ours or stock."""
    located = locate(str(path))
    if located is None:
        loaded: dict[str, Any] = torch.load(path, weights_only=False)
        return loaded
    state, _ = load_path(located, rank=rank, allow_pickle=True)
    kept: dict[str, Any] = state
    return kept


def rank_state(path: Path, *, rank: int = 0) -> Any:
    located = locate(str(path))
    assert located is not None, f"{path} is not a checkpoint of ours"
    return load_path(located, rank=rank)[1]


def steps(directory: Path, run: str = "default") -> list[int]:
    """Complete steps of a run, oldest first."""
    return [
        listing.id.step
        for listing in listings(LocalTier(str(directory), durable=False), run)
        if listing.manifest is not None
    ]


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Where two trees differ, in type, value or bits; empty when they are equal."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = (
            a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(
                a.contiguous().view(torch.uint8) if a.dim() else a, b.contiguous().view(torch.uint8) if b.dim() else b
            )
        )
        return [] if same else [f"{where}: {a!r} is not {b!r}"]
    if type(a) is not type(b):
        return [f"{where}: {type(a).__name__} is not {type(b).__name__} ({a!r}, {b!r})"]
    if isinstance(a, Mapping):
        if list(a) != list(b):
            return [f"{where}: keys {list(a)} are not {list(b)}"]
        return [line for key in a for line in differences(a[key], b[key], f"{where}/{key}")]
    if isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return [f"{where}: {len(a)} items, not {len(b)}"]
        return [line for i, (x, y) in enumerate(zip(a, b, strict=True)) for line in differences(x, y, f"{where}/{i}")]
    return [] if a == b or (a != a and b != b) else [f"{where}: {a!r} is not {b!r}"]


def state_of(callback: Any) -> dict[str, Any]:
    """Everything a user can read from the callback after a fit."""
    return {
        "state_dict": callback.state_dict(),
        "state_key": callback.state_key,
        "best_model_path": callback.best_model_path,
        "best_model_score": callback.best_model_score,
        "best_k_models": callback.best_k_models,
        "kth_best_model_path": callback.kth_best_model_path,
        "last_model_path": callback.last_model_path,
        "current_score": callback.current_score,
        "last_saved": callback._last_checkpoint_saved,
    }


def weights(module: Any) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}
