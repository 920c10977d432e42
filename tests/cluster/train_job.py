"""A Lightning training for pods: ``train_job.py FOLDER --steps N``. Its weights depend on every step of every rank.

Rank 0 writes ``ATTEMPT STEP SECONDS`` (of the machine's monotonic clock) to ``FOLDER/steps`` after each step, and the
digest of the weights to ``FOLDER/result`` at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

from resiliency import AutoCheckpointCallback, ModelCheckpoint
from resiliency.launch import restartable


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        time.sleep(0.02)
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Steps(pl.Callback):
    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            with self._path.open("a") as file:
                attempt = os.environ.get("RESILIENCY_ATTEMPT", "0")
                file.write(f"{attempt} {trainer.global_step} {time.monotonic():.6f}\n")


def digest(module: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for _, tensor in sorted(module.state_dict().items()):
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


@restartable
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--devices", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    pl.seed_everything(7, verbose=False)
    data = torch.randn(3000, 8)
    loader = DataLoader(TensorDataset(data, data.sum(1, keepdim=True)), batch_size=4, shuffle=True)
    checkpoint = ModelCheckpoint(
        dirpath=args.folder / "checkpoints", every_n_train_steps=5, save_last=True, auto_resume=True
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=args.devices,
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        # DDP orders its gradients anew after its first step, unless it looks for unused parameters. With three ranks the
        # order decides in which order they are added up, so that the first step of a resumed run is rounded differently.
        strategy=DDPStrategy(timeout=timedelta(seconds=60), find_unused_parameters=True),
        max_steps=args.steps,
        max_epochs=-1,
        default_root_dir=args.folder,
        callbacks=[checkpoint, AutoCheckpointCallback(), Steps(args.folder / "steps")],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Model()
    trainer.fit(model, loader)
    if trainer.is_global_zero:
        draft = args.folder / "result.draft"
        draft.write_text(digest(model))
        draft.rename(args.folder / "result")


if __name__ == "__main__":
    main()
