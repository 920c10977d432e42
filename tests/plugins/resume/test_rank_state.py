"""The resumed run equals the undisturbed one, bit for bit; see resume_cases.py for the job and how it is stopped."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler

from resiliency.plugins.resume.loader_recorder import attach_recorder, detach_recorder
from resiliency.plugins.resume.rank_state import RankState, is_step_boundary
from tests.plugins.resume.resume_cases import (
    FEATURES,
    Case,
    Endless,
    Items,
    MegatronBatches,
    OwnLoader,
    OwnStatefulLoader,
    PositionStream,
    ShuffledBatches,
    SizedPositionStream,
    SizedStream,
    Stopped,
    Stream,
    assert_equal_to,
    chosen,
    everything,
    run,
    second_batch,
    stateful_loader,
    workers,
)
from tests.rings import few

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Lightning's advice about workers, logging and small data
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def loader(dataset: Any = None, **more: Any) -> DataLoader[Any]:
    return DataLoader(Items() if dataset is None else dataset, **{"batch_size": 4, "shuffle": True, **more})


def sampled(sampler: Any) -> DataLoader[Any]:
    return DataLoader(Items(), batch_size=4, sampler=sampler)


def own_batches(length: int = 22, **more: Any) -> DataLoader[Any]:
    return DataLoader(Items(length), batch_sampler=ShuffledBatches(length, 4), **more)


def whole_batches() -> DataLoader[Any]:
    batches = [torch.rand(3, FEATURES, generator=torch.Generator().manual_seed(i)) for i in range(6)]
    return DataLoader(batches, batch_size=None, shuffle=True)  # type: ignore[arg-type]


CASES: dict[str, Case] = {
    # map-style data in this process
    "random sampler": Case(loaders=loader),
    "augmentation in this process": Case(loaders=lambda: loader(Items(noisy=True))),
    "generator of the user": Case(loaders=lambda: loader(generator=torch.Generator().manual_seed(5))),
    "replacement": Case(loaders=lambda: sampled(RandomSampler(range(22), replacement=True, num_samples=20))),
    "weighted": Case(loaders=lambda: sampled(WeightedRandomSampler(range(1, 23), 22))),
    "batch sampler of the user": Case(loaders=own_batches),
    "no batching": Case(loaders=whole_batches),
    "no validation": Case(loaders=loader, val=False),
    "validation within the epoch": Case(loaders=loader, trainer={"val_check_interval": 2}),
    "validation across epochs": Case(
        loaders=loader, trainer={"check_val_every_n_epoch": None, "val_check_interval": 4}
    ),
    "accumulation": Case(loaders=loader, trainer={"accumulate_grad_batches": 4}),
    "max steps": Case(loaders=loader, trainer={"max_epochs": -1, "max_steps": 16}),
    "limited batches": Case(loaders=loader, trainer={"limit_train_batches": 3}),
    "reload every epoch": Case(loaders=loader, trainer={"reload_dataloaders_every_n_epochs": 1}),
    "reload every second epoch": Case(
        loaders=loader, trainer={"reload_dataloaders_every_n_epochs": 2, "max_epochs": 4}
    ),
    "scheduler by epoch": Case(loaders=loader, scheduler="epoch"),
    "step fetches by itself": Case(loaders=loader, step="iterator"),
    "plateau by step": Case(loaders=loader, scheduler="plateau_step"),
    # iterable data in this process
    "stream": Case(loaders=lambda: DataLoader(Stream(), batch_size=4)),
    "stream, step fetches by itself": Case(loaders=lambda: DataLoader(Stream(), batch_size=4), step="iterator"),
    "stream with length": Case(loaders=lambda: DataLoader(SizedStream(), batch_size=4)),
    "loader of the user": Case(loaders=OwnLoader),
    "stateful loader of the user": Case(loaders=OwnStatefulLoader),
    # worker processes
    "workers": Case(loaders=lambda: loader(**workers(2))),
    "persistent workers": Case(loaders=lambda: loader(**workers(2, persistent_workers=True))),
    "workers, batch sampler of the user": Case(loaders=lambda: own_batches(**workers(2))),
    "persistent workers, batch sampler of the user": Case(
        loaders=lambda: own_batches(**workers(2, persistent_workers=True))
    ),
    "workers, stream": Case(loaders=lambda: DataLoader(Stream(), batch_size=4, **workers(2))),
    "workers, augmentation, reread": Case(
        loaders=lambda: loader(Items(noisy=True), **workers(2)), rank_state={"reread": True}
    ),
    # torchdata
    "stateful": Case(loaders=lambda: stateful_loader(Items(noisy=True), batch_size=4, shuffle=True)),
    "stateful, torch's sampler": Case(
        loaders=lambda: stateful_loader(Items(), batch_size=4, sampler=RandomSampler(range(22)))
    ),
    "stateful, batch sampler of the user": Case(
        loaders=lambda: stateful_loader(Items(), batch_sampler=ShuffledBatches(22, 4))
    ),
    "stateful, batch sampler of the user, workers": Case(
        loaders=lambda: stateful_loader(
            Items(), batch_sampler=ShuffledBatches(22, 4), **workers(2, persistent_workers=True)
        )
    ),
    "stateful, workers": Case(loaders=lambda: stateful_loader(Items(), batch_size=4, shuffle=True, **workers(2))),
    "stateful, persistent workers": Case(
        loaders=lambda: stateful_loader(Items(), batch_size=4, shuffle=True, **workers(2, persistent_workers=True))
    ),
    "stateful stream": Case(loaders=lambda: stateful_loader(PositionStream(22), batch_size=4)),
    "stateful stream with length": Case(loaders=lambda: stateful_loader(SizedPositionStream(22), batch_size=4)),
    "stateful stream, workers": Case(loaders=lambda: stateful_loader(PositionStream(11), batch_size=4, **workers(2))),
    "stateful stream across epochs": Case(
        loaders=lambda: stateful_loader(Endless(), batch_size=4), trainer={"limit_train_batches": 5}
    ),
    "stateful stream without end": Case(
        loaders=lambda: stateful_loader(PositionStream(), batch_size=4),
        trainer={"max_epochs": 1, "max_steps": 12, "val_check_interval": 5},
    ),
    # several loaders
    "combined": Case(loaders=lambda: {"a": loader(), "b": loader(Items(10))}),
    "combined, the same twice": Case(loaders=lambda: [one := loader(), one]),
    "combined, workers": Case(loaders=lambda: [loader(), loader(Items(10), **workers(2))]),
    "combined, streams": Case(
        loaders=lambda: [DataLoader(Stream(22), batch_size=4), DataLoader(Stream(10), batch_size=4)]
    ),
    "opened early": Case(loaders=loader, late=True),
    "opened early, persistent workers": Case(loaders=lambda: loader(**workers(2, persistent_workers=True)), late=True),
    "opened early, stateful": Case(loaders=lambda: stateful_loader(Items(), batch_size=4, shuffle=True), late=True),
    "combined, stateful": Case(loaders=lambda: [stateful_loader(PositionStream(22), batch_size=4), loader(Items(10))]),
}
SMALL = ["random sampler", "validation within the epoch", "accumulation", "stream", "stateful stream"]


#: One of each way in which batches are made, and of each moment that is special.
FEW = {
    *("random sampler", "batch sampler of the user", "stream", "stateful", "stateful stream", "combined"),
    *("workers", "stateful, workers", "persistent workers", "workers, augmentation, reread", "opened early"),
    *("accumulation", "validation within the epoch", "plateau by step", "max steps"),
}


@pytest.mark.parametrize("name", few(CASES, FEW))
def test_resumed_run_equals_the_undisturbed_one(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    slow = "workers" in name  # starting processes takes most of the time
    # Two epochs have all: a save within the first is followed by another epoch, one within the second comes after one.
    epochs = {} if name in SMALL or "max_epochs" in case.trainer else {"max_epochs": 2}
    whole = run(case, tmp_path, save=everything, **epochs)
    assert_equal_to(
        whole,
        case,
        tmp_path,
        chosen(whole.saves, name)[: (3 if "persistent" in name else 2) if slow else None],
        **epochs,
    )


@pytest.mark.parametrize("name", few(SMALL, SMALL[:2]))
def test_both_packages(name: str, tmp_path: Path) -> None:
    case = copy.copy(CASES[name])
    case.namespace = "pytorch_lightning"
    whole = run(case, tmp_path, save=everything, max_epochs=2)
    assert_equal_to(whole, case, tmp_path, chosen(whole.saves, name), max_epochs=2)


@pytest.mark.parametrize("seed", few(range(6), range(2)))
def test_any_mixture(seed: int, tmp_path: Path) -> None:
    lot = random.Random(seed)
    length, batch = lot.randint(9, 30), lot.randint(2, 5)
    kinds: list[Callable[[], Any]] = [
        lambda: loader(Items(length, noisy=True), batch_size=batch, drop_last=True),
        lambda: DataLoader(Stream(length), batch_size=batch, drop_last=True),
        lambda: stateful_loader(Items(length, noisy=True), batch_size=batch, shuffle=True, drop_last=True),
        lambda: stateful_loader(PositionStream(length), batch_size=batch, drop_last=True),
        lambda: [loader(Items(length), batch_size=batch, drop_last=True), loader(Items(12))],
    ]
    epochs = (
        {"max_epochs": lot.randint(2, 4)} if lot.random() < 0.7 else {"max_epochs": -1, "max_steps": lot.randint(5, 12)}
    )
    more = {"accumulate_grad_batches": lot.choice([1, 1, 2, 3]), "val_check_interval": lot.choice([1.0, 1, 2])}
    case = Case(loaders=lot.choice(kinds), trainer=epochs | more, scheduler=lot.choice(["step", "epoch"]))
    whole = run(case, tmp_path, save=everything, seed=seed)
    assert_equal_to(whole, case, tmp_path, lot.sample(whole.saves, min(5, len(whole.saves))), seed=seed)


@pytest.mark.parametrize(
    "name",
    few(
        [*SMALL, "augmentation in this process", "workers", "stateful", "combined"], [*SMALL[:2], "workers", "stateful"]
    ),
)
def test_without_rank_state_the_weights_differ(name: str, tmp_path: Path) -> None:
    """The exam can be failed: stock Lightning fails it in every one of these."""
    case = copy.copy(CASES[name])
    whole = run(case, tmp_path, save=second_batch, active=False, max_epochs=2)
    (save,) = whole.saves
    assert run(case, tmp_path, ckpt=save.path, active=False, max_epochs=2).digest != whole.digest


def test_a_resumed_run_can_be_resumed(tmp_path: Path) -> None:
    for case in (CASES["random sampler"], CASES["stateful stream"], CASES["combined"]):
        whole = run(case, tmp_path)
        third = run(case, tmp_path, save=lambda hook, number: (hook, number) == ("batch_end", 3)).saves[0]
        later = run(
            case, tmp_path, ckpt=third.path, save=lambda hook, number: hook == "batch_end" and number in (1, 3, 5)
        ).saves
        assert len(later) == 3  # within the epoch, at its end, in the next
        assert_equal_to(whole, case, tmp_path, later)


@pytest.mark.parametrize("val", [False, True], ids=["without validation", "with validation"])
@pytest.mark.parametrize(
    "name", few(["random sampler", "stream", "stateful stream", "combined", "workers"], ["random sampler", "workers"])
)
def test_training_is_the_same_with_and_without(name: str, val: bool, tmp_path: Path) -> None:
    """Following, capturing and saving change no random number. Validation draws some, which training then lacks."""
    case = copy.copy(CASES[name])
    case.val = val
    whole = run(case, tmp_path, save=everything, max_epochs=2)
    assert whole.digest == run(case, tmp_path, saver=False, max_epochs=2).digest


def test_plateau_scheduler_by_epoch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also from a save right before the validation whose metric it needs: the resumed run validates first."""
    case = Case(loaders=loader, scheduler="plateau")
    whole = run(case, tmp_path, save=everything)
    assert_equal_to(whole, case, tmp_path, whole.saves[:14])
    assert "exact resume" not in caplog.text


class Failing(Items):
    """Cannot be read any more after a number of samples."""

    def __init__(self, good: int) -> None:
        super().__init__()
        self.good = good

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.reads == self.good:
            raise Stopped
        return super().__getitem__(index)


@pytest.mark.parametrize("scheduler", ["plateau_step", "plateau"])
def test_terminated_within_a_validation_runs_all_of_it(
    scheduler: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = Case(loaders=loader, scheduler=scheduler, trainer={"val_check_interval": 2, "num_sanity_val_steps": 0})
    whole = run(case, tmp_path)
    for when in (1, 2, 3, 6):
        stopped = run(case, tmp_path, stop="sigterm", stop_at=when)
        assert stopped.losses == whole.losses[:when]
        assert_equal_to(whole, case, tmp_path, stopped.saves)
        assert "exact resume" not in caplog.text, f"terminated in step {when}"


def test_stopped_right_after_a_validation_updates_no_scheduler_twice(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"scheduler": "plateau_step", "trainer": {"val_check_interval": 2}}
    case = Case(loaders=loader, **settings)
    whole = run(case, tmp_path)
    stopped = run(Case(loaders=lambda: loader(Failing(8)), **settings), tmp_path)
    assert stopped.losses == whole.losses[:2]
    assert_equal_to(whole, case, tmp_path, stopped.saves)


def test_save_when_terminated(tmp_path: Path) -> None:
    """A SIGTERM that Lightning turns into an exception at the end of the batch."""
    case = CASES["random sampler"]
    whole = run(case, tmp_path)
    for when in (2, 6, 9):
        stopped = run(case, tmp_path, stop="sigterm", stop_at=when)
        assert [save.hook for save in stopped.saves] == ["exception"], f"terminated in step {when}"
        assert stopped.losses == whole.losses[:when]
        assert_equal_to(whole, case, tmp_path, stopped.saves)


def test_save_in_the_middle_of_a_step_repeats_that_batch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its random numbers are others, its data are not."""
    case = Case(loaders=lambda: loader(shuffle=True))
    whole = run(case, tmp_path)
    stopped = run(case, tmp_path, stop="step", stop_at=4)
    assert "middle of a step" in caplog.text
    resumed = run(case, tmp_path, ckpt=stopped.saves[0].path)
    assert resumed.batches == whole.batches[3:]


def test_changed_order_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = CASES["random sampler"]
    save = next(s for s in run(case, tmp_path, save=everything, max_epochs=1).saves if s.number == 4)
    run(Case(loaders=lambda: loader(Items(23)), trainer={"max_epochs": 1}), tmp_path, ckpt=save.path)
    assert "is not exact" in caplog.text


def test_changed_loaders_are_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save = run(CASES["combined"], tmp_path, save=everything, max_epochs=1).saves[2]
    run(CASES["random sampler"], tmp_path, ckpt=save.path, max_epochs=1)
    assert "they start from the beginning" in caplog.text


def test_another_world_size_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save = run(CASES["random sampler"], tmp_path, save=everything, max_epochs=1).saves[2]
    state = torch.load(f"{save.path}.rank0", weights_only=True) | {"world_size": 4}
    torch.save(state, f"{save.path}.rank0")
    run(CASES["random sampler"], tmp_path, ckpt=save.path, max_epochs=1)
    assert "saved by 4 ranks, resumed by 1" in caplog.text


def test_skipping_reads_nothing(tmp_path: Path) -> None:
    items = Items()
    case = Case(loaders=lambda: loader(items), trainer={"max_epochs": 1})
    save = run(case, tmp_path, save=everything).saves[3]
    items.reads = 0
    run(case, tmp_path, ckpt=save.path)
    assert items.reads == 22 - 16


@pytest.mark.parametrize("processes", [0, 2])
def test_samplers_that_find_their_place_are_not_moved_again(processes: int, tmp_path: Path) -> None:
    consumed = 0

    def megatron() -> DataLoader[Any]:
        return DataLoader(Items(40), batch_sampler=MegatronBatches(40, 4, consumed), **workers(processes))  # type: ignore[arg-type]

    case = Case(loaders=megatron, trainer={"max_epochs": 1})
    whole = run(case, tmp_path, save=everything)
    save = next(save for save in whole.saves if (save.hook, save.number) == ("batch_end", 3))
    consumed = 3 * 4
    assert_equal_to(whole, case, tmp_path, [save])


def test_newer_state_is_refused() -> None:
    with pytest.raises(ValueError, match="update it"):
        RankState().load({"version": 99})


class TestFollowing:
    def test_detach_leaves_no_trace(self, tmp_path: Path) -> None:
        one = loader()
        seen: list[type] = []
        case = Case(loaders=lambda: one, trainer={"max_epochs": 1}, probe=lambda trainer: seen.append(type(one)))
        trainer = run(case, tmp_path).trainer
        assert seen[0] is not DataLoader and issubclass(seen[0], DataLoader)
        assert type(one) is DataLoader and not [key for key in vars(one) if "resiliency" in key]
        for part in (
            trainer.strategy,
            trainer.fit_loop,
            trainer.fit_loop.epoch_loop,
            trainer.fit_loop.epoch_loop.val_loop,
        ):
            assert not [key for key, value in vars(part).items() if callable(value) and "RankState" in str(value)]
            assert not {"process_dataloader", "on_advance_start", "run"} & set(vars(part))

    def test_attributes_stay_the_users(self) -> None:
        one = loader()
        batch_sampler = one.batch_sampler
        attach_recorder(one, lambda: False)
        assert one.batch_sampler is batch_sampler and len(one) == 6 and isinstance(one, DataLoader)
        detach_recorder(one)

    def test_pickles_as_the_users_class(self) -> None:
        one = loader()
        attach_recorder(one, lambda: False)
        again = pickle.loads(pickle.dumps(one))
        assert type(again) is DataLoader and len(list(again)) == 6
        detach_recorder(one)

    def test_a_held_loader_can_be_iterated_by_others(self) -> None:
        one = loader(shuffle=False)
        attach_recorder(one, lambda: True)
        before = torch.get_rng_state()
        iterator = iter(one)
        assert torch.equal(torch.get_rng_state(), before)
        assert len(list(iterator)) == 6
        detach_recorder(one)

    def test_a_loader_whose_class_cannot_be_replaced_is_left_alone(self) -> None:
        for thing in ([1, 2], (i for i in range(3)), range(3)):
            assert not attach_recorder(thing, lambda: False)


def test_step_boundary(tmp_path: Path) -> None:
    case = Case(loaders=loader, trainer={"accumulate_grad_batches": 4, "max_epochs": 1})
    assert run(case, tmp_path).boundaries == [
        False,
        False,
        False,
        True,
        False,
        True,
    ]  # Lightning steps on the last batch
    inside: list[bool] = []
    case = Case(
        loaders=loader, trainer={"max_epochs": 1}, probe=lambda trainer: inside.append(is_step_boundary(trainer))
    )
    run(case, tmp_path)
    assert inside == [False] * 6
