"""Trains a GPT with plain Lightning and every callback of the library; the flags are those of an older library.

``python -m recipes.pretrain.train --model 36M --max-steps 200 --ckpt-dir run --checkpoint-interval 20``; start it again
after any crash, and it continues. ``resiliency run --nproc-per-node 8 -m recipes.pretrain.train --num-gpus 8 ...`` for
several ranks.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy

if __name__ == "__main__" and not __package__:  # started by its path: its own folder is not where `recipes` is found
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from recipes.pretrain.callbacks import make_callbacks
from recipes.pretrain.checkpointing import checkpoint_folder, make_checkpoint_io
from recipes.pretrain.checks import memory_problem, problems, settle
from recipes.pretrain.data import load_tokenizer, make_loaders
from recipes.pretrain.flags import make_parser
from recipes.pretrain.logs import log_folder, start_logging
from recipes.pretrain.model import GPT
from recipes.pretrain.models import CONFIGURATIONS
from resiliency.errors import ConfigError
from resiliency.launch import restartable
from resiliency.plugins._ckpt_utils import find_latest_checkpoint_path
from resiliency.settings import environment

__all__ = ["checked", "main", "make_trainer", "resume_path", "run"]

logger = logging.getLogger(__name__)


def checked(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the settled flags when they can be used; otherwise says why not and exits with 2."""
    parser = make_parser()
    launched = environment().world_size if environment().local_rank is not None else None
    try:
        args = settle(parser.parse_args(arguments))
    except ConfigError as error:
        parser.error(str(error))
    wrong = problems(args, launched_ranks=launched)
    if not wrong and args.accelerator == "gpu" and not torch.cuda.is_available():
        wrong = ["--accelerator gpu: torch finds no GPU on this host; pass auto or cpu"]
    too_large = "" if wrong else memory_problem(args, _available_bytes(args))
    if wrong or too_large:
        parser.error("\n  ".join(wrong or [too_large]))
    return args


def _available_bytes(args: argparse.Namespace) -> int:
    if args.accelerator != "cpu" and torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    return psutil.virtual_memory().total // args.num_gpus


def is_sharded(args: argparse.Namespace) -> bool:
    """True when the optimizer state is sharded over the ranks (FSDP2)."""
    return args.num_optimizer_replicas is not None and args.num_optimizer_replicas < args.ranks


def resume_path(args: argparse.Namespace) -> str | None:
    """The checkpoint that Lightning is told to resume from: the newest complete one when its own code writes them
    (FSDP2); None when there is none.

    Also None without FSDP2: then the callback itself finds the newest step of all tiers and resumes from it.
    """
    if not is_sharded(args):
        return None
    newest = find_latest_checkpoint_path(checkpoint_folder(args.persistent_ckpt_dir, args.job_name))
    return None if newest is None else str(newest)


def _strategy(args: argparse.Namespace) -> Any:
    if is_sharded(args):
        return ModelParallelStrategy(data_parallel_size=args.ranks, tensor_parallel_size=1)
    return DDPStrategy(timeout=timedelta(minutes=10)) if args.ranks > 1 else "auto"


def make_trainer(args: argparse.Namespace) -> pl.Trainer:
    """The Trainer for settled and checked flags."""
    accumulate = args.global_bs // (args.micro_bs * args.ranks)
    plugin = make_checkpoint_io(args)
    return pl.Trainer(
        accelerator=args.accelerator,
        devices=args.num_gpus,
        num_nodes=args.num_nodes,
        strategy=_strategy(args),
        plugins=None if plugin is None else [plugin],
        max_steps=args.max_steps,
        max_epochs=-1,
        max_time=None if args.max_runtime is None else timedelta(seconds=args.max_runtime),
        accumulate_grad_batches=accumulate,
        # Lightning counts batches here; across epochs when check_val_every_n_epoch is None.
        val_check_interval=None if args.val_check_interval is None else args.val_check_interval * accumulate,
        check_val_every_n_epoch=None if args.val_check_interval is not None else 1,
        limit_val_batches=args.limit_val_batches if args.val_check_interval is not None else 0,
        num_sanity_val_steps=0,
        log_every_n_steps=10,
        default_root_dir=log_folder(args),
        callbacks=make_callbacks(args, sharded=is_sharded(args)),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def run(arguments: Sequence[str]) -> pl.Trainer:
    """Trains as the flags say. Returns the Trainer; raises ConfigError when the data does not suffice."""
    args = checked(arguments)
    start_logging(args, environment().rank)
    pl.seed_everything(args.seed, verbose=False)
    tokenizer = load_tokenizer(args.tokenizer_path)
    shape = CONFIGURATIONS[args.model]
    shape = replace(shape, length=args.seq_length, vocabulary=max(shape.vocabulary, tokenizer.size))
    train, val = make_loaders(
        tokenizer,
        folder=args.data,
        length=shape.length,
        batch=args.micro_bs,
        val_windows=(args.limit_val_batches or 1) * args.micro_bs * args.ranks,
    )
    if len(train.dataset) < args.micro_bs * args.ranks:  # type: ignore[arg-type]
        raise ConfigError(
            f"--micro-bs {args.micro_bs} times {args.ranks} ranks is more than the {len(train.dataset)} sequences of"  # type: ignore[arg-type]
            " the text: there would be nothing to train on; pass less, or more --data"
        )
    module = GPT(shape, steps=args.max_steps, replicas=args.num_optimizer_replicas if is_sharded(args) else None)
    trainer = make_trainer(args)
    trainer.fit(module, train, val, ckpt_path=resume_path(args))
    if args.enable_dist_ckpt:
        # Saved through the Trainer, as other code would do it, so that the plugin writes it.
        trainer.save_checkpoint(Path(log_folder(args)) / "final.ckpt")
    if trainer.is_global_zero:
        logger.info(
            "trained to step %d, loss %.4f",
            trainer.global_step,
            trainer.callback_metrics.get("train_loss", float("nan")),
        )
    return trainer


@restartable
def main() -> None:
    try:
        run(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"train.py: {error}")


if __name__ == "__main__":
    main()
