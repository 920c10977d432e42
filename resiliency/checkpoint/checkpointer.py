"""The facade: the one class a torch user must know.

::

    checkpointer = Checkpointer("/ckpts")
    restored = checkpointer.load()                      # None at the first start
    ...
    checkpointer.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    ...
    checkpointer.close()
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from resiliency import faultpoints
from resiliency.agent.protocol import MAX_SERIAL, step_token
from resiliency.checkpoint import restore
from resiliency.checkpoint._arguments import checked_info, checked_names, checked_step, refuse_same_folder
from resiliency.checkpoint._cuda import pin
from resiliency.checkpoint.arena import Arena, Slot
from resiliency.checkpoint.exchange import Exchange, SoloExchange, StoreExchange
from resiliency.checkpoint.layout import Chunk, ShardLayout, make_layout, objects_reserve, stamp
from resiliency.checkpoint.manifest import ARENA_DIR, META_DIR, ShardRecord, StepId
from resiliency.checkpoint.options import CheckpointerOptions, LocalTierOptions, RemoteTierOptions
from resiliency.checkpoint.plan import WritePlan, describe, fingerprint, is_sharded, plan_replicated, plan_writes
from resiliency.checkpoint.policy import crossed
from resiliency.checkpoint.session import Session, open_session
from resiliency.checkpoint.snapshot import Copier, Copy, Snapshot
from resiliency.checkpoint.state import dtype_name, flatten
from resiliency.checkpoint.ticket import Outcome, Ticket
from resiliency.checkpoint.tiers import open_tier
from resiliency.checkpoint.tiers.local import LocalTier
from resiliency.errors import ConfigError, CorruptShard, NoCheckpointFound, TierError
from resiliency.events import EventKind, EventSink
from resiliency.settings import environment

__all__ = ["Checkpointer", "CheckpointerOptions", "Outcome", "Restored", "Ticket"]

logger = logging.getLogger(__name__)

#: The agent is taken for hung when it has not recorded a sealed shard for this long.
_HUNG_S = 60.0
_MAPPED_SLOTS = 3
#: How long a flush waits for other ranks to record their shards once this one is done.
_OTHERS_S = 30.0
_MAX_ROUNDS = 50


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


@dataclass
class _Planned:
    """A cached write plan and, per set of per-rank tensors, the layout made from it."""

    fingerprint: int
    plan: WritePlan
    layout: ShardLayout | None = None
    layout_key: object = None
    reserve: int = 0


@dataclass
class _InFlight:
    ticket: Ticket
    slot: Slot
    snapshot: Snapshot | None = None
    sealed_at: float | None = None
    supersedes: list[str] = field(default_factory=list)
    undo: Callable[[], None] | None = None  # forgets that this save was to go to slower tiers


class Checkpointer:
    """Saves and restores a training state on one or more tiers.

    Args:
        directory: folder of the local tier, or :class:`LocalTierOptions`. Its files are memory-mapped.
        remotes: further tiers the agent uploads to.
        run: name of the run; None: ``RESILIENCY_RUN``, ``JOB_IDENTIFIER`` or "default". Runs share nothing.
        rank, world_size: of this process; None: ``RANK`` and ``WORLD_SIZE``.
        exchange: how ranks talk at start and restore; None: over the default store of ``torch.distributed``.
        options: behaviour.
        sinks: further places for events; the log below the directory is always written.

    Threads: call everything from the training thread. Two background threads are owned: one copies, one listens.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | LocalTierOptions,
        *,
        remotes: Sequence[RemoteTierOptions] = (),
        run: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        exchange: Exchange | None = None,
        options: CheckpointerOptions | None = None,
        sinks: Sequence[EventSink] = (),
    ) -> None:
        if not isinstance(directory, (str, os.PathLike, LocalTierOptions)):
            raise TypeError(f"directory is a {type(directory).__name__}; pass a path or LocalTierOptions")
        self._environment = environment()
        self._local = directory if isinstance(directory, LocalTierOptions) else LocalTierOptions(directory=os.fspath(directory))
        if isinstance(remotes, (str, RemoteTierOptions)) or not all(isinstance(remote, RemoteTierOptions) for remote in remotes):
            raise TypeError("remotes must be a list of RemoteTierOptions(address=...)")
        if options is not None and not isinstance(options, CheckpointerOptions):
            raise TypeError(f"options is a {type(options).__name__}; pass CheckpointerOptions(...)")
        self._remotes = tuple(remotes)
        refuse_same_folder(self._local.directory, [remote.address for remote in self._remotes])
        if len({r.name for r in self._remotes}) != len(self._remotes):
            raise ConfigError("two remote tiers have the same name; give each its own")
        self.run = run or self._environment.run
        if "/" in self.run or self.run in ("", ".", ".."):
            raise ConfigError(f"run={self.run!r} must be usable as a folder name; leave out slashes")
        self.rank = self._environment.rank if rank is None else rank
        self.world_size = self._environment.world_size if world_size is None else world_size
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(f"rank={self.rank} is not within world_size={self.world_size}")
        self.options = options or CheckpointerOptions()
        self._sinks = tuple(sinks)
        self._exchange = exchange
        self._tier = LocalTier(self._local.directory, durable=False)
        self._remote_tiers = [
            open_tier(r.address, name=r.name, **({"storage_options": dict(r.storage_options)} if r.storage_options else {}))
            for r in self._remotes
        ]
        self._session: Session | None = None
        self._arena: Arena | None = None
        self._copier: Copier | None = None
        self._planned: _Planned | None = None
        self._in_flight: _InFlight | None = None
        self._tickets: dict[tuple[int, int], Ticket] = {}
        self._serials: dict[int, int] = {}
        self._uncounted: set[tuple[int, int]] = set()
        self._outcomes: list[Outcome] = []
        self._doomed: list[str] = []
        self._last_sent: dict[str, int | None] = {}
        self._last_sent_at: dict[str, float] = {}
        self._saves = 0
        self._closed = False
        self.skipped = 0

    # -- start ----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Agrees with the other ranks on the attempt and connects to the agent; called by the first use otherwise.

        Collective: yes. Blocks: up to ``options.agree`` plus the agent's start (about 0.1 s).

        Raises:
            TierError, AgentError, Timeout: nothing can be saved or restored; the message says why.
        """
        if self._closed:
            raise ConfigError("this Checkpointer is closed; make a new one")
        if self._session is not None:
            return
        if self._exchange is None:
            self._exchange = _default_exchange(self.rank, self.world_size)
        self._session = open_session(
            local=self._local, remotes=self._remotes, remote_tiers=self._remote_tiers, local_tier=self._tier, run=self.run,
            exchange=self._exchange, options=self.options, environment=self._environment, sinks=self._sinks,
        )  # fmt: skip
        self._arena = Arena(os.path.join(self._local.directory, META_DIR, self.run, ARENA_DIR), self.rank)
        self._copier = Copier()
        self._session.events.emit(
            EventKind.JOB_STARTED, pid=os.getpid(), world_size=self.world_size, restart=self._environment.restart,
            node_rank=sorted(set(self._session.nodes)).index(self._session.node),
        )  # fmt: skip

    @property
    def session(self) -> Session:
        """This attempt; opens it when it is not yet."""
        self.open()
        assert self._session is not None
        return self._session

    @property
    def directory(self) -> str:
        """Folder of the local tier."""
        return self._local.directory

    def warm_up(self, state: Any = None, *, nbytes: int | None = None, slots: int = 2) -> None:
        """Makes shard files and touches their pages, so that the first save costs what every other does.

        Collective: yes (it opens the checkpointer). Blocks: first touch, about 1-3 s per GiB and slot.

        Args:
            state: a state like those that will be saved; its tensors are only looked at.
            nbytes: or the expected size of this rank's shard.
            slots: how many; a save needs one while the step before it is still being committed.
        """
        self.open()
        if nbytes is None:
            if state is None:
                raise ConfigError("warm_up needs the state that will be saved, or nbytes=")
            flat = flatten(state)
            small, large = self._split(flat.tensors)
            layout = self._layout(self._plan(large), small, {}, len(json.dumps(flat.skeleton)))
            nbytes = layout.nbytes
        self._warm(nbytes, slots)

    def warm_up_for(self, tensors: Mapping[str, Tensor], *, slots: int = 2) -> None:
        """As :meth:`warm_up`, for tensors by key that may be on the meta device (a state that does not exist yet)."""
        _, large = self._split(dict(tensors))
        plan = plan_replicated(describe(large, world_size=self.world_size), rank=self.rank, world_size=self.world_size)
        # Room for the header, the Python objects and what is small; a slot that is too large is shortened for free.
        self._warm(int(sum(chunk.nbytes for chunk in plan.chunks) * 1.02) + (1 << 20), slots)

    def _warm(self, nbytes: int, slots: int) -> None:
        session = self.session
        assert self._arena is not None
        try:
            self._arena.adopt()
            while self._arena.free < slots:
                self._arena.grow(nbytes)
        except TierError as error:
            # The first save will say the same again, with its step; training must start.
            session.events.emit(EventKind.CHECKPOINT_FAILED, reason=str(error), tier="local", will_retry=True)
            logger.warning("rank %d: no shard file could be prepared: %s; the first save tries again", self.rank, error)

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
        lazy: bool | Callable[[str, Tensor], bool] = False,
        replicated: Callable[[str, Tensor], bool] | None = None,
    ) -> Ticket | None:
        """Takes a checkpoint. Every rank calls it at the same step.

        Collective: no talk between ranks, except at the first save of a sharded (DTensor) structure.
        Blocks: the copy of what is not lazy; up to ``options.busy_wait`` when the previous save is not recorded yet.
        Safe after return: everything when ``lazy`` is False. Otherwise lazy tensors must not change before
        :meth:`fence` returns; the Python objects, the small tensors and everything not lazy may.

        Args:
            step: number of the optimizer step, >= 0.
            state: any tree of dicts, lists, tuples, tensors and Python objects. Plain tensors are taken to be equal on
                all ranks; each rank writes its share of them. DTensors are written as they are sharded.
            per_rank: a tree that differs from rank to rank (RNG, data loader); each rank gets its own back.
            names: names by which the step can be loaded, relative to the directory ("step=100.ckpt").
            supersedes: names to be deleted once this step is committed.
            info: small JSON-able facts shown by listings.
            lazy: True, or a function of (key, tensor) that says which tensors may be copied in the background.
            replicated: a function of (key, tensor) that says which plain tensors are equal on all ranks, so that each rank
                may write a share of them; rank 0 writes the others. None: all are.

        Returns:
            A ticket, or None when the save was skipped (counted in ``skipped``, with an event and a warning).

        Raises:
            ConfigError: a state that cannot be stored, or wrong arguments. Failures of storage do not raise: they are
                reported by :meth:`poll`, an event and one warning.
        """
        began = time.monotonic()
        step = checked_step(step)
        names, supersedes = checked_names("names", names), checked_names("supersedes", supersedes)
        info = checked_info(info)
        session = self.session
        faultpoints.hit("save.begin", rank=self.rank)
        serial = self._serials.get(step, 0)
        if serial > MAX_SERIAL:
            raise ConfigError(f"step {step} was saved {serial} times in this attempt; pass a step that counts up")
        self.fence()
        self._pump()
        if not self._wait_for_previous(step):
            return None
        flat = flatten(state)
        own = flatten(per_rank)
        small, large = self._split(flat.tensors, replicated)
        plan = self._plan(large)
        objects = json.dumps(
            {"state": flat.skeleton if self.rank == 0 else None, "per_rank": own.skeleton, "info": dict(info or {})},
            separators=(",", ":"), allow_nan=True,
        ).encode()  # fmt: skip
        layout = self._layout(plan, small, own.tensors, len(objects))
        slot = self._slot(step, layout.nbytes)
        if slot is None:
            return None
        about = {"step": step, "serial": serial}
        ticket = Ticket(step, serial, layout.nbytes, tuple(names), self._wait)
        self._tickets[step, serial] = ticket
        self._serials[step] = serial + 1
        flight = self._in_flight = _InFlight(ticket, slot, supersedes=list(supersedes))
        created = time.time()
        sent_before = dict(self._last_sent)
        due = self._due(step)
        flight.undo = lambda: self._last_sent.update({tier: sent_before.get(tier) for tier in due})
        session.client.send(
            {"t": "begin", **about, "path": slot.path, "inode": slot.inode, "nbytes": slot.nbytes}
        )  # fmt: skip

        def progress(upto: int) -> None:
            session.client.send({"t": "progress", **about, "upto": upto})

        def done(snapshot: Snapshot) -> None:
            if snapshot.error is not None:
                session.client.send({"t": "abort", **about})
                return
            faultpoints.hit("save.sealed", rank=self.rank)
            flight.sealed_at = time.monotonic()
            ticket.reached.add("copied")
            session.client.send(
                {
                    "t": "seal", **about, "path": slot.path, "inode": slot.inode, "nbytes": slot.nbytes, "plan": plan.digest,
                    "names": list(names), "supersedes": list(flight.supersedes), "created": created, "info": dict(info or {}),
                    "tiers": due,
                }
            )  # fmt: skip

        try:
            if not slot.pinned and any(t.device.type == "cuda" for t in flat.tensors.values()):
                slot.pinned = pin(slot.address, slot.capacity)
            copies, lazy_bytes = self._copies(flat.tensors, own.tensors, layout, (step, serial), objects, lazy)
            faultpoints.hit("save.eager", rank=self.rank)
            assert self._copier is not None
            with slot.view() as view:
                flight.snapshot = self._copier.start(copies, mapping=view, address=slot.address, on_progress=progress, on_done=done)
            faultpoints.hit("save.fill", rank=self.rank)
            if lazy is False:
                self.fence()
        except BaseException:
            # The caller sees it; the next save must not wait for this one.
            if flight.snapshot is not None:
                self.fence()
            elif self._in_flight is flight:
                session.client.send({"t": "abort", **about})
                self._fail(flight, "the save was interrupted by an error")
                self._return(slot)
            raise
        self._saves += 1
        ticket.stall_s = time.monotonic() - began
        session.events.emit(
            EventKind.CHECKPOINT_STARTED, step=step, stall_s=round(ticket.stall_s, 6), bytes=layout.nbytes, lazy_bytes=lazy_bytes
        )
        return ticket

    def fence(self) -> float:
        """Waits until no pending copy reads live tensors; call before anything changes them.

        Collective: no. Blocks: what is left of the copy, which this thread helps with; 0 when nothing is pending.

        Returns:
            Seconds it took.
        """
        flight = self._in_flight
        if flight is None or flight.snapshot is None:
            return 0.0
        snapshot, flight.snapshot = flight.snapshot, None
        assert self._copier is not None
        waited = self._copier.fence(snapshot, deadline_s=self.options.fence.total_seconds())
        if snapshot.error is not None:
            self._fail(flight, f"copy failed: {snapshot.error}")
            self._return(flight.slot)
        elif waited > 1e-3 and self._session is not None:
            self._session.events.emit(EventKind.CHECKPOINT_FENCED, step=flight.ticket.step, stall_s=round(waited, 6))
        return waited

    @property
    def pending(self) -> bool:
        """True while live tensors may still be read, so that :meth:`fence` has something to do."""
        return self._in_flight is not None and self._in_flight.snapshot is not None

    def poll(self) -> list[Outcome]:
        """News about earlier saves since the last call. Collective: no. Blocks: no."""
        self._pump()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def delete(self, *names: str) -> None:
        """Asks for names to be deleted once the newest save so far is safe. Steps nothing refers to any more go with them.

        Collective: no, but every rank calls it: each host deletes its own part. Blocks: no.
        """
        checked_names("names", names)
        newest, serial = max(self._tickets, default=(-1, 0))  # -1: nothing saved yet, what is on disk is safe
        flight = self._in_flight
        if flight is not None and flight.sealed_at is None:
            flight.supersedes.extend(names)  # becomes part of the manifest, so it is done even if we die
        self.session.client.send({"t": "delete", "names": list(names), "after": newest, "serial": serial})

    def flush(self, level: str = "durable", *, timeout: timedelta = timedelta(minutes=10)) -> bool:
        """Waits until every save so far is "recorded" (this rank's shard is safe), "committed" (so are the others'), "durable" or
        "uploaded", as far as this host's agent is concerned.

        Collective: no. Returns False when ``timeout`` passed first, or when other ranks did not record a shard within half a
        minute after this one (they failed, or are gone).
        """
        if level not in ("recorded", "committed", "durable", "uploaded"):
            raise ConfigError(f"level={level!r}; pass 'recorded', 'committed', 'durable' or 'uploaded'")
        if self._session is None:
            return True
        deadline = time.monotonic() + timeout.total_seconds()
        self.fence()
        done = self._session.client.flush("committed" if level == "recorded" else level, timeout_s=timeout.total_seconds())
        self._pump()
        if level == "recorded":
            return done
        others = min(deadline, time.monotonic() + _OTHERS_S)
        while self._uncounted and done:
            # Several agents: completeness is learnt from the other ranks' counts.
            left = others - time.monotonic()
            if left <= 0:
                return False
            self._session.client.wait_message(min(left, 0.05))
            self._pump()
            if not self._uncounted:
                done = self._session.client.flush(level, timeout_s=max(0.0, deadline - time.monotonic()))
        self._pump()
        return done

    def close(self, *, flush: bool = True, timeout: timedelta = timedelta(minutes=10), reason: str = "finished") -> None:
        """Finishes what is sealed, leaves the agent and ends the threads. Idempotent.

        Collective: no. Blocks: up to ``timeout`` for uploads when ``flush``; a copy in progress otherwise.
        """
        if self._closed:
            return
        self._closed = True
        session = self._session
        if session is None:
            return
        try:
            if flush and not self.flush("uploaded", timeout=timeout):
                logger.warning("rank %d: not everything was uploaded within %s; the next start resumes it", self.rank, timeout)
            else:
                self.fence()
        finally:
            session.events.emit(EventKind.JOB_TERMINATED, reason=reason)
            if self._copier is not None:
                self._copier.close()
            if reason == "finished":
                session.client.send({"t": "bye"})
            session.client.close()
            self._pump()
            if self._arena is not None:
                self._arena.close()
            session.events.close()

    def __enter__(self) -> Checkpointer:
        self.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close(reason="finished" if kind is None else "exception")

    # -- pieces of a save -------------------------------------------------------------------------------------------

    def _plan(self, tensors: Mapping[str, Tensor]) -> WritePlan:
        mark = fingerprint(tensors)
        if self._planned is None or self._planned.fingerprint != mark:
            mine = describe(tensors, world_size=self.world_size)
            if self.world_size > 1 and any(is_sharded(t) for t in tensors.values()):
                assert self._exchange is not None
                said = self._exchange.all("plan", json.dumps(mine).encode(), timeout=self.options.agree)
                plan = plan_writes([json.loads(data) for data in said], rank=self.rank)
            else:
                plan = plan_replicated(mine, rank=self.rank, world_size=self.world_size)
            self._planned = _Planned(mark, plan)
        return self._planned.plan

    def _split(
        self, tensors: Mapping[str, Tensor], replicated: Callable[[str, Tensor], bool] | None = None
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Plain tensors that rank 0 writes for all (small ones, and those not replicated), and the rest, which is shared out.

        Callbacks and metrics may hold small tensors on some ranks only; the shared plan must not depend on them.
        """
        small: dict[str, Tensor] = {}
        large: dict[str, Tensor] = {}
        for key, tensor in tensors.items():
            alone = not is_sharded(tensor) and (
                tensor.numel() * tensor.element_size() < self.options.lazy_bytes or (replicated is not None and not replicated(key, tensor))
            )
            (small if alone else large)[key] = tensor
        return small if self.rank == 0 else {}, large

    def _layout(
        self, plan: WritePlan, small: Mapping[str, Tensor], own: Mapping[str, Tensor], objects_nbytes: int
    ) -> ShardLayout:
        planned = self._planned
        assert planned is not None
        key = tuple((name, t.dtype, tuple(t.shape)) for group in (small, own) for name, t in group.items())
        if planned.layout is None or planned.layout_key != key or planned.reserve < objects_nbytes:
            planned.layout_key, planned.reserve = key, max(planned.reserve, objects_reserve(objects_nbytes))
            chunks = [*plan.chunks]
            for group, per_rank in ((small, False), (own, True)):
                for name, tensor in group.items():
                    shape = tuple(tensor.shape)
                    dtype, size = dtype_name(tensor.dtype), tensor.element_size()
                    chunks.append(Chunk(name, (0,) * len(shape), shape, dtype, size, shape, per_rank=per_rank))
            planned.layout = make_layout(
                chunks, objects_nbytes=planned.reserve,
                meta={"run": self.run, "rank": self.rank, "world_size": self.world_size, "plan": plan.digest},
            )  # fmt: skip
        return planned.layout

    def _copies(
        self, shared: Mapping[str, Tensor], own: Mapping[str, Tensor], layout: ShardLayout, about: tuple[int, int], objects: bytes,
        lazy: bool | Callable[[str, Tensor], bool],
    ) -> tuple[list[Copy], int]:  # fmt: skip
        """Everything that goes into the file, in file order, and the bytes that may be copied late.

        This thread never writes to the mapping: while the file system commits its journal (an fsync of the step before),
        even one byte there can wait for tens of milliseconds. What must be taken now is taken into private memory.
        """
        session = self.session
        step, serial = about
        header = bytearray(layout.header)
        mark = stamp(step, session.attempt, step_token(session.token, serial))
        header[layout.stamp_at : layout.stamp_at + len(mark)] = mark
        copies = [Copy(torch.frombuffer(header, dtype=torch.uint8), 0)]
        lazy_bytes = 0
        for placed in layout.placed:
            chunk = placed.chunk
            nbytes = placed.end - placed.start
            source = own[chunk.key] if chunk.per_rank else _box(shared[chunk.key], chunk)
            if lazy is False:
                # Takes the same road with a fence at its end, so that two threads share the copy.
                copies.append(Copy(source, placed.start))
            elif not chunk.per_rank and nbytes >= self.options.lazy_bytes and (lazy is True or lazy(chunk.key, shared[chunk.key])):
                copies.append(Copy(source, placed.start))
                lazy_bytes += nbytes
            elif nbytes:
                copies.append(Copy(source.detach().clone(memory_format=torch.contiguous_format), placed.start))
        start, end = layout.objects
        copies.append(Copy(torch.frombuffer(bytearray(objects.ljust(end - start)), dtype=torch.uint8), start))
        return copies, lazy_bytes

    def _wait_for_previous(self, step: int) -> bool:
        """Waits for the rank's previous shard to be recorded; skips this save when it is not in time."""
        flight = self._in_flight
        if flight is None:
            return True
        client = self.session.client
        deadline = time.monotonic() + self.options.busy_wait.total_seconds()
        while self._in_flight is not None and time.monotonic() < deadline:
            client.wait_message(max(0.0, deadline - time.monotonic()))
            self._pump()
        if self._in_flight is None:
            return True
        if flight.sealed_at is not None and time.monotonic() - flight.sealed_at > _HUNG_S:
            logger.warning("rank %d: the checkpoint agent has not recorded step %d for %.0f s; it is given up", self.rank,
                           flight.ticket.step, time.monotonic() - flight.sealed_at)  # fmt: skip
            client.suspect()
        self._skip(step, f"step {flight.ticket.step} is not recorded yet; save less often or look at the agent's log")
        return False

    def _slot(self, step: int, nbytes: int) -> Slot | None:
        assert self._arena is not None
        try:
            if self._arena.mapped_bytes == 0:
                self._arena.adopt()
            slot = self._arena.acquire(nbytes)
            if slot is None:
                self._arena.grow(nbytes, populate=False)
                slot = self._arena.acquire(nbytes)
            return slot
        except TierError as error:
            self._skip(step, str(error), failed=True)
            return None

    def _return(self, slot: Slot) -> None:
        assert self._arena is not None
        self._arena.release(slot.inode, slot.path)

    def _skip(self, step: int, reason: str, *, failed: bool = False) -> None:
        self.skipped += 1
        kind = EventKind.CHECKPOINT_FAILED if failed else EventKind.CHECKPOINT_SKIPPED
        self.session.events.emit(kind, step=step, reason=reason, tier="local", **({"will_retry": True} if failed else {}))
        self._outcomes.append(Outcome(step, "failed", "local", reason))
        level = logging.WARNING if self.skipped == 1 else logging.DEBUG
        logger.log(level, "rank %d: no checkpoint at step %d: %s; training goes on, the next save tries again", self.rank, step, reason)

    def _due(self, step: int) -> list[str]:
        """Names of the remote tiers this save goes to."""
        due = []
        now = time.monotonic()
        assert self._exchange is not None
        for remote in self._remotes:
            interval = remote.interval
            if interval.time is not None:
                # Rank 0 decided one save ago and everybody reads it now: at least one step lies between the two.
                topic = f"clock/{remote.name}/"
                if self._exchange.count(f"{topic}{self._saves}", 0) == 0 and self._saves > 0:
                    wanted = False
                else:
                    wanted = True
                if self.rank == 0:
                    if wanted:
                        self._last_sent_at[remote.name] = now
                    if now - self._last_sent_at.get(remote.name, now) >= interval.time.total_seconds():
                        self._exchange.count(f"{topic}{self._saves + 1}", 1)
            else:
                wanted = crossed(self._last_sent.get(remote.name), step, interval.steps or 1) if interval.steps else True
            if wanted:
                self._last_sent[remote.name] = step
                due.append(remote.name)
        return due

    # -- news from the agent --------------------------------------------------------------------------------------

    def _pump(self) -> None:
        session = self._session
        if session is None:
            return
        for message in session.client.poll():
            self._take(message)
        for step, serial in sorted(self._uncounted):
            recorded = self._count(step, serial, 0)
            if recorded is None:
                return
            if recorded >= self.world_size:
                # What is older and not whole yet never will be: a rank failed there.
                self._uncounted = {key for key in self._uncounted if key > (step, serial)}
                session.client.send({"t": "complete", "step": step, "serial": serial})

    def _count(self, step: int, serial: int, amount: int) -> int | None:
        """Ranks that have recorded a save, or None when the store is gone (rank 0 has ended): then nobody waits any more."""
        assert self._exchange is not None and self._session is not None
        try:
            return self._exchange.count(f"recorded/{self._session.token}/{step}/{serial}", amount)
        except RuntimeError as error:  # what every torch store raises
            logger.info("rank %d: the job's store is gone (%s); saves of other hosts are not waited for", self.rank, error)
            waiting, self._uncounted = self._uncounted, set()
            if self._session.client.config.shared:
                # Rank 0 has ended. What is whole can still be seen in the folder.
                for key in sorted(waiting):
                    self._session.client.send({"t": "complete", "step": key[0], "serial": key[1]})
            return None

    def _take(self, message: Mapping[str, Any]) -> None:
        kind = message["t"]
        session, arena, flight = self._session, self._arena, self._in_flight
        assert session is not None and arena is not None
        if kind == "free":
            arena.release(message["inode"], message["path"])
            return
        if kind == "gone":
            arena.forget(message["inode"])
            return
        key = (int(message.get("step", -1)), int(message.get("serial", 0)))
        ticket = self._tickets.get(key)
        current = flight is not None and ticket is not None and flight.ticket is ticket
        if kind == "recorded":
            if current:
                self._in_flight = None
            if not session.together and self.world_size > 1:
                self._uncounted.add(key)
                self._count(*key, 1)
        elif kind in ("committed", "durable") and ticket is not None:
            if message["tier"] == "local":
                ticket.reached.add(kind)
                if kind == "committed" and not self._local.durable:
                    ticket.reached.add("durable")  # as durable as a ramdisk gets
                if kind == "durable" or not self._local.durable:
                    arena.trim(_MAPPED_SLOTS)
                for old in sorted(self._tickets)[:-64]:
                    del self._tickets[old]
            self._outcomes.append(Outcome(ticket.step, kind, message["tier"], names=ticket.names, serial=ticket.serial))
        elif kind == "failed":
            names = ticket.names if ticket is not None else ()
            if ticket is not None and message["tier"] == "local":
                ticket.failed = message["reason"]
                if current and flight is not None:
                    self._in_flight = None
                    if flight.undo is not None:
                        flight.undo()  # the next save goes there instead
            self._outcomes.append(Outcome(key[0], "failed", message["tier"], message["reason"], names, key[1]))

    def _fail(self, flight: _InFlight, reason: str) -> None:
        flight.ticket.failed = reason
        if self._in_flight is flight:
            self._in_flight = None
        self.session.events.emit(EventKind.CHECKPOINT_FAILED, step=flight.ticket.step, reason=reason, tier="local", will_retry=True)
        self._outcomes.append(Outcome(flight.ticket.step, "failed", "local", reason, flight.ticket.names))
        logger.warning("rank %d: checkpoint of step %d failed: %s; training goes on", self.rank, flight.ticket.step, reason)

    def _wait(self, ticket: Ticket, level: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        if self._in_flight is not None and self._in_flight.ticket is ticket:
            self.fence()
        while level not in ticket.reached and ticket.failed is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            # With several agents completeness is a count in the store, which nothing announces.
            self.session.client.wait_message(min(left, 0.05) if self._uncounted else left)
            self._pump()

    # -- load -----------------------------------------------------------------------------------------------------

    def load(
        self, *, into: Any = None, step: StepId | None = None, allow_pickle: bool = False, keys: Callable[[str], bool] | None = None
    ) -> Restored | None:
        """Restores the newest step that every host can get whole, or ``step``.

        Collective: yes. Blocks: up to ``options.agree`` for the other ranks, plus reading and checking.
        All bytes are checked against their digests before any of them is used. A bad copy is replaced from the next
        tier; when a step has no good copy left, an older one is taken (unless ``step`` was given).

        Args:
            into: a state tree whose tensors (plain or DTensor) are filled in place; None: new CPU tensors are made
                (then the state must not hold DTensors of which no rank wants all).
            step: which step; None: the newest.
            allow_pickle: also restore objects of unknown classes. Only for checkpoints you trust.
            keys: with ``into=None``: load only tensors whose key passes.

        Returns:
            What was restored, or None when there is nothing.

        Raises:
            CorruptShard: ``step`` was given and has no good copy, or every step is damaged; names the files.
            ConfigError: the state does not fit ``into``.
            TierError, Timeout: storage or another rank failed.
        """
        if step is not None and not isinstance(step, StepId):
            raise TypeError(f"step is a {type(step).__name__}; pass a StepId as listed by steps(), or None for the newest")
        session = self.session
        began = time.monotonic()
        self.fence()
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
                + ". Restore the files from a backup, or start afresh in another directory or run", path=self.directory,
            )  # fmt: skip
        if step is not None:
            raise NoCheckpointFound(f"{step} of run {self.run!r} is not complete on any tier: {self._places()}")
        if inventory:
            logger.warning("only unfinished checkpoints of run %r were found in %s; starting from scratch", self.run, self._places())
        return None

    def _places(self) -> str:
        return ", ".join([self.directory, *(tier.root for tier in self._remote_tiers)])

    def _inventory(self) -> list[restore.Holding]:
        """What all places hold, the same list on every rank."""
        session = self.session
        assert self._exchange is not None
        faultpoints.hit("restore.inventory", rank=self.rank)
        mine: list[restore.Holding] = []
        problem = ""
        try:
            if self.rank == session.local_ranks[0]:
                mine += restore.holdings(self._tier, self.run, node=session.node)
            if self.rank == 0:
                for tier in self._remote_tiers:
                    mine += restore.holdings(tier, self.run, node="")
        except TierError as error:
            problem = f"rank {self.rank}: {error}"
        data = json.dumps({"h": [h.to_list() for h in mine], "p": problem}).encode()
        answers = [json.loads(said) for said in self._exchange.all("inventory", data, timeout=self.options.agree)]
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
        session = self.session
        assert self._exchange is not None
        strikes: list[restore.Strike] = []
        messages: list[tuple[str, bool]] = []
        sources = choice.sources[session.node]
        place = session.local_ranks.index(self.rank)
        share = len(session.local_ranks)
        dirname = choice.step.dirname
        local = [rank for rank, tiers in sources.items() if tiers[0] == "local"]
        remote = [rank for rank in sources if rank not in local]
        for rank in remote[place::share]:
            self._fetch(choice, rank, sources[rank], strikes, messages)
        # The blocks of the local shards are shared out among the ranks of this host.
        for rank in local:
            try:
                faultpoints.hit("restore.verify", rank=self.rank)
                record = restore.read_record(self._tier, self.run, choice.step, rank)
                reader = restore.shard_reader(self.directory, self.run, record)
                blocks = len(record.digests)
                try:
                    bad = reader.check(blocks * place // share, blocks * (place + 1) // share)
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
        answers = [json.loads(said) for said in self._exchange.all("verified", data, timeout=self.options.agree)]
        return {(s[0], s[1], s[2], s[3]) for a in answers for s in a["s"]}, [(m[0], m[1]) for a in answers for m in a["m"]]

    def _fetch(
        self, choice: restore.Choice, rank: int, tiers: Sequence[str], strikes: list[restore.Strike],
        messages: list[tuple[str, bool]],
    ) -> None:
        for tier in self._remote_tiers:
            if tier.name not in tiers:
                continue
            try:
                restore.fetch_shard(tier, self.run, choice.step, rank, self.directory)
                self.session.events.emit(
                    EventKind.CHECKPOINT_REPAIRED, step=choice.step.step, source=tier.name, shard=rank, path=self.directory
                )
                return
            except (CorruptShard, TierError) as error:
                strikes.append((tier.name, "", choice.step.dirname, rank))
                messages.append((str(error), isinstance(error, CorruptShard)))
                self.session.events.emit(EventKind.CHECKPOINT_CORRUPT, step=choice.step.step, path=str(error), ranges=[])
                logger.warning("rank %d: %s; trying the next copy", self.rank, error)

    def _read(
        self, choice: restore.Choice, into: Any, allow_pickle: bool, keys: Callable[[str], bool] | None, began: float
    ) -> Restored:
        faultpoints.hit("restore.load", rank=self.rank)
        session = self.session
        readers: list[restore.ShardReader] = []
        try:
            records: list[ShardRecord] = []
            for rank in range(choice.world_size):
                records.append(restore.read_record(self._tier, self.run, choice.step, rank))
                readers.append(restore.shard_reader(self.directory, self.run, records[-1]))
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

    def steps(self) -> list[tuple[StepId, tuple[str, ...]]]:
        """Steps that could be restored now, newest first, with their names. Collective: yes.

        Digests are not checked here; :meth:`load` does that.
        """
        session = self.session
        inventory = self._inventory()
        names: dict[str, tuple[str, ...]] = {}
        for holding in inventory:
            names[holding.step] = tuple(dict.fromkeys((*names.get(holding.step, ()), *holding.names)))
        found = []
        for step in sorted(filter(None, map(StepId.parse, names)), reverse=True):
            if restore.choose(inventory, set(session.nodes), only=step) is not None:
                found.append((step, names[step.dirname]))
        return found


def _box(tensor: Tensor, chunk: Chunk) -> Tensor:
    """The part of a tensor that a chunk describes; for a DTensor its local shard."""
    if is_sharded(tensor):
        tensor = tensor.to_local()  # type: ignore[attr-defined]
        if tuple(tensor.shape) != chunk.sizes:
            raise ConfigError(f"tensor {chunk.key!r}: local shard {tuple(tensor.shape)} is not the planned box {chunk.sizes}")
        return tensor.detach()
    if not chunk.whole:
        for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            tensor = tensor.narrow(dim, offset, size)
    return tensor


def _default_exchange(rank: int, world_size: int) -> Exchange:
    if world_size == 1:
        return SoloExchange()
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise ConfigError(
            f"world_size={world_size}, but torch.distributed is not initialised; call init_process_group first, or pass exchange="
        )
    store = torch.distributed.distributed_c10d._get_default_store()
    # The default store may outlive an attempt (torchrun keeps its own), and a process may open several checkpointers, in the
    # same order on every rank. Counting starts in the store would not do: a rank can die before it is counted.
    prefix = f"resiliency/{environment().restart}/{next(_opened)}"
    return StoreExchange(store, rank=rank, world_size=world_size, prefix=prefix)


_opened = itertools.count()
