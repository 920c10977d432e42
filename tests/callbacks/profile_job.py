"""What each rank runs in :mod:`tests.callbacks.test_profile`."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy

from resiliency.callbacks import profile
from resiliency.callbacks.checkpointing.trainer_session import trainer_session
from resiliency.callbacks.model_checkpoint import build
from tests.callbacks.harness import loader, make_net, make_trainer

warnings.filterwarnings("ignore")


class KillsTheAgent(pl.Callback):
    """At the first batch after a save."""

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 3 and trainer.global_rank == 0:
            [shared] = trainer_session(trainer).engines.values()
            process = shared.engine.session.client._process
            assert process is not None
            os.kill(process.pid, signal.SIGKILL)


def train(*, directory: str, traces: str, ranks: int, kills: bool = False) -> None:
    torch.set_num_threads(1)
    strategy: Any = DDPStrategy(process_group_backend="gloo") if ranks > 1 else "auto"
    trainer = make_trainer(
        "lightning.pytorch",
        [
            profile.build("lightning.pytorch")(traces, 1),
            *([KillsTheAgent()] if kills else []),
            build("lightning.pytorch")(directory, every_n_train_steps=3, save_top_k=-1),
        ],
        root=Path(directory),
        devices=ranks,
        strategy=strategy,
        max_steps=6,
        max_epochs=-1,
    )
    trainer.fit(make_net("lightning.pytorch", width=20_000), loader())
