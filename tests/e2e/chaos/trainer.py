"""One rank of a job that trains and saves without end, and writes into the ledger what it saves and what it loaded."""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore

from resiliency.agent import client as agent_client
from resiliency.checkpoint import checkpointer as engine
from resiliency.checkpoint.checkpointer import Checkpointer, CheckpointerOptions, Restored, Ticket
from resiliency.checkpoint.coordinator import Coordinator, SoloCoordinator, StoreCoordinator
from resiliency.checkpoint.options import LocalTierOptions
from resiliency.errors import ConfigError, ResiliencyError, Timeout
from resiliency.storage.stage import Stage
from tests.e2e.chaos.agent_site.sitecustomize import use_clock
from tests.e2e.chaos.ledger import Ledger, committed_now, key_of
from tests.e2e.chaos.models import MODELS, Model, digest

#: Exit status of a trainer that could not open its folder or load from it, and said so in the ledger.
REFUSED = 3
_AGREE = timedelta(seconds=10)
#: Waits of the library that are minutes in a real job, so that what follows them happens in a short run.
_SHORTER = ((agent_client, "_HELLO_TIMEOUT_S", 1.0), (engine, "_HUNG_S", 1.5))
#: How long a child that the user's code forked may hold what it has.
_CHILD_S = 2.0


class _Orders:
    """What the driver has told this process by signals, to be carried out between two steps."""

    def __init__(self) -> None:
        self.fork = self.end = self.roll_back = False
        signal.signal(signal.SIGUSR1, self._set)
        signal.signal(signal.SIGTERM, self._set)
        signal.signal(signal.SIGHUP, self._set)

    def _set(self, number: int, frame: object) -> None:
        self.fork |= number == signal.SIGUSR1
        self.end |= number == signal.SIGTERM
        self.roll_back |= number == signal.SIGHUP


def train(
    *, directory: str, ledger: str, job: str, rank: int, world_size: int, port: int, model: str, seed: int, life_s: int
) -> None:
    """The process. Ends when told to, or after ``life_s`` seconds at the latest.

    Args:
        job: name of this start in the ledger.
        port: of the store by which the ranks of the job agree.
        seed: for what differs from start to start, the same on all ranks.
    """
    signal.alarm(life_s)
    logging.basicConfig(level=logging.WARNING, format=f"{job} rank {rank}: %(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(1)
    use_clock(os.environ["CHAOS_CLOCK"])
    for module, name, value in _SHORTER:
        assert hasattr(module, name)
        setattr(module, name, value)
    written = Ledger(ledger, job=job, rank=rank, pid=os.getpid())
    orders, chance = _Orders(), random.Random(seed)
    written.write("started")  # from here on it takes orders
    try:
        checkpointer = Checkpointer(
            LocalTierOptions(directory=directory, keep=2),
            rank=rank,
            world_size=world_size,
            coordinator=_coordinator(rank, world_size, port),
            options=CheckpointerOptions(
                agree_timeout=_AGREE,
                previous_save_timeout=timedelta(seconds=chance.choice([0.2, 2.0])),
                drain_timeout=timedelta(seconds=10),
            ),
        )
        training = _Training(checkpointer, written, MODELS[model](), rank, chance)
        checkpointer.open()
        written.write("opened", attempt=checkpointer.session.attempt, token=checkpointer.session.token)
        training.resume()
    except ResiliencyError as error:
        written.write("unable", error=f"{type(error).__name__}: {error}")
        raise SystemExit(REFUSED) from error
    # As a job that still compiles or opens its data: what an earlier one does meanwhile must come to nothing.
    threading.Event().wait(chance.choice([0.0, 0.0, 0.5, 2.0]))
    while not orders.end:
        training.step(orders)
    checkpointer.close(timeout=timedelta(seconds=10))
    training.note_commits()
    written.write("ended")


def _coordinator(rank: int, world_size: int, port: int) -> Coordinator:
    if world_size == 1:
        return SoloCoordinator()
    try:
        store = TCPStore("127.0.0.1", port, world_size, rank == 0, timeout=_AGREE, wait_for_workers=False)
    except RuntimeError as error:
        raise Timeout(f"rank 0 is not there: {error}") from error
    return StoreCoordinator(store, rank=rank, world_size=world_size, prefix="chaos")


class _Training:
    def __init__(
        self, checkpointer: Checkpointer, ledger: Ledger, model: Model, rank: int, chance: random.Random
    ) -> None:
        self._checkpointer, self._ledger, self._model, self._rank = checkpointer, ledger, model, rank
        self._step = 0
        self._key = ""
        self._tickets: list[Ticket] = []
        self._saved: dict[int, int] = {}
        self._names: list[str] = []
        self._chance = chance  # drawn from equally on all ranks
        self._every = chance.choice([1, 1, 2])
        self._lazy = chance.random() < 0.8
        self._named = chance.choice(["all", "some", "last"])
        self._pause = threading.Event()

    # -- load -----------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Loads the newest checkpoint and goes on from there.

        Raises:
            ResiliencyError: nothing could be loaded, although there is something.
        """
        into = None
        if self._chance.random() < 0.3 and not hasattr(self._model, "history"):
            self._model.forward_backward(0)
            self._model.update(0)  # now the optimizer has all that a checkpoint of it has
            into = {"key": "", "step": 0, **self._model.state()}
        self._load("attempt", "newest", lambda: self._checkpointer.load(into=into))

    def roll_back(self) -> None:
        """Loads an older checkpoint than the newest, as a user does who does not like the last steps."""
        steps = self._checkpointer.steps()
        if len(steps) > 1:
            self._load("attempt, an older step", "one", lambda: self._checkpointer.load(step=steps[-1][0]))

    def _load(self, how: str, scope: str, load: Callable[[], Restored | None]) -> None:
        where, name = self._checkpointer.directory, f"{os.getpid()}-{self._step}-{how}"
        self._ledger.write("loading", load=name, how=how, scope=scope, falls_back=True, seen=committed_now(where))
        try:
            restored = load()
        except ResiliencyError as error:
            text = f"{type(error).__name__}: {error}"
            self._ledger.write("refused", load=name, error=text[:500], still=committed_now(where))
            raise
        facts: dict[str, Any] = {"key": None, "state": "", "own": None}
        if restored is not None:
            at = restored.id
            facts["key"] = key_of(at.step, at.attempt, at.token, at.serial)
            facts["state"] = digest(restored.state)
            facts["own"] = digest(restored.per_rank) if restored.per_rank is not None else None
            self._model.load(restored.state)
            self._step = restored.state["step"]
        self._ledger.write("loaded", load=name, checked=True, still=committed_now(where), **facts)

    # -- train and save -------------------------------------------------------------------------------------------

    def step(self, orders: _Orders) -> None:
        if orders.roll_back:
            orders.roll_back = False
            self.roll_back()
        self._step += 1
        self._model.forward_backward(self._step)
        self._checkpointer.fence()
        self._model.update(self._step)
        if self._step % self._every == 0:
            self._save()
        if orders.fork:
            orders.fork = False
            self._fork()
        self._pause.wait(self._chance.choice([0.0, 0.01, 0.03, 0.1]))
        self.note_commits()

    def _save(self) -> None:
        session, step = self._checkpointer.session, self._step
        key = key_of(step, session.attempt, session.token, self._saved.get(step, 0))
        self._saved[step] = self._saved.get(step, 0) + 1  # a save that is skipped counts too
        state = {"key": key, "step": step, **self._model.state()}
        own = {"rank": self._rank, "key": key, "rng": torch.full((50,), self._rank * 1000 + step)}
        name = f"step={step}.ckpt"
        names = ["last.ckpt"] if self._named == "last" or (self._named == "some" and step % 3) else ["last.ckpt", name]
        superseded = self._names[:-2]
        self._ledger.write("save", key=key, state=digest(state), own=digest(own))
        ticket = self._checkpointer.save(
            step,
            state,
            per_rank=own,
            names=names,
            supersedes=superseded,
            lazy=self._model.lazy() if self._lazy else False,
        )
        if ticket is None:
            self._ledger.write("skipped", key=key)
            return
        self._names = self._names[-2:] + [name for name in names if name != "last.ckpt"]
        if key != key_of(step, ticket.id.attempt, ticket.id.token, ticket.id.serial):
            self._ledger.write("wrong", text=f"the save that was to be {key} became {ticket.id}")
        self._tickets.append(ticket)

    def note_commits(self) -> None:
        """Writes which saves are committed, as this rank was told."""
        self._checkpointer.poll()
        for ticket in list(self._tickets):
            if ticket.has_reached(Stage.COMMITTED):
                at = ticket.id
                self._ledger.write("committed", key=key_of(at.step, at.attempt, at.token, at.serial))
            elif ticket.failed is None:
                continue
            self._tickets.remove(ticket)

    # -- a fork ---------------------------------------------------------------------------------------------------

    def _fork(self) -> None:
        """The user's code forks while the last save may still be copied; the child holds all it has for a while."""
        hold_s, closes = self._chance.uniform(0.1, _CHILD_S), self._chance.random() < 0.5
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(10)
                self._be_a_child(closes)
                self._pause.wait(hold_s)
            finally:
                os._exit(0)
        self._ledger.write("forked", child=child)

    def _be_a_child(self, closes: bool) -> None:
        for tensor in self._model.late():
            tensor.detach().view(-1)[:50].fill_(-1)  # its own copy of the pages
        self._checkpointer.fence()
        try:
            self._checkpointer.save(10**6, {"x": torch.zeros(9)})
        except ConfigError:
            pass
        else:
            self._ledger.write("wrong", text="a forked child could save")
        if closes:
            self._checkpointer.close()
