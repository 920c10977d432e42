"""A training whose weights depend on everything a restart within an epoch can lose, for tests of exact resume.

Its learning rate follows an epoch's metric, its loss a moving average kept in the module's ``on_train_batch_end``; it
logs with every reduction, with torchmetrics objects, rarely, and in other hooks than ``training_step``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import os
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.callbacks.harness import ALL_LATE, make_trainer, ours

SIZES = (1, 5, 2, 4, 3, 5, 2)  # of the batches
EPOCHS = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """How to train.

    Attributes:
        loaders: "one", or "two" for a dict of two.
        interval: of ReduceLROnPlateau.
        monitor: of ReduceLROnPlateau.
        rank: whose data; ranks have batches of other sizes.
        sync: reduce over the ranks.
        stop_on: what EarlyStopping monitors.
        patience: of EarlyStopping.
        terminate_at: the batch of all validations in which SIGTERM arrives; 0 for none.
        fail_at: the batch of the whole run in whose ``on_train_batch_end`` the module raises; 0 for none.
    """

    namespace: str = "lightning.pytorch"
    trainer: dict[str, Any] = field(default_factory=dict)
    loaders: str = "one"
    interval: str = "epoch"
    monitor: str = "mse"
    rank: int = 0
    sync: bool = False
    stop_on: str = "loss_epoch"
    patience: int = 100
    terminate_at: int = 0
    fail_at: int = 0


class Sizes:
    """A batch sampler: batches of other sizes, in another order in every epoch."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(sum(SIZES)).tolist()
        for size in SIZES[self.rank :] + SIZES[: self.rank]:
            yield order[:size]
            order = order[size:]

    def __len__(self) -> int:
        return len(SIZES)


def loader(rank: int = 0) -> DataLoader[Any]:
    data = torch.sin(torch.arange(sum(SIZES) * 5, dtype=torch.float32) + rank).reshape(-1, 5)
    return DataLoader(TensorDataset(data), batch_sampler=Sizes(rank))  # type: ignore[arg-type]


class Following(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """Makes the learning rate a function of every bit of the metric, so that all weights after it are."""

    def step(self, metrics: Any, epoch: Any = None) -> None:
        super().step(metrics)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.05 / (1 + abs(float(metrics)))


def make_module(case: Case) -> Any:
    lightning = importlib.import_module(case.namespace)

    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1))
            self.average = nn.Linear(8, 1)
            self.average.requires_grad_(False)
            self.mse = torchmetrics.MeanSquaredError()
            self.order = torchmetrics.SpearmanCorrCoef()  # keeps every value in a list
            self.pair = torchmetrics.MetricCollection(
                [torchmetrics.MeanAbsoluteError(), torchmetrics.ExplainedVariance()]
            )
            self.own = torchmetrics.MeanMetric()  # never given to self.log, reset by the module
            self.val_mse = torchmetrics.MeanSquaredError()
            self.ran = 0
            self.rates: list[float] = []
            self.validations = self.validated = 0

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.ran += 1
            parts = list(batch.values()) if isinstance(batch, dict) else [batch]
            rows = torch.cat([part[0] for part in parts])
            given, wanted = rows[:, :4], rows[:, 4:]
            found = self.net(given)
            loss = (found - wanted).square().mean() * (1 + random.random())
            loss = loss + 0.3 * (self.average(torch.tanh(self.net[0](given))) - found).square().mean()
            self.rates.append(self.optimizers().param_groups[0]["lr"])
            value, size = loss.detach(), len(rows)
            self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, batch_size=size, sync_dist=case.sync)
            for how in ("sum", "min", "max"):
                self.log(f"loss_{how}", value, on_step=False, on_epoch=True, reduce_fx=how, sync_dist=case.sync)
            self.log("highest", value, on_step=True, on_epoch=True, reduce_fx=max, batch_size=size)
            self.log("double", value.double(), on_step=False, on_epoch=True, batch_size=size, sync_dist=case.sync)
            self.log("step_only", value)
            if batch_idx == 0:
                self.log("first", value, on_step=False, on_epoch=True, batch_size=size)
            if batch_idx % 3 == 1:
                self.log("third", value, on_step=True, on_epoch=True, batch_size=size)
            self.mse(found.detach(), wanted)
            self.log("mse", self.mse, on_step=True, on_epoch=True)
            if batch_idx % 2 == 0:
                self.order.update(found.detach().squeeze(1), wanted.squeeze(1))
                self.log("order", self.order, on_step=False, on_epoch=True)
            self.pair.update(found.detach(), wanted)
            self.log_dict(self.pair, on_step=False, on_epoch=True)
            self.own.update(value)
            return loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if 0 < case.fail_at == self.ran:
                raise RuntimeError("in the module's hook")
            with torch.no_grad():
                for kept, new in zip(self.average.parameters(), self.net[3].parameters(), strict=True):
                    kept.lerp_(new, 0.2 + 0.1 * (batch_idx % 3))  # equal on all ranks
            random.random()  # of this rank
            self.log("average", self.average.weight.sum(), on_step=False, on_epoch=True, batch_size=1)

        def on_train_epoch_start(self) -> None:
            self.log("at_start", torch.rand(()), on_step=False, on_epoch=True)

        def on_train_epoch_end(self) -> None:
            self.log("own", self.own.compute())
            self.own.reset()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.validations += batch_idx == 0
            self.validated += 1
            if self.validated == case.terminate_at:
                self.trainer._signal_connector.received_sigterm = True
            found = self.net(batch[0][:, :4])
            self.val_mse(found, batch[0][:, 4:])
            self.log("val_mse", self.val_mse)
            self.log("val_loss", found.square().mean() * torch.rand(()), batch_size=len(found), sync_dist=case.sync)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.net.parameters(), lr=0.05)
            how = {"scheduler": Following(optimizer, patience=100), "monitor": case.monitor, "interval": case.interval}
            return {"optimizer": optimizer, "lr_scheduler": how}

    torch.manual_seed(5)
    return Module()


def make_logger(namespace: str) -> Any:
    loggers = importlib.import_module(f"{namespace}.loggers")

    class Rows(loggers.Logger):  # type: ignore[name-defined,misc]
        """Keeps what is logged, in order."""

        name, version = "rows", 0

        def __init__(self) -> None:
            super().__init__()
            self.rows: list[dict[str, Any]] = []

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.rows.append({"at": step, **metrics})

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    return Rows()


@dataclass(frozen=True)
class Outcome:
    """What a run leaves behind, as plain data."""

    weights: str
    rates: list[float]
    rows: list[dict[str, Any]]
    shown: dict[str, float]
    stopping: dict[str, Any]
    ran: int
    validations: int
    epoch: int
    step: int


def train(case: Case, folder: Path, *, ckpt: Path | None = None, callbacks: list[Any] | None = None) -> Outcome:
    """Trains to the end, from the start or from a checkpoint."""
    seed = 1 + 100 * case.rank + (0 if ckpt is None else 1000)  # nothing is right by luck
    random.seed(seed)
    module = make_module(case)
    torch.manual_seed(seed)
    kinds = importlib.import_module(f"{case.namespace}.callbacks")
    stopping = kinds.EarlyStopping(case.stop_on, patience=case.patience, check_on_train_epoch_end=True, strict=True)
    logger = make_logger(case.namespace)
    settings: dict[str, Any] = {
        "max_epochs": EPOCHS,
        "log_every_n_steps": 1,
        "logger": logger,
        "num_sanity_val_steps": 1,
    }
    trainer = make_trainer(case.namespace, [stopping, *(callbacks or [])], root=folder, **(settings | case.trainer))
    loaders: Any = loader(case.rank) if case.loaders == "one" else {"a": loader(case.rank), "b": loader(case.rank + 1)}
    trainer.fit(module, loaders, loader(case.rank), ckpt_path=str(ckpt) if ckpt else None)
    digest = hashlib.sha256()
    for tensor in module.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return Outcome(
        weights=digest.hexdigest(),
        rates=[*module.rates, module.optimizers().param_groups[0]["lr"]],
        rows=logger.rows,
        shown={name: float(value) for name, value in sorted(trainer.callback_metrics.items())},
        stopping={"waited": stopping.wait_count, "best": float(stopping.best_score), "stopped": stopping.stopped_epoch},
        ran=module.ran,
        validations=module.validations,
        epoch=trainer.current_epoch,
        step=trainer.global_step,
    )


def savers(case: Case, folder: Path) -> list[Any]:
    """Callbacks that save at every step, after every validation, and at the end of every epoch."""
    every = {"save_top_k": -1, "auto_resume": False, "options": ALL_LATE}
    return [
        ours(case.namespace, folder / "batch", every_n_train_steps=1, filename="{step}", **every),
        ours(
            case.namespace,
            folder / "validation",
            filename="{step}",
            monitor="val_loss",
            save_on_train_epoch_end=False,
            **every,
        ),
        ours(case.namespace, folder / "epoch", filename="{step}", save_on_train_epoch_end=True, **every),
    ]


def on_rank(*, directory: str, result: str, ckpts: list[str | None], case: dict[str, Any]) -> None:
    """One rank of a job of several; trains once from each checkpoint (None: the start) and writes the outcomes."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    here = Case(**case, rank=rank, sync=True)
    lightning = importlib.import_module(here.namespace)
    outcomes = []
    for ckpt in ckpts:
        strategy = lightning.strategies.DDPStrategy(process_group_backend="gloo", find_unused_parameters=False)
        settings = here.trainer | {"devices": size, "strategy": strategy, "use_distributed_sampler": False}
        outcome = train(
            dataclasses.replace(here, trainer=settings),
            Path(directory),
            ckpt=Path(ckpt) if ckpt else None,
            callbacks=[ours(here.namespace, Path(directory), save_top_k=0)] if ckpt else savers(here, Path(directory)),
        )
        outcomes.append(dataclasses.asdict(outcome))
    Path(f"{result}.{rank}").write_text(json.dumps(outcomes))
