"""A small training job whose every step depends on all generators and on the order of the data, and ways to stop it.

One run goes through undisturbed and saves, without stopping, at the places asked for. A second trainer starts from such
a save and goes on to the end; its weights must be equal bit for bit. Saves are stock ``trainer.save_checkpoint`` files
with the rank's state beside them.
"""

from __future__ import annotations

import hashlib
import importlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, get_worker_info

from resiliency.plugins.resume.rank_state import RankState, is_step_boundary

FEATURES = 4


# ---- data


class Items(Dataset[torch.Tensor]):
    """Sample i is a fixed vector of i; with ``noisy`` it draws from every generator of the process that reads it."""

    def __init__(self, length: int = 22, *, noisy: bool = False) -> None:
        self.length, self.noisy, self.reads = length, noisy, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        item = torch.sin(torch.arange(FEATURES, dtype=torch.float32) * (index + 1))
        return item + 0.1 * torch.randn(()) + 0.1 * random.random() + 0.1 * np.random.rand() if self.noisy else item


class Stream(IterableDataset[torch.Tensor]):
    """Shuffled anew in every pass, when the pass begins; each rank has its own, each worker reads its part of it."""

    def __init__(self, length: int = 22, *, rank: int = 0) -> None:
        self.length, self.rank = length, rank

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = torch.randperm(self.length).tolist()
        worker = get_worker_info()
        ways, way = (1, 0) if worker is None else (worker.num_workers, worker.id)
        for index in sorted(order) if ways > 1 else order:
            if index % ways == way:
                yield torch.cos(torch.arange(FEATURES, dtype=torch.float32) * (index + 1 + 100 * self.rank))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.length


class PositionStream(IterableDataset[torch.Tensor]):
    """Saves and loads its place by itself; every pass starts at the beginning, but for the one after a load."""

    def __init__(self, length: int | None = None, *, rank: int = 0) -> None:
        self.length, self.rank, self.at, self.start = length, rank, 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.at, self.start = self.start, 0
        worker = get_worker_info()
        step, first = (1, 0) if worker is None else (worker.num_workers, worker.id)
        while self.length is None or self.at < self.length:
            number = self.at * step + first + 1000 * self.rank
            self.at += 1
            yield torch.sin(torch.arange(FEATURES, dtype=torch.float32) * (number + 1))

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["at"]


class Endless(PositionStream):
    """Goes on where it was in every pass."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.at += 1
            yield torch.cos(torch.arange(FEATURES, dtype=torch.float32) * (self.at + 1000 * self.rank))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class SizedPositionStream(PositionStream):
    def __len__(self) -> int:
        assert self.length is not None
        return self.length


class ShuffledBatches(BatchSampler):
    """A batch sampler of the user's own: shuffles whole batches with Python's generator, opened eagerly."""

    def __init__(self, length: int, batch_size: int) -> None:
        self.batches = [list(range(start, min(start + batch_size, length))) for start in range(0, length, batch_size)]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(random.sample(self.batches, len(self.batches)))

    def __len__(self) -> int:
        return len(self.batches)


class MegatronBatches:
    """Finds its place by itself, as the batch samplers of Megatron and NeMo do: built with what was consumed."""

    def __init__(self, length: int, batch_size: int, consumed_samples: int) -> None:
        self.length, self.batch_size, self.consumed_samples = length, batch_size, consumed_samples

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(self.consumed_samples, self.length, self.batch_size):
            yield list(range(start, min(start + self.batch_size, self.length)))

    def __len__(self) -> int:
        return self.length // self.batch_size


class OwnLoader:
    """Not a DataLoader at all: a class with ``__iter__``, as users write."""

    def __init__(self, batches: int = 6) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in torch.randperm(self.batches).tolist():
            yield torch.full((3, FEATURES), float(index + 1) / 7)

    def __len__(self) -> int:
        return self.batches


class OwnStatefulLoader(OwnLoader):
    """With a state of its own, which knows the place it was stopped at."""

    def __init__(self, rank: int = 0, batches: int = 6) -> None:
        super().__init__(batches)
        self.rank, self.at, self.start = rank, 0, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        start, self.start = self.start, 0
        for index in range(start, self.batches):
            self.at = index + 1
            yield torch.full((3, FEATURES), float(index + 1 + 10 * self.rank) / 7)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["at"]


def sample(number: int) -> torch.Tensor:
    return torch.sin(torch.arange(FEATURES, dtype=torch.float32) * (number + 1))


class Drawer:
    """Integers below a bound from a generator of any kind, made once."""

    def __init__(self, kind: str, seed: int = 3) -> None:
        self.kind = kind
        self.rng: Any = {
            "random": random.Random,
            "numpy": np.random.default_rng,
            "legacy numpy": np.random.RandomState,
            "torch": lambda seed: torch.Generator().manual_seed(seed),
        }[kind](seed)

    def below(self, bound: int) -> int:
        if self.kind == "random":
            return int(self.rng.randrange(bound))
        if self.kind == "torch":
            return int(torch.randint(bound, (), generator=self.rng))
        return int(self.rng.integers(bound) if self.kind == "numpy" else self.rng.randint(bound))


class Buffer(IterableDataset[torch.Tensor]):
    """A shuffle buffer with a generator made in ``__init__``, so that every epoch has an order of its own."""

    def __init__(self, length: int = 22, kind: str = "random", drawer: Drawer | None = None) -> None:
        self.length, self.drawer = length, drawer or Drawer(kind)

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        ways, way = (1, 0) if worker is None else (worker.num_workers, worker.id)
        held: list[int] = []
        for number in range(way, self.length, ways):
            held.append(number)
            if len(held) == 5:
                yield sample(held.pop(self.drawer.below(5)))
        while held:
            yield sample(held.pop(self.drawer.below(len(held))))


class Augmented(Items):
    """Map-style, with noise from a generator of its own."""

    def __init__(self, length: int = 22, drawer: Drawer | None = None) -> None:
        super().__init__(length)
        self.drawer = drawer or Drawer("numpy")

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + self.drawer.below(1000) / 1000


def stateful_loader(*args: Any, **kwargs: Any) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(*args, **kwargs)


def workers(count: int, **more: Any) -> dict[str, Any]:
    return {"num_workers": count, "multiprocessing_context": "fork", **more} if count else {}


# ---- the job


class Stopped(Exception):
    """The fault of a test."""


def model_class(namespace: str, step: str) -> type:
    lightning = importlib.import_module(namespace)

    class Job(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self, case: Case, stop: str | None, stop_at: int) -> None:
            super().__init__()
            self.case, self.stop, self.stop_at, self.scheduler = case, stop, stop_at, case.scheduler
            self.net = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.4), nn.Linear(8, 1))
            self.seen: list[float] = []
            self.batches: list[float] = []
            self.indices: list[int] = []

        def loss(self, batch: Any) -> torch.Tensor:
            parts = (
                batch
                if isinstance(batch, list | tuple)
                else list(batch.values())
                if isinstance(batch, dict)
                else [batch]
            )
            return sum((self.net(part).square().mean() for part in parts if part is not None), torch.zeros(()))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.case.probe is not None:
                self.case.probe(self.trainer)
            if self.stop == "step" and len(self.seen) + 1 == self.stop_at:
                raise Stopped
            if self.stop == "sigterm" and len(self.seen) + 1 == self.stop_at:
                self.trainer._signal_connector.received_sigterm = True
            self.indices.append(batch_idx)
            self.batches.append(float(batch.sum()) if isinstance(batch, torch.Tensor) else 0.0)
            loss = self.loss(batch) * (1 + random.random() + np.random.rand())
            self.seen.append(float(loss))
            self.log("train_loss", loss, batch_size=1)
            return loss

        def on_train_epoch_start(self) -> None:
            self.scale = torch.rand(())  # users draw here too

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.loss(batch) * (1 + torch.rand(()) + random.random()))

        def configure_optimizers(self) -> Any:
            if self.case.late:
                assert self.trainer.estimated_stepping_batches
            optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
            if self.scheduler.startswith("plateau"):
                schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.7, threshold=10.0)
                monitored = (
                    {"monitor": "train_loss", "interval": "step"}
                    if "step" in self.scheduler
                    else {"monitor": "val_loss"}
                )
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, **monitored}}
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self.scheduler}}

    class IteratorJob(Job):
        """Fetches its batches by itself, as NeMo's modules do."""

        def training_step(self, dataloader_iter: Any) -> torch.Tensor:
            batch, batch_idx, _ = next(dataloader_iter)
            return Job.training_step(self, batch, batch_idx)

    return {"batch": Job, "iterator": IteratorJob}[step]


@dataclass(kw_only=True)
class Case:
    """What is trained on and how; ``loaders`` builds fresh loaders for every run."""

    loaders: Callable[[], Any]
    trainer: dict[str, Any] = field(default_factory=dict)
    namespace: str = "lightning.pytorch"
    scheduler: str = "step"
    val: bool | Callable[[], Any] = True  # a few fixed samples, or what builds the loader
    step: str = "batch"  # what training_step is given: a batch, or the iterator
    late: bool = False  # the loaders are opened before the state is read, as with strategies that restore after setup
    rank_state: dict[str, Any] = field(default_factory=dict)
    probe: Callable[[Any], object] | None = None  # called with the trainer in every training_step


@dataclass(frozen=True)
class Save:
    hook: str
    number: int  # counted per hook, from 1
    path: Path


@dataclass
class Outcome:
    digest: str
    losses: list[float]
    saves: list[Save]
    batches: list[float]
    indices: list[int]
    boundaries: list[bool]
    trainer: Any


def saver_class(namespace: str) -> type:
    callbacks = importlib.import_module(f"{namespace}.callbacks")

    class Saver(callbacks.Checkpoint):  # type: ignore[name-defined,misc]
        """Attaches a RankState, saves at the places asked for, and loads what lies beside a checkpoint.

        A Checkpoint by type, so that Lightning calls it last, as it calls every checkpoint callback.
        """

        def __init__(
            self, folder: Path, wanted: Callable[[str, int], bool], active: bool, settings: dict[str, Any]
        ) -> None:
            self.folder, self.wanted, self.active = folder, wanted, active
            self.rank_state = RankState(**settings)
            self.counts: dict[str, int] = {}
            self.saves: list[Save] = []
            self.boundaries: list[bool] = []

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            if self.active and stage == "fit":
                self.rank_state.attach(trainer)

        def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
            self.rank_state.detach(trainer)

        def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            if self.active and not pl_module.case.late:
                state = torch.load(f"{trainer.ckpt_path}.rank{trainer.global_rank}", weights_only=True)
                self.rank_state.patch_loaded_checkpoint(checkpoint, state)
                self.rank_state.load(state)

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            if self.active and pl_module.case.late and trainer.ckpt_path:
                self.rank_state.load(torch.load(f"{trainer.ckpt_path}.rank{trainer.global_rank}", weights_only=True))

        def save(self, trainer: Any, hook: str) -> None:
            self.counts[hook] = number = self.counts.get(hook, 0) + 1
            if not self.wanted(hook, number) or trainer.sanity_checking:
                return
            path = self.folder / f"{hook}-{number}.ckpt"
            state = self.rank_state.capture(trainer) if self.active else {}
            torch.save(state, f"{path}.rank{trainer.global_rank}")
            trainer.save_checkpoint(path)
            self.saves.append(Save(hook, number, path))

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            self.boundaries.append(is_step_boundary(trainer))
            if self.boundaries[-1]:
                self.save(trainer, "batch_end")

        def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
            if not trainer.sanity_checking and is_step_boundary(trainer):
                self.save(trainer, "validation_end")

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.save(trainer, "epoch_end")

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            if isinstance(exception, Stopped | SystemExit):
                self.save(trainer, "exception")

    return Saver


def digest(module: nn.Module) -> str:
    text = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        text.update(name.encode() + tensor.detach().cpu().numpy().tobytes())
    return text.hexdigest()


def run(
    case: Case,
    folder: Path,
    *,
    save: Callable[[str, int], bool] | None = None,
    ckpt: Path | None = None,
    active: bool = True,
    saver: bool = True,
    seed: int = 1,
    stop: str | None = None,
    stop_at: int = 0,
    **more: Any,
) -> Outcome:
    """Trains to the end; with ``ckpt`` from that save, after another seed, so that nothing is right by luck.

    Args:
        save: asked with the hook's name and how often it was called; every rank must answer alike.
        active: whether the RankState is used; without it this is stock Lightning.
        saver: whether there is a callback at all.
        stop: "sigterm" at the end of step ``stop_at``, or an exception in its "step"; saved in ``on_exception``.
    """
    lightning = importlib.import_module(case.namespace)
    for sow in (random.seed, np.random.seed, torch.manual_seed):
        sow(seed if ckpt is None else seed + 1000)
    module = model_class(case.namespace, case.step)(case, stop, stop_at)
    wanted = save or (lambda hook, _: hook == "exception")
    callback = saver_class(case.namespace)(folder, wanted, active, case.rank_state)
    settings: dict[str, Any] = {"max_epochs": 3, "num_sanity_val_steps": 1, "accelerator": "cpu", "devices": 1}
    settings |= case.trainer | more
    trainer = lightning.Trainer(
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=saver,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback] if saver else [],
        **settings,
    )
    val = case.val() if callable(case.val) else DataLoader(Items(5), batch_size=2) if case.val else None
    try:
        trainer.fit(module, case.loaders(), val, ckpt_path=str(ckpt) if ckpt else None)
    except (Stopped, SystemExit):
        callback.rank_state.detach(trainer)
    return Outcome(
        digest(module), module.seen, callback.saves, module.batches, module.indices, callback.boundaries, trainer
    )


# ---- the exam


def everything(hook: str, number: int) -> bool:
    return True


def second_batch(hook: str, number: int) -> bool:
    return (hook, number) == ("batch_end", 2)


def chosen(saves: list[Save], seed: str) -> list[Save]:
    """By lot one save within the first epoch and one after it; and the end of the first epoch from every side."""
    lot = random.Random(seed)
    ends = [next((s for s in saves if s.hook == hook), None) for hook in ("validation_end", "epoch_end")]
    sides = [save for save in ends if save is not None]
    at = saves.index(sides[0]) if sides else len(saves)
    within = [lot.choice(saves[: max(1, at - 1)]), lot.choice(saves[at + 1 : -1] or saves)]
    return list(dict.fromkeys([*within, saves[max(0, at - 1)], *sides]))


def assert_equal_to(whole: Outcome, case: Case, folder: Path, saves: list[Save], **more: Any) -> None:
    for save in saves:
        resumed = run(case, folder, ckpt=save.path, **more)
        done = len(whole.losses) - len(resumed.losses)
        assert resumed.losses == whole.losses[done:], f"other steps after {save.hook} {save.number}"
        assert resumed.indices == whole.indices[done:], f"other batch indices after {save.hook} {save.number}"
        assert resumed.digest == whole.digest, f"other weights after {save.hook} {save.number}"
