"""What each rank runs in :mod:`tests.callbacks.test_autocheckpoint`."""

from __future__ import annotations

import faulthandler
import hashlib
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Dataset

from resiliency.callbacks.autocheckpoint import build
from resiliency.callbacks.model_checkpoint import build as build_model_checkpoint
from resiliency.storage.interval import Interval

warnings.filterwarnings("ignore")
PL = "lightning.pytorch"
#: The batch, from 0, in which ranks are found.
AT = 5
PATIENCE_S = 60.0
BATCH = 2


def wait_there(folder: str, what: str, *, to_go_on: bool) -> None:
    """Says that this rank is there, and waits for the test's word, or for ever."""
    rank = os.environ.get("RANK", "0")
    Path(folder, f"{what}-{rank}").touch()
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until and not (to_go_on and Path(folder, "go").exists()):
        time.sleep(0.005)


class Data(Dataset[torch.Tensor]):
    """Numbers; a batch of them never comes, where that is asked for."""

    def __init__(self, folder: str, stuck: bool) -> None:
        self._folder, self._stuck = folder, stuck
        self._given = 0  # by this process

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> torch.Tensor:
        worker = torch.utils.data.get_worker_info()
        # Of two workers one has every second batch.
        first, here = (AT // 2, worker.id == AT % 2) if worker is not None else (AT, True)
        if self._stuck and here and self._given >= BATCH * first:
            wait_there(self._folder, "there", to_go_on=False)
        self._given += 1
        if worker is not None and index == 0:  # a program that a worker starts and ends
            child = subprocess.Popen(["sleep", "60"])
            child.terminate()
            Path(self._folder, "child").write_text(str(child.wait(20)))
        if index < 4:
            Path(self._folder, f"drawn-{index}").write_text(str(numpy.random.randint(1 << 30)))
        return torch.full((8,), float(index) / 96)


class Wait(torch.autograd.Function):
    """The identity, whose backward waits."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, folder: str) -> Any:
        context.folder = folder
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: Any) -> Any:
        wait_there(context.folder, "there", to_go_on=True)
        return gradient, None


def make_module(namespace: str, folder: str, moment: str, dropout: float, fails: bool) -> Any:
    class Module(importlib.import_module(namespace).LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(dropout), torch.nn.Linear(64, 1))
            self.moment = moment
            self.hashes: dict[int, str] = {}

        def training_step(self, batch: Any, index: int) -> Any:
            now = index == AT and self.trainer.current_epoch == 0
            if now and self.moment == "forward":
                wait_there(folder, "there", to_go_on=True)
            loss = self.net(batch).square().mean()
            return Wait.apply(loss, folder) if now and self.moment == "backward" else loss

        def validation_step(self, batch: Any, index: int) -> None:
            if self.trainer.sanity_checking and self.moment == "sanity check":
                wait_there(folder, "there", to_go_on=True)
            if self.moment == "validation" and index == 0:
                wait_there(folder, "there", to_go_on=True)

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            self.hashes[self.trainer.global_step] = digest(self)
            if fails and index == AT:
                raise ValueError("of the user")
            if index == AT - 1:
                Path(folder, f"before-{self.trainer.global_rank}").touch()
            if index == AT and self.moment == "batch end":
                wait_there(folder, "there", to_go_on=True)

        def on_train_end(self) -> None:
            if self.moment == "train end":
                wait_there(folder, "there", to_go_on=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    return Module()


def digest(module: Any) -> str:
    found = hashlib.sha256()
    for tensor in module.state_dict().values():
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


def train(
    *,
    directory: str,
    folder: str,
    moment: str = "",
    stuck: bool = False,
    workers: int = 0,
    grace_s: float = 8.0,
    max_steps: int = 20,
    dropout: float = 0.2,
    model_checkpoint: bool = True,
    namespace: str = PL,
    arguments: dict[str, Any] | None = None,
    saves: dict[str, Any] | None = None,
    accumulate: int = 1,
    user_handler: bool = False,
    stock: bool = False,
    local_dir: str = "",
    handler: str = "",
    seed_workers: bool = False,
    fails: bool = False,
) -> None:
    """Trains; each rank writes its weights after each step, and what became of the fit."""
    torch.set_num_threads(1)
    log = Path(folder, f"log-{os.environ.get('RANK', '0')}")
    logging.basicConfig(filename=log, format="%(relativeCreated)d %(name)s %(message)s", level=logging.INFO, force=True)
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    given: dict[str, Any] = {"grace": timedelta(seconds=grace_s), "metadata_server": None} | (arguments or {})
    automatic = build(namespace)(None if model_checkpoint else directory, **given) if given.pop("used", True) else None
    lightning = importlib.import_module(namespace)
    callbacks: list[Any] = [automatic] if automatic is not None else []
    if stock:
        callbacks.append(importlib.import_module(f"{namespace}.callbacks").ModelCheckpoint(directory))
    elif model_checkpoint:
        every: dict[str, Any] = {"every_n_train_steps": 100, "save_top_k": 1} | (saves or {})
        if local_dir:
            every |= {"local_dir": local_dir, "persist": Interval(steps=1000)}
        callbacks.append(build_model_checkpoint(namespace)(directory, **every))
    kind: Any = "auto"
    if world_size > 1:
        kind = importlib.import_module(f"{namespace}.strategies").DDPStrategy(process_group_backend="gloo")
    torch.manual_seed(7)
    module = make_module(namespace, folder, moment, dropout, fails)
    torch.manual_seed(100 + rank)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=kind,
        max_steps=max_steps,
        max_epochs=-1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=model_checkpoint,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1 if moment == "sanity check" else 0,
        default_root_dir=folder,
        val_check_interval=AT + 1,
        limit_val_batches=3,
        accumulate_grad_batches=accumulate,
    )
    if handler == "exits":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
    elif handler == "stacks":
        faulthandler.register(signal.SIGUSR1, file=open(Path(folder, "stacks"), "w"))  # noqa: SIM115
    if seed_workers:
        lightning.seed_everything(3, workers=True)
    if user_handler:
        signal.signal(signal.SIGTERM, lambda *_: Path(folder, f"handled-{rank}").touch())
    data = Data(folder, stuck and rank == world_size - 1)
    loader = DataLoader(data, batch_size=BATCH, shuffle=False, num_workers=workers)
    answer = {"outcome": "", "step": -1}
    try:
        validation = DataLoader(Data(folder, False), batch_size=BATCH)
        trainer.fit(module, loader, validation)
        answer["outcome"] = "finished"
    except SystemExit as error:
        answer["outcome"] = f"{type(error).__name__} {error.code}"
        raise
    except BaseException as error:
        answer["outcome"] = repr(error)
        raise
    finally:
        left = [thread.name for thread in threading.enumerate() if thread.name.startswith("resiliency")]
        handlers = [str(signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGUSR1)]
        answer |= {"threads": left, "handlers": handlers, "wakeup": signal.set_wakeup_fd(-1)}
        answer |= {"step": trainer.global_step, "hashes": module.hashes, "hash": digest(module)}
        Path(folder, f"result-{rank}.json").write_text(json.dumps(answer))
        sys.stderr.flush()
