"""The job of ``benchmarks.restart``: a small Lightning DDP training that writes down when it reaches each mark.

Each line of its file is ``mark attempt step seconds``, by the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import time

BEGAN = time.monotonic()

import argparse  # noqa: E402 - the first line of the script is a mark
import os  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from resiliency import ModelCheckpoint  # noqa: E402
from resiliency.launch import restartable  # noqa: E402

IMPORTED = time.monotonic()
#: The attempt in which this process began.
ATTEMPT = os.environ["TORCHELASTIC_RESTART_COUNT"]


class Marks(Callback):
    def __init__(self, folder: Path) -> None:
        self._attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        self._file = (folder / f"marks-{os.environ['RANK']}").open("a", buffering=1)
        self._file.write(f"pid {self._attempt} {os.getpid()} 0\n")
        stayed = self._attempt != ATTEMPT
        self.mark("script", 0, time.monotonic() if stayed else BEGAN)
        self.mark("imports", 0, time.monotonic() if stayed else IMPORTED)

    def mark(self, name: str, step: int, at: float) -> None:
        self._file.write(f"{name} {self._attempt} {step} {at}\n")

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.mark("group", 0, time.monotonic())

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.mark("restored", trainer.global_step, time.monotonic())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.mark("step", trainer.global_step, time.monotonic())


class Net(LightningModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 2))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(0.02)  # compute that does not fight with the other ranks for cores
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--restartable", action="store_true")
    options = parser.parse_args()
    run = restartable(train) if options.restartable else train
    run(options)


def train(options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    marks = Marks(options.folder)
    checkpoint = ModelCheckpoint(dirpath=options.folder / "checkpoints", every_n_train_steps=5, auto_resume=True)
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_steps=options.steps,
        max_epochs=-1,
        callbacks=[checkpoint, marks],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(TensorDataset(torch.randn(4096, 32)), batch_size=8)
    trainer.fit(Net(options.width), data)


if __name__ == "__main__":
    main()
