"""Generators that datasets, samplers, collate functions and loaders keep for themselves are resumed, too, or it is said."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler, default_collate

from resiliency.plugins.resume.own_generators import own_generators, set_states, states_of
from tests.plugins.resume.resume_cases import (
    FEATURES,
    Augmented,
    Buffer,
    Case,
    Drawer,
    Items,
    OwnLoader,
    Stopped,
    assert_equal_to,
    chosen,
    everything,
    run,
    sample,
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


class SizedBuffer(Buffer):
    def __len__(self) -> int:
        return self.length


class Clocked(Buffer):
    """Its generator is a local variable, seeded by the clock."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        rng = random.Random(time.monotonic_ns())
        order = list(range(self.length))
        for _ in range(self.length):
            yield sample(order.pop(rng.randrange(len(order))))


class Lazy(Augmented):
    """Makes its generator when the first sample is read."""

    def __init__(self) -> None:
        super().__init__()
        del self.drawer

    def __getitem__(self, index: int) -> torch.Tensor:
        if not hasattr(self, "drawer"):
            self.drawer = Drawer("random")
        return super().__getitem__(index)


class EachIndex(Sampler[int]):
    """Draws for each index; with workers it is ahead of the training loop."""

    def __init__(self, length: int = 22) -> None:
        self.length, self.drawer = length, Drawer("random")

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.length):
            yield self.drawer.below(self.length)

    def __len__(self) -> int:
        return self.length


class Saving(Buffer):
    """Saves its generator and its place; every pass draws an order when it begins."""

    def __init__(self, length: int = 22, *, generator: bool = True) -> None:
        super().__init__(length)
        self.generator, self.at, self.start = generator, 0, 0
        self.began: Any = None

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.at, self.start = self.start, 0
        self.began = self.drawer.rng.getstate()
        order = self.drawer.rng.sample(range(self.length), self.length)
        while self.at < self.length:
            self.at += 1
            yield sample(order[self.at - 1])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at} | ({"began": self.began} if self.generator else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["at"]
        if self.generator:
            self.drawer.rng.setstate(state["began"])


class OwnNoisyLoader(OwnLoader):
    def __init__(self) -> None:
        super().__init__()
        self.drawer = Drawer("legacy numpy")

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(self.batches):
            yield torch.full((3, FEATURES), float(self.drawer.below(100)) / 7)


def noisy_collate(drawer: Drawer, samples: list[torch.Tensor]) -> torch.Tensor:
    return default_collate(samples) + drawer.below(1000) / 1000


class Collator:
    def __init__(self) -> None:
        self.held = {"in": [Drawer("torch")]}

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return noisy_collate(self.held["in"][0], samples)

    def method(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return self(samples)


def closure() -> Callable[[list[torch.Tensor]], torch.Tensor]:
    drawer = Drawer("random")
    return lambda samples: noisy_collate(drawer, samples)


GLOBAL = random.Random(4)


class UsesGlobal(Items):
    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + sum(GLOBAL.random() for _ in range(2))


def uses_global() -> DataLoader[Any]:
    GLOBAL.seed(4)
    return DataLoader(UsesGlobal(), batch_size=4)


def shuffled(dataset: Any = None, **more: Any) -> DataLoader[Any]:
    return DataLoader(Items() if dataset is None else dataset, **{"batch_size": 4, "shuffle": True, **more})


def seeded(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def one_for_all() -> DataLoader[Any]:
    """The same generator in the sampler, the loader and the dataset."""
    drawer = Drawer("torch")
    return DataLoader(Augmented(drawer=drawer), batch_size=4, shuffle=True, generator=drawer.rng)


def shared_by_loaders() -> list[DataLoader[Any]]:
    generator = seeded()
    return [shuffled(generator=generator), shuffled(Items(20), generator=generator)]


def nodes_loader(*, threads: bool = False) -> Any:
    from torchdata import nodes

    node: Any = nodes.SamplerWrapper(RandomSampler(range(22), generator=seeded()))
    node = nodes.Batcher(nodes.Mapper(node, Augmented().__getitem__), 4)
    return nodes.Loader(nodes.Prefetcher(node, 2) if threads else nodes.Mapper(node, default_collate))


def plain_nodes_loader() -> Any:
    from torchdata import nodes

    return nodes.Loader(nodes.Mapper(nodes.Batcher(nodes.IterableWrapper(Buffer()), 4), default_collate))


CASES: dict[str, Case] = {
    **{
        f"shuffle buffer, {kind}": Case(loaders=lambda kind=kind: DataLoader(Buffer(kind=kind), batch_size=4))
        for kind in ("random", "numpy", "legacy numpy", "torch")
    },
    "shuffle buffer with length": Case(loaders=lambda: DataLoader(SizedBuffer(), batch_size=4)),
    "shuffle buffer, step fetches by itself": Case(loaders=lambda: DataLoader(Buffer(), batch_size=4), step="iterator"),
    "shuffle buffer, validation within the epoch": Case(
        loaders=lambda: DataLoader(Buffer(), batch_size=4), trainer={"val_check_interval": 2}
    ),
    "shuffle buffer, workers": Case(loaders=lambda: DataLoader(Buffer(), batch_size=4, **workers(2))),
    "loader of the user": Case(loaders=OwnNoisyLoader),
    "noise": Case(loaders=lambda: shuffled(Augmented())),
    "noise, workers, reread": Case(loaders=lambda: shuffled(Augmented(), **workers(2)), rank_state={"reread": True}),
    "sampler with generator": Case(
        loaders=lambda: DataLoader(Items(), batch_size=4, sampler=RandomSampler(range(22), generator=seeded()))
    ),
    "sampler with generator, workers": Case(
        loaders=lambda: DataLoader(
            Items(), batch_size=4, sampler=RandomSampler(range(22), generator=seeded()), **workers(2)
        )
    ),
    "loader with generator, workers": Case(loaders=lambda: shuffled(generator=seeded(), **workers(2))),
    "sampler that draws each index": Case(loaders=lambda: DataLoader(Items(), batch_size=4, sampler=EachIndex())),
    "sampler that draws each index, workers": Case(
        loaders=lambda: DataLoader(Items(), batch_size=4, sampler=EachIndex(), **workers(2))
    ),
    "one generator for all": Case(loaders=one_for_all),
    "collate object": Case(loaders=lambda: shuffled(collate_fn=Collator())),
    "collate method": Case(loaders=lambda: shuffled(collate_fn=Collator().method)),
    "collate closure": Case(loaders=lambda: shuffled(collate_fn=closure())),
    "collate partial": Case(loaders=lambda: shuffled(collate_fn=functools.partial(noisy_collate, Drawer("numpy")))),
    "global variable": Case(loaders=uses_global),
    "made anew in every epoch": Case(
        loaders=lambda: shuffled(generator=seeded()), trainer={"reload_dataloaders_every_n_epochs": 1}
    ),
    "stateful, shuffle buffer": Case(loaders=lambda: stateful_loader(Buffer(), batch_size=4)),
    "stateful, noise": Case(loaders=lambda: stateful_loader(Augmented(), batch_size=4, shuffle=True)),
    "stateful, sampler with generator": Case(
        loaders=lambda: stateful_loader(Augmented(), batch_size=4, sampler=RandomSampler(range(22), generator=seeded()))
    ),
    "stateful, sampler that draws each index, workers": Case(
        loaders=lambda: stateful_loader(Items(), batch_size=4, sampler=EachIndex(), **workers(2))
    ),
    "stateful dataset with generator": Case(loaders=lambda: stateful_loader(Saving(), batch_size=4)),
    "stateful dataset without its generator": Case(
        loaders=lambda: stateful_loader(Saving(generator=False), batch_size=4)
    ),
    "nodes": Case(loaders=nodes_loader),
    "nodes, shuffle buffer": Case(loaders=plain_nodes_loader),
    "combined": Case(
        loaders=lambda: {"a": DataLoader(Buffer(20), batch_size=4), "b": shuffled(Augmented(10), generator=seeded())}
    ),
    "combined, shared": Case(loaders=shared_by_loaders),
}


#: One of each holder of a generator, of each kind of generator, and with workers.
FEW = {
    *("sampler with generator", "loader with generator, workers", "noise", "nodes", "combined", "global variable"),
    *("shuffle buffer, random", "shuffle buffer, numpy", "shuffle buffer, torch", "shuffle buffer, workers"),
    *("collate object", "stateful dataset with generator"),
}


@pytest.mark.parametrize("name", few(CASES, FEW))
def test_resumed_run_equals_the_undisturbed_one(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case = CASES[name]
    epochs = {} if "max_epochs" in case.trainer else {"max_epochs": 2}
    whole = run(case, tmp_path, save=everything, **epochs)
    saves = chosen(whole.saves, name)
    assert_equal_to(whole, case, tmp_path, saves[:3] if "workers" in name else saves, **epochs)
    assert "exact resume" not in caplog.text


class Read(Augmented):
    """Keeps what was read."""

    def __init__(self, values: list[float]) -> None:
        super().__init__(5)
        self.values = values

    def __getitem__(self, index: int) -> torch.Tensor:
        item = super().__getitem__(index)
        self.values.append(float(item.sum()))
        return item


@pytest.mark.parametrize(
    "settings",
    [{"max_epochs": 2}, {"max_epochs": 2, "val_check_interval": 2}, {"check_val_every_n_epoch": 2, "max_epochs": 4}],
    ids=["after the epoch", "within the epoch", "after every second epoch"],
)
def test_validation_goes_on(settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values: list[float] = []
    case = Case(
        loaders=lambda: DataLoader(Buffer(), batch_size=4),
        val=lambda: DataLoader(Read(values), batch_size=2, shuffle=True, generator=seeded()),
        trainer=settings,
    )
    whole = run(case, tmp_path, save=everything)
    read = list(values)
    for save in chosen(whole.saves, str(settings)):
        values.clear()
        assert_equal_to(whole, case, tmp_path, [save])
        after = values[2:]  # the sanity check reads two
        assert after and after == read[-len(after) :], f"other samples after {save.hook} {save.number}"
    assert "exact resume" not in caplog.text


def test_validation_that_was_stopped_is_run_again_with_the_same_samples(tmp_path: Path) -> None:
    values: list[float] = []
    fails: list[int] = []

    class Breaking(Read):
        def __getitem__(self, index: int) -> torch.Tensor:
            if len(self.values) in fails:
                raise Stopped
            return super().__getitem__(index)

    case = Case(
        loaders=shuffled,
        val=lambda: DataLoader(Breaking(values), batch_size=2, shuffle=True, generator=seeded()),
        trainer={"max_epochs": 2, "num_sanity_val_steps": 0},
    )
    run(case, tmp_path)
    read = list(values)
    values.clear()
    fails.append(8)  # in the second validation, which reads five
    (save,) = run(case, tmp_path).saves
    values.clear()
    fails.clear()
    run(case, tmp_path, ckpt=save.path)
    assert values == read[5:]


# ---- what is said


def noisy_pair() -> list[DataLoader[Any]]:
    """Two streams that draw from one generator by turns."""
    drawer = Drawer("random")
    return [DataLoader(Buffer(drawer=drawer), batch_size=4) for _ in range(2)]


LINES: dict[str, tuple[Case, str]] = {
    "seeded by the clock": (
        Case(loaders=lambda: DataLoader(Clocked(), batch_size=4)),
        "iteration.rng of DataLoader could not be brought to where it was",
    ),
    "drawn from by turns": (
        Case(loaders=noisy_pair),
        "dataset.drawer.rng of DataLoader could not be brought to where it was",
    ),
    "made late": (
        Case(loaders=lambda: shuffled(Lazy())),
        "dataset.drawer.rng of DataLoader could not be brought to where it was",
    ),
    "persistent workers": (
        Case(loaders=lambda: DataLoader(Buffer(), batch_size=4, **workers(2, persistent_workers=True))),
        "dataset.drawer.rng of DataLoader draw in persistent worker processes",
    ),
    "persistent workers of validation": (
        Case(
            loaders=shuffled, val=lambda: DataLoader(Augmented(5), batch_size=2, **workers(1, persistent_workers=True))
        ),
        "dataset.drawer.rng of DataLoader draw in persistent worker processes",
    ),
    "noise, workers": (
        Case(loaders=lambda: shuffled(Augmented(), **workers(2))),
        "dataset.drawer.rng of DataLoader draw in worker processes",
    ),
}


@pytest.mark.parametrize("name", LINES)
def test_what_is_not_exact_is_said_once(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    case, line = LINES[name]
    save = run(case, tmp_path, save=second_batch, max_epochs=2).saves[0]
    run(case, tmp_path, ckpt=save.path, max_epochs=2)
    lines = [record.getMessage() for record in caplog.records if "exact resume" in record.getMessage()]
    assert lines and all(line in said for said in lines)
    assert len(lines) == (2 if "workers" in name else 1)  # at the save, and again when resuming from it


def test_workers_between_two_epochs_are_exact(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each epoch starts its workers, with copies of the generators."""
    case = LINES["noise, workers"][0]
    whole = run(case, tmp_path, save=lambda hook, number: (hook, number) == ("epoch_end", 1), max_epochs=2)
    assert_equal_to(whole, case, tmp_path, whole.saves, max_epochs=2)
    assert "exact resume" not in caplog.text


def test_generator_of_another_kind_than_at_the_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save = run(CASES["shuffle buffer, random"], tmp_path, save=second_batch, max_epochs=1).saves[0]
    run(CASES["shuffle buffer, numpy"], tmp_path, ckpt=save.path, max_epochs=1)
    assert "dataset.drawer.rng is of another kind than at the save" in caplog.text


OLDER: dict[str, Callable[[], Any]] = {
    "generator": lambda: shuffled(generator=seeded()),
    "stateful": lambda: stateful_loader(Items(), batch_size=4, sampler=RandomSampler(range(22), generator=seeded())),
    "combined": shared_by_loaders,
}


@pytest.mark.parametrize("name", OLDER)
@pytest.mark.parametrize("place", [("batch_end", 3), ("epoch_end", 1)])
def test_states_of_the_version_before(name: str, place: tuple[str, int], tmp_path: Path) -> None:
    """They hold torch's generators of samplers and loaders only, as a list."""
    case = Case(loaders=OLDER[name])
    whole = run(case, tmp_path, save=lambda hook, number: (hook, number) == place, max_epochs=2)
    (save,) = whole.saves
    state = torch.load(f"{save.path}.rank0", weights_only=True) | {"version": 2}
    for entry in state["loaders"]:
        for part in filter(None, (entry, *map(entry.get, ("before", "opened", "begun")))):
            states = part["generators"].values()
            part["generators"] = [torch.frombuffer(bytearray(one), dtype=torch.uint8) for one in states]
        del entry["undone"]
    for key in ("validation_generators", "whole"):
        del state[key]
    torch.save(state, f"{save.path}.rank0")
    assert_equal_to(whole, case, tmp_path, whole.saves, max_epochs=2)


# ---- the search


def test_each_generator_is_found_once() -> None:
    data = Augmented()
    data.again, data.loop = [data.drawer, {"x": data.drawer.rng}], data  # type: ignore[attr-defined]
    data.twin = np.random.Generator(data.drawer.rng.bit_generator)  # type: ignore[attr-defined]
    assert list(own_generators(DataLoader(data))) == ["dataset.twin"]  # the shortest path


def test_those_of_the_process_are_left_out() -> None:
    data = Items()
    data.all = [random, random.random.__self__, np.random.rand.__self__, torch.default_generator]  # type: ignore[attr-defined]
    assert own_generators(DataLoader(data)) == {}


class Slotted:
    __slots__ = ("rng", "unset")
    shared = np.random.PCG64(1)

    def __init__(self) -> None:
        self.rng = random.Random(1)


def test_slots_and_class_attributes() -> None:
    data = Items()
    data.one = Slotted()  # type: ignore[attr-defined]
    assert set(own_generators(DataLoader(data))) == {"dataset.one.rng", "dataset.one.shared"}


def test_properties_do_not_run() -> None:
    class Loud(Items):
        @property
        def rng(self) -> random.Random:
            raise AssertionError

    assert own_generators(DataLoader(Loud())) == {}


def test_containers_of_samples_are_not_looked_into() -> None:
    data = Items()
    data.samples = [random.Random(number) for number in range(257)]  # type: ignore[attr-defined]
    data.few = data.samples[:2]  # type: ignore[attr-defined]
    assert list(own_generators(DataLoader(data))) == ["dataset.few[0]", "dataset.few[1]"]


def test_search_ends() -> None:
    """After the 2000 nearest objects."""
    tree: Any = random.Random(1)
    for _ in range(5000):
        tree = [tree]
    data = Items()
    data.deep, data.near = tree, random.Random(2)  # type: ignore[attr-defined]
    assert list(own_generators(DataLoader(data))) == ["dataset.near"]


@pytest.mark.parametrize("kind", ["random", "numpy", "legacy numpy", "torch"])
def test_states_are_plain_and_restore(kind: str, tmp_path: Path) -> None:
    drawer = Drawer(kind)
    data = DataLoader(Augmented(drawer=drawer))
    states = states_of(data)
    drawn = [drawer.below(1 << 30) for _ in range(5)]
    assert states_of(data) != states
    torch.save(states, tmp_path / "states")
    set_states(data, torch.load(tmp_path / "states", weights_only=True))
    assert states_of(data) == states
    assert [drawer.below(1 << 30) for _ in range(5)] == drawn
