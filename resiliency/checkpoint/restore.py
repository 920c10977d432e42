"""Restoring, step by step: what every place holds, which step is whole, its shards made good, its tensors filled.

All of it is collective: every rank sees the same inventory, strikes out the same copies, and so chooses the same step.
Decisions are in :mod:`resiliency.checkpoint.restore_plan`; this module asks the tiers and the other ranks.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from resiliency import faultpoints
from resiliency.agent.messages import Rescan
from resiliency.checkpoint import restore_plan
from resiliency.checkpoint.coordinator import Coordinator
from resiliency.checkpoint.session import Session
from resiliency.checkpoint.shard_assembler import ShardAssembler, threads_for
from resiliency.checkpoint.shard_reader import ShardReader, shard_reader
from resiliency.checkpoint.state import flatten
from resiliency.errors import ConfigError, CorruptShard, NoCheckpointFound, TierError
from resiliency.events import EventKind
from resiliency.storage.catalog import read_record
from resiliency.storage.fetch import fetch_shard
from resiliency.storage.manifest import StepId
from resiliency.storage.tiers.base import Tier
from resiliency.storage.tiers.local import LocalTier

__all__ = ["Restorer", "Restored"]

logger = logging.getLogger(__name__)

#: How often a plan is made again after a copy was struck out.
_MAX_ROUNDS = 50


@dataclass(frozen=True)
class Restored:
    """A loaded checkpoint.

    Attributes:
        id: step, attempt and token.
        state: the state tree; with ``into`` its tensors are the ones passed in.
        per_rank: what this rank passed as ``per_rank``, or None when the checkpoint has nothing for this rank (the
            world grew).
        world_size: ranks that wrote it.
        names: names of the step.
        info: what the save passed as ``info``.
        duration_s, nbytes: time and bytes read by this rank.
    """

    id: StepId
    state: Any
    per_rank: Any
    world_size: int
    names: tuple[str, ...]
    info: Mapping[str, Any]
    duration_s: float
    nbytes: int

    @property
    def step(self) -> int:
        return self.id.step


@dataclass
class _Findings:
    """Copies that are no good, and why: (text, True when bytes are damaged and False when a tier failed)."""

    strikes: set[restore_plan.BadCopy] = field(default_factory=set)
    messages: list[tuple[str, bool]] = field(default_factory=list)


class Restorer:
    """Restores for one rank of one attempt. Thread: training.

    Args:
        session: of this attempt.
        coordinator: how ranks talk.
        local: the local tier; everything is read from there, after it was brought there.
        remotes: further tiers, in the order they are asked. The list may grow.
        run: name of the run.
        agree_timeout: how long to wait for the other ranks.
    """

    def __init__(
        self,
        *,
        session: Session,
        coordinator: Coordinator,
        local: LocalTier,
        remotes: Sequence[Tier],
        run: str,
        agree_timeout: timedelta,
    ) -> None:
        self._session = session
        self._coordinator = coordinator
        self._tier = local
        self._remote_tiers = remotes
        self._run = run
        self._agree_timeout = agree_timeout
        self.rank = coordinator.rank

    def load(
        self, *, into: Any, step: StepId | None, allow_pickle: bool, keys: Callable[[str], bool] | None
    ) -> Restored | None:
        """See :meth:`resiliency.checkpoint.checkpointer.Checkpointer.load`."""
        session = self._session
        began = time.monotonic()
        session.events.emit(EventKind.RESTORE_STARTED)
        inventory = self._inventory()
        strikes: set[restore_plan.BadCopy] = set()
        damage: list[str] = []
        refused: list[str] = []
        for _ in range(_MAX_ROUNDS):
            choice = restore_plan.plan_restore(inventory, set(session.nodes), strikes, only=step)
            if choice is None:
                break
            findings = self._bring_here(choice)
            if not findings.strikes:
                restored, findings = self._read(choice, into, allow_pickle, keys, began)
                if restored is not None:
                    session.client.send(Rescan())
                    return restored
            strikes |= findings.strikes
            damage += [text for text, corrupt in findings.messages if corrupt]
            refused += [text for text, corrupt in findings.messages if not corrupt]
        damage += [what for holding in inventory if step in (None, StepId.parse(holding.step)) for what in holding.lost]
        if refused and not damage:
            raise TierError(
                "checkpoints exist but cannot be read or brought here: " + "; ".join(dict.fromkeys(refused)),
                retryable=True,
            )
        if damage:
            raise CorruptShard(
                "nothing could be restored, although checkpoints exist: "
                + "; ".join(dict.fromkeys(damage))
                + ". Restore the files from a backup, or start afresh in another directory or run",
                path=self._tier.root,
            )
        if step is not None:
            raise NoCheckpointFound(f"{step} of run {self._run!r} is not complete on any tier: {self._places()}")
        if inventory:
            logger.warning(
                "only unfinished checkpoints of run %r were found in %s; starting from scratch",
                self._run,
                self._places(),
            )
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
            if restore_plan.plan_restore(inventory, set(session.nodes), only=step) is not None:
                found.append((step, names[step.dirname]))
        return found

    def _inventory(self) -> list[restore_plan.StepInventory]:
        """What all places hold, the same list on every rank."""
        session = self._session
        faultpoints.hit("restore.inventory", rank=self.rank)
        mine: list[restore_plan.StepInventory] = []
        problem = ""
        try:
            if self.rank == session.local_ranks[0]:
                mine += restore_plan.list_inventory(self._tier, self._run, node=session.node)
            if self.rank == 0:
                for tier in self._remote_tiers:
                    mine += restore_plan.list_inventory(tier, self._run, node="")
        except TierError as error:
            problem = f"rank {self.rank}: {error}"
        data = json.dumps({"h": [h.to_list() for h in mine], "p": problem}).encode()
        answers = [
            json.loads(said) for said in self._coordinator.all_gather("inventory", data, timeout=self._agree_timeout)
        ]
        problems = [answer["p"] for answer in answers if answer["p"]]
        inventory = [restore_plan.StepInventory.from_list(item) for answer in answers for item in answer["h"]]
        if problems:
            if not inventory:
                raise TierError("checkpoints cannot be listed: " + "; ".join(problems), retryable=True)
            logger.warning("some checkpoints cannot be listed: %s; restoring from what is left", "; ".join(problems))
        return inventory

    def _bring_here(self, choice: restore_plan.RestorePlan) -> _Findings:
        """Fetches the shards of the choice that are not on this host, each checked on the way."""
        findings = _Findings()
        if all(tiers[0] == "local" for sources in choice.sources.values() for tiers in sources.values()):
            return findings  # the same on every rank, so nobody needs to talk
        session = self._session
        sources = choice.sources[session.node]
        remote = [rank for rank, tiers in sources.items() if tiers[0] != "local"]
        place, share = session.local_ranks.index(self.rank), len(session.local_ranks)
        for rank in remote[place::share]:
            self._fetch(choice, rank, sources[rank], findings)
        return self._together("fetched", findings)

    def _together(self, topic: str, mine: _Findings) -> _Findings:
        """What all ranks found. Collective: yes."""
        data = json.dumps({"s": sorted(mine.strikes), "m": mine.messages}).encode()
        answers = [json.loads(said) for said in self._coordinator.all_gather(topic, data, timeout=self._agree_timeout)]
        strikes = {(s[0], s[1], s[2], s[3]) for answer in answers for s in answer["s"]}
        return _Findings(strikes, [(m[0], m[1]) for answer in answers for m in answer["m"]])

    def _strike(
        self, findings: _Findings, tier: str, node: str, choice: restore_plan.RestorePlan, rank: int, error: Exception
    ) -> None:
        """Takes note that a copy is no good."""
        findings.strikes.add((tier, node, choice.step.dirname, rank))
        findings.messages.append((str(error), isinstance(error, CorruptShard)))
        ranges = list(error.ranges) if isinstance(error, CorruptShard) else []
        self._session.events.emit(EventKind.CHECKPOINT_CORRUPT, step=choice.step.step, path=str(error), ranges=ranges)
        logger.warning("rank %d: %s; trying the next copy", self.rank, error)

    def _fetch(self, choice: restore_plan.RestorePlan, rank: int, tiers: Sequence[str], findings: _Findings) -> None:
        session = self._session
        for tier in self._remote_tiers:
            if tier.name not in tiers:
                continue
            try:
                fetch_shard(tier, self._run, choice.step, rank, self._tier.root, node=session.node)
                session.events.emit(
                    EventKind.CHECKPOINT_REPAIRED,
                    step=choice.step.step,
                    source=tier.name,
                    shard=rank,
                    path=self._tier.root,
                )
                return
            except (CorruptShard, TierError) as error:
                self._strike(findings, tier.name, "", choice, rank, error)

    def _read(
        self,
        choice: restore_plan.RestorePlan,
        into: Any,
        allow_pickle: bool,
        keys: Callable[[str], bool] | None,
        began: float,
    ) -> tuple[Restored | None, _Findings]:
        """Reads what this rank wants, checking it, and hears what the others found; no result when anybody found
        damage."""
        session, findings = self._session, _Findings()
        readers: list[ShardReader] = []
        misfit: ConfigError | None = None
        try:
            assembly = None
            try:
                if self._open(choice, readers, findings):
                    assembly = ShardAssembler(
                        readers, rank=self.rank, into=flatten(into).tensors if into is not None else None, keys=keys
                    )
                    for rank, ranges in assembly.read(threads=threads_for(len(session.local_ranks))).items():
                        path = readers[rank].path
                        error = CorruptShard(
                            f"{path}: bytes {ranges} do not match their digests", path=path, ranges=ranges
                        )
                        self._strike(findings, "local", session.node, choice, rank, error)
            except ConfigError as error:
                misfit = error  # the others must not wait for this rank before it gives up
            findings = self._together("verified", findings)
            if misfit is not None:
                raise misfit
            if findings.strikes or assembly is None:
                return None, findings
            faultpoints.hit("restore.load", rank=self.rank)
            state, per_rank = assembly.result(allow_pickle=allow_pickle)
        finally:
            for reader in readers:
                reader.close()
        seconds, nbytes = time.monotonic() - began, sum(reader.record.nbytes for reader in readers)
        local = all(tiers[0] == "local" for tiers in choice.sources[session.node].values())
        session.events.emit(
            EventKind.CHECKPOINT_LOADED,
            step=choice.step.step,
            duration_s=round(seconds, 6),
            bytes=nbytes,
            source="local" if local else "remote",
            from_attempt=choice.step.attempt,
            from_world_size=choice.world_size,
        )
        record = readers[0].record
        return Restored(
            choice.step, state, per_rank, choice.world_size, record.names, record.info, seconds, nbytes
        ), findings

    def _open(self, choice: restore_plan.RestorePlan, readers: list[ShardReader], findings: _Findings) -> bool:
        """Opens every shard, which checks its header; False when one is no good."""
        for rank in range(choice.world_size):
            try:
                faultpoints.hit("restore.verify", rank=self.rank)
                record = read_record(self._tier, self._run, choice.step, rank)
                readers.append(shard_reader(self._tier.root, self._run, record))
            except (CorruptShard, TierError, OSError) as error:
                self._strike(findings, "local", self._session.node, choice, rank, error)
        return not findings.strikes
