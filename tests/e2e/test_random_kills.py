"""Hundreds of SIGKILLs at random times: any rank, the agent, all of them; and the weights end as if nothing had happened."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.e2e.driver import Job, chance, kill_agents, make_zygote, wait_ended

#: Of each of the two jobs that run side by side; the issue asks for at least 200 in one run.
KILLS = 104
#: An attempt that is not killed takes a little over a second; kills fall anywhere in it.
WINDOW_S = 1.3


class _Tally:
    def __init__(self) -> None:
        self.kills = 0
        self.attempts = 0
        self.problems: list[str] = []


def _torment(job: Job, seed: int, tally: _Tally) -> None:
    """Kills and restarts the job until it has had its share of kills, then lets it end."""
    random = chance(seed)
    while tally.kills < KILLS:
        tally.attempts += 1
        before = job.newest_complete()
        workers = job.start()
        try:
            if wait_ended(workers[:1], seconds=random.uniform(0.0, WINDOW_S)):
                # It reached its end: start it over in a new directory, so that there is always something to kill.
                wait_ended(workers, seconds=30)
                _check_attempt(job, before, tally)
                tally.problems += [] if job.outcome()["hash"] == job.arguments_hash else [f"wrong weights after {tally.kills} kills"]
                job.renew()
                continue
            victim = random.choice(["rank 0", "rank 1", "agent", "all", "all and agent"])
            if victim == "agent":
                tally.kills += kill_agents(job)
                wait_ended(workers[:1], seconds=random.uniform(0.0, 0.5))
                victim = "all"
            if victim.startswith("rank"):
                workers[int(victim[-1])].kill()
                tally.kills += 1
            elif victim == "all":
                tally.kills += 1
            elif victim == "all and agent":
                tally.kills += 1 + kill_agents(job)
        finally:
            job.kill(workers)
        _check_attempt(job, before, tally)
    job.run_to_end()
    if job.outcome()["hash"] != job.arguments_hash:
        tally.problems.append("wrong weights at the end")


def _check_attempt(job: Job, before: int, tally: _Tally) -> None:
    """The attempt resumed from the newest step there was, or from a newer one the draining agent still committed."""
    resumed = job.resumed_from()
    if before and len(resumed) > job.resumes_seen:
        job.resumes_seen = len(resumed)
        if resumed[-1] < before:
            tally.problems.append(f"step {before} was committed, but the next start resumed from {resumed[-1]}")


class _KilledJob(Job):
    arguments_hash = ""
    resumes_seen = 0
    number = 0

    def renew(self) -> None:
        self.number += 1
        self.resumes_seen = 0
        self.result.unlink()
        self.directory = self.directory.parent / f"{self.directory.name.split('-')[0]}-{self.number}"


@pytest.mark.kill
@pytest.mark.timeout(600)
def test_hundreds_of_kills_do_not_change_the_weights(tmp_path: Path) -> None:
    with make_zygote(tmp_path / "log") as zygote:
        reference = Job(zygote, tmp_path / "reference", steps=60).run_to_end()["hash"]
        tallies, threads = [], []
        for seed in (1, 2):
            job = _KilledJob(zygote, tmp_path / f"job{seed}", steps=60)
            job.arguments_hash = reference
            tallies.append(_Tally())
            threads.append(threading.Thread(target=_torment, args=(job, seed, tallies[-1])))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    problems = [problem for tally in tallies for problem in tally.problems]
    kills = sum(tally.kills for tally in tallies)
    print(f"{kills} kills in {sum(tally.attempts for tally in tallies)} attempts")
    assert not problems, problems
    assert kills >= 200
