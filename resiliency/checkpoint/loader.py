"""Restoring, step by step: what every place holds, which step is whole, its shards made good, its tensors filled.

All of it is collective: every rank sees the same inventory, strikes out the same copies, and so chooses the same step.
Decisions are in :mod:`resiliency.checkpoint.restore`; this module asks the tiers and the other ranks.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from resiliency import faultpoints
from resiliency.checkpoint import restore
from resiliency.checkpoint.catalog import read_record
from resiliency.checkpoint.exchange import Exchange
from resiliency.checkpoint.fetch import fetch_shard
from resiliency.checkpoint.manifest import ShardRecord, StepId
from resiliency.checkpoint.session import Session
from resiliency.checkpoint.state import flatten
from resiliency.checkpoint.tiers.base import Tier
from resiliency.checkpoint.tiers.local import LocalTier
from resiliency.errors import CorruptShard, NoCheckpointFound, TierError
from resiliency.events import EventKind

__all__ = ["Loader", "Restored"]

logger = logging.getLogger(__name__)

#: How often a plan is made again after a copy was struck out.
_MAX_ROUNDS = 50
#: Threads that check digests in one rank; more only wait for memory.
_CHECK_THREADS = 4


@dataclass(frozen=True)
class Restored:
    """A loaded checkpoint.

    Attributes:
        id: step, attempt and token.
        state: the state tree; with ``into`` its tensors are the ones passed in.
        per_rank: what this rank passed as ``per_rank``, or None when the checkpoint has nothing for this rank (the world
            grew).
        world_size: ranks that wrote it.
        names: names of the step.
        info: what the save passed as ``info``.
        seconds_s, nbytes: time and bytes read by this rank.
    """

    id: StepId
    state: Any
    per_rank: Any
    world_size: int
    names: tuple[str, ...]
    info: Mapping[str, Any]
    seconds_s: float
    nbytes: int

    @property
    def step(self) -> int:
        return self.id.step


class Loader:
    """Restores for one rank of one attempt. Thread: training.

    Args:
        session: of this attempt.
        exchange: how ranks talk.
        local: the local tier; everything is read from there, after it was brought there.
        remotes: further tiers, in the order they are asked. The list may grow.
        run: name of the run.
        agree: how long to wait for the other ranks.
    """

    def __init__(
        self, *, session: Session, exchange: Exchange, local: LocalTier, remotes: Sequence[Tier], run: str, agree: timedelta
    ) -> None:
        self._session = session
        self._exchange = exchange
        self._tier = local
        self._remote_tiers = remotes
        self._run = run
        self._agree = agree
        self.rank = exchange.rank

    def load(
        self, *, into: Any, step: StepId | None, allow_pickle: bool, keys: Callable[[str], bool] | None
    ) -> Restored | None:
        """See :meth:`resiliency.checkpoint.checkpointer.Checkpointer.load`."""
        session = self._session
        began = time.monotonic()
        session.events.emit(EventKind.RESTORE_STARTED)
        inventory = self._inventory()
        strikes: set[restore.Strike] = set()
        damage: list[str] = []
        refused: list[str] = []
        for _ in range(_MAX_ROUNDS):
            choice = restore.choose(inventory, set(session.nodes), strikes, only=step)
            if choice is None:
                break
            found, messages = self._make_good(choice)
            damage += [text for text, corrupt in messages if corrupt]
            refused += [text for text, corrupt in messages if not corrupt]
            if not found:
                restored = self._read(choice, into, allow_pickle, keys, began)
                session.client.send({"t": "rescan"})
                return restored
            strikes |= found
        damage += [what for holding in inventory if step in (None, StepId.parse(holding.step)) for what in holding.lost]
        if refused and not damage:
            raise TierError("checkpoints exist but cannot be read or brought here: " + "; ".join(dict.fromkeys(refused)), retryable=True)
        if damage:
            raise CorruptShard(
                "nothing could be restored, although checkpoints exist: " + "; ".join(dict.fromkeys(damage))
                + ". Restore the files from a backup, or start afresh in another directory or run", path=self._tier.root,
            )  # fmt: skip
        if step is not None:
            raise NoCheckpointFound(f"{step} of run {self._run!r} is not complete on any tier: {self._places()}")
        if inventory:
            logger.warning("only unfinished checkpoints of run %r were found in %s; starting from scratch", self._run, self._places())
        return None

    def _places(self) -> str:
        return ", ".join([self._tier.root, *(tier.root for tier in self._remote_tiers)])
    def steps(self) -> list[tuple[StepId, tuple[str, ...]]]:
        """See :meth:`resiliency.checkpoint.checkpointer.Checkpointer.steps`."""
        session = self._session
        inventory = self._inventory()
        names: dict[str, tuple[str, ...]] = {}
        for holding in inventory:
            names[holding.step] = tuple(dict.fromkeys((*names.get(holding.step, ()), *holding.names)))
        found = []
        for step in sorted(filter(None, map(StepId.parse, names)), reverse=True):
            if restore.choose(inventory, set(session.nodes), only=step) is not None:
                found.append((step, names[step.dirname]))
        return found

    def _inventory(self) -> list[restore.Holding]:
        """What all places hold, the same list on every rank."""
        session = self._session
        faultpoints.hit("restore.inventory", rank=self.rank)
        mine: list[restore.Holding] = []
        problem = ""
        try:
            if self.rank == session.local_ranks[0]:
                mine += restore.holdings(self._tier, self._run, node=session.node)
            if self.rank == 0:
                for tier in self._remote_tiers:
                    mine += restore.holdings(tier, self._run, node="")
        except TierError as error:
            problem = f"rank {self.rank}: {error}"
        data = json.dumps({"h": [h.to_list() for h in mine], "p": problem}).encode()
        answers = [json.loads(said) for said in self._exchange.all("inventory", data, timeout=self._agree)]
        problems = [answer["p"] for answer in answers if answer["p"]]
        inventory = [restore.Holding.from_list(item) for answer in answers for item in answer["h"]]
        if problems:
            if not inventory:
                raise TierError("checkpoints cannot be listed: " + "; ".join(problems), retryable=True)
            logger.warning("some checkpoints cannot be listed: %s; restoring from what is left", "; ".join(problems))
        return inventory

    def _make_good(self, choice: restore.Choice) -> tuple[set[restore.Strike], list[tuple[str, bool]]]:
        """Brings every shard of the choice onto this host and checks it.

        Returns:
            What any rank found bad, and why: (text, True when bytes are damaged and False when a tier failed).
        """
        session = self._session
        strikes: list[restore.Strike] = []
        messages: list[tuple[str, bool]] = []
        sources = choice.sources[session.node]
        place = session.local_ranks.index(self.rank)
        share = len(session.local_ranks)
        dirname = choice.step.dirname
        threads = max(1, min(_CHECK_THREADS, len(os.sched_getaffinity(0)) // share))
        local = [rank for rank, tiers in sources.items() if tiers[0] == "local"]
        remote = [rank for rank in sources if rank not in local]
        for rank in remote[place::share]:
            self._fetch(choice, rank, sources[rank], strikes, messages)
        # The blocks of the local shards are shared out among the ranks of this host.
        for rank in local:
            try:
                faultpoints.hit("restore.verify", rank=self.rank)
                record = read_record(self._tier, self._run, choice.step, rank)
                reader = restore.shard_reader(self._tier.root, self._run, record)
                blocks = len(record.digests)
                try:
                    bad = reader.check(blocks * place // share, blocks * (place + 1) // share, threads=threads)
                finally:
                    reader.close()
                if bad:
                    raise CorruptShard(f"{reader.path}: bytes {bad} do not match their digests", path=reader.path, ranges=bad)
            except (CorruptShard, TierError, OSError) as error:
                strikes.append(("local", session.node, dirname, rank))
                messages.append((str(error), isinstance(error, CorruptShard)))
                ranges = list(error.ranges) if isinstance(error, CorruptShard) else []
                session.events.emit(EventKind.CHECKPOINT_CORRUPT, step=choice.step.step, path=str(error), ranges=ranges)
                logger.warning("rank %d: %s; trying the next copy", self.rank, error)
        data = json.dumps({"s": strikes, "m": messages}).encode()
        answers = [json.loads(said) for said in self._exchange.all("verified", data, timeout=self._agree)]
        return {(s[0], s[1], s[2], s[3]) for a in answers for s in a["s"]}, [(m[0], m[1]) for a in answers for m in a["m"]]

    def _fetch(
        self, choice: restore.Choice, rank: int, tiers: Sequence[str], strikes: list[restore.Strike],
        messages: list[tuple[str, bool]],
    ) -> None:
        for tier in self._remote_tiers:
            if tier.name not in tiers:
                continue
            try:
                fetch_shard(tier, self._run, choice.step, rank, self._tier.root, node=self._session.node)
                self._session.events.emit(
                    EventKind.CHECKPOINT_REPAIRED, step=choice.step.step, source=tier.name, shard=rank, path=self._tier.root
                )
                return
            except (CorruptShard, TierError) as error:
                strikes.append((tier.name, "", choice.step.dirname, rank))
                messages.append((str(error), isinstance(error, CorruptShard)))
                self._session.events.emit(EventKind.CHECKPOINT_CORRUPT, step=choice.step.step, path=str(error), ranges=[])
                logger.warning("rank %d: %s; trying the next copy", self.rank, error)

    def _read(
        self, choice: restore.Choice, into: Any, allow_pickle: bool, keys: Callable[[str], bool] | None, began: float
    ) -> Restored:
        faultpoints.hit("restore.load", rank=self.rank)
        session = self._session
        readers: list[restore.ShardReader] = []
        try:
            records: list[ShardRecord] = []
            for rank in range(choice.world_size):
                records.append(read_record(self._tier, self._run, choice.step, rank))
                readers.append(restore.shard_reader(self._tier.root, self._run, records[-1]))
            targets = flatten(into).tensors if into is not None else None
            state, per_rank = restore.assemble(readers, rank=self.rank, into=targets, allow_pickle=allow_pickle, keys=keys)
            nbytes = sum(record.nbytes for record in records)
        finally:
            for reader in readers:
                reader.close()
        seconds = time.monotonic() - began
        local = all(tiers[0] == "local" for tiers in choice.sources[session.node].values())
        session.events.emit(
            EventKind.CHECKPOINT_LOADED, step=choice.step.step, seconds_s=round(seconds, 6), bytes=nbytes,
            source="local" if local else "remote", from_attempt=choice.step.attempt, from_world_size=choice.world_size,
        )  # fmt: skip
        return Restored(
            choice.step, state, per_rank, choice.world_size, records[0].names, records[0].info, seconds, nbytes
        )
