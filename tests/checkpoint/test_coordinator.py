"""Every rank gets every message, or a deadline names the ranks that are missing, on every kind of store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from resiliency.checkpoint import coordinator as module
from resiliency.checkpoint.coordinator import Coordinator, SoloCoordinator, StoreCoordinator
from resiliency.errors import ConfigError, Timeout
from resiliency.testing.checkpoints import run_ranks

T = TypeVar("T")

SHORT = timedelta(seconds=0.3)
LONG = timedelta(seconds=20)
RANKS = 3

Connect = Callable[[int], Any]
"""The store as rank N sees it: over TCP a connection of its own, since one that waits blocks its other users."""


@pytest.fixture(scope="module")
def tcp() -> Iterator[dict[bool, list[TCPStore]]]:
    """By whether libuv serves it: a server and a connection for each rank."""
    made = {}
    for libuv in (True, False):
        server = TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False, use_libuv=libuv)
        made[libuv] = [server] + [
            TCPStore("127.0.0.1", server.port, 1, False, wait_for_workers=False, use_libuv=libuv)
            for _ in range(1, RANKS)
        ]
    yield made
    made.clear()


@pytest.fixture(params=["hash", "file", "tcp", "tcp without libuv", "prefix"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Connect:
    if request.param == "hash":
        shared = HashStore()
        return lambda rank: shared
    if request.param == "file":
        return lambda rank: FileStore(str(tmp_path / "store"), RANKS)
    clients = request.getfixturevalue("tcp")[request.param != "tcp without libuv"]
    if request.param == "prefix":
        return lambda rank: PrefixStore("default", clients[rank])
    return lambda rank: clients[rank]


@pytest.fixture
def coordinators(connect: Connect, request: pytest.FixtureRequest) -> list[StoreCoordinator]:
    name = request.node.name
    return [StoreCoordinator(connect(rank), rank=rank, world_size=RANKS, prefix=name) for rank in range(RANKS)]


class Around:
    """A store that calls ``before(operation, key)`` first."""

    def __init__(self, store: Any, before: Callable[[str, Any], None]) -> None:
        self._store = store
        self._before = before

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._store, name)

        def call(*arguments: Any) -> Any:
            self._before(name, arguments[0] if arguments else None)
            return inner(*arguments)

        return call


def until_waiting(*coordinators: StoreCoordinator) -> Callable[[], None]:
    """Blocks its caller until all of these have posted their message and wait for the others."""
    begun = [threading.Event() for _ in coordinators]
    for coordinator, event in zip(coordinators, begun, strict=True):
        coordinator._store = Around(coordinator._store, lambda name, _, e=event: e.set() if name == "wait" else None)

    def block() -> None:
        assert all(event.wait(LONG.total_seconds()) for event in begun), "nobody waits"

    return block


class Died(Exception):
    """Stands for the end of a rank."""


def at_once(*calls: Callable[[], T]) -> list[Future[T]]:
    """Each call on a thread of its own; returns when all have ended."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [pool.submit(call) for call in calls]


def gather(coordinator: Coordinator, topic: str = "x", *, timeout: timedelta = LONG) -> Callable[[], list[bytes]]:
    return lambda: coordinator.all_gather(topic, b"from %d" % coordinator.rank, timeout=timeout)


ALL = [b"from %d" % rank for rank in range(RANKS)]


# ---- every rank gets every message


def test_every_rank_gets_every_message_in_every_round(coordinators: list[StoreCoordinator]) -> None:
    def rounds(coordinator: StoreCoordinator) -> list[list[bytes]]:
        return [
            coordinator.all_gather(topic, f"{topic} {coordinator.rank} é".encode() * times, timeout=LONG)
            for topic, times in (("a", 1), ("b", 1000), ("a", 0), ("a", 2))
        ]

    for result in at_once(*(lambda c=c: rounds(c) for c in coordinators)):
        assert result.result() == [
            [f"{topic} {rank} é".encode() * times for rank in range(RANKS)]
            for topic, times in (("a", 1), ("b", 1000), ("a", 0), ("a", 2))
        ]


@pytest.mark.parametrize("world_size", [1, 2, 64])
def test_worlds_of_one_and_of_many_ranks_agree_round_after_round(world_size: int) -> None:
    def work(rank: int, coordinator: Coordinator) -> list[list[bytes]]:
        return [coordinator.all_gather("x", f"{rank} {turn}".encode(), timeout=LONG) for turn in range(20)]

    expected = [[f"{rank} {turn}".encode() for rank in range(world_size)] for turn in range(20)]
    assert run_ranks(world_size, work) == [expected] * world_size


def test_a_message_larger_than_a_store_takes_at_once_arrives_whole(coordinators: list[StoreCoordinator]) -> None:
    """A TCPStore closes the connection of who sends more than 8 MiB."""
    messages = [bytes([65 + rank]) * size for rank, size in enumerate((9 << 20, 4 << 20, (4 << 20) + 1))]
    results = at_once(*(lambda c=c: c.all_gather("x", messages[c.rank], timeout=LONG) for c in coordinators))
    assert all(result.result() == messages for result in results)


def test_a_rank_that_comes_late_is_waited_for(coordinators: list[StoreCoordinator]) -> None:
    others_wait = until_waiting(*coordinators[1:])

    def late() -> list[bytes]:
        others_wait()
        return gather(coordinators[0])()

    for result in at_once(late, *map(gather, coordinators[1:])):
        assert result.result() == ALL


def test_two_starts_on_one_store_do_not_hear_each_other(connect: Connect) -> None:
    """torchrun keeps its store over restarts."""
    names = ("first start", "second start")
    first, second = (StoreCoordinator(connect(0), rank=0, world_size=1, prefix=name) for name in names)
    assert first.all_gather("x", b"old", timeout=SHORT) == [b"old"]
    assert second.all_gather("x", b"new", timeout=SHORT) == [b"new"]
    assert (first.count("c", 1), second.count("c", 0)) == (1, 0)


def test_two_coordinators_on_one_store_agree_at_the_same_time_without_meeting() -> None:
    store = HashStore()
    both = [
        [StoreCoordinator(store, rank=rank, world_size=RANKS, prefix=name) for rank in range(RANKS)] for name in "ab"
    ]

    def rounds(coordinator: StoreCoordinator, name: str) -> bool:
        expected = [name.encode() * (rank + 1) for rank in range(RANKS)]
        mine = expected[coordinator.rank]
        return all(coordinator.all_gather("x", mine, timeout=LONG) == expected for _ in range(50))

    results = at_once(*(lambda c=c, n=n: rounds(c, n) for n, ranks in zip("ab", both, strict=True) for c in ranks))
    assert all(result.result() for result in results)


# ---- missing ranks


@pytest.mark.parametrize("missing", [[0], [0, 2]])
def test_every_rank_that_waits_names_the_missing_ranks_within_its_deadline(
    coordinators: list[StoreCoordinator], missing: list[int]
) -> None:
    waiting = [c for c in coordinators if c.rank not in missing]
    began = time.monotonic()
    results = at_once(*(gather(c, "inventory", timeout=SHORT) for c in waiting))
    assert 0.2 < time.monotonic() - began < 2.2, "the deadline counts once; a FileStore rounds it up to whole seconds"
    for coordinator, result in zip(waiting, results, strict=True):
        error = result.exception()
        assert isinstance(error, Timeout)
        assert isinstance(error, TimeoutError)
        for words in (f"rank {coordinator.rank} ", f"rank(s) {missing} of {RANKS}", "'inventory'"):
            assert words in str(error)


def test_ranks_whose_calls_lie_apart_each_keep_their_own_deadline(coordinators: list[StoreCoordinator]) -> None:
    other_waits = until_waiting(coordinators[1])

    def later() -> float:
        other_waits()
        began = time.monotonic()
        with pytest.raises(Timeout, match=r"\[0\]"):
            gather(coordinators[2], timeout=timedelta(seconds=0.5))()
        return time.monotonic() - began

    earlier, apart = at_once(gather(coordinators[1], timeout=timedelta(seconds=0.5)), later)
    assert isinstance(earlier.exception(), Timeout)
    assert "rank(s) [0]" in str(earlier.exception()), "rank 2 has called meanwhile"
    assert 0.4 < apart.result() < 2.2


def test_ranks_agree_again_after_a_missing_one_has_come_back(coordinators: list[StoreCoordinator]) -> None:
    assert all(
        isinstance(r.exception(), Timeout) for r in at_once(*(gather(c, timeout=SHORT) for c in coordinators[1:]))
    )
    assert gather(coordinators[0])() == ALL, "the messages of those who gave up are still there"
    for result in at_once(*map(gather, coordinators)):
        assert result.result() == ALL


@pytest.mark.parametrize("operation", ["append", "add", "set"])
def test_a_rank_that_dies_in_the_middle_is_missed_only_if_its_message_is(operation: str) -> None:
    """Before its message it is named. After it the others have all they need, whoever dies: also the rank that comes
    last and was to tell them so."""
    store = HashStore()

    def die(name: str, key: Any) -> None:
        if name == operation:
            raise Died

    alive = [StoreCoordinator(store, rank=rank, world_size=RANKS, prefix="p") for rank in (0, 1)]
    dying = StoreCoordinator(Around(store, die), rank=2, world_size=RANKS, prefix="p")

    others_wait = until_waiting(*alive)

    def last() -> None:
        others_wait()
        with pytest.raises(Died):
            gather(dying)()

    *results, _ = at_once(*(gather(c, timeout=timedelta(seconds=0.5)) for c in alive), last)
    for result in results:
        if operation == "append":
            assert "rank(s) [2]" in str(result.exception())
        else:
            assert result.result() == ALL


def test_a_rank_that_dies_between_two_pieces_of_its_message_is_missing() -> None:
    store = HashStore()
    appended: list[str] = []

    def die(name: str, key: Any) -> None:
        appended.extend([key] if name == "append" else [])
        if len(appended) == 2:
            raise Died

    dying = StoreCoordinator(Around(store, die), rank=0, world_size=2, prefix="p")
    with pytest.raises(Died):
        dying.all_gather("x", b"x" * (5 << 20), timeout=SHORT)
    with pytest.raises(Timeout, match=r"rank\(s\) \[0\]"):
        StoreCoordinator(store, rank=1, world_size=2, prefix="p").all_gather("x", b"y", timeout=SHORT)


@pytest.mark.parametrize("libuv", [True, False])
def test_ranks_whose_store_goes_away_while_they_wait_stop_at_once_and_say_so(libuv: bool) -> None:
    server = [TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False, use_libuv=libuv)]
    client = TCPStore("127.0.0.1", server[0].port, 1, False, wait_for_workers=False, use_libuv=libuv)
    coordinator = StoreCoordinator(client, rank=1, world_size=2, prefix="p")
    timer = threading.Timer(0.3, server.clear)
    timer.start()
    began = time.monotonic()
    with pytest.raises(Timeout, match=r"rank 1 cannot agree on 'x'.* store does not answer .*rank 0 or the launcher"):
        gather(coordinator)()
    assert time.monotonic() - began < 10
    timer.join()
    with pytest.raises(Timeout, match="store does not answer"):
        gather(coordinator, "next")()
    with pytest.raises(RuntimeError):
        coordinator.count("c", 1)


def test_two_processes_of_one_rank_are_refused() -> None:
    store = HashStore()
    one, other = (StoreCoordinator(store, rank=0, world_size=2, prefix="p") for _ in range(2))
    with pytest.raises(Timeout):
        gather(one, timeout=SHORT)()
    with pytest.raises(ConfigError, match="two processes wrote to p/0/x as rank 0: the prefix must differ"):
        gather(other, timeout=SHORT)()


# ---- what it costs


@pytest.mark.parametrize("world_size", [2, 64])
def test_a_rank_makes_a_constant_number_of_calls(world_size: int) -> None:
    def work(rank: int, _: Coordinator) -> int:
        calls: list[str] = []
        counted = Around(store, lambda name, key: calls.append(name))
        coordinator = StoreCoordinator(counted, rank=rank, world_size=world_size, prefix="p")  # type: ignore[arg-type]
        calls.clear()
        for _ in range(10):
            coordinator.all_gather("x", b"", timeout=LONG)
        return len(calls)

    store = HashStore()
    calls = run_ranks(world_size, work)
    assert max(calls) <= 10 * 7
    assert sum(calls) <= 10 * (4 * world_size + 3)


def test_keys_do_not_pile_up(coordinators: list[StoreCoordinator], connect: Connect) -> None:
    def rounds(coordinator: StoreCoordinator, number: int) -> None:
        for _ in range(number):
            gather(coordinator)()

    left = []
    for number in (2, 30):
        for result in at_once(*(lambda c=c, n=number: rounds(c, n) for c in coordinators)):
            result.result()
        left.append(connect(0).num_keys())
    assert left[1] <= left[0] + 1, "a FileStore counts one key more or less"


def test_a_slow_rank_gets_what_it_has_not_read_yet() -> None:
    """The others have gone on to the next round when it reads."""
    store = HashStore()

    def hold_up(name: str, key: Any) -> None:
        if name == "get":
            time.sleep(0.05)

    stores = [store, store, Around(store, hold_up)]
    ranks = [StoreCoordinator(stores[rank], rank=rank, world_size=RANKS, prefix="p") for rank in range(RANKS)]
    results = at_once(*(lambda c=c: [gather(c)() for _ in range(10)] for c in ranks))
    assert all(result.result() == [ALL] * 10 for result in results)


def test_a_store_that_cannot_delete_still_serves() -> None:
    def refuse(name: str, key: Any) -> None:
        if name == "delete_key":
            raise RuntimeError("not supported")

    coordinator = StoreCoordinator(Around(HashStore(), refuse), rank=0, world_size=1, prefix="p")
    assert [gather(coordinator)() for _ in range(3)] == [[b"from 0"]] * 3


# ---- counters, and jobs of one rank


def test_counts_are_shared() -> None:
    counts = run_ranks(4, lambda rank, coordinator: [coordinator.count("a", 1) for _ in range(50)])
    assert sorted(value for values in counts for value in values) == list(range(1, 201))


def test_a_job_of_one_rank_needs_no_store() -> None:
    solo = SoloCoordinator()
    assert solo.all_gather("x", b"y", timeout=timedelta(0)) == [b"y"]
    assert (solo.count("a", 2), solo.count("a", 0), solo.count("b", 1)) == (2, 2, 1)


def test_messages_are_found_again_whatever_bytes_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE_NBYTES", 3)
    messages = [b"", b"\0\n 1 2", bytes(range(256)), b"abc", b"abcd"]
    run = run_ranks(len(messages), lambda rank, c: c.all_gather("x", messages[rank], timeout=LONG))
    assert run == [messages] * len(messages)


# ---- rank 0 answers


def reversed_each(messages: list[bytes]) -> list[bytes]:
    return [message[::-1] for message in messages]


def test_each_rank_gets_its_own_answer(coordinators: list[StoreCoordinator]) -> None:
    def work(rank: int) -> list[bytes]:
        return [
            coordinators[rank].ask_first(f"save {number}", b"%d:%d" % (number, rank), reversed_each, timeout=LONG)
            for number in (1, 2)
        ]

    with ThreadPoolExecutor(RANKS) as pool:
        found = list(pool.map(work, range(RANKS)))
    assert found == [[b"%d:1" % rank, b"%d:2" % rank] for rank in range(RANKS)]


@pytest.mark.parametrize("absent", [0, 2])
def test_an_exchange_that_a_rank_misses_names_it_and_the_next_one_works(
    coordinators: list[StoreCoordinator], absent: int
) -> None:
    def work(rank: int) -> str:
        said = ""
        if rank != absent:
            with pytest.raises(Timeout) as caught:
                coordinators[rank].ask_first("save 1", b"x", reversed_each, timeout=SHORT)
            said = str(caught.value)
        assert coordinators[rank].ask_first("save 2", b"ab", reversed_each, timeout=LONG) == b"ba"
        return said

    with ThreadPoolExecutor(RANKS) as pool:
        found = list(pool.map(work, range(RANKS)))
    assert all(f"rank(s) [{absent}] of {RANKS}" in said for rank, said in enumerate(found) if rank != absent)


def test_a_rank_alone_answers_itself() -> None:
    assert SoloCoordinator().ask_first("save 1", b"ab", reversed_each, timeout=SHORT) == b"ba"
