"""Two gloo ranks going through the cases of resume_cases.py; run in processes of their own by test_rank_state_ddp.py."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch.strategies
import torch
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

from tests.plugins.resume.resume_cases import (
    Augmented,
    Buffer,
    Case,
    Drawer,
    Items,
    PositionStream,
    Stream,
    run,
    stateful_loader,
    workers,
)

#: A collective that waits longer than this has lost a rank.
COLLECTIVE_TIMEOUT = timedelta(seconds=30)

#: name -> (case for this rank, saves to resume from as "hook number")
CASES: dict[str, tuple[Callable[[int], Case], list[tuple[str, int]]]] = {
    "distributed sampler": (
        lambda rank: Case(loaders=lambda: DataLoader(Items(40, noisy=True), batch_size=4, shuffle=True)),
        [("batch_end", 2), ("batch_end", 5), ("validation_end", 1), ("epoch_end", 2), ("batch_end", 13)],
    ),
    "distributed sampler, workers": (
        lambda rank: Case(
            loaders=lambda: DataLoader(Items(40), batch_size=4, shuffle=True, **workers(2)), trainer={"max_epochs": 2}
        ),
        [("batch_end", 7)],
    ),
    "accumulation, validation within the epoch": (
        lambda rank: Case(
            loaders=lambda: DataLoader(Items(40), batch_size=4, shuffle=True),
            trainer={"accumulate_grad_batches": 2, "val_check_interval": 2},
        ),
        [("batch_end", 1), ("validation_end", 2), ("batch_end", 4)],
    ),
    "a stream for each rank": (
        lambda rank: Case(loaders=lambda: DataLoader(Stream(20, rank=rank), batch_size=4), trainer={"max_epochs": 2}),
        [("batch_end", 3), ("epoch_end", 1)],
    ),
    "stateful, distributed sampler": (
        lambda rank: Case(loaders=lambda: stateful_loader(Items(40), batch_size=4, shuffle=True)),
        [("batch_end", 8), ("epoch_end", 1)],
    ),
    "stateful, sampler of the user": (
        lambda rank: Case(
            loaders=lambda: stateful_loader(Items(40), batch_size=4, sampler=WeightedRandomSampler(range(1, 41), 40)),
            trainer={"max_epochs": 2},
        ),
        [("batch_end", 2), ("epoch_end", 1), ("batch_end", 7)],
    ),
    "sampler of the user, workers": (
        lambda rank: Case(
            loaders=lambda: DataLoader(
                Items(40), batch_size=4, sampler=WeightedRandomSampler(range(1, 41), 40), **workers(2)
            ),
            trainer={"max_epochs": 2},
        ),
        [("batch_end", 2), ("batch_end", 7)],
    ),
    "a stateful stream for each rank": (
        lambda rank: Case(
            loaders=lambda: stateful_loader(PositionStream(rank=rank), batch_size=4 + rank),
            trainer={"max_epochs": 1, "max_steps": 4, "val_check_interval": 2},
        ),
        [("batch_end", 1), ("batch_end", 3)],
    ),
    "a stateful stream for each rank, workers": (
        lambda rank: Case(
            loaders=lambda: stateful_loader(PositionStream(rank=rank), batch_size=3, **workers(2)),
            trainer={"max_epochs": 1, "max_steps": 6, "val_check_interval": 3},
        ),
        [("batch_end", 4)],
    ),
    "a generator of its own for each rank": (
        lambda rank: Case(
            loaders=lambda: DataLoader(Buffer(20, drawer=Drawer("random", rank)), batch_size=4),
            val=lambda: DataLoader(Augmented(6, drawer=Drawer("numpy", rank)), batch_size=2),
            trainer={"max_epochs": 2},
        ),
        [("batch_end", 2), ("epoch_end", 1), ("batch_end", 7)],
    ),
    "sampler of the user with a generator, noise for each rank": (
        lambda rank: Case(
            loaders=lambda: DataLoader(
                Augmented(40, drawer=Drawer("numpy", rank)),
                batch_size=4,
                sampler=RandomSampler(range(40), generator=torch.Generator().manual_seed(5)),
            ),
            trainer={"max_epochs": 2},
        ),
        [("batch_end", 2), ("batch_end", 7)],
    ),
}


def examine(rank: int, folder: Path) -> list[dict[str, Any]]:
    strategy = {"devices": 2, "num_sanity_val_steps": 0}
    results: list[dict[str, Any]] = []

    def train(case: Case, where: Path, **more: Any) -> Any:
        ddp = lightning.pytorch.strategies.DDPStrategy(process_group_backend="gloo", timeout=COLLECTIVE_TIMEOUT)
        return run(case, where, seed=1 + 100 * rank, strategy=ddp, **strategy, **more)

    for name, (build, places) in CASES.items():
        case, where = build(rank), folder / name.replace(" ", "-").replace(",", "")
        where.mkdir(exist_ok=True)
        whole = train(case, where, save=lambda hook, number, places=places: (hook, number) in places)
        for save in whole.saves:
            resumed = train(case, where, ckpt=save.path)
            done = len(whole.losses) - len(resumed.losses)
            same = resumed.losses == whole.losses[done:], resumed.digest == whole.digest
            results.append({"case": name, "save": (save.hook, save.number), "losses": same[0], "weights": same[1]})
    # the comparison can fail
    case, where = CASES["distributed sampler"][0](rank), folder / "stock"
    where.mkdir(exist_ok=True)
    whole = train(case, where, save=lambda hook, number: (hook, number) == ("batch_end", 2), active=False)
    stock = train(case, where, ckpt=whole.saves[0].path, active=False)
    results.append(
        {
            "case": "stock",
            "save": ("batch_end", 2),
            "losses": stock.losses == whole.losses[2:],
            "weights": stock.digest == whole.digest,
        }
    )
    return results


def rank_main(*, rank: int, folder: str, result: str) -> None:
    """One rank; writes its results as JSON."""
    torch.set_num_threads(1)
    random.seed(rank)
    warnings.simplefilter("ignore")
    Path(result).write_text(json.dumps(examine(rank, Path(folder))))
