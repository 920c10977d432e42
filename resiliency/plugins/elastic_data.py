"""Deals the rest of an epoch to another number of ranks, so that each sample is seen once.

``DistributedSampler`` gives rank r of N the places r, r + N, r + 2N, ... of the epoch's order, which follows from seed
and epoch. All ranks take the same number of batches. So the samples that they have trained on are always the first ones
of the order, and one number, their count, describes the position. The samples after them are dealt in the same way to
the new ranks.

As in stock Lightning, all ranks get the same number of samples: when an epoch does not divide by the number of ranks,
some samples at its end are seen twice (or left out, with ``drop_last``), fewer than there are ranks.

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
from resiliency.plugins.resume.generator_search import is_stateful

__all__ = ["Dealing", "EpochPosition", "deal", "dealing_of", "epoch_order", "make_reproducible", "place_rest"]


@dataclass(frozen=True, kw_only=True)
class EpochPosition:
    """The position in an epoch, as it is stored in a checkpoint.

    Attributes:
        epoch: number of the epoch.
        seen: number of samples, from the start of the epoch's order, trained on up to the last optimizer step.
        begun_at: the value of ``seen`` when the present number of ranks began; 0: they began the epoch.
        samples: number of samples in the data set.
        seed, shuffle: they determine the order.
        finished: True when all batches of the epoch were trained on.
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
    """How the samples of an epoch, from place ``begun_at`` of its order on, are dealt to ranks.

    Attributes:
        samples: number of samples in the data set.
        begun_at: place in the epoch's order, counted from 0.
        ranks: number of data parallel ranks.
        batch_size: number of samples in one rank's batch.
        drop_uneven: True: samples that cannot be dealt evenly are left out. False: other samples are repeated instead.
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
        """Number of samples that each rank gets."""
        left = max(0, self.samples - self.begun_at)
        return left // self.ranks if self.drop_uneven else -(-left // self.ranks)

    @property
    def batches(self) -> int:
        """Number of batches that each rank gets."""
        return self.per_rank // self.batch_size if self.drop_last else -(-self.per_rank // self.batch_size)

    def seen_after(self, batches: int) -> int:
        """Number of samples, from the start of the order, that are seen when each rank has trained on ``batches``."""
        of_each = min(batches * self.batch_size, self.per_rank)
        return min(self.samples, self.begun_at + of_each * self.ranks)


def epoch_order(samples: int, *, seed: int, shuffle: bool, epoch: int) -> list[int]:
    """The order of an epoch's samples, as in torch's DistributedSampler before it deals them to ranks."""
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
    """In a job of one rank: replaces the loader's stock sampler by one whose order follows from seed and epoch.

    Returns:
        A function that undoes this; None when the loader has no stock sampler and nothing was changed.
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
        object.__setattr__(loader, "sampler", chosen)  # because torch's DataLoader.__setattr__ refuses it
        batches.sampler = chosen

    place(ours)
    return lambda: place(sampler)


def dealing_of(loader: Any, *, begun_at: int = 0) -> Dealing:
    """How a loader deals an epoch.

    Raises:
        ConfigError: the loader's order is not known; the message says what to use instead.
    """
    advice = "; pass ElasticityCallback(exact_epoch=False) to begin an interrupted epoch anew after a resize"
    kind = type(loader).__name__
    if is_stateful(loader):
        raise ConfigError(
            f"the {kind} saves a position of its own, which this library cannot divide among another number of"
            f" ranks{advice}"
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
    """In the epoch of ``position``, gives only the rest of the epoch; in all other epochs, torch's own order.

    Its length is always that of a whole epoch, because :class:`ElasticityCallback` sets Lightning's counters to match.
    """

    position: EpochPosition
    dealing: Dealing

    def __iter__(self) -> Iterator[Any]:
        if self.epoch != self.position.epoch:
            return super().__iter__()
        position = self.position
        order = epoch_order(position.samples, seed=position.seed, shuffle=position.shuffle, epoch=position.epoch)
        return iter(deal(order, self.dealing, self.rank))


def place_rest(loader: Any, position: EpochPosition, dealing: Dealing) -> Callable[[], None]:
    """Makes the loader begin with the rest of the epoch of ``position``, as ``dealing`` deals it. Returns the undo."""
    sampler = loader.sampler
    # Changed in place, because Lightning and the loader hold this object.
    sampler.__class__ = _RestFirst
    sampler.position, sampler.dealing = position, dealing
    sampler.set_epoch(position.epoch)  # because workers draw indices before Lightning sets the epoch

    def undo() -> None:
        sampler.__class__ = DistributedSampler

    return undo
