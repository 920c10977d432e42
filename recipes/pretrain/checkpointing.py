"""Makes the callback that saves checkpoints to the tiers that the flags name, and a CheckpointIO plugin."""

from __future__ import annotations

import argparse
import math
from typing import Any

from resiliency import CheckpointerOptions, Interval, ModelCheckpoint
from resiliency.plugins.checkpoint_io import TieredCheckpointIO
from resiliency.plugins.combined_functionality import CombinedCheckpointIO
from resiliency.plugins.in_cluster_local_ckpt import InClusterLocalCheckpointIO
from resiliency.plugins.min_ckpt_overhead import MinCkptOverheadCheckpointIO
from resiliency.plugins.persistent_ckpt_proc import PersistentCheckpointProcessIO

__all__ = ["BlockingCheckpoint", "Checkpoint", "checkpoint_folder", "make_checkpoint_callback", "make_checkpoint_io"]


class Checkpoint(ModelCheckpoint):
    """Also saves at the end of training, whatever the interval, so that ``--max-runtime`` does not lose the last
    steps."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step > self._last_global_step_saved:
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))
        super().on_train_end(trainer, pl_module)


class BlockingCheckpoint(Checkpoint):
    """A save returns once it is committed, because the engine waits for that when a derived class overrides this
    method."""

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)


def checkpoint_folder(root: str, job: str) -> str:
    """Where a job's checkpoints are below a tier's folder or address."""
    return f"{root.rstrip('/')}/{job}/checkpoint"


def make_checkpoint_callback(args: argparse.Namespace) -> Checkpoint:
    """The callback for settled and checked flags."""
    asynchronous = args.enable_async_ckpt or args.enable_optimized_async_ckpt
    kind = Checkpoint if asynchronous else BlockingCheckpoint
    return kind(
        **_tiers(args),
        filename="{step}",
        monitor="step",
        mode="max",
        save_top_k=_saves_to_keep(args),
        every_n_train_steps=args.save_interval,
        enable_version_counter=False,
        lazy=args.enable_optimized_async_ckpt,
        auto_resume=True,  # a job of the same name continues
        run=args.job_name,
        options=CheckpointerOptions(copy_threads=args.ckpt_threads_per_rank),
    )


def _saves_to_keep(args: argparse.Namespace) -> int:
    """Value of ``save_top_k``: the callback counts every save, so this is the number of saves among which
    ``--topk-ckpt`` go to the persistent tier. -1: keep all. The local tier keeps its newest ones whatever this is.
    """
    if args.topk_ckpt is None:
        return -1
    return int(args.topk_ckpt * math.ceil(args.persistent_ckpt_interval / args.save_interval))


def _tiers(args: argparse.Namespace) -> dict[str, Any]:
    if args.persistent_ckpt_dir is None:
        folder = checkpoint_folder(args.local_ckpt_dir, args.job_name)
        return {"dirpath": folder, "use_in_cluster_local_ckpts": True, "is_persistent_storage": False}
    tiers: dict[str, Any] = {"dirpath": checkpoint_folder(args.persistent_ckpt_dir, args.job_name)}
    if args.local_ckpt_dir is not None:
        tiers["local_dir"] = checkpoint_folder(args.local_ckpt_dir, args.job_name)
    elif args.enable_in_cluster_local_ckpt:
        tiers["use_in_cluster_local_ckpts"] = True
    if args.persistent_ckpt_interval != args.save_interval:
        tiers["persist"] = Interval(steps=args.persistent_ckpt_interval)
    return tiers


def make_checkpoint_io(args: argparse.Namespace) -> Any:
    """The plugin for ``--enable-dist-ckpt``, chosen as the guide chooses it; None without that flag."""
    if not args.enable_dist_ckpt:
        return None
    local = args.local_ckpt_dir is not None or args.enable_in_cluster_local_ckpt
    shared: dict[str, Any] = {
        "async_save": args.enable_async_ckpt,
        "torch_dist_multiproc": args.ckpt_threads_per_rank,
        "assume_constant_structure": True,
        "run": args.job_name,
    }
    if local:
        kind = CombinedCheckpointIO if args.enable_optimized_async_ckpt else InClusterLocalCheckpointIO
        made = kind("torch_dist", local_ckpt_dir=args.local_ckpt_dir, **shared)
    elif args.enable_optimized_async_ckpt or args.enable_async_ckpt:
        made = MinCkptOverheadCheckpointIO("torch_dist", **shared)
    else:
        made = TieredCheckpointIO(
            run=args.job_name, options=CheckpointerOptions(agent="embedded", copy_threads=args.ckpt_threads_per_rank)
        )
    return PersistentCheckpointProcessIO(made) if args.enable_optimized_async_ckpt else made
