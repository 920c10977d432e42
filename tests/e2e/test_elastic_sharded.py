"""FSDP2 on several hosts with a spare: hosts are lost and come back, and the losses are those of a run that had these
sizes by plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from resiliency.testing.zygote import Zygote
from tests.e2e import elastic_job
from tests.e2e.clusters import Cluster
from tests.ports import free_port
from tests.rings import few

pytestmark = [pytest.mark.kill, pytest.mark.long, pytest.mark.timeout(300)]

SETTINGS = {"quarantine_s": 1, "dwell_s": 1, "heartbeat_timeout_s": 2, "heartbeat_polling_period_s": 0.5}


def sizes_of(folder: Path) -> list[tuple[int, int, int]]:
    """Attempt, number of ranks and first step of each time that training began."""
    lines = (folder / "sizes").read_text().splitlines() if (folder / "sizes").exists() else []
    return [(int(attempt), int(ranks), int(step)) for attempt, ranks, step in map(str.split, lines)]


def losses_of(folder: Path) -> dict[tuple[int, int], dict[int, list[str]]]:
    """(attempt, rank) -> step -> the losses of its batches."""
    found: dict[tuple[int, int], dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for path in folder.glob("records-*"):
        for line in path.read_text().splitlines():
            attempt, step, loss = line.split()
            found[int(attempt), int(path.name.removeprefix("records-"))][int(step)].append(loss)
    return found


@pytest.fixture
def cluster(tmp_path: Path, zygote: Zygote) -> Iterator[Callable[..., Cluster]]:
    words = [word for name, value in SETTINGS.items() for word in ("--supervisor-set", f"{name}={value}")]
    made: list[Cluster] = []

    def start(*flags: Any) -> Cluster:
        made.append(Cluster(tmp_path, zygote, *flags, *words, job=Path(elastic_job.__file__)))
        return made[-1]

    yield start
    for one in made:
        one.close()


def planned(zygote: Zygote, folder: Path, ranks: int, steps: int, attempt: int) -> None:
    """Trains on from the newest checkpoint, up to this step, which is saved."""
    port = str(free_port())
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    job = {"TORCHELASTIC_RUN_ID": "planned", "TORCHELASTIC_RESTART_COUNT": str(attempt), "GROUP_RANK": "0"}
    workers = [
        zygote.start(
            "tests.e2e.elastic_job:train",
            {"directory": str(folder), "steps": steps, "every": 1},
            env={
                **shared,
                **job,
                "NODE_RANK": "0",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "RESILIENCY_ATTEMPT": str(attempt),
            },
        )
        for rank in range(ranks)
    ]
    try:
        assert [worker.wait(timeout_s=90) for worker in workers] == [0] * ranks
    finally:
        for worker in workers:
            worker.kill()


#: Hosts, spares, and the number of ranks at the beginning, after each loss of a host, and after one comes back.
CASES = [("1:2", 0, (2, 1, 2)), ("2:3", 1, (3, 3, 2, 3))]


@pytest.mark.parametrize(("hosts", "spares", "ranks"), few(CASES, CASES[:1]))
def test_the_losses_are_those_of_a_run_that_had_these_sizes_by_plan(
    hosts: str, spares: int, ranks: tuple[int, ...], cluster: Callable[..., Cluster], zygote: Zygote, tmp_path: Path
) -> None:
    job = cluster("--nnodes", hosts, "--spares", spares)

    def train_with(attempts: int) -> None:
        """Until so many attempts have begun and the last has made some steps."""

        def some_steps_are_made() -> bool:
            sizes = sizes_of(tmp_path)
            return len(sizes) == attempts and job.progress() > (sizes[-1][0], sizes[-1][2] + 4)

        job.wait_until(some_steps_are_made, f"attempt {attempts} of {ranks} ranks", timeout_s=90)

    train_with(1)
    for attempts in range(2, len(ranks)):
        job.kill_host(job.where(0)[0])
        train_with(attempts)
    job.bring_back()
    train_with(len(ranks))
    job.close()

    attempts = sizes_of(tmp_path)
    assert tuple(size for _, size, _ in attempts) == ranks
    done = losses_of(tmp_path)
    # the newest step may not be whole on every rank
    ends = [first for _, _, first in attempts[1:]] + [max(done[attempts[-1][0], 0]) - 1]
    folder = tmp_path / "planned"
    folder.mkdir()
    for number, (_, size, _) in enumerate(attempts):
        planned(zygote, folder, size, ends[number], number)
    wanted = losses_of(folder)
    for number, (attempt, size, first) in enumerate(attempts):
        for step in range(first, ends[number]):
            for rank in range(size):
                losses = done[attempt, rank][step]
                assert len(losses) == elastic_job.ACCUMULATED * ranks[0] // size
                assert losses == wanted[number, rank][step], (
                    f"attempt {attempt} of {size} ranks, rank {rank}, step {step}"
                )
