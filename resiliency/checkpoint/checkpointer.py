"""The engine's facade for users of plain torch.

::

    checkpointer = Checkpointer("/ckpts")
    restored = checkpointer.load()                      # None at the first start
    ...
    checkpointer.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    ...
    checkpointer.close()
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from resiliency.agent.file_pool import MOST_READY, SMALL_FILE
from resiliency.agent.messages import Bye, Delete, Prepare, Seal
from resiliency.checkpoint._arguments import checked_info, checked_names, checked_step, refuse_same_folder
from resiliency.checkpoint.arena import Arena
from resiliency.checkpoint.coordinator import Coordinator, SoloCoordinator, StoreCoordinator
from resiliency.checkpoint.copier import Copier
from resiliency.checkpoint.options import CheckpointerOptions, LocalTierOptions, RemoteTierOptions
from resiliency.checkpoint.read_plan import Read, ReadPlan, plan_given, plan_into, plan_new
from resiliency.checkpoint.restore import Inventory, Restored, Restorer
from resiliency.checkpoint.save_copies import SaveCopies
from resiliency.checkpoint.save_trace import SaveTrace
from resiliency.checkpoint.save_tracker import SaveTracker
from resiliency.checkpoint.session import Session, open_session
from resiliency.checkpoint.shard_plan import Agree, ShardPlanner, Wanted
from resiliency.checkpoint.snapshot import Snapshot
from resiliency.checkpoint.step_hook import StepHook
from resiliency.checkpoint.ticket import LOCAL, Outcome, Ticket, checked_stage
from resiliency.checkpoint.upload_schedule import RemoteSchedule
from resiliency.checkpoint.write_agreement import LeftOut
from resiliency.checkpoint.write_plan import WritePlan
from resiliency.errors import AgentError, ConfigError, ResiliencyError, TierError
from resiliency.events import EventKind, EventSink, boot_id
from resiliency.faultpoints import hit
from resiliency.runtime.start_times import start_fields
from resiliency.settings import environment
from resiliency.spans import traced
from resiliency.storage.shard_file import Chunk
from resiliency.storage.sources import Cost, ShardSource, providers_of_tiers
from resiliency.storage.stage import Stage
from resiliency.storage.step_id import StepId
from resiliency.storage.tiers import open_tier
from resiliency.storage.tiers.local import on_ramdisk
from resiliency.to_thread import to_thread

__all__ = ["Checkpointer", "CheckpointerOptions", "Outcome", "Restored", "Ticket", "default_coordinator"]

logger = logging.getLogger(__name__)

#: Seconds after which an agent that has not recorded a sealed shard counts as hung.
_HUNG_S = 60.0
#: Seconds that a warm-up waits for a file, in addition to the time in which a slow disk writes it.
_PREPARE_S, _PREPARE_BYTES_PER_S = 10.0, 100e6
#: Seconds that a flush waits for other ranks to record their shards once this rank's is done.
_OTHERS_S = 30.0
#: Seconds that close waits for an agent to exit: one that has nothing left to do, and one that has uploads to finish.
_IDLE_AGENT_S, _BUSY_AGENT_S = 10.0, 0.5
#: The same for an agent that gives names files of their own at the end: a second per GiB and name. A script that writes
#: into such a file right after the fit must not meet the copy.
_FILES_AGENT_S = 120.0
#: Seconds that close waits for the agent on a rank that failed; the agent itself waits for the other ranks.
_FAILED_S = 2.0
#: Seconds that close waits for the traces of saves to be written.
_TRACES_S = 10.0


class Checkpointer:
    """Saves and restores a training state on one or more tiers.

    Args:
        directory: folder of the local tier, or :class:`LocalTierOptions`. Its files are memory-mapped.
        remotes: further tiers, to which the agent uploads.
        run: name of the run; None: ``RESILIENCY_RUN``, ``JOB_IDENTIFIER`` or "default". Runs are independent.
        rank, world_size: of this process; None: those of ``coordinator``, else ``RANK`` and ``WORLD_SIZE``.
        coordinator: exchanges messages between ranks at start and restore; None: one over the default store of
            ``torch.distributed``.
        options: further settings.
        sinks: additional places for events; the log below the directory is always written.

    Threads: call every method from the training thread. Two background threads: one copies, one receives the agent's
    messages. What uses files or sockets and may take long (open, load, flush, close) runs on a further one, for which
    the training thread waits: what a signal's handler raises ends that wait.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | LocalTierOptions,
        *,
        remotes: Sequence[RemoteTierOptions] = (),
        run: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        coordinator: Coordinator | None = None,
        options: CheckpointerOptions | None = None,
        sinks: Sequence[EventSink] = (),
    ) -> None:
        if not isinstance(directory, (str, os.PathLike, LocalTierOptions)):
            raise TypeError(f"directory is a {type(directory).__name__}; pass a path or LocalTierOptions")
        self._environment = environment()
        self._local = (
            directory if isinstance(directory, LocalTierOptions) else LocalTierOptions(directory=os.fspath(directory))
        )
        if isinstance(remotes, (str, RemoteTierOptions)) or not all(
            isinstance(remote, RemoteTierOptions) for remote in remotes
        ):
            raise TypeError("remotes must be a list of RemoteTierOptions(address=...)")
        if options is not None and not isinstance(options, CheckpointerOptions):
            raise TypeError(f"options is a {type(options).__name__}; pass CheckpointerOptions(...)")
        if self._local.durable and on_ramdisk(self._local.directory):
            self._local = dataclasses.replace(self._local, durable=False)  # a ramdisk does not survive a power loss
        self._remotes = tuple(remotes)
        refuse_same_folder(self._local.directory, [remote.address for remote in self._remotes])
        if len({r.name for r in self._remotes}) != len(self._remotes):
            raise ConfigError("two remote tiers have the same name; give each its own")
        self.run = run or self._environment.run
        if "/" in self.run or self.run in ("", ".", ".."):
            raise ConfigError(f"run={self.run!r} must be usable as a folder name; leave out slashes")
        place = self._environment if coordinator is None else coordinator
        self.rank = place.rank if rank is None else rank
        self.world_size = place.world_size if world_size is None else world_size
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank={self.rank} is not within world_size={self.world_size}")
        if coordinator is not None and (self.rank, self.world_size) != (coordinator.rank, coordinator.world_size):
            raise ConfigError(
                f"rank {self.rank} of {self.world_size} was given the coordinator of rank {coordinator.rank} of"
                f" {coordinator.world_size}; pass each rank its own, or leave out rank= and world_size="
            )
        self.options = options or CheckpointerOptions()
        self._sinks = tuple(sinks)
        self._coordinator = coordinator
        self._remote_tiers = [open_tier(r.address, name=r.name, **_store_options(r)) for r in self._remotes]
        self._warm_ups = 0
        self._planner = ShardPlanner(rank=self.rank, world_size=self.world_size, small_nbytes=self.options.lazy_bytes)
        self._opened: _Parts | None = None
        #: Replaces the fence before an optimizer step that the saving thread makes while a copy is pending; called with
        #: the optimizer, and whether its ``step`` was given a closure. For a trainer that fences within the closure.
        self.before_step: Callable[[Optimizer, bool], object] | None = None
        self._step_hook: StepHook | None = None
        self._saving_thread = 0
        self._pid = os.getpid()
        self._closed = False
        #: (tier, save) whose missing parts of other ranks a flush waits for -> monotonic seconds when the first began.
        self._awaited: dict[tuple[str, StepId], float] = {}

    # -- start ----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Agrees with the other ranks on the attempt and connects to the agent. Other methods call it if necessary.

        Collective: yes. Blocks: up to ``options.agree_timeout`` plus the agent's start (about 0.1 s).

        Raises:
            TierError, AgentError, Timeout: nothing can be saved or restored; the message says why.
        """
        self._parts()

    def _parts(self) -> _Parts:
        """The parts of the open checkpointer; opens it if necessary."""
        if self._closed:
            raise ConfigError("this Checkpointer is closed; make a new one")
        self._refuse_forked()
        return self._opened if self._opened is not None else self._open()

    def _open(self) -> _Parts:
        gave_up = threading.Event()

        def start() -> None:
            self._opened = self._start()
            if gave_up.is_set():
                self._abandon()

        try:
            to_thread(start, interrupted=gave_up.set)
        except BaseException:  # Ctrl-C may come when it is open already, and nobody else might close it
            self._abandon()
            raise
        assert self._opened is not None
        return self._opened

    def _abandon(self) -> None:
        """Ends what is open after all when the start was interrupted. Idempotent. Thread: any."""
        parts, self._opened = self._opened, None
        if parts is not None:
            parts.copier.close()
            parts.session.abandon()

    def _start(self) -> _Parts:
        """Opens a session, and starts the threads.

        Raises:
            ResiliencyError: one of those of :meth:`open`. What the system or torch raises otherwise on this rank alone
                is a TierError or an AgentError.
        """
        try:
            return self._make_parts()
        except ResiliencyError:
            raise
        except Exception as error:  # Boundary: no thread can be started, sockets are forbidden (pytest-socket), ...
            what = f"rank {self.rank}: the engine of {self._local.directory} cannot start: {error}"
            if self.world_size == 1:
                raise AgentError(what) from error
            if isinstance(error, OSError):
                raise TierError(what, retryable=True) from error
            raise ResiliencyError(f"{what}; the other ranks may have started theirs") from error

    def _make_parts(self) -> _Parts:
        coordinator = self._coordinator or default_coordinator(self.rank, self.world_size)
        began = time.monotonic()
        session = open_session(
            local=self._local,
            remotes=self._remotes,
            run=self.run,
            coordinator=coordinator,
            options=self.options,
            environment=self._environment,
            sinks=self._sinks,
        )
        copier: Copier | None = None
        try:
            arena = Arena(part=session.host_part.index, writers=session.host_part.writers)
            session.client.give_files_to(
                lambda file: arena.offer(file.path, file.inode, file.nbytes, is_new=file.is_new)
            )
            copier = Copier(threads=self.options.copy_threads)
            saves = SaveTracker(session=session, coordinator=coordinator)
            here = ShardSource(tier=session.local_tier.name, host=session.node, cost=Cost.LOCAL)
            parts = _Parts(
                session=session,
                coordinator=coordinator,
                arena=arena,
                copier=copier,
                saves=saves,
                copies=SaveCopies(
                    run=self.run,
                    rank=self.rank,
                    world_size=self.world_size,
                    session=session,
                    saves=saves,
                    arena=arena,
                    copier=copier,
                ),
                schedule=RemoteSchedule(self._remotes, coordinator),
                restorer=Restorer(
                    session=session,
                    coordinator=coordinator,
                    here=here,
                    providers=providers_of_tiers(
                        here,
                        session.local_tier,
                        self._remote_tiers,
                        lists_local=coordinator.rank == session.local_ranks[0],
                        lists_remotes=coordinator.rank == 0,
                    ),
                    run=self.run,
                    agree_timeout=self.options.agree_timeout,
                ),
            )
            session.events.emit(
                EventKind.JOB_STARTED,
                pid=os.getpid(),
                device="cuda" if torch.cuda.is_available() else "cpu",
                world_size=self.world_size,
                restart=self._environment.restart,
                node_rank=sorted(set(session.nodes)).index(session.node),
                opening_s=round(time.monotonic() - began, 6),
                boot=boot_id(),
                **start_fields(),
            )
        except Exception:  # no thread can be started: nobody could close what is open
            if copier is not None:
                copier.close()
            session.abandon()
            raise
        return parts

    @property
    def is_forked(self) -> bool:
        """True in a forked child, which has none of the parent's saves, threads and connection to the agent."""
        return self._pid != os.getpid()

    def _refuse_forked(self) -> None:
        if self.is_forked:
            raise ConfigError(f"this Checkpointer belongs to process {self._pid}, of which this is a forked child")

    @property
    def session(self) -> Session:
        """This attempt; opens the checkpointer if necessary."""
        return self._parts().session

    @property
    def line(self) -> int:
        """Line of descent of the next save, the same on all ranks, see :mod:`resiliency.checkpoint.lineage`."""
        return self.session.lineage.line

    def rise_to_line(self, line: int) -> None:
        """Makes the next saves part of a line with a larger number, if ``line`` is larger. Every rank calls it."""
        self.session.lineage.rise_to(line)

    @property
    def directory(self) -> str:
        """Folder of the local tier."""
        return self._local.directory

    @property
    def can_be_durable(self) -> bool:
        """True when a save on the local tier can survive a power loss: the tier is not a ramdisk."""
        return self._local.durable

    @property
    def skipped(self) -> int:
        """Number of saves not started because the previous one was not recorded or no shard file could be made."""
        return 0 if self._opened is None else self._opened.saves.skipped

    @property
    def torn(self) -> int:
        """Number of saves given up because a tensor changed before the fence, while it was being copied."""
        return 0 if self._opened is None else self._opened.saves.torn

    def warm_up(self, state: Any = None, *, nbytes: int | None = None, slots: int = 2) -> None:
        """Makes the agent prepare shard files and bring their pages into memory, so that the first save is as fast as
        later ones.

        Collective: yes (it opens the checkpointer). Blocks: until the files are ready, 0.3 to 3 s per GiB of each.

        Args:
            state: a state tree or write plan like those that will be saved; tensor data is not read.
            nbytes: instead of ``state``, the expected size of this host's file in bytes.
            slots: number of files; a save needs its own while the previous step is still being committed. The agent
                prepares at most two; from the first save on it keeps one ready, on a disk two once a save found none.
        """
        parts = self._parts()
        if nbytes is None:
            if state is None:
                raise ConfigError("warm_up needs the state that will be saved, or nbytes=")
            self._warm_ups += 1
            nbytes = self._planner.plan(
                state,
                None,
                host=parts.session.host_part,
                agree=self._agree(parts, f"warm_up/{self._warm_ups}"),
            ).nbytes
        self._warm(parts, nbytes, slots, wait_for=slots)

    def warm_up_for(self, tensors: Mapping[str, Tensor], *, slots: int = 2) -> None:
        """Like :meth:`warm_up`, for tensors by key, which may be on the meta device (of a state yet to be created).
        Waits for the first file only."""
        parts = self._parts()
        self._warm(parts, self._planner.estimate(tensors, host=parts.session.host_part), slots, wait_for=1)

    def _warm(self, parts: _Parts, nbytes: int, slots: int, *, wait_for: int) -> None:
        if nbytes < SMALL_FILE:
            return  # a save makes such a small file itself
        parts.saves.process_messages()
        parts.arena.none_to_come = False
        parts.session.client.send(Prepare(nbytes=nbytes, count=slots))
        wait_for = min(wait_for, MOST_READY)
        deadline = time.monotonic() + _PREPARE_S + wait_for * nbytes / _PREPARE_BYTES_PER_S
        while parts.arena.prepared < wait_for and not parts.arena.none_to_come and time.monotonic() < deadline:
            parts.saves.wait(max(0.0, deadline - time.monotonic()))
        parts.arena.wait_mapped(deadline)

    # -- save -----------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: Any,
        *,
        per_rank: Any = None,
        names: Sequence[str] = (),
        supersedes: Sequence[str] = (),
        info: Mapping[str, Any] | None = None,
        exact: bool = True,
        lazy: Wanted = False,
        replicated: Callable[[Tensor], bool] | None = None,
        beside: Mapping[str, Any] | None = None,
        everywhere: bool = False,
        trace: SaveTrace | None = None,
    ) -> Ticket | None:
        """Saves a checkpoint. Every rank calls it at the same step.

        Collective: only for a :class:`~resiliency.checkpoint.write_plan.WritePlan`; otherwise ranks do not communicate,
          and a save of states whose structures differ is refused by the agent: the tickets of all ranks fail.
        Blocks: while it copies what is not lazy; up to ``options.previous_save_timeout`` when the previous save is not
          recorded yet.
        Safe after return: everything when ``lazy`` is False. Otherwise lazy tensors must not change before
        :meth:`fence` returns, which a step of an optimizer of torch calls first; the Python objects, the small tensors
        and everything not lazy may.

        Args:
            step: number of the optimizer step, >= 0.
            state: any tree of dicts, lists, tuples, tensors and Python objects. Plain tensors are assumed to be equal
                on all ranks; each rank writes its share of them. DTensors are written as they are sharded, one replica
                of each, and plain tensors beside them by rank 0. Every rank holds the same keys. Or a
                :class:`~resiliency.checkpoint.write_plan.WritePlan`: the boxes this rank holds, planned by the caller.
            per_rank: a tree that differs between ranks (RNG, data loader); ``load`` returns to each rank its own.
            names: names by which the step can be loaded, relative to the directory ("step=100.ckpt").
            supersedes: names to be deleted once this step is committed.
            info: small JSON values shown by listings.
            exact: False when resuming from this save is not exact; of several saves of one step an exact one is
                preferred.
            lazy: True, or a function that says for a tensor whether it may be copied in the background.
            replicated: a function that says for a plain tensor whether it is equal on all ranks, so that each rank may
                write a share of it; the first rank of a host writes the other tensors. None: all are equal. Beside
                DTensors rank 0 writes all plain tensors.
            beside: for a sharded state: file name -> a tree of which rank 0's is put into the step's folder beside the
                shards, as ``torch.save`` writes it, or the bytes of the file (Lightning's ``meta.pt``); committed with
                the rest.
            everywhere: send this save to all remote tiers, whatever their intervals.
            trace: records where the time of this save goes, here and in the agent.

        Returns:
            A ticket, or None when the save was skipped (counted in ``skipped``, with an event and a warning). A file
            that cannot be made fails the ticket.

        Raises:
            ConfigError: a state that cannot be stored (also an event), or wrong arguments. Failures of storage do not
                raise: they are reported by :meth:`poll`, an event and one warning.
        """
        request = _Request(
            step=checked_step(step),
            per_rank=per_rank,
            names=checked_names("names", names),
            supersedes=checked_names("supersedes", supersedes),
            info=checked_info(info),
            exact=exact,
            lazy=lazy,
            replicated=replicated,
            beside=beside,
            everywhere=everywhere,
            trace=trace,
        )
        if trace is None:
            return self._save(state, request)
        try:
            with traced(trace, "save"):
                ticket = self._save(state, request)
        except BaseException as error:
            trace.end(f"{type(error).__name__}: {error}")
            raise
        if ticket is None:
            trace.end("skipped: the save before it was not recorded in time")
        return ticket

    def _save(self, state: Any, request: _Request) -> Ticket | None:
        began = time.monotonic()
        self._saving_thread = threading.get_ident()
        parts, trace, step, lazy = self._parts(), request.trace, request.step, request.lazy
        session, saves = parts.session, parts.saves
        hit("save.begin", rank=self.rank)
        save_id = saves.next_id(step)
        with traced(trace, "wait for the save before"):
            self.fence()
            saves.process_messages()
            skipped = self._wait_for_previous(parts)
        agree = self._agree(parts, save_id.dirname)
        if skipped:
            saves.skip(save_id, skipped)
            if isinstance(state, WritePlan):
                self._planner.leave_out(skipped, agree)
            return None
        try:
            with traced(trace, "planning"):
                plan = self._planner.plan(
                    state,
                    request.per_rank,
                    host=session.host_part,
                    agree=agree,
                    lazy=lazy,
                    replicated=request.replicated,
                    beside=request.beside,
                )
        except LeftOut as reason:
            saves.skip(save_id, str(reason))
            return None
        except Exception as error:  # Boundary: the user's classes may raise anything; the caller gets it.
            saves.refuse(save_id, str(error))
            raise
        due, undo_schedule = parts.schedule.due(step, everywhere=request.everywhere)
        ticket = Ticket(
            id=save_id,
            nbytes=plan.nbytes,
            names=request.names,
            tiers=(LOCAL, *due),
            can_be_durable=(*((LOCAL,) if self._local.durable else ()), *due),
            _wait=self._wait,
        )
        seal = Seal(
            id=save_id,
            files=(),
            plan=plan.plan,
            replicated=plan.replicated,
            names=ticket.names,
            created=time.time(),
            info=request.info,
            job=dict(self._environment.launch.job),
            tiers=tuple(due),
            exact=request.exact,
        )
        snapshot: Snapshot | None = None
        try:
            in_flight = saves.begin(ticket, request.supersedes, plan=plan.plan)
            in_flight.undo_schedule = undo_schedule
            if trace is not None:
                in_flight.trace = trace
                parts.traces[:] = [*(other for other in parts.traces if not other.written), trace]
                local = Stage.DURABLE if self._local.durable else Stage.COMMITTED
                trace.follow(session.client, save_id, {**dict.fromkeys(due, Stage.DURABLE), LOCAL: local})
            with traced(trace, "copying at once"):
                lazy_bytes = parts.copies.start(plan, in_flight, seal)
            snapshot = in_flight.snapshot
            hit("save.fill", rank=self.rank)
            if lazy is False:
                self.fence()
            elif self._step_hook is None:
                self._step_hook = StepHook(self._before_any_step)
            parts.schedule.count_save()
            ticket.stall_s = time.monotonic() - began
            session.events.emit(
                EventKind.CHECKPOINT_STARTED,
                step=step,
                stall_s=round(ticket.stall_s, 6),
                bytes=ticket.nbytes,
                lazy_bytes=lazy_bytes,
            )
        except BaseException:
            # The caller gets the error; the next save must not wait for this one.
            begun = saves.in_flight
            if begun is None or begun.ticket is not ticket:
                pass
            elif begun.snapshot is not None:
                self.fence()
            elif snapshot is None or snapshot.failure is not None:
                saves.fail(begun, "the save was interrupted by an error")
            raise
        return ticket

    def _wait_for_previous(self, parts: _Parts) -> str:
        """Waits until the rank's previous shard is recorded, up to ``previous_save_timeout``. Returns why the save
        cannot begin; "" when it can."""
        saves, in_flight = parts.saves, parts.saves.in_flight
        if parts.session.client.is_down:
            return "the checkpoint agent was lost again and again; another one is started every two minutes"
        if in_flight is None:
            return ""
        deadline = time.monotonic() + self.options.previous_save_timeout.total_seconds()
        while saves.in_flight is not None and time.monotonic() < deadline:
            parts.session.client.wait_message(max(0.0, deadline - time.monotonic()))
            saves.process_messages()
        if saves.in_flight is None:
            return ""
        if in_flight.sealed_at is not None and time.monotonic() - in_flight.sealed_at > _HUNG_S:
            logger.warning(
                "rank %d: the checkpoint agent has not recorded step %d for %.0f s; it is ended",
                self.rank,
                in_flight.ticket.step,
                time.monotonic() - in_flight.sealed_at,
            )
            parts.session.client.give_up_agent()
        return f"step {in_flight.ticket.step} is not recorded yet; save less often or look at the agent's log"

    def _agree(self, parts: _Parts, topic: str) -> Agree:
        return Agree(coordinator=parts.coordinator, topic=f"plan/{topic}", timeout=self.options.agree_timeout)

    def fence(self) -> float:
        """Waits until no pending copy reads live tensors; call it before anything changes them. Each step of an
        optimizer of torch calls it by itself.

        A lazily copied save is committed once this thread has verified that nothing changed during the copy: here, or
        in :meth:`settle`. If something has changed, the save is given up.

        Collective: no. Blocks: for the rest of the copy, with which this thread helps; not when nothing is pending.

        Returns:
            Seconds spent here.

        Raises:
            Timeout: the copy did not finish within ``options.fence_timeout``, and up to 10 s more.
        """
        parts = self._opened
        if self.is_forked:
            return 0.0  # a child has none of the copies, and must not write to the parent's file
        in_flight = parts.saves.in_flight if parts is not None else None
        if parts is None or in_flight is None or in_flight.snapshot is None:
            return 0.0
        snapshot = in_flight.snapshot
        try:
            with traced(in_flight.trace, "wait at the fence"):
                waited = parts.copier.fence(snapshot, deadline_s=self.options.fence_timeout.total_seconds())
        finally:
            if snapshot.decided:  # else Ctrl-C came first, and the next fence waits for the rest
                in_flight.snapshot = None
        if snapshot.slot is not None:
            parts.arena.learn(snapshot.slot)
        if snapshot.failure is not None:
            in_flight.failure = snapshot.failure
            parts.saves.process_messages()
        elif waited > 1e-3:
            parts.session.events.emit(EventKind.CHECKPOINT_FENCED, step=in_flight.ticket.step, stall_s=round(waited, 6))
        return waited

    def _before_any_step(self, optimizer: Optimizer, with_closure: bool) -> None:
        if not self.pending:
            return
        if threading.get_ident() == self._saving_thread:
            if self.before_step is None:
                self.fence()
            else:
                self.before_step(optimizer, with_closure)
            return
        # An optimizer that backward's hooks step runs on a thread of autograd, while the saving thread waits for it.
        # The saving thread's next fence does the rest.
        parts = self._opened
        in_flight = parts.saves.in_flight if parts is not None and not self.is_forked else None
        snapshot = in_flight.snapshot if in_flight is not None else None
        if parts is not None and snapshot is not None and snapshot.reads(optimizer):
            parts.copier.fence(snapshot, deadline_s=self.options.fence_timeout.total_seconds())

    @property
    def pending(self) -> bool:
        """True while a copy may still read live tensors, so that :meth:`fence` may wait."""
        in_flight = self._opened.saves.in_flight if self._opened is not None else None
        return in_flight is not None and in_flight.snapshot is not None

    def settle(self) -> None:
        """Lets a late copy that is done be committed now, instead of at the fence. Call it where nothing is changing
        the tensors, for example between forward and backward of a long step; :meth:`poll` calls it.

        Collective: no. Blocks: no.
        """
        in_flight = self._opened.saves.in_flight if self._opened is not None and not self.is_forked else None
        if in_flight is not None and in_flight.snapshot is not None:
            in_flight.snapshot.settle()

    def poll(self) -> list[Outcome]:
        """Outcomes of earlier saves since the last call. Collective: no. Blocks: no."""
        if self._opened is None or self.is_forked:
            return []
        self.settle()
        saves = self._opened.saves
        saves.process_messages()
        return saves.outcomes()

    def delete(self, *names: str) -> None:
        """Requests the deletion of names, and of steps left without a name, once the newest save so far is durable; on
        a ramdisk: committed.

        Collective: no, but every rank calls it: each host deletes its own part. Blocks: no.
        """
        names = checked_names("names", names)
        parts = self._parts()
        in_flight = parts.saves.in_flight
        if in_flight is not None and in_flight.sealed_at is None:
            in_flight.supersedes.extend(names)  # stored in the manifest, so done even when this process is killed
        parts.session.client.send(Delete(names=names, after=parts.saves.newest))

    def flush(
        self,
        stage: Stage = Stage.DURABLE,
        *,
        tier: str | None = None,
        timeout: timedelta = timedelta(minutes=10),
    ) -> bool:
        """Waits until this host's agent has brought every save so far to ``stage``, or as far as the save's tiers
        allow.

        Collective: no. Blocks: up to ``timeout``.

        Args:
            stage: RECORDED: this rank's shards are recorded; COMMITTED: those of the other ranks, too; DURABLE: durable
                on every tier the save goes to. On a ramdisk, where a save is never durable, DURABLE waits for
                COMMITTED.
            tier: for DURABLE: only this tier ("local", or the name of a remote one).

        Returns:
            False when ``timeout`` passed first, or when other ranks did not record their shards, or other hosts did not
            send them to a remote tier, within 30 s (they exited); a later call does not wait for the same parts again.
            A save that one of them has given up is not waited for.
        """
        return self._flush(stage, tier, timeout, others_s=_OTHERS_S)

    def _flush(self, stage: Stage, tier: str | None, timeout: timedelta, *, others_s: float) -> bool:
        checked_stage(stage)
        known = [LOCAL, *(remote.name for remote in self._remotes)]
        if tier is not None and tier not in known:
            raise ConfigError(f"tier={tier!r}; pass one of {known}, or None for all")
        parts = self._opened
        if parts is None or self.is_forked:
            return True
        client, saves = parts.session.client, parts.saves
        deadline = time.monotonic() + timeout.total_seconds()
        self.fence()
        # After the last copy, the end of the file is written and the agent gets its message.
        if not parts.copier.wait_idle(timeout.total_seconds()):
            return False

        def flushed() -> bool:
            left = max(0.0, deadline - time.monotonic())
            done = to_thread(lambda: client.flush(stage, tier=tier, timeout_s=left), patience_s=0.0)
            saves.process_messages()
            return done

        done = flushed()
        if stage in (Stage.COPIED, Stage.RECORDED):
            return done
        began = time.monotonic()
        while done and (missing := saves.parts_of_others(stage, tier)):
            # Counted from the first flush that waited: at the end of a job several come one after the other.
            self._awaited = {part: self._awaited.get(part, began) for part in missing}
            left = min(deadline, max(self._awaited.values()) + others_s) - time.monotonic()
            if left <= 0:
                return False
            saves.wait(left)
            if not saves.parts_of_others(stage, tier):
                done = flushed()
        return done

    def _wait(self, ticket: Ticket, stage: Stage, tier: str | None, timeout_s: float) -> None:
        parts = self._opened
        assert parts is not None  # because there is a ticket
        self._refuse_forked()
        deadline = time.monotonic() + timeout_s
        if parts.saves.in_flight is not None and parts.saves.in_flight.ticket is ticket:
            self.fence()
        while not ticket.has_reached(stage, tier=tier) and not ticket.is_hopeless(stage, tier=tier):
            left = deadline - time.monotonic()
            if left <= 0:
                return
            parts.saves.wait(left)

    def close(
        self, *, flush: bool = True, timeout: timedelta = timedelta(minutes=10), reason: str = "finished"
    ) -> None:
        """Waits for sealed saves, disconnects from the agent and ends the threads. Idempotent.

        Collective: no. Blocks: up to ``timeout`` for uploads when ``flush``, otherwise for a copy in progress; and some
            seconds for the agent to exit.
        """
        if self._closed:
            return
        self._closed = True
        if self.is_forked:
            return  # a child has neither the threads nor the connection
        parts = self._opened
        if parts is None:
            return
        done = not flush
        try:
            if flush:
                # When this rank fails, the others may be gone already.
                others_s = _OTHERS_S if reason == "finished" else _FAILED_S
                done = self._flush(Stage.DURABLE, None, timeout, others_s=others_s)
            else:
                self.fence()
            if not done:
                logger.warning(
                    "rank %d: not every save was durable in time; the agent goes on for up to %s, and the next start"
                    " resumes uploads",
                    self.rank,
                    self.options.drain_timeout,
                )
        finally:
            # It goes on by itself when Ctrl-C comes meanwhile.
            to_thread(lambda: self._end_cleanly(parts, reason, patient=flush and done, done=done))

    def _end_cleanly(self, parts: _Parts, reason: str, *, patient: bool, done: bool) -> None:
        try:
            self._end(parts, reason, patient=patient, done=done)
        except Exception:  # Boundary: what is saved is safe, and the caller is about to end.
            logger.warning(
                "rank %d: the checkpoint engine did not close cleanly; the agent finishes the saves it has",
                self.rank,
                exc_info=True,
            )

    def _end(self, parts: _Parts, reason: str, *, patient: bool, done: bool) -> None:
        session = parts.session
        idle_s = _IDLE_AGENT_S if done else _BUSY_AGENT_S
        if done and session.client.config.only_files:
            idle_s = _FILES_AGENT_S
        if reason != "finished" and self.world_size > 1:
            idle_s = min(idle_s, _FAILED_S)
        # Where the agent removes its folder at the end, a script that lists the directory afterwards must find that
        # done.
        others_s = idle_s if session.client.config.only_files else 0.0
        with ExitStack() as last_first:  # all of it, also when one of these fails
            last_first.callback(session.events.close)
            last_first.callback(parts.saves.summarise)
            last_first.callback(parts.saves.process_messages)
            last_first.callback(session.client.close, timeout_s=idle_s, others_s=others_s)
            last_first.callback(session.client.send, Bye(finished=reason == "finished"))
            # Where the agent removes its folder at the end, an event that is written for the first time after that
            # would make it anew.
            last_first.callback(session.events.drain)
            last_first.callback(parts.arena.close)
            last_first.callback(parts.copier.close)
            if self._step_hook is not None:
                last_first.callback(self._step_hook.remove)
            session.events.emit(EventKind.JOB_TERMINATED, reason=reason)
            deadline = time.monotonic() + _TRACES_S
            for trace in parts.traces:
                left = max(0.0, deadline - time.monotonic())
                trace.close(timeout_s=left, patience_s=left / 2 if patient else 0.0)

    def __enter__(self) -> Checkpointer:
        self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(reason="finished" if kind is None else "exception")

    # -- load -----------------------------------------------------------------------------------------------------

    def load(
        self,
        *,
        into: Any = None,
        step: StepId | None = None,
        allow_pickle: bool = False,
        keys: Callable[[str], bool] | None = None,
        reads: Callable[[Sequence[Chunk]], Sequence[Read] | ReadPlan] | None = None,
        inventory: Inventory | None = None,
    ) -> Restored | None:
        """Restores the newest step of which every host can get all shards, or ``step``.

        Collective: yes. Blocks: up to ``options.agree_timeout`` for the other ranks, plus reading and checking. Every
            byte is compared with its digest. A bad copy is replaced from the next tier; when a step has no good copy
            left, an older step is restored (unless ``step`` was given).

        Args:
            into: a state tree whose tensors (plain or DTensor) are filled in place; None: new CPU tensors are made,
                whole ones on every rank, also where the save had DTensors.
            step: the step to load; None: the newest. What is saved after loading an older step counts as newer than all
                that was saved before, whatever its number.
            allow_pickle: also restore objects of unknown classes. Only for checkpoints you trust.
            keys: with ``into=None``: load only tensors whose key passes; the others become empty tensors.
            reads: instead of ``into`` and ``keys``: called with every chunk that the step stores, returns the copies to
                make (:class:`~resiliency.checkpoint.read_plan.Read`). Called again when another copy or step is tried.
                All tensors of the restored state are then empty, except those of a whole
                :class:`~resiliency.checkpoint.read_plan.ReadPlan`. An exception that it raises becomes a ConfigError.
            inventory: what :meth:`inventory` has just returned, so that the tiers are not listed again; the same on all
                ranks. None: they are listed.

        Returns:
            What was restored, or None when there is no checkpoint.

        Raises:
            CorruptShard: ``step`` was given and has no good copy, or every step is damaged; names the files. The
                tensors to be filled then hold undefined values.
            ConfigError: the checkpoint does not fit ``into`` or ``reads``, or more than one way to fill was given.
            TierError, Timeout: storage or another rank failed.
        """
        if step is not None and not isinstance(step, StepId):
            raise TypeError(
                f"step is a {type(step).__name__}; pass a StepId as listed by steps(), or None for the newest"
            )
        if sum(way is not None for way in (into, keys, reads)) > 1:
            raise ConfigError("pass one of into=, keys= and reads=")
        planner = plan_given(reads) if reads is not None else plan_into(into) if into is not None else None
        planner = plan_new(keys) if keys is not None else planner
        parts = self._parts()
        self.fence()
        newest = parts.saves.newest
        restored = to_thread(
            lambda: parts.restorer.load(
                planner=planner, step=step, allow_pickle=allow_pickle, saved=newest, inventory=inventory
            )
        )
        if restored is not None:
            parts.schedule.loaded(restored.id.step)
        return restored

    def steps(self) -> list[tuple[StepId, tuple[str, ...]]]:
        """Steps that could be restored now, newest first, with their names. Collective: yes.

        Their digests are not checked here; :meth:`load` does that.
        """
        return list(self.inventory().steps)

    def inventory(self) -> Inventory:
        """What all tiers hold now: :meth:`steps`, and what cannot be restored. Collective: yes. Blocks: for one listing
        of each tier.

        Raises:
            TierError: some tiers could not be listed, and no checkpoint was found on the others.
        """
        parts = self._parts()
        newest = parts.saves.newest
        return to_thread(lambda: parts.restorer.inventory(newest))


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """The parts of an open checkpointer."""

    session: Session
    coordinator: Coordinator
    arena: Arena
    copier: Copier
    saves: SaveTracker
    copies: SaveCopies
    schedule: RemoteSchedule
    restorer: Restorer
    traces: list[SaveTrace] = dataclasses.field(default_factory=list)  # some of them are still being written


@dataclass(frozen=True, kw_only=True)
class _Request:
    """The arguments of :meth:`Checkpointer.save`."""

    step: int
    per_rank: Any
    names: tuple[str, ...]
    supersedes: tuple[str, ...]
    info: Mapping[str, Any]
    exact: bool
    lazy: Wanted
    replicated: Callable[[Tensor], bool] | None
    beside: Mapping[str, Any] | None
    everywhere: bool
    trace: SaveTrace | None


def _store_options(remote: RemoteTierOptions) -> dict[str, Any]:
    return {"storage_options": dict(remote.storage_options)} if remote.storage_options else {}


def default_coordinator(rank: int, world_size: int) -> Coordinator:
    """A coordinator over the default process group's store, with keys of its own. Collective: all ranks call in the
    same order.

    Raises:
        ConfigError: there is no default process group.
    """
    if world_size == 1:
        return SoloCoordinator()
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise ConfigError(
            f"world_size={world_size}, but torch.distributed is not initialised; call init_process_group first, or"
            " pass coordinator="
        )
    store = torch.distributed.distributed_c10d._get_default_store()
    # The prefix must be unique: the default store may outlive an attempt (torchrun keeps its own), and a process may
    # open several checkpointers, in the same order on every rank. The store cannot count starts, because a rank can die
    # before it is counted. Where rank 0 makes a new store for each start, the restart count is left out: it is not
    # needed, and differs between hosts, each of which counts the restarts that its own ranks have caused.
    settings = environment()
    restart = settings.restart if settings.keeps_store else 0
    prefix = f"resiliency/{restart}/{next(_opened[settings.start])}"
    return StoreCoordinator(store, rank=rank, world_size=world_size, prefix=prefix)


#: Start of this process -> numbers of its checkpointers. A process that goes on in another attempt counts from zero
#: again, like the new processes that it meets.
_opened: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
