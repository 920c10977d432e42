"""SIGKILLs at random times, nightly hundreds: any rank, the agent, all of them; and the weights end as if nothing had happened."""

from __future__ import annotations

import json
import threading
import time
import traceback
from pathlib import Path
from random import Random

import pytest

from resiliency.testing.zygote import WorkerProcess, Zygote
from tests.e2e.driver import Job, chance, kill_agents, wait_ended
from tests.rings import few

#: Long enough that most attempts are killed before they end, and the next one goes on from there; short enough that a
#: good part of the kills falls into a start or a restore. A save every second or third step is under way most of the time.
STEPS = 24
#: The time within which an attempt is killed grows by this with each killed attempt, and shrinks by this with each that
#: reached its end before: so about one attempt in ten does, whatever else the machine has to do meanwhile.
LONGER, SHORTER = 1.04, 0.7
#: Seconds within which the next of an attempt's kills follows: what is left of the job is then dealing with the last one.
PAUSE_S = 0.4


class _Tally:
    def __init__(self) -> None:
        self.kills = 0
        self.attempts = 0
        self.problems: list[str] = []


class _KilledJob(Job):
    reference = ""
    resumes_seen = 0
    number = 0

    def renew(self) -> None:
        self.number += 1
        self.resumes_seen = 0
        self.result.unlink()
        self.directory = self.directory.parent / f"{self.directory.name.split('-')[0]}-{self.number}"


def _torment(job: _KilledJob, seed: int, window_s: float, tally: _Tally, count: int) -> None:
    """Kills and restarts the job until it has had its share of kills, then lets it end."""
    try:
        _kill_and_restart(job, seed, window_s, tally, count)
    except Exception:  # Boundary: a thread's failure must reach the test.
        tally.problems.append(traceback.format_exc())


def _kill_and_restart(job: _KilledJob, seed: int, window_s: float, tally: _Tally, count: int) -> None:
    random = chance(seed)
    while tally.kills < count:
        tally.attempts += 1
        before = job.newest_committed()
        workers = job.start()
        try:
            if wait_ended(workers[:1], seconds=random.uniform(0.0, window_s)):
                window_s *= SHORTER
                # It reached its end: start it over in a new directory, so that there is always something to kill.
                wait_ended(workers, seconds=30)
                _check_attempt(job, before, tally)
                if job.outcome()["hash"] != job.reference:
                    tally.problems.append(
                        f"wrong weights in {job.directory} after {tally.kills} kills, resumed from {job.resumed_from()}"
                    )
                job.renew()
                continue
            window_s *= LONGER
            tally.kills += _kill(job, workers, random)
        finally:
            job.kill(workers)
        _check_attempt(job, before, tally)
    if job.run_to_end()["hash"] != job.reference:
        tally.problems.append(f"wrong weights at the end, resumed from {job.resumed_from()}")


def _kill(job: _KilledJob, workers: list[WorkerProcess], random: Random) -> int:
    """Kills a part of the attempt, and most times, while the rest deals with that, more of it. Returns how many kills.

    All ranks at one moment are one kill.
    """

    def pause(for_: WorkerProcess) -> None:
        wait_ended([for_], seconds=random.uniform(0.0, PAUSE_S))

    victim = random.choice(["rank 0", "rank 1", "agent", "all", "all and agent"])
    if victim.startswith("rank"):
        first = int(victim[-1])
        kills = _kill_ranks([workers[first]])
        pause(workers[1 - first])  # the other one notices, or is still at what it did
        return kills + _kill_ranks([workers[1 - first]])
    if victim == "agent":
        kills = 0
        for _ in range(3):
            kills += kill_agents(job)
            pause(workers[0])  # training goes on, and another agent starts
        return kills + _kill_ranks(workers)
    kills = _kill_ranks(workers)
    return kills if victim == "all" else kills + kill_agents(job)


def _kill_ranks(workers: list[WorkerProcess]) -> int:
    """1 when one of them still ran."""
    alive = [worker for worker in workers if worker.returncode is None]
    for worker in alive:
        worker.kill()
    return min(len(alive), 1)


def _check_attempt(job: _KilledJob, before: int, tally: _Tally) -> None:
    """The attempt resumed from the newest step there was, or from a newer one the draining agent still committed; from
    an older one if three kills in a row fell into its restore."""
    resumed = job.resumed_from()
    if before and len(resumed) > job.resumes_seen:
        job.resumes_seen = len(resumed)
        if resumed[-1] < before and not _is_set_aside(job, before):
            tally.problems.append(f"step {before} was committed, but the next start resumed from {resumed[-1]}")


def _is_set_aside(job: _KilledJob, step: int) -> bool:
    accounts = job.directory.glob(".resiliency/*/loads.json")
    return any(name.startswith(f"{step:010d}-") for path in accounts for name in json.loads(path.read_text())["aside"])


@pytest.mark.kill
@pytest.mark.long
@pytest.mark.timeout(900)  # the nightly one takes one to three minutes beside other tests; the rest is for busy cores
@pytest.mark.parametrize("count", few([12, 104], [12]))
def test_kills_at_random_do_not_change_the_weights(count: int, zygote: Zygote, tmp_path: Path) -> None:
    """So many kills of each of two jobs that run side by side."""
    reference_job = Job(zygote, tmp_path / "reference", steps=STEPS)
    began = time.monotonic()
    reference = reference_job.run_to_end()["hash"]
    # Kills fall anywhere in an attempt, whatever the speed of this machine; see LONGER for what comes later.
    window_s = 0.6 * (time.monotonic() - began)
    tallies, threads = [], []
    for seed in (1, 2):
        job = _KilledJob(zygote, tmp_path / f"job{seed}", steps=STEPS)
        job.reference = reference
        tallies.append(_Tally())
        threads.append(threading.Thread(target=_torment, args=(job, seed, window_s, tallies[-1], count)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    problems = [problem for tally in tallies for problem in tally.problems]
    kills = sum(tally.kills for tally in tallies)
    print(f"{kills} kills in {sum(tally.attempts for tally in tallies)} attempts")
    assert not problems, problems
    assert kills >= 2 * count
