"""Describes a training in a folder beside its checkpoint, for people who find the checkpoint later.

``step=5-context/`` beside ``step=5.ckpt`` holds ``context.json`` (module, hyperparameters, Trainer, versions, command
line) and ``model.txt`` (the module's layers). This library never reads it.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from resiliency._version import __version__
from resiliency.plugins._ckpt_utils import CONTEXT_SUFFIX

__all__ = ["context_folder", "remove_context", "write_context"]

logger = logging.getLogger(__name__)

_SETTINGS = ("max_steps", "max_epochs", "accumulate_grad_batches", "gradient_clip_val", "precision", "world_size")


def context_folder(checkpoint: str) -> Path:
    """The context folder of a checkpoint: ``step=5-context`` for ``step=5.ckpt``."""
    path = Path(checkpoint)
    return path.with_name(path.name.removesuffix(".ckpt") + CONTEXT_SUFFIX)


def write_context(checkpoint: str, trainer: Any) -> None:
    """Writes the context folder of a checkpoint; an earlier one is replaced. Blocks: for two small writes.

    Only warns when it cannot write: ``checkpoint`` is an address, or the disk is full.
    """
    if "://" in checkpoint:
        logger.warning("no context is written beside %s: only a folder can have one", checkpoint)
        return
    folder = context_folder(checkpoint)
    making = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        making.mkdir(parents=True, exist_ok=True)
        (making / "context.json").write_text(json.dumps(_describe(trainer), indent=2, default=str) + "\n")
        (making / "model.txt").write_text(f"{trainer.lightning_module}\n")
        shutil.rmtree(folder, ignore_errors=True)
        making.rename(folder)
    except OSError as error:
        logger.warning("the context of %s was not written: %s; training goes on", checkpoint, error)
        shutil.rmtree(making, ignore_errors=True)


def remove_context(checkpoint: str) -> None:
    """Removes the context folder of a checkpoint if it exists."""
    if "://" not in checkpoint:
        shutil.rmtree(context_folder(checkpoint), ignore_errors=True)


def _describe(trainer: Any) -> dict[str, Any]:
    module = trainer.lightning_module
    lightning = sys.modules[type(trainer).__module__.split(".")[0]]
    return {
        "module": f"{type(module).__module__}.{type(module).__qualname__}",
        "hyper_parameters": dict(module.hparams),
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "trainer": {name: getattr(trainer, name, None) for name in _SETTINGS},
        "strategy": type(trainer.strategy).__name__,
        "global_step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            lightning.__name__: getattr(lightning, "__version__", None),
            "resiliency": __version__,
        },
        "command": sys.argv,
    }
