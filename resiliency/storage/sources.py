"""Sources from which a shard can be read or fetched, as values. Pure: no I/O, no torch.

:class:`ShardSource` is one source, :class:`BadCopy` an unusable shard on a source, and :class:`SourceResolver` finds
for one step which sources each host has for each shard, cheapest first.

A new kind of source (the memory of a peer host, a folder that a replicator fills on each host) needs:

1. a :class:`SourceProvider` with a tier name of its own, among those that the Restorer is given: it opens the tier to
   read from, and
2. on the rank that can list it, its ``ShardSource`` in ``listed``.

Resolver, plan and fetching look only at :attr:`ShardSource.cost` and :attr:`ShardSource.only_host`, so they stay as
they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from resiliency.errors import ConfigError, TierError
from resiliency.storage.step_id import StepId
from resiliency.storage.tiers.base import Tier

__all__ = [
    "BadCopy",
    "Cost",
    "Opener",
    "ShardSource",
    "SourceProvider",
    "SourceResolver",
    "open_source",
    "providers_of_tiers",
]


class Cost(IntEnum):
    """The cost of getting a shard, cheapest first.

    A shard of a replicated step that is not LOCAL is copied into the local tier, once for all ranks of the host; of a
    sharded step each rank reads the ranges that it wants.
    """

    #: Files of the host that reads them; used in place.
    LOCAL = 0
    #: On another host of the job, over the network.
    PEER = 1
    #: In storage outside the job's hosts.
    REMOTE = 2


@dataclass(frozen=True, kw_only=True)
class ShardSource:
    """A place where shards are stored.

    Attributes:
        tier: name of the tier; unique among the tiers of a job, and the key under which the source is opened.
        host: the host it is on; None for storage outside the job's hosts.
        cost: the cost of getting a shard from there.
    """

    tier: str
    host: str | None
    cost: Cost

    def __post_init__(self) -> None:
        if (self.host is None) != (self.cost is Cost.REMOTE):
            raise ConfigError(
                f"source {self.tier!r} has cost {self.cost.name} and host={self.host!r}; pass a host with LOCAL and"
                " PEER, and None with REMOTE"
            )

    def __str__(self) -> str:
        return self.tier if self.host is None else f"{self.tier} on {self.host}"

    @property
    def only_host(self) -> str | None:
        """The one host that can read it, or None when every host can."""
        return self.host if self.cost is Cost.LOCAL else None


@dataclass(frozen=True, kw_only=True)
class BadCopy:
    """A copy of a shard that is damaged or cannot be read.

    Attributes:
        source: where the copy is.
        step: the step.
        rank: writer of the shard.
    """

    source: ShardSource
    step: StepId
    rank: int


class SourceResolver:
    """Finds the sources each host has for each shard of one step.

    Args:
        step: the step.
        held: each source with shards of the step, and the ranks of these shards.
        bad: copies to exclude; those of other steps are ignored.
    """

    def __init__(
        self, step: StepId, held: Iterable[tuple[ShardSource, Iterable[int]]], bad: Collection[BadCopy] = ()
    ) -> None:
        # By the only host that can read it (None: all can) and rank, so that the cost of a look-up does not grow with
        # the number of hosts.
        self._found: dict[tuple[str | None, int], list[ShardSource]] = {}
        excluded = {(copy.source, copy.rank) for copy in bad if copy.step == step}
        for source, ranks in held:
            for rank in ranks:
                if (source, rank) not in excluded:
                    known = self._found.setdefault((source.only_host, rank), [])
                    if source not in known:
                        known.append(source)

    def sources(self, host: str, rank: int) -> tuple[ShardSource, ...]:
        """Sources of a shard that a host can use, cheapest first; those of equal cost in the order given."""
        found = [*self._found.get((host, rank), ()), *self._found.get((None, rank), ())]
        return tuple(sorted(found, key=lambda source: source.cost))


#: Returns the tier to read a source from; one opener per tier name.
Opener = Callable[[ShardSource], Tier]


def open_source(source: ShardSource, openers: Mapping[str, Opener]) -> Tier:
    """The tier of a source.

    Args:
        openers: one for each tier name of the job.

    Raises:
        TierError: there is no opener for it, or the opener failed.
    """
    opener = openers.get(source.tier)
    if opener is None:
        raise TierError(
            f"this rank has no tier named {source.tier!r}, only {', '.join(sorted(openers))}; pass the same tiers"
            " on all ranks",
            retryable=False,
        )
    return opener(source)


@dataclass(frozen=True, kw_only=True)
class SourceProvider:
    """Sources of one tier name, as one rank sees them.

    Attributes:
        tier: the tier name.
        place: path or address, for messages.
        open: makes the tier to read a source from.
        listed: the sources that this rank lists for all ranks.
    """

    tier: str
    place: str
    open: Opener
    listed: tuple[ShardSource, ...] = ()


def providers_of_tiers(
    here: ShardSource, local: Tier, remotes: Sequence[Tier], *, lists_local: bool, lists_remotes: bool
) -> list[SourceProvider]:
    """The providers of a job's own tiers.

    Args:
        here: the local tier of this host, as a source.
        lists_local: True on one rank of each host.
        lists_remotes: True on one rank of the job.
    """
    listed = [(local, (here,) if lists_local else ())]
    for tier in remotes:
        source = ShardSource(tier=tier.name, host=None, cost=Cost.REMOTE)
        listed.append((tier, (source,) if lists_remotes else ()))
    return [
        SourceProvider(tier=tier.name, place=tier.root, open=lambda source, tier=tier: tier, listed=sources)  # type: ignore[misc]
        for tier, sources in listed
    ]
