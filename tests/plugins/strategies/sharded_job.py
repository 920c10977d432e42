"""What each rank runs in :mod:`tests.plugins.strategies.test_sharded`: several fits one after the other."""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from resiliency.callbacks.model_checkpoint import build
from tests.callbacks.harness import ALL_LATE, loader, make_trainer

PL = "lightning.pytorch"
warnings.filterwarnings("ignore")

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "single": {},
    "reversed": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


class Net(pl.LightningModule):
    """Tied weights, a dimension of 5 (an empty part for one of four ranks), BatchNorm, dropout and a scheduler."""

    def __init__(
        self, *, kind: str, optimizer: str = "single", wraps: tuple[str, ...] = (), freezes: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.kind, self.optimizer, self.wraps = kind, optimizer, wraps
        self.first = nn.Linear(4, 8)
        self.net = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 8))
        self.odd = nn.Linear(8, 5)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.2)
        self.last = nn.Linear(8, 8, bias=False)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.last.weight
        self.odd.requires_grad_(not freezes)
        self.configured = False
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.configured:
            return
        self.configured = True
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = self.device_mesh
        if mesh is not None and mesh["tensor_parallel"].size() > 1:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(self.net, mesh["tensor_parallel"], plan)
        if "checkpointed" in self.wraps:
            self.net = checkpoint_wrapper(self.net)
        if "compiled" in self.wraps:
            self.net = torch.compile(self.net, backend="eager")  # type: ignore[assignment]
        if mesh is not None and mesh["data_parallel"].size() > 1:
            sharded = mesh["data_parallel"]
            fully_shard(self.net, mesh=sharded)
            fully_shard(self, mesh=sharded)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x))
        return self.tied(self.last(self.dropout(self.net(hidden)) + hidden)) + self.odd(hidden).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self(batch[0]).square().mean() + (batch[0] * self.first.bias[:4].sum()).mean()
        self.losses.append(float(loss))
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        if self.optimizer == "sgd":
            optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=0.02)
        else:
            parameters = parameters[:: -1 if self.optimizer == "reversed" else 1]
            optimizer = torch.optim.AdamW(parameters, lr=0.02, **OPTIMIZERS[self.optimizer])
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.7), "interval": "step"},
        }


class Watch(pl.Callback):
    """Notes what training begins with. ``odd``: its own state cannot be pickled at this step."""

    def __init__(self, *, odd: int = -1) -> None:
        self.started: dict[str, Any] = {}
        self.odd = odd
        self.step = 0

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.step = trainer.global_step + 1

    def state_dict(self) -> dict[str, Any]:
        return {"odd": (lambda: 0) if self.step == self.odd else 0}

    def on_train_start(self, trainer: Any, net: Any) -> None:
        self.started = {"step": trainer.global_step, **hashes(trainer, net)}


def whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def digest(tensors: dict[str, Any]) -> str:
    """Of the whole tensors under their plain names, however they are sharded. Collective."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + whole(tensors[name]).detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:12]


def hashes(trainer: Any, net: Any) -> dict[str, Any]:
    def plain(name: str) -> str:
        return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")

    names = {id(p): plain(name) for name, p in net.named_parameters()}
    (optimizer,) = trainer.optimizers
    buffers = {f"{name}.buffer" for name, _ in net.named_buffers()}
    state = {f"{names[id(p)]}.{key}": value for p, values in optimizer.state.items() for key, value in values.items()}
    return {
        "weights": digest({plain(name): value for name, value in net.named_parameters()}),
        "statistics": digest({plain(name): value for name, value in net.named_buffers()}) if buffers else "",
        "moments": digest(state),
        "lr": optimizer.param_groups[0]["lr"],
        "scheduler": trainer.lr_scheduler_configs[0].scheduler.last_epoch,
    }


def tensor_ranks(kind: str) -> int:
    """Number of ranks among which tensors are divided that see the same data."""
    return {"tp": int(os.environ["WORLD_SIZE"]), "2d": 2}.get(kind, 1)


def strategy(kind: str) -> Any:
    """ "fsdp", "tp", "2d", "ddp" or "single"; "full": fsdp, saved as one file."""
    strategies = importlib.import_module(f"{PL}.strategies")
    ranks = int(os.environ["WORLD_SIZE"])
    if kind == "single":
        return "auto"
    if kind == "ddp":
        return strategies.DDPStrategy(process_group_backend="gloo")
    tensor = tensor_ranks(kind)
    return strategies.ModelParallelStrategy(
        data_parallel_size=ranks // tensor,
        tensor_parallel_size=tensor,
        save_distributed_checkpoint=kind != "full",
        process_group_backend="gloo",
    )


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def fit(
    *,
    directory: str,
    max_steps: int,
    kind: str = "fsdp",
    ckpt_path: str | None = None,
    net: dict[str, Any] | None = None,
    test: bool = False,
    odd: int = -1,
    stock: bool = False,
    replaced: bool = False,
    **arguments: Any,
) -> dict[str, Any]:
    """One fit, or with ``test`` one test; what this rank knows at its end.

    Args:
        replaced: other code has put a function in the place of ``trainer.save_checkpoint``.
    """
    rank = int(os.environ["RANK"])
    given: dict[str, Any] = {"every_n_train_steps": 2, "save_top_k": -1, "filename": "{step}", "save_last": True}
    if stock:
        callback = pl.callbacks.ModelCheckpoint(dirpath=directory, **given)
    else:
        callback = build(PL)(dirpath=directory, **(given | {"options": ALL_LATE} | arguments))
    watch = Watch(odd=odd)
    lines = Lines()
    logging.getLogger("resiliency").addHandler(lines)
    trainer = make_trainer(
        PL,
        [callback, watch],
        root=Path(directory),
        devices=1 if kind == "single" else int(os.environ["WORLD_SIZE"]),
        strategy=strategy(kind),
        max_steps=max_steps,
        max_epochs=-1,
    )
    if replaced:
        save = trainer.save_checkpoint
        trainer.save_checkpoint = lambda *args, **kwargs: save(*args, **kwargs)
    module = Net(kind=kind, **(net or {}))
    torch.manual_seed(100 + rank // tensor_ranks(kind))
    error = ""
    try:
        if test:
            trainer.test(module, loader(batches=1), ckpt_path=ckpt_path, verbose=False)
        else:
            trainer.fit(module, loader(batches=12, shuffle=True), ckpt_path=ckpt_path)
    except Exception as raised:  # Boundary: the test is told.
        error = f"{type(raised).__name__}: {raised}"
    finally:
        logging.getLogger("resiliency").removeHandler(lines)
    return {
        "error": error,
        "losses": module.losses,
        "started": watch.started,
        "ended": hashes(trainer, module) if not error and not test else {},
        "weights": digest(dict(module.named_parameters())) if test else "",
        "lines": lines.lines,
        "last": callback.last_model_path,
    }


def run_fits(*, fits: list[dict[str, Any]], result: str) -> None:
    """Several fits; each answer is written at once, because a later fit may die."""
    torch.set_num_threads(1)
    answers: list[dict[str, Any]] = []
    ranks = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_PORT")}
    for one in fits:
        os.environ.update(ranks)  # the end of a fit may unset them
        answers.append(fit(**one))
        Path(f"{result}.{os.environ['RANK']}").write_text(json.dumps(answers))
