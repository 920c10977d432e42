"""The flags of the training script: those of an older library, and the aliases that its recipes use."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from recipes.pretrain.models import CONFIGURATIONS

__all__ = ["make_parser", "parse"]


def _whether(text: str) -> bool:
    words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in words:
        raise argparse.ArgumentTypeError(f"{text!r}: say true or false, or leave it out for true")
    return words[text.lower()]


def _number_or_none(text: str) -> int | None:
    """Returns None for "None", which recipes pass for a flag that is not set, and for "-1", which says the same of an
    interval; else the number."""
    return None if text == "None" or text == "-1" else int(text)


def _text_or_none(text: str) -> str | None:
    return None if text == "None" else text


class _StoreGiven(argparse.Action):
    """Stores the value, and True in ``<dest>_given``, because a value that was passed means more than the same
    default."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, *_: object
    ) -> None:
        setattr(namespace, self.dest, values)
        setattr(namespace, f"{self.dest}_given", True)


class _Flags:
    def __init__(self, parser: argparse.ArgumentParser, title: str) -> None:
        self._group = parser.add_argument_group(title)

    def on_off(self, *names: str, help: str) -> None:
        self._group.add_argument(*names, nargs="?", const=True, default=False, type=_whether, metavar="BOOL", help=help)

    def number(self, *names: str, help: str, default: int | None = None) -> None:
        self._group.add_argument(*names, default=default, type=_number_or_none, metavar="N", help=help)

    def text(self, *names: str, help: str, default: str | None = None) -> None:
        self._group.add_argument(*names, default=default, type=_text_or_none, metavar="TEXT", help=help)


def make_parser() -> argparse.ArgumentParser:
    """The parser. :mod:`recipes.pretrain.checks` checks the values and which flags go together."""
    parser = argparse.ArgumentParser(
        prog="train.py",
        description="Trains a GPT with plain Lightning and the callbacks of resiliency.",
        allow_abbrev=False,
    )
    job = _Flags(parser, "job")
    job.text("--job-name", default="test_job", help="names the run, its folders and its restarts")
    job.number("--num-nodes", default=1, help="hosts")
    job.number("--num-gpus", default=1, help="ranks on each host, one per device")
    job.text("--accelerator", default="auto", help="auto, cpu or gpu")
    job.number("--max-steps", default=1_000_000, help="optimizer steps after which training ends")
    job.number(
        "--max-runtime",
        help="seconds of training after which it ends, with a checkpoint; those of earlier starts count; default: none",
    )
    job.on_off("--enable-fault-tolerance", help="heartbeats for what watches the ranks, such as ft_launcher")
    job.text("--sim-fault-desc", default="", help='"type,seconds": rank_killed, rank_hung or random, after that time')
    job.number("--seed", default=1234, help="of weights and the order of data")

    model = _Flags(parser, "model and data")
    model._group.add_argument("--model", default="36M", choices=sorted(CONFIGURATIONS), help="configuration")
    model.text(
        "--tokenizer-path", help="tokenizer.model (sentencepiece) or tokenizer.json (tokenizers); default: bytes"
    )
    model.text("--data", help="folder with *.txt and *.py files; default: the sources of Python's library")
    model.number("--global-bs", help="sequences per optimizer step over all ranks; default: --micro-bs times ranks")
    model.number("--micro-bs", default=1, help="sequences per rank and batch")
    model.number("--seq-length", help="tokens of a sequence; default: that of the model")
    model.number("--val-check-interval", help="optimizer steps between validations; default: none")
    model._group.add_argument(
        "--limit-val-batches",
        default=10,
        type=_number_or_none,
        metavar="N",
        action=_StoreGiven,
        help="batches of a validation, with --val-check-interval; default: 10",
    )
    parser.set_defaults(limit_val_batches_given=False)
    model.number("--num-optimizer-replicas", help="ranks that hold the same optimizer state; default: all (DDP)")

    checkpoints = _Flags(parser, "checkpoints")
    checkpoints.text("--persistent-ckpt-dir", help="folder or address that survives the hosts")
    checkpoints.number("--persistent-ckpt-interval", help="it gets every Nth step")
    checkpoints.text("--ckpt-dir", help="the same as --persistent-ckpt-dir")
    checkpoints.number("--checkpoint-interval", help="the same as --persistent-ckpt-interval")
    checkpoints.text("--local-ckpt-dir", help="folder of each host: a ramdisk or local SSD")
    checkpoints.number("--local-ckpt-interval", help="it gets every Nth step")
    checkpoints.on_off("--enable-in-cluster-local-ckpt", help="a local tier on the ramdisk, without naming its folder")
    checkpoints.number("--topk-ckpt", help="newest checkpoints to keep on the persistent tier; default: all")
    checkpoints.on_off("--enable-async-ckpt", help="training goes on while a save is written; default: it waits")
    checkpoints.on_off("--enable-optimized-async-ckpt", help="and the copy is made during the next step")
    checkpoints.number("--ckpt-threads-per-rank", default=2, help="threads of a rank that copy a save")
    checkpoints.on_off("--enable-dist-ckpt", help="a CheckpointIO plugin, for what trainer.save_checkpoint writes")
    checkpoints.on_off("--enable-ckpt-load-replication", help="ranks fetch missing local checkpoints from others")
    checkpoints.on_off("--enable-high-scale-ckpt", help="GKE's replicator copies the local tier")

    speed = _Flags(parser, "speed")
    speed.on_off("--enable-comm-overlap", help="communication behind computation")
    speed.on_off("--enable-gc", help="Python's garbage collection at the same step on all ranks, and at no other time")

    watching = _Flags(parser, "watching")
    watching.text("--log-dir", default="log", help="folder for logs that stay, and for traces")
    watching.on_off(
        "--log-to-remote-storage", help="logs go to --log-dir; default: to the temporary folder of each host"
    )
    watching.on_off("--enable-tensorboard", help="scalars for TensorBoard, below the logs")
    watching.number("--profile-ckpt-interval", help="steps between saves that are traced, in <log-dir>/<job>/profile")
    watching.text("--trace-name", help="traces the whole run, in <log-dir>/<job>/profile/<name>-rank<r>.json")
    watching._group.add_argument(
        "--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], help="of log lines"
    )
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Returns the flags; exits with 2 when one is unknown or its value cannot be parsed."""
    return make_parser().parse_args(arguments)
