"""An FSDP2 training that goes on with any number of ranks: ``elastic_job.py FOLDER``, which does not end by itself.

Each rank writes its loss in each batch, bit by bit, to ``FOLDER/records-RANK``, and rank 0 where each attempt begins to
``FOLDER/sizes``. The files ``starts`` and ``steps`` are those of :mod:`tests.e2e.cluster_job`.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, TensorDataset

from resiliency.callbacks.elasticity import ElasticityCallback
from resiliency.callbacks.model_checkpoint import ModelCheckpoint
from resiliency.launch import restartable
from tests.e2e.cluster_job import append

__all__ = ["ACCUMULATED", "train"]

#: Batches that a rank accumulates at the first size; another number of ranks as many as make up the same samples.
ACCUMULATED = 2


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 10), torch.nn.Tanh(), torch.nn.Linear(10, 8))

    def configure_model(self) -> None:
        if not isinstance(self.layers, FSDPModule):
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layers(batch[0]), batch[0].roll(1, dims=1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class Records(pl.Callback):
    def __init__(self, folder: Path, pause_s: float) -> None:
        self.folder, self.pause_s = folder, pause_s
        self.attempt = os.environ.get("RESILIENCY_ATTEMPT", "0")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            append(self.folder / "sizes", f"{self.attempt} {trainer.world_size} {trainer.global_step}")

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        accumulated = trainer.accumulate_grad_batches
        step = trainer.global_step - 1 if (batch_idx + 1) % accumulated == 0 else trainer.global_step
        loss = (outputs["loss"] * accumulated).item()
        append(self.folder / f"records-{trainer.global_rank}", f"{self.attempt} {step} {loss.hex()}")
        if trainer.is_global_zero:
            append(self.folder / "steps", f"{self.attempt} {trainer.global_step} 0")
        time.sleep(self.pause_s)


def train(*, directory: str, steps: int, every: int, pause_s: float = 0.0) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    pl.seed_everything(7, verbose=False)
    folder, ranks = Path(directory), int(os.environ["WORLD_SIZE"])
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
        strategy=ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1, process_group_backend="gloo"),
        max_steps=steps,
        max_epochs=-1,
        accumulate_grad_batches=ACCUMULATED,  # as at the first start
        callbacks=[
            ElasticityCallback(rule="keep_global_batch"),
            ModelCheckpoint(dirpath=folder / "saved", every_n_train_steps=every, save_last=True, auto_resume=True),
            Records(folder, pause_s),
        ],
        default_root_dir=directory,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.randn(600, 8, generator=torch.Generator().manual_seed(3))
    trainer.fit(Net(), DataLoader(TensorDataset(data), batch_size=2, shuffle=True))


def main(folder: str) -> None:
    start = f"{os.environ['RESILIENCY_ATTEMPT']} {os.environ['RANK']} {os.environ['RESILIENCY_NODE']} {os.getpid()}"
    append(Path(folder) / "starts", start)
    train(directory=folder, steps=100_000, every=3, pause_s=0.05)


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    restartable(main)(sys.argv[1])
