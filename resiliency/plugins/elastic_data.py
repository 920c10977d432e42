"""Deals what is left of an epoch to another number of ranks, so that each sample is seen once.

``DistributedSampler`` gives rank r of N the places r, r + N, r + 2N, ... of the epoch's order, which follows from seed
and epoch. All ranks take as many batches. So what they have trained on is always a beginning of the order, and one
number says how long it is. What follows it is dealt in the same way to the ranks that come.

As in stock Lightning, ranks get equally many samples: at the end of an epoch that does not divide, some are seen twice
(or left out, with ``drop_last``), one less than there are ranks at most.

Everything here runs on the training thread and is not collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from resiliency.errors import ConfigError
from resiliency.plugins.resume.loader_recorder import is_stateful

__all__ = ["Dealing", "Position", "deal", "dealing_of", "epoch_order", "make_reproducible", "place_rest"]


@dataclass(frozen=True, kw_only=True)
class Position:
    """How far an epoch has come, for the checkpoint.

    Attributes:
        epoch: number of the epoch.
        seen: samples of its order that were trained on, up to the last optimizer step.
        begun_at: samples that were seen when the present ranks began.
        samples: of the data set.
        seed, shuffle: of the order.
        finished: the epoch has come to its end.
    """

    epoch: int
    seen: int
    begun_at: int
    samples: int
    seed: int
    shuffle: bool
    finished: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Dealing:
    """How the samples of an epoch from place ``begun_at`` on are dealt.

    Attributes:
        samples: of the data set.
        begun_at: place in the epoch's order.
        ranks: data parallel ranks.
        batch_size: samples of a rank's batch.
        drop_uneven: samples that cannot be dealt evenly are left out, not filled up.
        drop_last: an incomplete last batch is left out.
    """

    samples: int
    begun_at: int = 0
    ranks: int
    batch_size: int
    drop_uneven: bool = False
    drop_last: bool = False

    @property
    def per_rank(self) -> int:
        """Samples that each rank gets."""
        left = max(0, self.samples - self.begun_at)
        return left // self.ranks if self.drop_uneven else -(-left // self.ranks)

    @property
    def batches(self) -> int:
        """Batches that each rank gets."""
        return self.per_rank // self.batch_size if self.drop_last else -(-self.per_rank // self.batch_size)

    def seen_after(self, batches: int) -> int:
        """Samples of the order that are seen when each rank has trained on so many of its batches."""
        of_each = min(batches * self.batch_size, self.per_rank)
        return min(self.samples, self.begun_at + of_each * self.ranks)


def epoch_order(samples: int, *, seed: int, shuffle: bool, epoch: int) -> list[int]:
    """The order of an epoch, as torch's DistributedSampler has it before it deals."""
    if not shuffle:
        return list(range(samples))
    generator = torch.Generator()
    generator.manual_seed(seed + epoch)
    order: list[int] = torch.randperm(samples, generator=generator).tolist()
    return order


def deal(order: list[int], dealing: Dealing, rank: int) -> list[int]:
    """The samples of one rank, in its order."""
    total = dealing.per_rank * dealing.ranks
    rest = order[dealing.begun_at :][:total]
    rest += islice(cycle(order), total - len(rest)) if rest else []
    return rest[rank :: dealing.ranks]


def make_reproducible(loader: Any, seed: int) -> Callable[[], None] | None:
    """In a job of one rank: gives the loader of a stock sampler one whose order follows from seed and epoch.

    Returns:
        what undoes it; None when nothing was to be done.
    """
    sampler = getattr(loader, "sampler", None)
    batches = getattr(loader, "batch_sampler", None)
    if type(batches) is not BatchSampler or batches.sampler is not sampler:
        return None
    if type(sampler) is SequentialSampler:
        shuffle = False
    elif type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None:
        shuffle = True
    else:
        return None
    ours: DistributedSampler[Any] = DistributedSampler(
        loader.dataset, num_replicas=1, rank=0, shuffle=shuffle, seed=seed
    )

    def place(chosen: Any) -> None:
        object.__setattr__(loader, "sampler", chosen)  # torch's loader refuses it by the usual way
        batches.sampler = chosen

    place(ours)
    return lambda: place(sampler)


def dealing_of(loader: Any, *, begun_at: int = 0) -> Dealing:
    """How a loader deals an epoch.

    Raises:
        ConfigError: its order is not known; the message says what it can be instead.
    """
    advice = "; pass ElasticityCallback(exact_epoch=False) to begin an interrupted epoch anew after a resize"
    kind = type(loader).__name__
    if is_stateful(loader):
        raise ConfigError(
            f"the {kind} restores its own position, of which only it knows how to divide it among other ranks{advice}"
        )
    if not isinstance(loader, DataLoader):
        raise ConfigError(f"the train loader is a {kind}, of which the order of samples is not known{advice}")
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            "the data set is an IterableDataset, which decides by itself what each rank reads, so that the rest of an"
            f" epoch cannot be dealt to other ranks{advice}, or make it a map-style data set"
        )
    sampler, batches = loader.sampler, loader.batch_sampler
    if type(batches) is not BatchSampler or batches.sampler is not sampler:
        raise ConfigError(
            f"the train loader has the batch sampler {type(batches).__name__}, of which the order is not known{advice},"
            " or pass batch_size="
        )
    if type(sampler) is not DistributedSampler and not isinstance(sampler, _RestFirst):
        raise ConfigError(
            f"the train loader has the sampler {type(sampler).__name__}, whose order another start cannot repeat"
            f"{advice}, or use shuffle= or torch's DistributedSampler"
        )
    return Dealing(
        samples=len(loader.dataset),  # type: ignore[arg-type]
        begun_at=begun_at,
        ranks=sampler.num_replicas,
        batch_size=batches.batch_size,
        drop_uneven=sampler.drop_last,
        drop_last=batches.drop_last,
    )


class _RestFirst(DistributedSampler[Any]):
    """In one epoch: what is left of it. In all others: torch's own order.

    Its length is that of a whole epoch, which Lightning's counters are set to (:class:`ElasticityCallback`).
    """

    position: Position
    dealing: Dealing

    def __iter__(self) -> Iterator[Any]:
        if self.epoch != self.position.epoch:
            return super().__iter__()
        position = self.position
        order = epoch_order(position.samples, seed=position.seed, shuffle=position.shuffle, epoch=position.epoch)
        return iter(deal(order, self.dealing, self.rank))


def place_rest(loader: Any, position: Position, dealing: Dealing) -> Callable[[], None]:
    """Makes the loader begin with what ``dealing`` leaves of the epoch of ``position``. Returns what undoes it."""
    sampler = loader.sampler
    # In its place: Lightning and the loader have the object.
    sampler.__class__ = _RestFirst
    sampler.position, sampler.dealing = position, dealing
    sampler.set_epoch(position.epoch)  # worker processes draw indices before Lightning says the epoch

    def undo() -> None:
        sampler.__class__ = DistributedSampler

    return undo
