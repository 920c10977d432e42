"""Ranks that are told to go save one step, and leave with a code that says so."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from resiliency.callbacks.autocheckpoint import build
from resiliency.errors import ConfigError
from resiliency.runtime.exit_codes import PREEMPTED
from resiliency.testing.zygote import WorkerProcess, Zygote
from tests.callbacks.harness import names
from tests.callbacks.preempted_job import AT
from tests.patience import PATIENCE
from tests.ports import free_port
from tests.rings import few

SOON_S = 40.0
#: What a rank logs once it has chosen, and told the others, the batch at whose end it can stop.
NOTICED = "that the job is to go"

#: Who gets the signal.
WHOM = ("0", "1", "all", "group")


class Job:
    """Two ranks, or one."""

    def __init__(self, zygote: Zygote, folder: Path, *, ranks: int = 2) -> None:
        self.zygote, self.folder, self.ranks = zygote, folder, ranks
        self.directory = folder / "ckpts"
        self.workers: list[WorkerProcess] = []
        self.starts = 0

    def start(self, *, env: dict[str, str | None] | None = None, **arguments: Any) -> None:
        self.folder.mkdir(exist_ok=True)
        for path in self.folder.glob("*-?*"):
            path.unlink()
        (self.folder / "go").unlink(missing_ok=True)
        port = str(free_port())
        self.workers = []
        for rank in range(self.ranks):
            launched: dict[str, Any] = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.ranks),
                "LOCAL_WORLD_SIZE": str(self.ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "NODE_RANK": "0",
                "GROUP_RANK": "0",
                "TORCHELASTIC_RUN_ID": "job",
                "TORCHELASTIC_RESTART_COUNT": str(self.starts),
                **(env or {}),
            }
            launched = {name: value for name, value in launched.items() if value is not None}
            given = {"directory": str(self.directory), "folder": str(self.folder), **arguments}
            self.workers.append(self.zygote.start("tests.callbacks.preempted_job:train", given, env=launched))
        self.starts += 1

    def wait_there(self, *ranks: int, what: str = "there") -> None:
        until = time.monotonic() + SOON_S
        for rank in ranks or range(self.ranks):
            while not (self.folder / f"{what}-{rank}").exists():
                assert time.monotonic() < until, f"rank {rank} does not come there"
                assert self.workers[rank].returncode is None, f"rank {rank} has ended: {self.results()}"
                time.sleep(0.005)

    def signal(self, whom: str, number: int = signal.SIGTERM) -> None:
        for rank, worker in enumerate(self.workers):
            if whom == "group":
                os.killpg(worker.pid, number)  # each rank of these tests has a group of its own, with its children
            elif whom in ("all", str(rank)):
                os.kill(worker.pid, number)

    def wait_noticed(self, whom: str) -> None:
        """Waits until the ranks that were signalled know it: their threads may come late on a busy machine."""
        until = time.monotonic() + SOON_S
        for rank in range(self.ranks):
            while whom in ("all", "group", str(rank)) and NOTICED not in (self.folder / f"log-{rank}").read_text():
                assert time.monotonic() < until, f"rank {rank} did not notice: {self.logs()}"
                time.sleep(0.005)

    def go(self) -> None:
        (self.folder / "go").touch()

    def codes(self, timeout_s: float = SOON_S) -> list[int | None]:
        until = time.monotonic() + PATIENCE * timeout_s
        return [worker.wait(timeout_s=max(0.1, until - time.monotonic())) for worker in self.workers]

    def results(self) -> list[dict[str, Any]]:
        found = [self.folder / f"result-{rank}.json" for rank in range(self.ranks)]
        return [json.loads(path.read_text()) if path.exists() else {} for path in found]

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(self.folder.glob("log-*")))

    def kill(self) -> None:
        for worker in self.workers:
            worker.kill()


@pytest.fixture
def make(zygote: Zygote, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def new(name: str = "job", **values: Any) -> Job:
        jobs.append(Job(zygote, tmp_path / name, **values))
        return jobs[-1]

    yield new
    for job in jobs:
        job.kill()


@pytest.fixture(scope="module")
def undisturbed(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Weights after each step, with dropout and without."""
    found = {}
    for dropout in (0.2, 0.0):
        job = Job(zygote, tmp_path_factory.mktemp("undisturbed") / "job")
        try:
            job.start(dropout=dropout)
            assert job.codes() == [0, 0]
        finally:
            job.kill()
        found[str(dropout)] = job.results()[0]["hashes"]
    return found


def saved_step(job: Job) -> tuple[int, Any]:
    assert (job.directory / "preempted.ckpt").exists(), job.logs()
    state = torch.load(job.directory / "preempted.ckpt", weights_only=True)
    return state["global_step"], state


def weights(job: Job) -> str:
    import hashlib

    digest = hashlib.sha256()
    for tensor in saved_step(job)[1]["state_dict"].values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize(
    ("whom", "moment"),
    few(
        product(WHOM, ["forward", "backward", "batch end", "validation"]),
        [("0", "forward"), ("1", "backward"), ("all", "batch end"), ("group", "validation")],
    ),
)
def test_all_ranks_save_one_step_and_leave(
    whom: str, moment: str, make: Callable[..., Job], undisturbed: dict[str, dict[str, str]]
) -> None:
    job = make()
    job.start(moment=moment, workers=2 if whom == "group" else 0)
    job.wait_there()
    job.signal(whom)
    job.wait_noticed(whom)
    job.go()
    assert job.codes() == [PREEMPTED, PREEMPTED], job.results()
    first, second = job.results()
    assert first["outcome"] == second["outcome"] == f"Preempted {PREEMPTED}"
    assert "is not there" not in job.logs()
    step, _ = saved_step(job)
    assert first["step"] == second["step"] == step and AT < step <= AT + 3
    assert weights(job) == undisturbed["0.2"][str(step)]
    job.start()
    assert job.codes() == [0, 0]
    assert job.results()[0]["hash"] == undisturbed["0.2"]["20"]
    assert min(map(int, job.results()[0]["hashes"])) == step + 1


@pytest.mark.parametrize(("whom", "workers"), few(product(WHOM, [0, 2]), [("0", 0), ("group", 2)]))
def test_ranks_with_a_data_loader_that_is_stuck_end_in_time(
    workers: int, whom: str, make: Callable[..., Job], undisturbed: dict[str, dict[str, str]]
) -> None:
    """One rank waits for its data, the other for that rank, in an operation of gloo that nothing can end."""
    job = make()
    job.start(stuck=True, workers=workers, dropout=0.0, grace_s=5.0)
    job.wait_there(1)
    job.wait_there(what="before")
    job.signal(whom)
    began = time.monotonic()
    assert job.codes() == [PREEMPTED, PREEMPTED], job.results()
    assert 2.4 < time.monotonic() - began < 5.5
    job.start(dropout=0.0)
    assert job.codes() == [0, 0]
    assert job.results()[0]["hash"] == undisturbed["0.0"]["20"]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_rank_with_a_data_loader_that_is_stuck_saves_the_step_before(workers: int, make: Callable[..., Job]) -> None:
    job = make(ranks=1)
    job.start(stuck=True, workers=workers, grace_s=5.0)
    job.wait_there(what="before")
    job.signal("0")
    assert job.codes() == [PREEMPTED], job.results()
    assert job.results()[0]["step"] == saved_step(job)[0] == AT


@pytest.mark.parametrize(
    ("whom", "second"),
    few(product(WHOM, [signal.SIGTERM, signal.SIGUSR1]), [("1", signal.SIGTERM), ("all", signal.SIGUSR1)]),
)
def test_signals_that_follow_change_nothing(
    second: int, whom: str, make: Callable[..., Job], undisturbed: dict[str, dict[str, str]]
) -> None:
    job = make()
    job.start(moment="forward")
    job.wait_there()
    job.signal(whom)
    job.signal("all", second)
    job.go()
    until = time.monotonic() + SOON_S
    while any(worker.returncode is None for worker in job.workers):  # all the while, to the last moment
        assert time.monotonic() < until
        for worker in job.workers:
            if worker.returncode is None:
                with suppress(ProcessLookupError):
                    os.kill(worker.pid, second)
        time.sleep(0.01)
    assert job.codes() == [PREEMPTED, PREEMPTED]
    step, _ = saved_step(job)
    assert weights(job) == undisturbed["0.2"][str(step)]


def test_a_signal_before_the_first_batch_stops_after_it(make: Callable[..., Job]) -> None:
    job = make()
    job.start(moment="sanity check")
    job.wait_there()
    job.signal("0")
    job.go()
    assert job.codes() == [PREEMPTED, PREEMPTED], job.logs()
    assert saved_step(job)[0] == 1


def test_with_accumulated_gradients_the_step_is_ended_first(make: Callable[..., Job]) -> None:
    job = make()
    job.start(moment="forward", accumulate=4)  # the batch is the second of its step
    job.wait_there()
    job.signal("1")
    job.go()
    assert job.codes() == [PREEMPTED, PREEMPTED], job.logs()
    step, state = saved_step(job)
    progress = state["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]
    assert (step, progress["ready"]) == (2, 8)


def test_a_job_that_finishes_and_one_that_fails_are_as_without(make: Callable[..., Job]) -> None:
    finished = make("finished", ranks=1)
    finished.start()
    assert finished.codes() == [0]
    (answer,) = finished.results()
    assert answer["outcome"] == "finished" and answer["threads"] == [] and answer["wakeup"] == -1
    assert answer["handlers"] == [str(signal.SIG_DFL)] * 2
    assert not (finished.directory / "preempted.ckpt").exists()
    failed = make("failed", ranks=1)
    failed.start(fails=True)
    assert failed.codes() == [1]
    (answer,) = failed.results()
    assert answer["outcome"] == "ValueError('of the user')" and answer["threads"] == []
    assert answer["handlers"] == [str(signal.SIG_DFL)] * 2


@pytest.mark.parametrize("namespace", few(["lightning.pytorch", "pytorch_lightning"], ["lightning.pytorch"]))
def test_alone_it_has_a_run_of_its_own_and_resumes(namespace: str, make: Callable[..., Job]) -> None:
    job = make(ranks=1)
    job.start(moment="forward", model_checkpoint=False, namespace=namespace)
    job.wait_there()
    job.signal("0", signal.SIGUSR1)
    job.go()
    assert job.codes() == [PREEMPTED], job.logs()
    assert names(job.directory) == {"preempted.ckpt"}
    step, _ = saved_step(job)
    job.start(model_checkpoint=False, namespace=namespace)
    assert job.codes() == [0], job.logs()
    assert min(map(int, job.results()[0]["hashes"])) == step + 1


def test_beside_the_stock_callback_the_engine_saves_too(make: Callable[..., Job]) -> None:
    job = make()
    job.start(moment="forward", stock=True)
    job.wait_there()
    job.signal("1")
    job.go()
    assert job.codes() == [PREEMPTED, PREEMPTED], job.logs()
    assert saved_step(job)[0] > AT


def test_the_checkpoint_goes_when_the_next_start_has_saved(make: Callable[..., Job]) -> None:
    job = make()
    job.start(moment="forward")
    job.wait_there()
    job.signal("0")
    job.go()
    assert job.codes() == [PREEMPTED, PREEMPTED]
    assert names(job.directory) == {"preempted.ckpt"}
    job.start(saves={"every_n_train_steps": 5, "save_top_k": 1, "filename": "{step}"})
    assert job.codes() == [0, 0]
    assert names(job.directory) == {"step=20.ckpt"}


def test_what_is_on_a_fast_tier_is_sent_to_the_slow_one_too(make: Callable[..., Job], tmp_path: Path) -> None:
    """Whatever its interval says: memory goes with the machine."""
    job = make()
    job.start(moment="batch end", local_dir=str(tmp_path / "fast"), saves={"every_n_train_steps": 2, "save_last": True})
    job.wait_there()
    job.signal("0")
    job.go()
    assert job.codes() == [PREEMPTED, PREEMPTED], job.logs()
    assert saved_step(job)[0] > AT


def test_a_file_is_a_notice(make: Callable[..., Job], tmp_path: Path) -> None:
    job, notice = make(), tmp_path / "go away"
    job.start(moment="forward", arguments={"notice_file": str(notice), "signals": []})
    job.wait_there()
    notice.touch()
    until = time.monotonic() + SOON_S
    while "go away" not in job.logs():
        assert time.monotonic() < until
        time.sleep(0.01)
    job.go()
    assert job.codes() == [PREEMPTED, PREEMPTED], job.logs()
    assert saved_step(job)[0] > AT


def test_a_handler_of_the_user_is_called_as_well(make: Callable[..., Job]) -> None:
    job = make(ranks=1)
    job.start(moment="forward", user_handler=True)
    job.wait_there()
    job.signal("0")
    job.go()
    assert job.codes() == [PREEMPTED], job.logs()
    assert (job.folder / "handled-0").exists() and saved_step(job)[0] > AT


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"grace": 30}, "timedelta"),
        ({"exit_code": 0}, "from 1 to 255"),
        ({"signals": [signal.SIGKILL]}, "cannot be caught"),
        ({"signals": [4711]}, "cannot be caught"),
    ],
)
def test_values_that_cannot_work_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build("lightning.pytorch")(**arguments)


def test_a_preempted_job_goes_on_whoever_starts_it_again(make: Callable[..., Job]) -> None:
    """Nothing says that the second start is a restart of the first."""
    job = make(ranks=1)
    job.start(moment="forward")
    job.wait_there()
    job.signal("0")
    job.go()
    assert job.codes() == [PREEMPTED], job.logs()
    step, _ = saved_step(job)
    for first in (step + 1, 1):  # and the third is a job of its own, as ever
        job.start(
            env={"TORCHELASTIC_RUN_ID": None, "TORCHELASTIC_RESTART_COUNT": None}, saves={"every_n_train_steps": 5}
        )
        assert job.codes() == [0], job.logs()
        assert min(map(int, job.results()[0]["hashes"])) == first
        assert "preempted.ckpt" not in names(job.directory)


def test_under_slurm_lightning_requeues_the_job_where_all_have_stopped(
    make: Callable[..., Job], tmp_path: Path
) -> None:
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/requeued\n')
    scontrol.chmod(0o755)
    slurm: dict[str, str | None] = {
        "SLURM_NTASKS": "1",
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_ID": "77",
        "SLURM_PROCID": "0",
    }
    slurm |= {"SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NODELIST": "localhost"}
    slurm |= {"TORCHELASTIC_RUN_ID": None, "GROUP_RANK": None, "NODE_RANK": None}
    slurm |= {"PATH": f"{scontrol.parent}:{os.environ['PATH']}"}
    job = make(ranks=1)
    job.start(moment="forward", env=slurm)
    job.wait_there()
    job.signal("0", signal.SIGUSR1)
    job.go()
    assert job.codes() == [PREEMPTED], job.logs()
    assert (tmp_path / "requeued").read_text() == "requeue 77\n"
    assert torch.load(job.folder / "hpc_ckpt_1.ckpt")["global_step"] > AT
    step, _ = saved_step(job)  # which, unlike Lightning's file, has what an exact resume needs
    job.start(env={**slurm, "SLURM_RESTART_COUNT": "1"})
    assert job.codes() == [0], job.logs()
    assert min(map(int, job.results()[0]["hashes"])) == step + 1


def test_a_signal_to_the_peer_of_a_rank_that_has_died_is_no_preemption(make: Callable[..., Job]) -> None:
    """Launchers end the other ranks so, before they start all again: nothing waits for what cannot be saved."""
    job = make()
    job.start(moment="forward", grace_s=30.0)
    job.wait_there()
    os.kill(job.workers[1].pid, signal.SIGKILL)
    job.workers[1].wait(timeout_s=10)
    job.signal("0")
    job.go()
    began = time.monotonic()
    (code,) = [job.workers[0].wait(timeout_s=SOON_S)]
    assert code in (1, PREEMPTED) and time.monotonic() - began < 8, job.logs()
    assert not (job.directory / "preempted.ckpt").exists()


@pytest.mark.parametrize("late", ["", "preemption.interrupt:delay=0.5@*"])
def test_a_rank_whose_store_is_frozen_ends_within_the_grace(make: Callable[..., Job], late: str) -> None:
    """Rank 0 has the store, and answers nobody. The signal that interrupts rank 1 comes late where ``late`` says so:
    after the error of its aborted collective."""
    job = make()
    job.start(moment="forward", grace_s=4.0, env={"RESILIENCY_FAULTS": late})
    job.wait_there()
    os.kill(job.workers[0].pid, signal.SIGSTOP)
    began = time.monotonic()
    job.signal("1")
    job.go()
    assert job.workers[1].wait(timeout_s=15) == PREEMPTED, job.logs()
    assert time.monotonic() - began < 8
    assert not (job.directory / "preempted.ckpt").exists()


def test_a_checkpoint_that_is_to_be_resumed_has_all_of_the_state(make: Callable[..., Job]) -> None:
    """Also beside a callback that saves weights alone."""
    job = make(ranks=1)
    job.start(moment="forward", saves={"save_weights_only": True})
    job.wait_there()
    job.signal("0")
    job.go()
    assert job.codes() == [PREEMPTED], job.logs()
    step, state = saved_step(job)
    assert "optimizer_states" in state
    job.start(saves={"save_weights_only": True})
    assert job.codes() == [0], job.logs()
    assert min(map(int, job.results()[0]["hashes"])) == step + 1


def test_workers_are_seeded_and_end_what_they_start_as_without_it(make: Callable[..., Job]) -> None:
    drawn = []
    for used in (False, True):
        job = make(f"used-{used}", ranks=1)
        job.start(workers=2, seed_workers=True, arguments={"used": used}, max_steps=4)
        assert job.codes() == [0], job.logs()
        assert (job.folder / "child").read_text() == str(-signal.SIGTERM)
        drawn.append([(job.folder / f"drawn-{index}").read_text() for index in range(4)])
    assert drawn[0] == drawn[1]


def test_the_handler_of_faulthandler_is_left_alone(make: Callable[..., Job]) -> None:
    job = make(ranks=1)
    job.start(moment="forward", handler="stacks")
    job.wait_there()
    job.signal("0", signal.SIGUSR1)
    until = time.monotonic() + SOON_S
    while "wait_there" not in (job.folder / "stacks").read_text():
        assert time.monotonic() < until
        time.sleep(0.01)
    job.go()
    assert job.codes() == [0], job.logs()


def test_a_handler_of_the_user_that_exits_does_so_when_all_is_saved(make: Callable[..., Job]) -> None:
    job = make()
    job.start(moment="forward", handler="exits")
    job.wait_there()
    job.signal("all")
    job.go()
    assert job.codes() == [9, 9], job.logs()
    assert saved_step(job)[0] > AT


@pytest.mark.parametrize("ends", few([True, False], [True]))
def test_a_notice_after_the_last_batch(ends: bool, make: Callable[..., Job]) -> None:
    """The job ends by itself, or is ended when the grace is over. Lightning's handler would wait for the other rank."""
    job = make()
    job.start(moment="train end", grace_s=3.0)
    job.wait_there()
    job.signal("0")
    if ends:
        job.go()
    assert job.codes(timeout_s=15) == ([0, 0] if ends else [PREEMPTED, PREEMPTED]), job.logs()


def test_a_rank_is_interrupted_without_a_signal_that_is_a_notice(make: Callable[..., Job], tmp_path: Path) -> None:
    job, notice = make(ranks=1), tmp_path / "notice"
    job.start(stuck=True, dropout=0.0, grace_s=5.0, arguments={"notice_file": str(notice), "signals": []})
    job.wait_there(what="before")
    notice.touch()
    assert job.codes() == [PREEMPTED], job.logs()
    assert saved_step(job)[0] == AT
