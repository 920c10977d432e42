"""What follows from the number of ranks alone: accumulation, learning rates, and who gets which samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, WeightedRandomSampler
from torch.utils.data.distributed import DistributedSampler

from resiliency.errors import ConfigError
from resiliency.plugins.elastic_data import Dealing, deal, dealing_of, epoch_order, make_reproducible
from resiliency.plugins.elastic_rates import read_rates, write_rates
from resiliency.plugins.elastic_rules import Rate, accumulation, rate_factor, rescaled


@pytest.mark.parametrize(("size", "expected"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_accumulation_keeps_the_global_batch(size: int, expected: int) -> None:
    assert accumulation(began_with=4, accumulated=2, size=size, nearest=False) == expected


@pytest.mark.parametrize(("size", "nearest"), [(3, 3), (5, 2), (16, 1)])
def test_what_does_not_divide_is_refused_or_taken_near(size: int, nearest: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"{size} ranks cannot divide; run on 1, 2, 4, 8 ranks, or pass nearest=True"
    ):
        accumulation(began_with=4, accumulated=2, size=size, nearest=False)
    assert accumulation(began_with=4, accumulated=2, size=size, nearest=True) == nearest


def test_factors_of_the_rules() -> None:
    assert rate_factor("linear_lr", began_with=4, size=2) == 0.5
    assert rate_factor("sqrt_lr", began_with=4, size=1) == 0.5
    assert rate_factor("keep_global_batch", began_with=4, size=1) == rate_factor(None, began_with=4, size=1) == 1.0


@given(
    st.floats(1e-9, 1e3),
    st.lists(st.integers(1, 64), min_size=1, max_size=6),
    st.sampled_from(["linear_lr", "sqrt_lr"]),
)
def test_the_first_size_has_exactly_the_first_rate_again(first: float, sizes: list[int], rule: str) -> None:
    rates, factor = [Rate(base=first, placed=first)], 1.0
    for size in [*sizes, 4]:
        chosen = rate_factor(rule, began_with=4, size=size)
        rates = rescaled(rates, [rates[0].placed], before=factor, factor=chosen)
        assert rates[0].placed == first * chosen
        factor = chosen
    assert rates[0].placed == first


def test_a_rate_that_a_scheduler_has_changed_keeps_the_change() -> None:
    rates = rescaled([Rate(base=0.4, placed=0.4)], [0.1], before=1.0, factor=0.5)
    assert rates == [Rate(base=0.1, placed=0.05)]
    assert rescaled(rates, [0.025], before=0.5, factor=1.0)[0].placed == 0.05


def test_rates_of_other_optimizers_than_at_the_save_are_divided_by_the_factor() -> None:
    assert rescaled([], [0.2], before=0.5, factor=1.0) == [Rate(base=0.4, placed=0.4)]


def schedulers_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    some = torch.optim.lr_scheduler
    return {
        "step": some.StepLR(optimizer, 2),
        "cosine": some.CosineAnnealingLR(optimizer, 10),
        "one cycle": some.OneCycleLR(optimizer, max_lr=0.8, total_steps=10),
        "plateau": some.ReduceLROnPlateau(optimizer, min_lr=0.01),
        "sequential": some.SequentialLR(
            optimizer, [some.ConstantLR(optimizer), some.StepLR(optimizer, 2)], milestones=[3]
        ),
    }


@pytest.mark.parametrize("kind", ["step", "cosine", "one cycle", "sequential"])
def test_scaled_schedules_go_on_as_if_they_had_begun_so(kind: str) -> None:
    """Half the rate at each step from the resize on, also where schedulers work from what they keep."""

    def rates(scaled_at: int | None) -> list[float]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.4)
        scheduler = schedulers_of(optimizer)[kind] if kind != "one cycle" else None
        if scheduler is None:
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.8, total_steps=10)
        found = []
        for step in range(8):
            if step == scaled_at:
                before = read_rates([optimizer], [scheduler])
                write_rates([optimizer], [scheduler], [rate / 2 for rate in before])
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        return found

    whole, halved = rates(None), rates(4)
    assert halved[:4] == whole[:4]
    if kind == "sequential":
        return  # all schedulers of the list were made in one optimizer, whose initial rate each has changed
    assert halved[4:] == pytest.approx([rate / 2 for rate in whole[4:]])


def test_the_bounds_of_a_plateau_are_scaled_and_a_tensor_stays_the_tensor() -> None:
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], lr=rate, capturable=False, foreach=False)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, min_lr=0.01)
    found = read_rates([optimizer], [plateau])
    write_rates([optimizer], [plateau], [2 * one for one in found])
    assert plateau.min_lrs == [0.02]
    assert optimizer.param_groups[0]["lr"] is not None and float(optimizer.param_groups[0]["lr"]) == 1.0


# -- samples -----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 60), st.integers(1, 6), st.booleans(), st.booleans(), st.integers(0, 3))
def test_a_whole_epoch_is_dealt_as_torch_deals_it(
    samples: int, ranks: int, drop: bool, shuffle: bool, epoch: int
) -> None:
    for rank in range(ranks):
        stock: DistributedSampler[Any] = DistributedSampler(
            range(samples),  # type: ignore[arg-type]
            num_replicas=ranks,
            rank=rank,
            shuffle=shuffle,
            seed=7,
            drop_last=drop,
        )
        stock.set_epoch(epoch)
        order = epoch_order(samples, seed=7, shuffle=shuffle, epoch=epoch)
        dealing = Dealing(samples=samples, ranks=ranks, batch_size=2, drop_uneven=drop)
        assert deal(order, dealing, rank) == list(stock)


@given(
    st.integers(1, 80),
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 6), st.integers(1, 4)), min_size=1, max_size=5),
    st.booleans(),
)
def test_whatever_the_sizes_each_sample_is_seen_once(
    samples: int, lives: list[tuple[int, int, int]], drop: bool
) -> None:
    order = epoch_order(samples, seed=1, shuffle=True, epoch=0)
    seen: list[int] = []
    begun_at = 0
    for ranks, batches, batch_size in [*lives, (3, 1000, 2)]:
        dealing = Dealing(samples=samples, begun_at=begun_at, ranks=ranks, batch_size=batch_size, drop_uneven=drop)
        for rank in range(ranks):
            seen += deal(order, dealing, rank)[: batches * batch_size]
        begun_at = dealing.seen_after(batches)
        ends = begun_at + (ranks if drop else 0) > samples or begun_at == samples
        if not ends:
            assert sorted(seen) == sorted(order[:begun_at])
    missing = set(order) - set(seen)
    assert len(missing) <= (2 if drop else 0)
    assert len(seen) - len(set(seen)) <= (0 if drop else max(ranks for ranks, _, _ in [*lives, (3, 0, 0)]) - 1)


def test_batches_are_counted_as_the_loader_counts_them() -> None:
    for drop_last in (False, True):
        loader = DataLoader(
            list(range(23)),  # type: ignore[arg-type]
            batch_size=3,
            drop_last=drop_last,
            sampler=DistributedSampler(range(23), num_replicas=2, rank=0),  # type: ignore[arg-type]
        )
        assert dealing_of(loader).batches == len(loader)
        assert replace(dealing_of(loader), begun_at=21).batches == (0 if drop_last else 1)


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(())


class OwnBatches(BatchSampler): ...


class Stateful(DataLoader[int]):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


DATA: Any = list(range(10))


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (DataLoader(Endless()), "IterableDataset, which decides by itself"),
        ([1, 2], "the train loader is a list"),
        (Stateful(DATA), "a position of its own"),
        (DataLoader(DATA, batch_sampler=OwnBatches(SequentialSampler(DATA), 2, False)), "batch sampler OwnBatches"),
        (DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 10, 10)), "sampler WeightedRandomSampler"),
        (DataLoader(DATA, batch_size=None), "batch sampler NoneType"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_loader_whose_order_is_not_known_is_refused(loader: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"{said}.*exact_epoch=False"):
        dealing_of(loader)


def test_one_rank_gets_a_sampler_that_can_be_repeated_and_back() -> None:
    loader = DataLoader(DATA, batch_size=2, shuffle=True)
    before = loader.sampler
    undo = make_reproducible(loader, 5)
    assert undo is not None
    order = epoch_order(10, seed=5, shuffle=True, epoch=0)
    assert [int(one) for batch in loader for one in batch] == order
    undo()
    assert loader.sampler is before and loader.batch_sampler.sampler is before  # type: ignore[union-attr]
    assert make_reproducible(DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 10, 10)), 5) is None
