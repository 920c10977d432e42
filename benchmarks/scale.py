"""Measures what an agreement of many ranks, the plan of a save, and a restore cost: ``python -m benchmarks.scale``.

Simulated ranks, each a thread with a TCPStore connection of its own, agree over one store. They are spread over a few
processes, so that one interpreter lock does not serialise them, and the store has a process for itself, as under
torchrun. Every rank checks what it got.

The store, its protocol, our code and the number of requests are as in a job. Unlike in a job, all ranks share the cores
of this machine with the store, and there is no network between them. On a cluster each rank has its own core: there an
agreement costs about the processor time of the store plus that of one rank and five times the latency of the network,
and the seconds measured here are more than that.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.table import Table
from torch.distributed import TCPStore

from benchmarks._machine import cores
from benchmarks._plan_scale import measure_plans, plan_table
from benchmarks._restore_bytes import measure_restores, restore_table
from resiliency.checkpoint.coordinator import StoreCoordinator

__all__ = ["Figures", "main", "measure"]

HOST = "127.0.0.1"
DEADLINE = timedelta(minutes=10)
PLAN_RANKS = (8, 32, 128, 512, 1024, 4096)
RESTORES = ((2, 2), (2, 4), (4, 2))
RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
MESSAGES = {"small": 64, "inventory": 2048}

#: Torch asks for the host name of every peer, which takes seconds where no name server answers, and warns of it.
ENVIRONMENT = {"RES_OPTIONS": "timeout:1 attempts:1", "TORCH_CPP_LOG_LEVEL": "ERROR"}

#: ``(store, rank, ranks, key, message, rounds)``; returns the messages of the last round.
Agree = Callable[[Any, int, int, str, bytes, int], list[bytes]]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One row of the table.

    Attributes:
        seconds: of one agreement, from the first rank's call to the last rank's return.
        rank_cpu_s: processor time of a rank for one agreement, the mean of all ranks.
        store_cpu_s: processor time of the store's process for one agreement.
        rank_calls, store_calls: calls of the store for one agreement, by the rank with the most and by all ranks. A
            ``get`` is two requests.
        keys_left: number of keys that all agreements of the row leave on the store.
    """

    way: str
    ranks: int
    message: str
    message_nbytes: int
    seconds: float
    rank_cpu_s: float
    store_cpu_s: float
    rank_calls: float
    store_calls: float
    keys_left: int


class CountingStore:
    """Counts the calls that go to a store."""

    def __init__(self, store: TCPStore) -> None:
        self._store = store
        self.calls = 0

    def has_extended_api(self) -> bool:
        return bool(self._store.has_extended_api())  # type: ignore[attr-defined]  # no request to the store

    def __getattr__(self, name: str) -> Any:
        self.calls += 1
        return getattr(self._store, name)


def gather_once(store: Any, rank: int, ranks: int, key: str, data: bytes, rounds: int) -> list[bytes]:
    """The agreement as the library does it."""
    coordinator = StoreCoordinator(store, rank=rank, world_size=ranks, prefix=key)
    return [coordinator.all_gather("scale", data, timeout=DEADLINE) for _ in range(rounds)][-1]


def key_of_each(store: Any, rank: int, ranks: int, key: str, data: bytes, rounds: int) -> list[bytes]:
    """The old way, for comparison: every rank waits for the key of every other rank, and gets it."""
    for number in range(rounds):
        store.set(f"{key}/{number}/{rank}", data)
        for other in range(ranks):
            store.wait([f"{key}/{number}/{other}"], DEADLINE)
        messages = [store.get(f"{key}/{number}/{other}") for other in range(ranks)]
    return messages


WAYS: dict[str, Agree] = {"append": gather_once, "key of each": key_of_each}


def message_of(rank: int, nbytes: int) -> bytes:
    return f"{rank:08d}".encode().ljust(nbytes, b"x")


# ---- processes: one for the store, a few for the ranks


def serve(pipe: Connection) -> None:
    """Hosts the store; answers each message with its processor time and the number of keys, until the pipe closes."""
    store = TCPStore(HOST, 0, 1, True, wait_for_workers=False)
    pipe.send(store.port)
    while _received(pipe) is not None:
        pipe.send((time.process_time(), store.num_keys()))


def act(pipe: Connection, port: int, ranks: Sequence[int]) -> None:
    """Connects the given ranks, each in a thread of this process, then takes part in the agreements that ``pipe`` asks
    for, until it closes."""
    stores = {rank: TCPStore(HOST, port, 1, False, wait_for_workers=False) for rank in ranks}
    pipe.send(len(stores))
    with ThreadPoolExecutor(len(ranks)) as pool:
        while (task := _received(pipe)) is not None:
            way, world_size, nbytes, key, rounds = task
            expected = [message_of(rank, nbytes) for rank in range(world_size)]

            def take_part(rank: int) -> tuple[float, float, float, int]:
                store = CountingStore(stores[rank])
                began, cpu = time.monotonic(), time.thread_time()
                got = WAYS[way](store, rank, world_size, key, expected[rank], rounds)  # noqa: B023 - ends in this turn
                ended, cpu = time.monotonic(), time.thread_time() - cpu
                if got != expected:  # noqa: B023
                    raise AssertionError(f"rank {rank} did not get what the others said")
                return began, ended, cpu, store.calls

            pipe.send(list(pool.map(take_part, [rank for rank in ranks if rank < world_size])))


def _received(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return None


class Simulation:
    """The store and the ranks, as processes, which end when the context is left. Thread: one."""

    def __init__(self, ranks: int, processes: int) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._stack = ExitStack()
        self._keys = 0
        try:
            self._store = self._start(serve)
            port = self._ask(self._store)
            groups = [range(first, ranks, processes) for first in range(min(processes, ranks))]
            self._actors = [self._start(act, port, group) for group in groups]
            for actor in self._actors:
                self._ask(actor)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, way: str, ranks: int, message: str, nbytes: int, rounds: int) -> Figures:
        """Measures ``rounds`` agreements of ``ranks`` ranks in a row."""
        self._keys += 1
        cpu_before, keys_before = self._state()
        for actor in self._actors:
            actor.send((way, ranks, nbytes, f"run{self._keys}", rounds))
        spans = [span for actor in self._actors for span in self._ask(actor)]
        cpu_after, keys_after = self._state()
        return Figures(
            way=way,
            ranks=ranks,
            message=message,
            message_nbytes=nbytes,
            seconds=(max(span[1] for span in spans) - min(span[0] for span in spans)) / rounds,
            rank_cpu_s=sum(span[2] for span in spans) / len(spans) / rounds,
            store_cpu_s=(cpu_after - cpu_before) / rounds,
            rank_calls=max(span[3] for span in spans) / rounds,
            store_calls=sum(span[3] for span in spans) / rounds,
            keys_left=keys_after - keys_before,
        )

    def _state(self) -> tuple[float, int]:
        self._store.send("state")
        cpu_s, keys = self._ask(self._store)
        return cpu_s, keys

    def _start(self, target: Callable[..., None], *arguments: Any) -> Connection:
        here, there = self._context.Pipe()
        process = self._context.Process(target=target, args=(there, *arguments), daemon=True)
        with patch.dict(os.environ, ENVIRONMENT):
            process.start()
        there.close()
        self._stack.callback(process.join, 10.0)
        self._stack.callback(process.kill)
        self._stack.callback(here.close)
        return here

    def _ask(self, pipe: Connection) -> Any:
        if not pipe.poll(DEADLINE.total_seconds()):
            raise SystemExit(f"a process did not answer in {DEADLINE}")
        try:
            return pipe.recv()
        except EOFError:
            raise SystemExit("a process of the benchmark has ended; its error is above") from None


def measure(
    ranks: Sequence[int], messages: dict[str, int], *, rounds: int, old_up_to: int, processes: int
) -> list[Figures]:
    """Returns the rows of both ways, small world sizes first."""
    rows = []
    with Simulation(max(ranks), processes) as simulation:
        simulation.run("append", min(ranks), "small", 64, 1)  # imports and first uses
        for message, nbytes in messages.items():
            for world_size in ranks:
                rows.append(simulation.run("append", world_size, message, nbytes, rounds))
                if world_size <= old_up_to:
                    rows.append(simulation.run("key of each", world_size, message, nbytes, 1))
    return rows


def table(rows: Sequence[Figures]) -> Table:
    made = Table(title="One agreement of all ranks over one TCPStore", title_justify="left", pad_edge=False)
    made.add_column("message")
    figures = ("seconds", "CPU ms\non a rank", "CPU ms on\nthe store", "calls on\na rank", "calls on\nthe store")
    for head in ("ranks", *figures, *(f"old way\n{head}" for head in figures), "old / new\nseconds"):
        made.add_column(head, justify="right")
    old = {(row.message, row.ranks): row for row in rows if row.way == "key of each"}
    for row in (row for row in rows if row.way == "append"):
        other = old.get((row.message, row.ranks))
        ratio = "-" if other is None else f"{other.seconds / row.seconds:.1f}"
        cells = _cells(row), _cells(other)
        made.add_row(f"{row.message} ({row.message_nbytes} B)", str(row.ranks), *cells[0], *cells[1], ratio)
    return made


def _cells(row: Figures | None) -> tuple[str, ...]:
    if row is None:
        return ("-",) * 5
    cpu = (f"{1000 * seconds:.1f}" for seconds in (row.rank_cpu_s, row.store_cpu_s))
    return f"{row.seconds:.4f}", *cpu, f"{row.rank_calls:.1f}", f"{row.store_calls:.0f}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS), help="numbers of ranks")
    parser.add_argument("--bytes", type=int, nargs="+", help="sizes of a rank's message, instead of 64 and 2048")
    parser.add_argument("--rounds", type=int, default=5, help="agreements in a row (the old way: one)")
    parser.add_argument("--old-up-to", type=int, default=1024, help="ranks up to which the old way runs too")
    parser.add_argument("--processes", type=int, default=2 * cores(), help="processes the ranks are spread over")
    parser.add_argument("--only", choices=("agreements", "plans", "restores"), help="one of the three tables")
    parser.add_argument("--tensors", type=int, default=1000, help="tensors of the planned state")
    parser.add_argument(
        "--plan-ranks", type=int, nargs="+", default=list(PLAN_RANKS), help="numbers of ranks that plan"
    )
    parser.add_argument("--write-plans-up-to", type=int, default=128, help="ranks up to which write plans are planned")
    parser.add_argument("--rank-mib", type=int, default=256, help="MiB of each rank in the saved step of a restore")
    parser.add_argument("--json", type=Path, help="file for all figures")
    options = parser.parse_args(argv)
    messages = MESSAGES if options.bytes is None else {f"given {n}": n for n in options.bytes}
    console, rows, plans, restores = Console(width=170), [], [], []
    if options.only in (None, "agreements"):
        rows = measure(
            sorted(options.ranks),
            messages,
            rounds=options.rounds,
            old_up_to=options.old_up_to,
            processes=options.processes,
        )
        console.print(table(rows))
    if options.only in (None, "plans"):
        plans = measure_plans(
            sorted(options.plan_ranks), tensors=options.tensors, write_plans_up_to=options.write_plans_up_to
        )
        console.print(plan_table(plans))
    if options.only in (None, "restores"):
        restores = measure_restores(RESTORES, rank_mib=options.rank_mib)
        console.print(restore_table(restores))
    if options.json is not None:
        facts = {"cores": cores(), "processes": options.processes, "rounds": options.rounds}
        made = {"rows": rows, "plans": plans, "restores": restores}
        found = {"settings": facts, **{name: [asdict(row) for row in of_it] for name, of_it in made.items()}}
        options.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
