"""The collective restore: lists all sources, plans, reads what each rank wants, and checks it.

Of a sharded step each rank reads byte ranges where they are. What a host lacks of a replicated step, which all its
ranks want whole, is first fetched into its local tier, once.

:mod:`resiliency.storage.restore_plan` decides which step is restored, and from which source each shard is read. This
module lists the tiers and exchanges the inventories between ranks. Every rank then has the same inventory and the same
list of bad copies, and so makes the same plan.
"""

from __future__ import annotations

import gc
import logging
import pickle
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from resiliency.agent.messages import Rescan
from resiliency.checkpoint.coordinator import Coordinator
from resiliency.checkpoint.rank_messages import CopyProblem, InventoryReport, ProblemReport, gather
from resiliency.checkpoint.read_plan import ReadPlanner
from resiliency.checkpoint.session import Session
from resiliency.checkpoint.shard_access import ShardAccess
from resiliency.checkpoint.shard_assembler import ShardAssembler, threads_for
from resiliency.checkpoint.shard_reader import ShardReader
from resiliency.errors import ConfigError, CorruptShard, NoCheckpointFound, TierError, UnsupportedFormat
from resiliency.events import EventKind
from resiliency.faultpoints import hit
from resiliency.storage.inventory import StepInventory, list_inventory
from resiliency.storage.passed_over import PassedOver, steps_passed_over, why_out_of_reach, why_unfinished
from resiliency.storage.restore_plan import RestorePlan, plan_restore
from resiliency.storage.sources import BadCopy, Cost, ShardSource, SourceProvider, open_source
from resiliency.storage.step_id import StepId

__all__ = ["Inventory", "Restored", "Restorer"]

logger = logging.getLogger(__name__)

#: Most plans tried, each without the copies that the earlier ones found bad.
_MAX_PLANS = 50


@dataclass(frozen=True)
class Restored:
    """A loaded checkpoint.

    Attributes:
        id: step, attempt and token.
        state: the state tree; with ``into`` its tensors are the ones passed in.
        per_rank: what this rank passed as ``per_rank``; None when the save had no such rank, or no good copy of it is
            left.
        world_size: number of ranks that wrote the checkpoint.
        names: names of the step.
        info: what the save passed as ``info``.
        duration_s: seconds from the call of ``load`` to its result.
        nbytes: bytes that this rank has read.
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


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """What all tiers held when they were listed, the same on every rank.

    Attributes:
        entries: one for each source and step, restorable or not.
        saved: the newest save of any rank that may not be listed.
        steps: those that can be restored, newest first, with their names.
    """

    entries: tuple[StepInventory, ...]
    saved: StepId | None
    steps: tuple[tuple[StepId, tuple[str, ...]], ...]

    def job_of(self, step: StepId) -> Mapping[str, str]:
        """What identifies the job that wrote a step, see :class:`resiliency.settings.Launch`; empty when unknown."""
        return next((entry.job for entry in self.entries if entry.step == step and entry.job), {})


@dataclass(frozen=True, kw_only=True)
class _Request:
    """Arguments of one ``load``, and when it began (monotonic seconds)."""

    planner: ReadPlanner | None
    allow_pickle: bool
    began: float


class Restorer:
    """Restores for one rank of one attempt. Thread: training.

    Args:
        session: of this attempt.
        coordinator: exchanges messages between the ranks.
        here: the local tier of this host, as a source; what is fetched goes there.
        providers: of all sources that this rank can read, the local tier's first; the same tiers on all ranks.
        run: name of the run.
        agree_timeout: how long to wait for the other ranks in each exchange.
    """

    def __init__(
        self,
        *,
        session: Session,
        coordinator: Coordinator,
        here: ShardSource,
        providers: Sequence[SourceProvider],
        run: str,
        agree_timeout: timedelta,
    ) -> None:
        self._session = session
        self._coordinator = coordinator
        self._run = run
        self._agree_timeout = agree_timeout
        self._places = [provider.place for provider in providers]
        self._openers = {provider.tier: provider.open for provider in providers}
        self._listed = [source for provider in providers for source in provider.listed]
        self.rank = coordinator.rank
        self._shards = ShardAccess(here=here, openers=self._openers, run=run, rank=self.rank, events=session.events)

    def load(
        self,
        *,
        planner: ReadPlanner | None,
        step: StepId | None,
        allow_pickle: bool,
        saved: StepId | None = None,
        inventory: Inventory | None = None,
    ) -> Restored | None:
        """See :meth:`resiliency.checkpoint.checkpointer.Checkpointer.load`. Collective: yes.

        Args:
            saved: the newest save of this rank so far, which may not be committed yet.
        """
        request = _Request(planner=planner, allow_pickle=allow_pickle, began=time.monotonic())
        self._session.events.emit(EventKind.RESTORE_STARTED)
        if inventory is not None:
            entries, newest_saved = inventory.entries, inventory.saved
        else:
            entries, newest_saved = self._list(saved)
        problems: list[CopyProblem] = []
        for _ in range(_MAX_PLANS):
            bad = {problem.copy for problem in problems}
            plan = self._plan(entries, bad, only=step)
            if plan is None and problems:
                # The step may be gone because a newer one was committed meanwhile, and the ranks did not see that yet.
                entries, newest_saved = self._list(saved)
                plan = self._plan(entries, bad, only=step)
            if plan is None:
                break
            found = self._fetch_missing(plan)
            if not found:
                restored, found = self._read(plan, request)
                if restored is not None:
                    if self.rank == 0:
                        self._tell_passed_over(entries, problems, restored.id)
                    line = self._go_on_from(plan.step, entries, newest_saved)
                    self._session.client.send(Rescan(loaded=plan.step, line=line))
                    return restored
            problems += found
        self._raise_reason(entries, problems, step)
        return None

    def inventory(self, saved: StepId | None = None) -> Inventory:
        """Lists all tiers; see :meth:`resiliency.checkpoint.checkpointer.Checkpointer.inventory`. Collective: yes."""
        entries, newest_saved = self._list(saved)
        names: dict[StepId, tuple[str, ...]] = {}
        for entry in entries:
            names[entry.step] = tuple(dict.fromkeys((*names.get(entry.step, ()), *entry.names)))
        steps = [step for step in sorted(names, reverse=True) if self._plan(entries, only=step) is not None]
        return Inventory(entries=entries, saved=newest_saved, steps=tuple((step, names[step]) for step in steps))

    def _tell_passed_over(
        self, inventory: Sequence[StepInventory], problems: Sequence[CopyProblem], taken: StepId
    ) -> None:
        """Reports the newer steps that are damaged or unfinished, if the newest that can be restored was: one warning,
        and an event for each damaged step."""
        newest = self._plan(inventory, {problem.copy for problem in problems}, only=None)
        passed = self._passed_over(inventory, problems, taken) if newest is not None and newest.step == taken else []
        for one in (one for one in passed if one.damaged):
            self._session.events.emit(
                EventKind.CHECKPOINT_PASSED_OVER,
                step=one.step.step,
                taken=taken.step,
                reason="; ".join(one.reasons),
            )
        if passed:
            others = f"; of newer steps, {len(passed) - 1} more damaged or unfinished" if passed[1:] else ""
            advice = f"; `resiliency ckpt verify {self._places[0]}` lists all damage" if passed[0].damaged else ""
            logger.warning("%s; %s is restored instead%s%s", passed[0], taken, others, advice)

    def _passed_over(
        self, inventory: Sequence[StepInventory], problems: Sequence[CopyProblem], taken: StepId | None
    ) -> list[PassedOver]:
        bad = [(problem.copy.step, problem.reason) for problem in problems]
        return steps_passed_over(inventory, taken, bad, lambda entries: self._plan(entries, only=None))

    def _plan(
        self, inventory: Sequence[StepInventory], bad: Collection[BadCopy] = (), *, only: StepId | None
    ) -> RestorePlan | None:
        ranks: dict[str, list[int]] = {}
        for rank, node in enumerate(self._session.nodes):
            ranks.setdefault(node, []).append(rank)
        return plan_restore(inventory, set(ranks), bad, only=only, ranks=ranks)

    # -- inventory --------------------------------------------------------------------------------------------------

    def _list(self, saved: StepId | None) -> tuple[tuple[StepInventory, ...], StepId | None]:
        """The inventory of all sources, the same list on every rank, and the newest save of any rank (None: no save).
        Collective: yes.

        Args:
            saved: the newest save of this rank; None: none.

        Raises:
            TierError: some tiers could not be listed, and no checkpoint was found on the others.
        """
        hit("restore.inventory", rank=self.rank)
        entries: list[StepInventory] = []
        failures: list[str] = []
        for source in self._listed:  # a failed source is skipped, because each may hold what the others lack
            try:
                entries += list_inventory(open_source(source, self._openers), self._run, source)
            except (TierError, UnsupportedFormat) as error:
                failures.append(f"rank {self.rank}: {error}")
        own_report = InventoryReport(entries=tuple(entries), saved=saved, problem="; ".join(failures))
        reports = gather(self._coordinator, "inventory", own_report, timeout=self._agree_timeout)
        problems = "; ".join(report.problem for report in reports if report.problem)
        inventory = tuple(entry for report in reports for entry in report.entries)
        if problems and not any(entry.world_size or entry.lost for entry in inventory):
            raise TierError(f"checkpoints cannot be listed: {problems}", retryable=True)
        if problems:
            logger.warning("some checkpoints cannot be listed: %s; restoring from the others", problems)
        return inventory, max((report.saved for report in reports if report.saved is not None), default=None)

    def _go_on_from(self, step: StepId, inventory: Sequence[StepInventory], saved: StepId | None) -> int:
        """Records that the job continues from ``step``; returns the line of the next save, the same on every rank."""
        # Unfinished steps do not count: an attempt that was killed during a save continues from the step before.
        committed = [entry.step for entry in inventory if entry.lost]
        whole = self._plan(inventory, only=None)
        committed += [step, *([whole.step] if whole is not None else []), *([saved] if saved is not None else [])]
        return self._session.lineage.loaded(
            step, newest=max(committed), largest=max(entry.step.line for entry in inventory)
        )

    def _raise_reason(
        self, inventory: Sequence[StepInventory], problems: Sequence[CopyProblem], step: StepId | None
    ) -> None:
        """Raises the reason why nothing was restored; returns when no committed checkpoint exists.

        Raises:
            CorruptShard: there are checkpoints, but they are damaged.
            TierError: there are checkpoints, but the tiers that hold them failed, or are folders of single hosts.
            NoCheckpointFound: ``step`` was given and is not committed on any tier.
        """
        damage = [problem.reason for problem in problems if problem.damaged]
        damage += [text for entry in inventory if step in (None, entry.step) for text in entry.lost]
        failures = [problem.reason for problem in problems if not problem.damaged]
        places = ", ".join(self._places)
        if damage:
            raise CorruptShard(
                "nothing could be restored, although checkpoints exist: "
                + "; ".join(dict.fromkeys(damage))
                + ". Restore the files from a backup, or start afresh in another directory or run",
                path=self._places[0],
            )
        if failures:
            raise TierError(
                "checkpoints exist but cannot be read or fetched: " + "; ".join(dict.fromkeys(failures)),
                retryable=True,
            )
        for one in sorted({entry.step for entry in inventory if step in (None, entry.step)}, reverse=True):
            apart = why_out_of_reach([entry for entry in inventory if entry.step == one])
            if apart:
                raise TierError(
                    f"{one} cannot be restored: {apart}. Copy the shards into a folder that every host reads, and give"
                    " it as a slower tier (with dirpath= beside local_dir= each step goes there, too); or start afresh"
                    " in another directory or run",
                    retryable=False,
                )
        if step is not None:
            here = [entry for entry in inventory if entry.step == step]
            why = f" ({why_unfinished(here)})" if here else ""
            raise NoCheckpointFound(f"{step} of run {self._run!r} is not committed on any tier: {places}{why}")
        if inventory and self.rank == 0:
            passed = self._passed_over(inventory, problems, None)
            logger.warning(
                "no checkpoint of run %r in %s is complete (%d steps lack records or shards; %s): their saves were cut"
                " off, or files were deleted; nothing is restored",
                self._run,
                places,
                len(passed),
                passed[0],
            )

    # -- fetching ---------------------------------------------------------------------------------------------------

    def _fetch_missing(self, plan: RestorePlan) -> list[CopyProblem]:
        """Fetches the shards of a replicated step that this host lacks, divided among its ranks. Returns the bad copies
        that any rank found.

        Collective: only when some host has to fetch; the plan says so on every rank.
        """
        if not plan.fetches:
            return []
        host, ranks = self._session.node, self._session.local_ranks
        problems: list[CopyProblem] = []
        for rank in plan.to_fetch(host)[ranks.index(self.rank) :: len(ranks)]:
            problems += self._shards.fetch(plan, rank)
        return self._share("fetched", problems)

    def _share(self, topic: str, problems: Sequence[CopyProblem]) -> list[CopyProblem]:
        """The bad copies found by all ranks; ``problems`` are those that this rank found. Collective: yes.

        Of several ranks that found the same copy to be bad, the first says so.
        """
        report = ProblemReport(problems=tuple(problems))
        reports = gather(self._coordinator, topic, report, timeout=self._agree_timeout)
        said = {problem.copy for earlier in reports[: self.rank] for problem in earlier.problems}
        for problem in (one for one in problems if one.copy not in said):
            step, ranges = problem.copy.step.step, list(problem.ranges)
            self._session.events.emit(EventKind.CHECKPOINT_CORRUPT, step=step, path=problem.reason, ranges=ranges)
            logger.warning("rank %d: %s; trying the next copy", self.rank, problem.reason)
        return [problem for report in reports for problem in report.problems]

    # -- reading ----------------------------------------------------------------------------------------------------

    def _read(self, plan: RestorePlan, request: _Request) -> tuple[Restored | None, list[CopyProblem]]:
        """Calls :meth:`_read_all` with garbage collection off: a plan of many tensors makes no garbage, but would
        trigger a collection of all objects of the process (15 of 250 ms for 1 GiB in 1,000 tensors)."""
        collects = gc.isenabled()
        gc.disable()
        try:
            return self._read_all(plan, request)
        finally:
            if collects:
                gc.enable()

    def _read_all(self, plan: RestorePlan, request: _Request) -> tuple[Restored | None, list[CopyProblem]]:
        """Reads and checks this rank's part of the step. Collective: yes.

        Returns:
            (result, no bad copies), or (None, bad copies) when any rank found some.

        Raises:
            ConfigError: the state passed in does not fit the checkpoint; raised after the exchange with the other
                ranks.
            pickle.UnpicklingError: the state holds objects of classes that may not be loaded; raised after the
                exchange, too.
        """
        readers: dict[int, ShardReader] = {}
        misfit: ConfigError | pickle.UnpicklingError | None = None
        assembler: ShardAssembler | None = None
        problems: list[CopyProblem] = []
        try:
            try:
                problems = self._shards.open(plan, readers)
                if not problems:
                    assembler = ShardAssembler(
                        readers, rank=self.rank, planner=request.planner, allow_pickle=request.allow_pickle
                    )
                    problems = self._shards.fill(
                        plan, readers, assembler, threads=threads_for(len(self._session.local_ranks))
                    )
            except (ConfigError, pickle.UnpicklingError) as error:
                misfit = error  # raised later: the other ranks must not wait for this one
            except CorruptShard as error:
                problems = [self._shards.problem_with(plan, readers, error)]
            except Exception as error:  # Boundary: the caller's tensors and reads; raised later, too.
                into = " into what was passed" if request.planner is not None else ""
                misfit = ConfigError(f"{plan.step} cannot be read{into}: {type(error).__name__}: {error}")
                misfit.__cause__ = error
            problems = self._share("verified", problems)
            if misfit is not None:
                raise misfit
            if problems or assembler is None:
                return None, problems
            hit("restore.load", rank=self.rank)
            state, per_rank = assembler.result()
            nbytes = assembler.nbytes
        finally:
            for reader in readers.values():
                reader.close()
        return self._restored(plan, readers, state, per_rank, request.began, nbytes), []

    def _restored(
        self,
        plan: RestorePlan,
        readers: Mapping[int, ShardReader],
        state: Any,
        per_rank: Any,
        began: float,
        nbytes: int,
    ) -> Restored:
        duration_s, sources = time.monotonic() - began, plan.sources[self._session.node].values()
        self._session.events.emit(
            EventKind.CHECKPOINT_LOADED,
            step=plan.step.step,
            duration_s=round(duration_s, 6),
            bytes=nbytes,
            source="local" if all(found[0].cost is Cost.LOCAL for found in sources) else "remote",
            from_attempt=plan.step.attempt,
            from_world_size=plan.world_size,
        )
        record = readers[0].record
        if self.rank < plan.world_size and (self.rank not in readers or not readers[self.rank].has_rank_state):
            missing = (
                f"this host's copy of step {plan.step.step} lacks what this rank alone had (random state, place in the"
                " data), because rank 0 was on another host, whose folder has it"
                if self.rank in readers
                else f"no good copy is left of what this rank alone had at step {plan.step.step} (random state, place"
                " in the data)"
            )
            logger.warning("rank %d: %s; it goes on without, so that the resume is not exact", self.rank, missing)
        return Restored(plan.step, state, per_rank, plan.world_size, record.names, record.info, duration_s, nbytes)
