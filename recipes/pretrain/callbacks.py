"""Makes the list of callbacks for the flags."""

from __future__ import annotations

import argparse
import gc
import os
from typing import Any

import torch
from lightning.pytorch import Callback

from recipes.pretrain.checkpointing import make_checkpoint_callback
from recipes.pretrain.faults import FaultPlan, SimulatedFault
from recipes.pretrain.logs import log_folder, profile_folder
from resiliency import AutoCheckpointCallback
from resiliency.callbacks.comm_overlap import DDPCommOverlapCallback, FSDP2CommOverlapCallback
from resiliency.callbacks.goodput import GoodputCallback
from resiliency.callbacks.heartbeat import HeartbeatCallback
from resiliency.callbacks.logging import (
    MemoryLoggingCallback,
    StepLoggingCallback,
    TensorboardCallback,
    TPSLoggingCallback,
)
from resiliency.callbacks.profile import ProfileCheckpointCallback

__all__ = ["GarbageCollection", "RunTrace", "make_callbacks", "other_callbacks"]


def make_callbacks(args: argparse.Namespace, *, sharded: bool) -> list[Any]:
    """The callbacks for settled and checked flags.

    Args:
        sharded: True when parameters are sharded (FSDP2), see ``--num-optimizer-replicas``.
    """
    callbacks = [make_checkpoint_callback(args), *other_callbacks(args)]
    if args.enable_comm_overlap:
        callbacks.append(FSDP2CommOverlapCallback() if sharded else DDPCommOverlapCallback())
    if args.profile_ckpt_interval:
        saves = args.profile_ckpt_interval // args.save_interval
        callbacks.append(ProfileCheckpointCallback(profile_folder(args), saves))
    return callbacks


def other_callbacks(args: argparse.Namespace) -> list[Any]:
    """Those that suit every strategy, and whatever saves the checkpoints."""
    tb_dir = os.path.join(log_folder(args), "tensorboard") if args.enable_tensorboard else None
    callbacks: list[Any] = [
        AutoCheckpointCallback(),
        GoodputCallback(prog_bar=False, log=False),
        StepLoggingCallback(tb_dir),
        TPSLoggingCallback(args.global_bs, args.seq_length, tb_dir),
        MemoryLoggingCallback(),
    ]
    if tb_dir is not None:
        callbacks.append(TensorboardCallback(tb_dir))
    if args.enable_fault_tolerance:
        callbacks.append(HeartbeatCallback())
    if args.enable_gc:
        callbacks.append(GarbageCollection())
    if args.trace_name:
        callbacks.append(RunTrace(profile_folder(args), args.trace_name))
    if args.sim_fault_desc:
        callbacks.append(SimulatedFault(FaultPlan.parse(args.sim_fault_desc), job=args.job_name))
    return callbacks


class GarbageCollection(Callback):
    """Collects garbage every ``every_n_steps`` steps, on all ranks at the same step, and at no other time of training.

    Ranks wait for each other in every step. If each rank collected at a step of its own, for 50 ms, all ranks would
    lose 50 ms each time.
    """

    def __init__(self, every_n_steps: int = 100) -> None:
        self._every, self._was_on, self._last = every_n_steps, False, 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._was_on = gc.isenabled()
        gc.disable()
        gc.collect()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step // self._every > self._last // self._every:
            gc.collect()
        self._last = trainer.global_step

    def _back(self) -> None:
        if self._was_on:
            gc.enable()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._back()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._back()


class RunTrace(Callback):
    """Traces the whole training with torch's profiler and writes a Chrome trace for each rank. For short runs, of some
    hundred steps."""

    def __init__(self, folder: str, name: str) -> None:
        self._folder, self._name = folder, name
        self._profiler: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._profiler = torch.profiler.profile()
        self._profiler.start()

    def _write(self, rank: int) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()
            os.makedirs(self._folder, exist_ok=True)
            profiler.export_chrome_trace(os.path.join(self._folder, f"{self._name}-rank{rank}.json"))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._write(trainer.global_rank)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._write(trainer.global_rank)
