"""What one process of a job runs in :mod:`tests.callbacks.test_set_aside`."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from tests.callbacks.harness import loader, make_net, make_trainer, ours

PL = "lightning.pytorch"


class Watch(pl.Callback):
    """Notes the step that training begins with; makes the weights NaN once a step is done; dies of a NaN loss."""

    def __init__(self, poisons: int) -> None:
        self.poisons, self.started = poisons, -1

    def on_train_start(self, trainer: Any, net: Any) -> None:
        self.started = trainer.global_step

    def on_train_batch_end(self, trainer: Any, net: Any, outputs: Any, *args: Any) -> None:
        if torch.isnan(outputs["loss"]):
            raise RuntimeError("the loss is NaN")
        if trainer.global_step == self.poisons:
            with torch.no_grad():
                net.layers[0].weight.fill_(float("nan"))


def fit(*, directory: str, result: str, max_steps: int, poisons: int = 0, auto_resume: bool | None = None) -> None:
    watch, lines = Watch(poisons), _Lines()
    logging.getLogger("resiliency").addHandler(lines)
    callback = ours(PL, directory, every_n_train_steps=2, save_top_k=-1, filename="{step}", auto_resume=auto_resume)
    trainer = make_trainer(PL, [watch, callback], root=Path(directory), max_steps=max_steps, max_epochs=-1)
    try:
        trainer.fit(make_net(PL), loader())
    except RuntimeError as error:
        lines.texts.append(str(error))
    Path(result).write_text(json.dumps({"started": watch.started, "step": trainer.global_step, "lines": lines.texts}))
    if any("NaN" in text for text in lines.texts):
        os._exit(1)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
