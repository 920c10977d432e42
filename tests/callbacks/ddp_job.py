"""What each rank runs in :mod:`tests.callbacks.test_ddp` and :mod:`tests.callbacks.test_only_files_ddp`."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from resiliency.callbacks.model_checkpoint import build
from tests.callbacks.harness import below, loader, make_net, make_trainer, names, ours, stock

warnings.filterwarnings("ignore")
PL = "lightning.pytorch"


class Uneven(pl.Callback):
    """Holds tensors of another number and size on every rank."""

    def __init__(self, rank: int) -> None:
        self.tensors = {str(i): torch.full((i + 1 + rank,), float(rank)) for i in range(1 + 2 * rank)}

    def state_dict(self) -> dict[str, Any]:
        return self.tensors


class Unpicklable(pl.Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"open": lambda: 0, "within": [{"lambda": lambda: 0, "kept": torch.ones(3)}]}


class Raising(pl.Callback):
    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 5:
            raise RuntimeError("one rank only")


class Signalled(pl.Callback):
    """Gets the signal with which SLURM tells of a requeue, in the batch after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGUSR1)


def leaving(namespace: str, hook: str) -> Any:
    """A callback that raises in a hook."""
    callback = importlib.import_module(namespace).Callback()

    def leave(*args: Any, **kwargs: Any) -> None:
        raise ValueError("this rank leaves")

    setattr(callback, hook, leave)
    return callback


def dying(namespace: str, hook: str) -> Any:
    """A callback that kills its process in a hook."""
    callback = importlib.import_module(namespace).Callback()
    setattr(callback, hook, lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL))
    return callback


def train(
    *,
    directory: str,
    result: str,
    max_steps: int,
    own: bool = True,
    uneven: bool = False,
    ckpt_path: str | None = None,
    raising: int = -1,
    odd: int = -1,
    leaves: tuple[int, str] = (-1, ""),
    dies: tuple[int, str] = (-1, ""),
    signalled_at: int = -1,
    via_module: bool = False,
    eval_at: int = -1,
    namespace: str = PL,
    agent: str = "embedded",
    arguments: dict[str, Any] | None = None,
) -> None:
    """Trains and writes what this rank knows at the end, also when it fails."""
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if "SLURM_NTASKS" in os.environ:
        os.environ["SLURM_PROCID"] = os.environ["SLURM_LOCALID"] = str(rank)
    given: dict[str, Any] = {
        "every_n_train_steps": 3,
        "monitor": "step",
        "mode": "max",
        "save_top_k": 2,
        "filename": "{step}",
        "save_last": True,
    }
    given |= arguments or {}
    if own and agent == "embedded":
        callback = ours(namespace, directory, **given)
    else:
        callback = (build(namespace) if own else stock(namespace))(directory, **given)
    callbacks = [
        *([] if via_module else [callback]),
        *([Uneven(rank)] if uneven else []),
        *([Raising()] if raising == rank else []),
    ]
    callbacks += [Unpicklable()] if odd == rank else []
    callbacks += [leaving(namespace, leaves[1])] if leaves[0] == rank else []
    callbacks += [dying(namespace, dies[1])] if dies[0] == rank else []
    callbacks += [Signalled(signalled_at)] if signalled_at >= 0 else []
    strategy = importlib.import_module(f"{namespace}.strategies").DDPStrategy(process_group_backend="gloo")
    trainer = make_trainer(
        namespace,
        callbacks,
        root=Path(directory),
        devices=world_size,
        strategy=strategy,
        max_steps=max_steps,
        max_epochs=-1,
    )
    net = make_net(namespace, width=200, dropout=0.2)
    net.on_train_epoch_start = lambda: net.layers[1:].eval() if net.current_epoch == eval_at else None
    if via_module:
        net.configure_callbacks = lambda: [callback]
    torch.manual_seed(100 + rank)
    error = ""
    try:
        trainer.fit(net, loader(shuffle=True), ckpt_path=ckpt_path)
    except Exception as raised:  # Boundary: the test is told; the process ends by itself.
        error = str(raised)
    digest = hashlib.sha256()
    for tensor in net.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    answer = {
        "error": error,
        "hash": digest.hexdigest(),
        "step": trainer.global_step,
        "ran": net.ran,
        "training": [layer.training for layer in net.layers],
        "best": callback.best_model_path,
        "best_k": sorted(callback.best_k_models),
        "last": callback.last_model_path,
        "names": sorted(names(Path(directory))),
        "files": below(Path(directory)),
    }
    Path(f"{result}.{rank}").write_text(json.dumps(answer))
