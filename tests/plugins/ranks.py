"""Runs real ranks, forked from the zygote, each of which writes its answers into a file."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from resiliency.testing.zygote import Zygote
from tests.ports import free_port

__all__ = ["Answers", "run_ranks"]

Answers = list[list[dict[str, Any]]]
DEADLINE_S = 150.0


def run_ranks(
    zygote: Zygote,
    target: str,
    arguments: Mapping[str, Any],
    folder: Path,
    *,
    ranks: int = 2,
    env: Mapping[str, str] | None = None,
    of_rank: Sequence[Mapping[str, str]] | None = None,
) -> Answers:
    """The answers of each rank; none of a rank that has written none.

    Args:
        target: "module:function", called with the arguments and ``result``, to which each rank adds "." and its number.
        folder: for the answers.
        env, of_rank: further variables, of all ranks and of each.
    """
    result = folder / f"result-{time.monotonic_ns()}"
    launched = {"TORCHELASTIC_RUN_ID": "ranks", "TORCHELASTIC_RESTART_COUNT": "0", "GROUP_RANK": "0", "NODE_RANK": "0"}
    placed = {
        "LOCAL_WORLD_SIZE": str(ranks),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    workers = [
        zygote.start(
            target,
            {**arguments, "result": str(result)},
            env={
                **launched,
                **placed,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                **(of_rank[rank] if of_rank else {}),
                **(env or {}),
            },
        )
        for rank in range(ranks)
    ]
    deadline = time.monotonic() + DEADLINE_S
    try:
        for worker in workers:
            worker.wait(timeout_s=max(0.1, deadline - time.monotonic()))
    finally:
        for worker in workers:
            worker.kill()
    results = [Path(f"{result}.{rank}") for rank in range(ranks)]
    return [json.loads(path.read_text()) if path.exists() else [] for path in results]
