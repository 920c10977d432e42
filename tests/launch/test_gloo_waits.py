"""Waits of gloo for messages that a dead peer has left half sent or half received, with real processes."""

from __future__ import annotations

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from resiliency.launch import gloo_waits
from resiliency.launch.gloo_waits import GlooWaits
from resiliency.launch.leaving import looks_like_a_lost_peer
from tests.older_torch import needs_names_of_gloo_threads

pytestmark = pytest.mark.timeout(120)

#: Rank 1 dies in the middle of a message from (attempt 0) or to (attempt 1) rank 0. Gloo tells neither end.
HALF_A_MESSAGE = """
    import os, signal, sys, time
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from resiliency.launch import restartable

    folder = Path(sys.argv[1])

    def written():
        return int(Path("/proc/self/io").read_text().split("wchar:")[1].split()[0])

    def wait_until(holds):
        deadline = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.0005)

    @restartable
    def main():
        rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        os.write(1, f"rank {rank} attempt {attempt} process {os.getpid()}\\n".encode())
        dist.init_process_group("gloo")
        dist.barrier()
        before = written()
        if attempt == 0 and rank == 1:
            dist.irecv(torch.zeros(1 << 25), 0)
            (folder / "part").write_text(str(os.getpid()))
            (folder / "part").rename(folder / "stops")  # whole as soon as it is there
            os.kill(os.getpid(), signal.SIGSTOP)
        elif attempt == 0:
            wait_until((folder / "stops").exists)
            peer = int((folder / "stops").read_text())
            wait_until(lambda: Path(f"/proc/{peer}/stat").read_text().rpartition(")")[2].split()[0] == "T")
            work = dist.isend(torch.zeros(1 << 25), 1)
            wait_until(lambda: written() > before + 100_000)
            os.kill(peer, signal.SIGKILL)
            work.wait()
        elif attempt == 1 and rank == 1:
            work = dist.isend(torch.zeros(1 << 26), 0)
            wait_until(lambda: written() > before + 100_000)
            os.kill(os.getpid(), signal.SIGKILL)
        elif attempt == 1:
            dist.recv(torch.zeros(1 << 26), 1)
        total = torch.ones(1)
        dist.all_reduce(total)
        os.write(1, f"rank {rank} sums {int(total)}\\n".encode())
        dist.destroy_process_group()

    main()
"""


@needs_names_of_gloo_threads
def test_a_rank_stays_whose_peer_died_in_the_middle_of_a_message(launch: Any, tmp_path: Any) -> None:
    job = launch(HALF_A_MESSAGE, "--nproc-per-node", 2, "--max-restarts", 2, "--crash-loop", 0, arguments=[tmp_path])
    assert job.wait(60) == 0, job.text
    assert "this rank is stuck in native code" not in job.text, job.text
    assert len(set(re.findall(r"rank 0 attempt \d process (\d+)", job.text))) == 1, job.text
    assert len(set(re.findall(r"rank 1 attempt \d process (\d+)", job.text))) == 3, job.text
    assert re.findall(r"rank \d sums (\d)", job.text) == ["2", "2"], job.text


def test_a_wait_is_ended_when_it_was_there_before_and_all_connections_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(gloo_waits, "_loaded", lambda: SimpleNamespace(table=0, end=ended.append))
    seen = {(1, 0x10)}
    monkeypatch.setattr(gloo_waits, "_buffers", lambda table: iter(seen))
    waits = GlooWaits()
    assert [waits.end(closed=closed) for closed in (True, False, False, True)] == [0, 0, 0, 0]
    assert ended == []
    seen = {(1, 0x10), (2, 0x20)}
    assert waits.end(closed=True) == 1
    assert ended == [0x10]


def test_an_operation_whose_wait_is_ended_raises_and_returns_no_numbers() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        here, there = threads.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60)), range(2))
        work = here.allreduce([torch.ones(1)])
        waits, deadline = GlooWaits(), time.monotonic() + 30
        while waits.end(closed=True) != 1:
            assert time.monotonic() < deadline
        with pytest.raises(RuntimeError, match="the connection to a peer has ended") as raised:
            work.wait(timedelta(seconds=10))
    assert looks_like_a_lost_peer(raised.value)
    del work, here, there


def test_what_waits_for_something_else_is_left_alone() -> None:
    event = threading.Event()
    thread = threading.Thread(target=event.wait)
    thread.start()
    waits = GlooWaits()
    assert [waits.end(closed=True) for _ in range(2)] == [0, 0]
    assert thread.is_alive()
    event.set()
    thread.join(10)
