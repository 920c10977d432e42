"""Trains a Llama with NeMo 2 and the engine's checkpoints; the flags are those of ``recipes.pretrain`` and Megatron's.

``python -m recipes.nemo_llama3_70b.train --model 70B --num-nodes 32 --num-gpus 8 --plan`` prints what a save costs, on
any machine; ``resiliency run --nproc-per-node 8 -m recipes.nemo_llama3_70b.train --num-gpus 8 ...`` trains. A job of
the same name goes on after any crash.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

if __name__ == "__main__" and not __package__:  # started by its path: its own folder is not where `recipes` is found
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from recipes.nemo_llama3_70b.flags import make_parser, plan_of, problems, settle
from recipes.pretrain.logs import start_logging
from resiliency.errors import ConfigError
from resiliency.settings import environment
from resiliency.testing import cuda_on_cpu

__all__ = ["checked", "main", "run"]

logger = logging.getLogger(__name__)


def checked(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the settled flags when they can be used; otherwise says why not and exits with 2."""
    parser = make_parser()
    launched = environment().world_size if environment().local_rank is not None else None
    try:
        args = settle(parser.parse_args(arguments), launched_ranks=launched)
    except ConfigError as error:
        parser.error(str(error))
    wrong = problems(args, launched_ranks=launched)
    if not wrong and not args.plan and args.accelerator != "cpu" and not torch.cuda.is_available():
        wrong = ["torch finds no GPU on this host; pass --cpu to try the script, or --plan to see what a save costs"]
    if wrong:
        parser.error("\n  ".join(wrong))
    return args


def host_bandwidth() -> float:
    """Bytes a second at which this host copies memory, with torch's threads. Blocks: some tenths of a second."""
    source = torch.ones(64 << 20)
    target = torch.zeros_like(source)
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began)
    return source.nbytes / min(seconds)


def run(arguments: Sequence[str]) -> None:
    """Trains, or prints the plan, as the flags say."""
    args = checked(arguments)
    if args.plan:
        measured = f"measured here, {torch.get_num_threads()} threads"
        speed = args.bandwidth * 1e9 if args.bandwidth else host_bandwidth()
        print(*plan_of(args).lines(speed, "as you said" if args.bandwidth else measured), sep="\n")
        return
    if args.accelerator == "cpu":
        cuda_on_cpu.install()
        cuda_on_cpu.install_fused_adam()
    from recipes.nemo_llama3_70b.job import fit  # NeMo, which must find the device that it names

    start_logging(args, environment().rank)
    trainer = fit(args)
    if trainer.is_global_zero:
        loss = trainer.callback_metrics.get("reduced_train_loss", float("nan"))
        logger.info("trained to step %d, loss %.4f", trainer.global_step, loss)


def main() -> None:
    try:
        run(sys.argv[1:])
    except ConfigError as error:
        sys.exit(f"train.py: {error}")


if __name__ == "__main__":  # megatron-core starts processes that import this again
    main()
