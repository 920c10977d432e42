"""Ranks that hang: which one it is, and what is done, with real processes."""

from __future__ import annotations

import os
import re
import signal
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from resiliency.launch.hangs import Seen, hang_text, hung, threshold
from resiliency.runtime.heartbeat import Page
from tests.launch.launching import wait_for

pytestmark = pytest.mark.timeout(180)


def seen(beats: int, quiet_s: float, *, longest_s: float = 0.1, watched: bool = True, stopped_s: float = 0.0) -> Seen:
    page = Page(beats=beats, last_s=0, longest_s=longest_s, watched=watched)
    return Seen(page=page if beats else None, quiet_s=quiet_s, stopped_s=stopped_s)


@pytest.mark.parametrize(
    ("ranks", "blamed"),
    [
        ([seen(9, 1), seen(9, 1)], []),
        ([seen(9, 9), seen(9, 9.5)], []),
        ([seen(9, 11), seen(8, 11)], [1]),
        ([seen(9, 11), seen(8, 11), seen(8, 12)], [1, 2]),
        # All wait, as many beats: the one that made the last one first.
        ([seen(9, 11), seen(9, 12), seen(9, 11)], [1]),
        ([seen(9, 11), seen(9, 12, stopped_s=1), seen(8, 11)], [1]),
        # Nobody waits for it.
        ([seen(99, 0.1), seen(8, 11)], [1]),
        ([seen(9, 1000, watched=False), seen(9, 1)], []),
        # It has been as slow before.
        ([seen(9, 50, longest_s=6), seen(9, 1)], []),
        ([seen(9, 61, longest_s=6), seen(9, 1)], [0]),
        # Stopped where nothing is expected of it, or before it has ever beaten.
        ([seen(9, 1000, watched=False, stopped_s=11), seen(9, 1)], [0]),
        ([seen(0, 0, stopped_s=11), seen(0, 0)], [0]),
        ([seen(0, 0, stopped_s=9), seen(0, 0)], []),
        ([], []),
    ],
)
def test_the_rank_that_holds_up_the_others_is_found(ranks: list[Seen], blamed: list[int]) -> None:
    assert hung(dict(enumerate(ranks)), floor_s=10) == blamed


def test_a_threshold_follows_the_longest_step_and_has_a_floor() -> None:
    assert threshold(seen(9, 0, longest_s=0.5).page, floor_s=60) == 60
    assert threshold(seen(9, 0, longest_s=30).page, floor_s=60) == 300


def test_what_is_said_names_the_rank_its_process_and_how_far_it_came() -> None:
    text = hang_text(1, 77, seen(41, 12.2, stopped_s=1), {0: seen(42, 11), 1: seen(41, 12.2), 2: seen(43, 11)})
    assert "rank 1 (process 77) has made no progress for 12 s" in text
    assert "a signal has stopped it" in text and "41 beats; the other ranks of this host are at 42 to 43" in text


def test_of_a_rank_no_step_of_which_was_measured_it_is_said_what_the_time_out_must_be() -> None:
    text = hang_text(0, 77, seen(1, 4, longest_s=0), {0: seen(1, 4, longest_s=0)})
    assert "no step of it was measured yet: --hang-timeout must be longer than any takes" in text


def test_of_a_rank_that_never_had_a_word_it_is_said_that_it_was_stopped() -> None:
    text = hang_text(1, 77, seen(0, 0, stopped_s=12.2), {0: seen(0, 0), 1: seen(0, 0, stopped_s=12.2)})
    assert "rank 1 (process 77) was stopped by a signal 12 s ago: it hangs" in text


#: Holds the GIL, so that no Python code runs; a signal does not end it.
DEADLOCK = """import ctypes
mutex = ctypes.create_string_buffer(64)
for _ in range(2):
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)"""

HANGING = """
    import os, signal, sys, threading, time
    import torch
    import torch.distributed as dist
    from resiliency.launch import beat, restartable

    def hang(rank):
{place}

    @restartable
    def main():
        rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        os.write(1, f"rank {{rank}} attempt {{attempt}} process {{os.getpid()}}\\n".encode())
        dist.init_process_group("gloo")
        for step in range(30):
            if (rank, step, attempt) == (1, 20, 0):
                hang(rank)
            beat()
            dist.all_reduce(torch.ones(1))
            beat()
            time.sleep(0.01)
        dist.destroy_process_group()
        os.write(1, f"rank {{rank}} ends\\n".encode())

    main()
"""


@pytest.mark.parametrize(
    ("place", "stacks"),
    [
        (DEADLOCK, True),
        ("os.kill(os.getpid(), signal.SIGSTOP)", False),
        ("import queue; queue.Queue().get()  # as of a data loader whose workers are stuck", True),
    ],
    ids=["holding the GIL", "stopped", "waiting for data"],
)
def test_a_rank_that_hangs_is_named_and_replaced(place: str, stacks: bool, launch: Any, tmp_path: Path) -> None:
    script = textwrap.dedent(HANGING).format(place=textwrap.indent(place, "    " * 2))
    flags = ["--nproc-per-node", 3, "--max-restarts", 1, "--hang-timeout", 2, "--crash-loop", 0]
    job = launch(script, *flags, "--log-dir", tmp_path / "logs", "-r", "3")
    assert job.wait() == 0, job.text
    found = re.search(r"rank 1 \(process (\d+)\) has made no progress for \d+ s", job.text)
    assert found is not None, job.text
    (logs,) = (tmp_path / "logs").iterdir()
    said = {
        (attempt, rank): [
            (logs / f"attempt_{attempt}" / str(rank) / name).read_text() for name in ("stdout.log", "stderr.log")
        ]
        for attempt in (0, 1)
        for rank in range(3)
    }
    assert f"rank 1 attempt 0 process {found[1]}\n" in said[0, 1][0]
    assert job.text.count("has made no progress") == 1
    # The stacks: what the one that hangs does, if it can say so, and the others in their step.
    assert ("in hang" in said[0, 1][1]) is stacks
    assert all("in main" in said[0, rank][1] for rank in (0, 2))
    assert all(f"rank {rank} ends\n" in said[1, rank][0] for rank in range(3))
    assert ("a signal has stopped it" in job.text) is (not stacks)
    job.descendants()
    assert job.left() == []


def test_a_rank_that_was_stopped_before_it_had_a_word_is_replaced(launch: Any) -> None:
    script = """
        import os, signal
        import torch.distributed as dist
        rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if (rank, attempt) == (1, 0):
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.init_process_group("gloo")
        dist.barrier()
        os.write(1, f"rank {rank} of attempt {attempt} ends\\n".encode())
        dist.destroy_process_group()
    """
    job = launch(script, "--nproc-per-node", 2, "--max-restarts", 1, "--hang-timeout", 2, "--crash-loop", 0)
    assert job.wait() == 0, job.text
    assert re.search(r"rank 1 \(process \d+\) was stopped by a signal \d+ s ago: it hangs", job.text), job.text
    assert "rank 1 of attempt 1 ends" in job.text


def test_a_rank_that_a_script_of_the_user_has_started_is_asked_for_its_stacks_and_ended(
    launch: Any, tmp_path: Path
) -> None:
    hanging = HANGING.format(place=textwrap.indent(DEADLOCK, "    " * 2)).replace("@restartable", "")
    (tmp_path / "job.py").write_text(textwrap.dedent(hanging))
    wrapper = tmp_path / "wrapper.sh"
    wrapper.write_text(f"#!/bin/sh\n{sys.executable} {tmp_path}/job.py\nexit $?\n")
    wrapper.chmod(0o755)
    flags = ["--nproc-per-node", 2, "--max-restarts", 1, "--hang-timeout", 2, "--crash-loop", 0, "--no-python"]
    job = launch("", *flags, "--log-dir", tmp_path / "logs", "-r", "3", wrapper)
    log = tmp_path / "logs"
    deadline = time.monotonic() + 60
    while "rank 1 attempt 0" not in "".join(path.read_text() for path in log.rglob("1/stdout.log")):
        assert time.monotonic() < deadline, job.text
        time.sleep(0.05)
    job.descendants()
    assert job.wait() == 0, job.text
    stacks = {path.parent.name: path.read_text() for path in log.rglob("attempt_0/*/stderr.log")}
    assert "in hang" in stacks["1"] and "in main" in stacks["0"], stacks
    assert "rank 1 (process" in job.text and "because it hung" in job.text, job.text
    assert "out of memory" not in job.text
    assert job.left() == []


def test_steps_that_take_their_time_and_ranks_that_do_something_else_do_not_hang(launch: Any) -> None:
    script = """
        import time
        from resiliency.launch import beat, pause

        time.sleep(2.5)  # before the first beat
        for step in range(8):
            beat()
            time.sleep(0.3)
        time.sleep(2.5)  # ten times the longest step is 3 s
        beat()
        pause()
        time.sleep(4)
    """
    job = launch(script, "--nproc-per-node", 1, "--hang-timeout", 1)
    assert job.wait() == 0, job.text
    assert "no progress" not in job.text


def test_a_hang_is_left_alone_where_that_was_asked_for(launch: Any, tmp_path: Path) -> None:
    script = """
        import sys, time
        from resiliency.launch import beat
        beat()
        time.sleep(4)
        open(sys.argv[1] + "/done", "w").write("1")
    """
    job = launch(script, "--nproc-per-node", 1, "--hang-timeout", 0, arguments=[tmp_path])
    wait_for(tmp_path / "done")
    assert job.wait() == 0 and "no progress" not in job.text


def test_a_launcher_that_was_stopped_with_its_ranks_takes_none_for_hung(launch: Any, tmp_path: Path) -> None:
    script = """
        import sys, time
        from resiliency.launch import beat
        for step in range(400):
            beat()
            time.sleep(0.01)
            if step == 50:
                open(sys.argv[1] + "/began", "w").write("1")
    """
    job = launch(script, "--nproc-per-node", 2, "--hang-timeout", 1, arguments=[tmp_path])
    wait_for(tmp_path / "began")
    processes = [*job.descendants()]
    for process in processes:
        process.suspend()
    os.kill(job.pid, signal.SIGSTOP)
    time.sleep(3)  # as a virtual machine that was paused
    os.kill(job.pid, signal.SIGCONT)
    time.sleep(0.3)
    for process in processes:
        process.resume()
    assert job.wait() == 0, job.text
    assert "no progress" not in job.text


def test_a_trainer_beats_from_batch_to_batch_and_not_in_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A validation, or what a user does at the end of an epoch, may take any time."""
    import torch
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader, TensorDataset

    from resiliency import ModelCheckpoint
    from resiliency.plugins import step_hooks

    said: list[str] = []
    steps: list[int | None] = []
    monkeypatch.setattr(step_hooks, "beat", lambda step: (said.append("beat"), steps.append(step)))
    monkeypatch.setattr(step_hooks, "pause", lambda: said.append("pause"))

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.layer(batch[0]).mean()

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            said.append("validation")

        def on_train_epoch_end(self) -> None:
            said.append("end of epoch")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=2)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=2,
        callbacks=[ModelCheckpoint(dirpath=tmp_path)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(Net(), data, data)
    words = " ".join(said)
    epoch = "beat beat beat beat pause pause validation validation end of epoch"
    assert steps == [0, 1, 1, 2, 2, 2, 3, 3, 4]
    assert words == f"{epoch} beat {epoch} pause", (
        words
    )  # the loader of a later epoch is waited for no longer than a step
