"""``copy_threads``: as many threads copy blocks of one snapshot at the same time, and what they copy is right."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from resiliency.checkpoint import snapshot as snapshot_module
from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.options import CheckpointerOptions
from resiliency.errors import ConfigError

BLOCKS = 6


def save_twice(folder: Path, threads: int) -> Any:
    state = {"w": torch.arange(BLOCKS * 2**21, dtype=torch.float32)}  # of 8 MiB each
    with Checkpointer(str(folder), options=CheckpointerOptions(agent="embedded", copy_threads=threads)) as checkpointer:
        for step in (1, 2):  # helpers wait for the second one
            state["w"] += 1
            ticket = checkpointer.save(step, state, lazy=True)
            assert ticket is not None
            assert checkpointer._opened is not None
            in_flight = checkpointer._opened.saves.in_flight
            if in_flight is not None and in_flight.snapshot is not None:
                assert in_flight.snapshot.copied.wait(60)  # without this thread, which would help at the fence
            ticket.wait()
        return checkpointer.load().state["w"]  # type: ignore[union-attr]


@pytest.mark.parametrize("threads", [1, 3])
def test_so_many_threads_copy_at_once(threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = threading.Barrier(threads)
    copied: dict[str, int] = {}
    first: list[str] = []

    def hit(point: str, **where: Any) -> None:
        name = threading.current_thread().name
        if point != "save.block" or not name.startswith("resiliency-copy"):
            return
        copied[name] = copied.get(name, 0) + 1
        if len(first) < threads:
            first.append(name)
            barrier.wait(timeout=20)  # breaks, and the save with it, unless all of them come

    monkeypatch.setattr(snapshot_module, "hit", hit)
    found = save_twice(tmp_path, threads)
    assert torch.equal(found, torch.arange(BLOCKS * 2**21, dtype=torch.float32) + 2)
    assert len(set(first)) == threads
    assert len(copied) == threads and sum(copied.values()) >= 2 * BLOCKS


def test_threads_end_with_the_checkpointer(tmp_path: Path) -> None:
    save_twice(tmp_path, 3)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("resiliency-copy")] == []


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5])
def test_a_number_of_threads_that_cannot_work_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="copy_threads"):
        CheckpointerOptions(copy_threads=wrong)
