"""Times one training: with stock Lightning's ModelCheckpoint, with this library's, or without checkpoints."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint as StockModelCheckpoint
from torch.utils.data import DataLoader

from recipes.benchmark.figures import Measured
from recipes.pretrain.model import GPT
from recipes.pretrain.models import Configuration
from resiliency import ModelCheckpoint

__all__ = ["WRITERS", "measure"]

WRITERS = {"stock": StockModelCheckpoint, "resiliency": ModelCheckpoint}


class _Clock(pl.Callback):
    """Notes when the warm-up is over."""

    def __init__(self, warm_up: int) -> None:
        self._warm_up, self.began_s = warm_up, 0.0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._warm_up:
            self.began_s = time.monotonic()


def measure(
    writer: str, interval: int, *, model: Configuration, data: DataLoader[Any], steps: int, warm_up: int, folder: str
) -> Measured:
    """Trains ``warm_up`` steps untimed and then ``steps`` steps timed, with a save every ``interval`` steps (0: none).

    Blocks for the training, and until the last save is written.
    """
    pl.seed_everything(1, verbose=False)
    clock = _Clock(warm_up)
    callbacks: list[Any] = [clock]
    if interval:
        settings = {
            "dirpath": folder,
            "every_n_train_steps": interval,
            "save_top_k": 2,
            "monitor": "step",
            "mode": "max",
        }
        callbacks.append(WRITERS[writer](filename="{step}", save_on_train_epoch_end=False, **settings))
    trainer = pl.Trainer(
        accelerator="cpu" if not pl.accelerators.CUDAAccelerator.is_available() else "gpu",
        devices=1,
        max_steps=warm_up + steps,
        max_epochs=-1,
        default_root_dir=folder,
        callbacks=callbacks,
        enable_checkpointing=bool(interval),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(GPT(model, steps=warm_up + steps), data)
    wall_s = time.monotonic() - clock.began_s
    saves = (warm_up + steps) // interval - warm_up // interval if interval else 0
    return Measured(writer=writer if interval else "none", interval=interval, steps=steps, wall_s=wall_s, saves=saves)
