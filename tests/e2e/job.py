"""The job that the kill tests kill: Lightning DDP or FSDP2 with everything in it that makes an exact resume hard."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from resiliency.callbacks.model_checkpoint import ModelCheckpoint

warnings.filterwarnings("ignore")


class Net(pl.LightningModule):
    """Dropout, BatchNorm, Adam, a scheduler; large enough tensors that both ranks write and copies are lazy."""

    def __init__(self, fail_at: int | None) -> None:
        super().__init__()
        self.fail_at = fail_at
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(16, 1200),
            torch.nn.BatchNorm1d(1200),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(1200, 16),
        )

    def configure_model(self) -> None:
        mesh = self.device_mesh
        if mesh is None or isinstance(self.layers, FSDPModule):
            return  # not sharded, or called once more
        for layer in (self.layers[0], self.layers[-1], self.layers):
            fully_shard(layer, mesh=mesh["data_parallel"])

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        (x,) = batch
        if self.global_step == self.fail_at:
            raise RuntimeError("the user's code failed")
        return torch.nn.functional.mse_loss(self.layers(x), x.roll(1, dims=1))

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("noise", torch.rand(()), sync_dist=False)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 7), "interval": "step"},
        }


def weights_hash(module: torch.nn.Module) -> str:
    """Digest of every parameter, bit for bit. Collective where they are sharded."""
    digest = hashlib.sha256()
    for parameter in module.parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        digest.update(whole.detach().numpy().tobytes())
    return digest.hexdigest()


def strategy_of(name: str, world_size: int) -> Any:
    if name == "fsdp2":
        return pl.strategies.ModelParallelStrategy(
            data_parallel_size=world_size, tensor_parallel_size=1, process_group_backend="gloo"
        )
    return pl.strategies.DDPStrategy(process_group_backend="gloo") if world_size > 1 else "auto"


def train(
    *,
    directory: str,
    steps: int,
    every: int,
    result: str,
    accumulate: int = 2,
    validate: int | None = 5,
    fail_at: int | None = None,
    strategy: str = "ddp",
    **checkpoint: Any,
) -> None:
    """One rank of one attempt. Writes the final hash to ``result`` when it gets that far."""
    torch.set_num_threads(1)
    pl.seed_everything(11)
    data = torch.randn(96, 16)
    module = Net(fail_at)
    callback = ModelCheckpoint(
        dirpath=directory,
        filename="{step}",
        every_n_train_steps=every,
        save_top_k=1,
        monitor="step",
        mode="max",
        save_last=True,
        enable_version_counter=False,
        **checkpoint,
    )
    world_size = int(os.environ["WORLD_SIZE"])
    trainer = pl.Trainer(
        max_steps=steps,
        max_epochs=-1,
        accumulate_grad_batches=accumulate,
        accelerator="cpu",
        devices=world_size,
        logger=False,
        strategy=strategy_of(strategy, world_size),
        callbacks=[callback],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        val_check_interval=validate,
        check_val_every_n_epoch=None if validate else 1,
        limit_val_batches=1 if validate else 0,
    )
    loader = DataLoader(TensorDataset(data), batch_size=4, shuffle=True)
    trainer.fit(module, loader, DataLoader(TensorDataset(data[:8]), batch_size=4))
    weights = weights_hash(module)
    if trainer.global_rank == 0:
        partial = f"{result}.partial"
        with open(partial, "w", encoding="ascii") as file:
            json.dump({"hash": weights, "steps": trainer.global_step}, file)
        os.replace(partial, result)
