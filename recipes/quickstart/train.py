"""Trains the small GPT. A user's script: a Trainer, with our ModelCheckpoint instead of Lightning's.

``torchrun --nproc-per-node 2 -m recipes.quickstart.train --dir run``; start it again after any crash, and it continues
(``auto_resume=True``: also when it was started by hand). Under ``resiliency run`` a rank whose peer has died stays in
its process (``restartable``), and when the job comes back with more or fewer hosts, batch and learning rate follow
(``ElasticityCallback``).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader

if __name__ == "__main__" and not __package__:  # started by its path: its own folder is not where `recipes` is found
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from recipes.quickstart.data import ByteWindows, read_corpus
from recipes.quickstart.model import TinyGPT
from resiliency import ModelCheckpoint
from resiliency.callbacks.elasticity import ElasticityCallback
from resiliency.launch import restartable

__all__ = ["main"]


def weights_hash(module: torch.nn.Module) -> str:
    """SHA-256 over names and bytes of all weights and buffers: equal only if every bit is."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


class EndOnFile(pl.Callback):
    """Ends the training on all ranks after the same step once ``path`` exists, which is how the demo ends it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.strategy.reduce_boolean_decision(self._path.exists(), all=False):
            trainer.should_stop = True


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", required=True, help="folder for checkpoints")
    parser.add_argument("--data", help="folder with text files (default: the sources of Python's library)")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--batch", type=int, default=8, help="windows per rank and step")
    parser.add_argument("--ranks", type=int, default=2, help="of all hosts, at full size")
    parser.add_argument("--width", type=int, default=128, help="width of the model")
    parser.add_argument("--until", type=Path, help="end when this file is there")
    return parser.parse_args()


@restartable
def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    pl.seed_everything(1234, verbose=False)

    # Three epochs, so that the run with restarts also passes the end of an epoch.
    data = ByteWindows(read_corpus(args.data), length=128, count=args.batch * args.ranks * (args.steps // 3 + 1))
    loader = DataLoader(data, batch_size=args.batch, shuffle=True)
    model = TinyGPT(steps=args.steps, width=args.width)

    def resized(old: int, new: int, trainer: pl.Trainer) -> None:
        """Notes the new size. Each rank keeps its batch, so the samples of a step change with the number of ranks, and
        the learning rate with them (by the rule below)."""
        if not trainer.is_global_zero:
            return
        now = {"old": old, "new": new, "step": trainer.global_step, "samples": new * args.batch}
        now["lr_factor"] = trainer.optimizers[0].param_groups[0]["initial_lr"] / model.lr
        with Path(args.dir, "resizes.jsonl").open("a") as file:
            file.write(json.dumps(now) + "\n")

    callbacks: list[pl.Callback] = [
        ElasticityCallback(resized, rule="linear_lr"),
        ModelCheckpoint(dirpath=args.dir, every_n_train_steps=args.every, save_last=True, auto_resume=True),
    ]
    if args.until is not None:
        callbacks.append(EndOnFile(args.until))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", args.ranks)),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", 1)),
        strategy=DDPStrategy(timeout=timedelta(seconds=60)),
        max_steps=args.steps,
        max_epochs=-1,
        default_root_dir=args.dir,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)  # continues from the newest committed step below --dir, if there is one

    if trainer.is_global_zero:
        loss = float(trainer.callback_metrics["loss"])
        result = {"hash": weights_hash(model), "step": trainer.global_step, "loss": loss}
        Path(args.dir, "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
