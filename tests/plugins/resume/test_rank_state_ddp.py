"""Exact resume of two ranks: each has its own random numbers and its own place in the data."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

RANKS = 2
DEADLINE_S = 120.0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _kill_session(process: Any) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Any]]:
    """What every rank found, rank -> list of results or the text of its traceback."""
    context = multiprocessing.get_context("forkserver")  # a parent without threads, that has everything imported once
    context.set_forkserver_preload(["tests.plugins.resume.resume_ddp"])
    from tests.plugins.resume.resume_ddp import rank_main

    results, port, folder = context.Queue(), _free_port(), str(tmp_path_factory.mktemp("ddp"))
    ranks = [context.Process(target=rank_main, args=(rank, port, folder, results)) for rank in range(RANKS)]
    found: dict[int, Any] = {}
    deadline = time.monotonic() + DEADLINE_S
    try:
        for process in ranks:
            process.start()
        while len(found) < RANKS:
            rank, value = results.get(timeout=max(0.1, deadline - time.monotonic()))
            found[rank] = value
            if isinstance(value, str):
                break
        for process in ranks:
            process.join(timeout=max(0.1, min(10.0, deadline - time.monotonic())))
    except queue.Empty:
        found[-1] = f"no answer within {DEADLINE_S} s; exit codes {[process.exitcode for process in ranks]}"
    finally:
        for process in ranks:
            if process.is_alive():
                _kill_session(process)
            process.join(timeout=5.0)
        results.close()
        results.join_thread()
    yield found


def test_both_ranks_finish(outcome: dict[int, Any]) -> None:
    assert sorted(outcome) == list(range(RANKS)), outcome
    assert all(isinstance(value, list) for value in outcome.values()), "\n".join(map(str, outcome.values()))


def test_resumed_ranks_equal_the_undisturbed_ones(outcome: dict[int, Any]) -> None:
    results = [
        result | {"rank": rank} for rank, found in outcome.items() for result in found if result["case"] != "stock"
    ]
    assert len(results) == RANKS * 21
    assert [result for result in results if not (result["losses"] and result["weights"])] == []


def test_without_rank_state_they_differ(outcome: dict[int, Any]) -> None:
    assert [result["weights"] for found in outcome.values() for result in found if result["case"] == "stock"] == [
        False
    ] * RANKS
