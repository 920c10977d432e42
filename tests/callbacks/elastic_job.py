"""What each rank runs in :mod:`tests.callbacks.test_elasticity`: it notes every sample that it trains on."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from resiliency.callbacks import elasticity
from tests.callbacks.harness import make_trainer, ours, stock

warnings.filterwarnings("ignore")


class Numbers(Dataset[Any]):
    """Sample i is the number i."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(float(index))


def make_module(namespace: str, notes: Path) -> Any:
    lightning = importlib.import_module(namespace)

    class Noting(lightning.LightningModule):  # type: ignore[name-defined,misc]
        """Writes [epoch, optimizer steps before, samples] for each batch."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            line = [self.current_epoch, self.trainer.global_step, [int(one) for one in batch]]
            with open(notes, "a") as file:
                file.write(json.dumps(line) + "\n")
            return self.layer(batch[:, None] / 100).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(3)
    return Noting()


def train(
    *,
    directory: str,
    notes: str,
    samples: int,
    die_at: list[int] | None = None,
    save_at: list[int] | None = None,
    ckpt_path: str | None = None,
    engine: bool = True,
    callback: dict[str, Any] | None = None,
    namespace: str = "lightning.pytorch",
    accumulate: int = 1,
    epochs: int = 2,
    shuffle: bool = True,
    workers: int = 0,
    drop_last: bool = False,
    saves_first: bool = False,
) -> None:
    """Trains, until after an optimizer step it is killed.

    Args:
        notes: each rank writes to this path and its number.
        die_at: (epoch, batches of it) after which all ranks are killed.
        save_at: likewise: ``trainer.save_checkpoint`` is called, to ``directory``/by-hand.ckpt.
        engine: the checkpoints are ours, else those of the stock callback.
        callback: arguments of ElasticityCallback; None: without.
        saves_first: the callback that does what ``save_at`` says comes before ours.
    """
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    own = Path(f"{notes}.{rank}")
    lightning = importlib.import_module(namespace)
    resized: list[list[int]] = []

    class Acts(lightning.Callback):  # type: ignore[name-defined,misc]
        def on_train_start(self, trainer: Any, module: Any) -> None:
            facts = {
                "step": trainer.global_step,
                "resized": resized,
                "accumulate": trainer.accumulate_grad_batches,
                "lr": trainer.optimizers[0].param_groups[0]["lr"],
            }
            Path(f"{own}.start").write_text(json.dumps(facts))

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if [trainer.current_epoch, batch_idx + 1] == save_at:
                trainer.save_checkpoint(f"{directory}/by-hand.ckpt")

    class Dies(lightning.Callback):  # type: ignore[name-defined,misc]
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if [trainer.current_epoch, batch_idx] == die_at:
                trainer.checkpoint_callback.last_model_path  # noqa: B018 - reading it waits until it is there
                os.kill(os.getpid(), signal.SIGKILL)

    given = {"every_n_train_steps": 1, "save_top_k": 1, "save_last": True, "monitor": "step", "mode": "max"}
    checkpoint = ours(namespace, directory, **given) if engine else stock(namespace)(directory, **given)
    callbacks = [Acts(), Dies(), checkpoint]
    if callback is not None:

        def on_world_resize(old: int, new: int, trainer: Any) -> None:
            resized.append([old, new, trainer.global_step])

        callbacks.insert(1 if saves_first else 0, elasticity.build(namespace)(on_world_resize, **callback))
    strategy: Any = "auto"
    if world_size > 1:
        strategy = importlib.import_module(f"{namespace}.strategies").DDPStrategy(process_group_backend="gloo")
    trainer = make_trainer(
        namespace,
        callbacks,
        root=Path(directory),
        devices=world_size,
        strategy=strategy,
        max_epochs=epochs,
        accumulate_grad_batches=accumulate,
    )
    module = make_module(namespace, own)
    loader = DataLoader(Numbers(samples), batch_size=2, shuffle=shuffle, num_workers=workers, drop_last=drop_last)
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    digest = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in module.parameters())).hexdigest()
    Path(f"{own}.end").write_text(json.dumps({"step": trainer.global_step, "hash": digest}))
