"""Exact resume of two ranks: each has its own random numbers and its own place in the data."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from resiliency.errors import Timeout
from resiliency.testing.zygote import Zygote
from tests.ports import free_port

pytestmark = pytest.mark.long

RANKS = 2
DEADLINE_S = 70.0


@dataclass(frozen=True)
class Ended:
    """How a rank has ended, and its results if it got that far."""

    code: int
    results: list[dict[str, Any]]


#: Where a child hangs that was forked while another thread (here of gloo) held a lock of the interpreter: CPython until 3.10.14
#: and 3.11.9, https://github.com/python/cpython/issues/112275. One of ten thousand workers of a loader.
HUNG_IN_FORK = re.compile(r'most recent call first\):\n  File "[^"]*popen_fork.py", line \d+ in _launch\n')


@pytest.fixture(scope="module")
def outcome(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> list[Ended]:
    """How each rank has ended."""
    try:
        return run_ranks(zygote, tmp_path_factory.mktemp("ddp"))
    except Timeout as error:
        if not HUNG_IN_FORK.search(str(error)):
            raise
    return run_ranks(zygote, tmp_path_factory.mktemp("ddp"))


def run_ranks(zygote: Zygote, folder: Path) -> list[Ended]:
    results, port = [folder / f"result-{rank}" for rank in range(RANKS)], str(free_port())
    ranks = [
        zygote.start(
            "tests.plugins.resume.resume_ddp:rank_main",
            {"rank": rank, "folder": str(folder), "result": str(results[rank])},
            env={
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "GROUP_RANK": "0",
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "TORCHELASTIC_RUN_ID": "exam",
            },
        )
        for rank in range(RANKS)
    ]
    deadline = time.monotonic() + DEADLINE_S
    try:
        codes = [worker.wait(timeout_s=max(0.1, deadline - time.monotonic())) for worker in ranks]
    except Timeout as error:
        raise Timeout(f"{error}; the stacks:\n{zygote.stacks_of(ranks)}") from error
    finally:
        for worker in ranks:
            with suppress(ProcessLookupError):  # each has a session of its own, with the workers of its loaders
                os.killpg(worker.pid, signal.SIGKILL)
    return [
        Ended(code, json.loads(result.read_text()) if result.exists() else [])
        for code, result in zip(codes, results, strict=True)
    ]


def test_both_ranks_finish(outcome: list[Ended]) -> None:
    assert [rank.code for rank in outcome] == [0] * RANKS, "see the log of the zygote"


def test_resumed_ranks_equal_the_undisturbed_ones(outcome: list[Ended]) -> None:
    results = [
        result | {"rank": rank}
        for rank, ended in enumerate(outcome)
        for result in ended.results
        if result["case"] != "stock"
    ]
    assert len(results) == RANKS * 26
    assert [result for result in results if not (result["losses"] and result["weights"])] == []


def test_without_rank_state_they_differ(outcome: list[Ended]) -> None:
    stock = [result["weights"] for ended in outcome for result in ended.results if result["case"] == "stock"]
    assert stock == [False] * RANKS
