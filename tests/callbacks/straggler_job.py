"""What each rank runs in :mod:`tests.callbacks.test_logging`: DDP on two ranks, one of which is slow."""

from __future__ import annotations

import logging
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy

from resiliency.callbacks.logging import StragglerLoggingCallback
from tests.callbacks.harness import loader, make_net

warnings.filterwarnings("ignore")


def train(*, result: str, slow_rank: int, seconds: float, every_s: float, factor: float, accumulate: int = 1) -> None:
    callback = StragglerLoggingCallback(every=timedelta(seconds=every_s), factor=factor)
    trainer: Any = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=20,
        accumulate_grad_batches=accumulate,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    logging.basicConfig(
        filename=f"{result}.{trainer.global_rank}", level=logging.INFO, format="%(levelname)s %(message)s"
    )
    net = make_net("lightning.pytorch")
    step = net.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        time.sleep(seconds if trainer.global_rank == slow_rank else 0.0)
        return step(batch, batch_idx)

    net.training_step = training_step
    trainer.fit(net, loader(batches=8))
    Path(f"{result}.{trainer.global_rank}.done").write_text(str(trainer.global_step))
