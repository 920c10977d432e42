"""Makes the callback that saves checkpoints to the tiers that the flags name, and a CheckpointIO plugin."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from dataclasses import dataclass
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
    steps.

    Args:
        tiers: for a local tier and a persistent one: what each of them gets; None: there is one tier.
    """

    def __init__(self, *, tiers: TwoTiers | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._two_tiers = tiers

    def _should_skip_saving_checkpoint(self, trainer: Any) -> bool:
        tiers = self._two_tiers
        unwanted = tiers is not None and not tiers.wants(trainer.global_step)
        return unwanted or bool(super()._should_skip_saving_checkpoint(trainer))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._remove_outdated(trainer, ends=False)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step > self._last_global_step_saved:
            self._save_topk_checkpoint(trainer, self._monitor_candidates(trainer))
        self._remove_outdated(trainer, ends=True)
        super().on_train_end(trainer, pl_module)

    def _remove_outdated(self, trainer: Any, *, ends: bool) -> None:
        """After a save, removes what neither tier is to keep; the engine waits with that until the save is safe."""
        models = vars(self)["best_k_models"]  # read by its name, the attribute waits for the files
        by_step = {int(step): path for path, step in models.items()}
        if self._two_tiers is None or self._last_global_step_saved != trainer.global_step or not by_step:
            return
        for step in self._two_tiers.outdated(by_step, ends=ends):
            models.pop(by_step[step])
            self._remove_checkpoint(trainer, by_step[step])


@dataclass(frozen=True, kw_only=True)
class TwoTiers:
    """What a local and a persistent tier get.

    Attributes:
        local_every, persistent_every: steps; each tier gets every Nth step.
        keep: number of checkpoints to keep on the persistent tier; None: all. The local tier keeps its newest one.
    """

    local_every: int
    persistent_every: int
    keep: int | None

    def wants(self, step: int) -> bool:
        """Whether a tier gets this step. The last save of a training goes to both tiers all the same."""
        return step % self.local_every == 0 or step % self.persistent_every == 0

    def outdated(self, steps: Iterable[int], *, ends: bool) -> list[int]:
        """Which saves need not be kept once the newest of them is safe: all older ones but multiples of the persistent
        tier's interval, because the local tier keeps one, and a last save of an earlier start is not the last any more.

        Args:
            ends: the newest is the last save of a training, which the persistent tier gets, too.
        """
        *older, newest = sorted(steps)
        kept = [step for step in older if step % self.persistent_every == 0]
        if self.keep is not None:
            room = self.keep - (ends or newest % self.persistent_every == 0)
            kept = kept[max(0, len(kept) - room) :]
        return [step for step in older if step not in kept]


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
    local_every, persistent_every, keep = args.local_ckpt_interval, args.persistent_ckpt_interval, args.topk_ckpt
    two = TwoTiers(local_every=local_every, persistent_every=persistent_every, keep=keep) if _has_two(args) else None
    return kind(
        tiers=two,
        **_tiers(args),
        filename="{step}",
        monitor="step",
        mode="max",
        save_top_k=-1 if two or keep is None else keep,  # of two tiers the callback would count the saves of both
        every_n_train_steps=math.gcd(local_every, persistent_every) if two else args.save_interval,
        enable_version_counter=False,
        lazy=args.enable_optimized_async_ckpt,
        auto_resume=True,  # a job of the same name continues
        run=args.job_name,
        options=CheckpointerOptions(copy_threads=args.ckpt_threads_per_rank),
    )


def _has_two(args: argparse.Namespace) -> bool:
    return None not in (args.local_ckpt_interval, args.persistent_ckpt_interval)


def _tiers(args: argparse.Namespace) -> dict[str, Any]:
    if args.persistent_ckpt_dir is None:
        folder = checkpoint_folder(args.local_ckpt_dir, args.job_name)
        return {"dirpath": folder, "use_in_cluster_local_ckpts": True, "is_persistent_storage": False}
    tiers: dict[str, Any] = {"dirpath": checkpoint_folder(args.persistent_ckpt_dir, args.job_name)}
    if args.local_ckpt_dir is not None:
        tiers["local_dir"] = checkpoint_folder(args.local_ckpt_dir, args.job_name)
    elif args.enable_in_cluster_local_ckpt:
        tiers["use_in_cluster_local_ckpts"] = True
    if _has_two(args):
        tiers["persist"] = Interval(steps=args.persistent_ckpt_interval)
    return tiers


def make_checkpoint_io(args: argparse.Namespace) -> Any:
    """The plugin for ``--enable-dist-ckpt``, chosen as in the older library; None without that flag."""
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
