"""Carries out the actions of a script on one folder, and asks the judge after each."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from resiliency.testing.zygote import WorkerProcess, Zygote
from tests.e2e.chaos.agent_site.sitecustomize import set_clock
from tests.e2e.chaos.files import Files, blank, cut, flip_bits
from tests.e2e.chaos.judge import Judge
from tests.e2e.chaos.ledger import Ledger, LedgerReader, committed_folders, steps_folder
from tests.e2e.chaos.processes import Processes, RunningJob, send
from tests.e2e.chaos.script import Action
from tests.e2e.chaos.trainer import REFUSED
from tests.patience import PATIENCE

#: A job must have loaded so soon after its start when nothing is in its way; the machine may be busy.
_START_S = 60.0
#: How long a job is left alone that starts among other actions.
_SOON_S = 10.0
#: How long an action waits for the saves that are to come before the next; what is stopped or away makes none.
_PAUSE_S = 1.0
#: Jobs that may be there at once, stopped ones included.
_JOBS = 3
FIRST = Action("start afresh", 0.0, 0.0, 0, False, False, 1)
_HOSTS = [f"host-{letter}" for letter in "abcdef"]


class World:
    """One folder, its processes, and what has been done to them.

    Args:
        place: a folder to be made, with the checkpoint folder and the ledger in it.
        stop: when set, no more actions follow.

    Attributes:
        problems: what was wrong, in words. Nothing is done any more after the first.
        done: how often each action was carried out; those that found nothing to act on are not counted.
        judge: of this folder.
    """

    def __init__(self, zygote: Zygote, place: Path, model: str, *, stop: threading.Event) -> None:
        place.mkdir()
        self._stop_all = stop
        self.directory = place / "checkpoints"
        self.problems: list[str] = []
        self.done: Counter[str] = Counter()
        self.judge = Judge()
        clock, ledger = place / "clock", place / "ledger.jsonl"
        set_clock(str(clock), 0.0)
        self._clock = clock
        self._ledger = Ledger(ledger)
        self._lines = LedgerReader(ledger)
        self._files = Files(self.directory, place / "aside", self._ledger)
        self._processes = Processes(zygote, self.directory, ledger, clock, model)
        self._pause = threading.Event()
        self._loaded: Counter[str] = Counter()
        self._started: Counter[str] = Counter()
        self._errors: dict[str, str] = {}
        self._cuts = False
        self._ledger.write("world", model=model)

    def torment(self, script: Any, count: int) -> None:
        """Carries out actions until ``count`` had an effect, then starts a job that must find everything in order."""
        self._start_afresh(FIRST)
        while self.done.total() < count and not self.problems and not self._stop_all.is_set():
            action: Action = next(script)
            self._ledger.write("action", **vars(action))
            if self._carry_out(action):
                self.done[action.kind] += 1
            if action.starts and not self._processes.running():
                job = self._start(action)
                if action.size < 0.7:  # else the next action comes while it is starting
                    self._wait_for(partial(self._is_done_starting, job), _SOON_S)
            self._wait_for(partial(self._has_gone_on, self._progress() + action.pause), _PAUSE_S)
        if not self.problems and not self._stop_all.is_set():
            self._processes.wake_all()
            self._start_afresh(FIRST, everything=True)
            self._end_well()

    def close(self) -> list[int]:
        """Ends all processes; returns those that are left."""
        left = self._processes.end()
        self._ledger.close()
        return left

    # -- what is seen ---------------------------------------------------------------------------------------------

    def _look(self) -> None:
        for line in self._lines.lines():
            self.judge.read(line)
            if line["what"] == "forked":
                self._processes.children.append(line["child"])
            elif line["what"] == "loaded" and "job" in line:
                self._loaded[line["job"]] += 1
            elif line["what"] == "started":
                self._started[line["job"]] += 1
            elif line["what"] in ("unable", "refused"):
                self._errors[line.get("job", "")] = line["error"]
        for job in list(self._processes.jobs):
            for rank in job.ranks:
                self._look_at(job, rank)
            if not job.alive:
                self._processes.jobs.remove(job)
        for reader in [reader for reader in self._processes.readers if reader.returncode is not None]:
            self._processes.readers.remove(reader)
            # A reader that has mapped a file gets SIGBUS when we cut it.
            if reader.returncode not in (0, -signal.SIGKILL) and not (
                reader.returncode == -signal.SIGBUS and self._cuts
            ):
                self.problems.append(f"a reader ended with {reader.returncode}; see the log")
        self.problems += self.judge.problems
        self.judge.problems = []

    def _look_at(self, job: RunningJob, rank: WorkerProcess) -> None:
        if rank.returncode in (None, 0, -signal.SIGKILL) or (rank.returncode == REFUSED and job.disturbed):
            return
        said = self._errors.get(job.name, "see the log")
        self.problems.append(f"a rank of {job.name} ended with {rank.returncode}: {said}")

    # -- jobs -----------------------------------------------------------------------------------------------------

    def _start(self, action: Action) -> RunningJob:
        while len(self._processes.jobs) >= _JOBS:
            self._end(self._processes.jobs[0])
        used = {job.host for job in self._processes.jobs if job.alive}
        host = next(host for host in _HOSTS if host not in used)
        # Of jobs that are starting at the same moment one is let in.
        racing = [job for job in self._processes.running() if not self._has_loaded(job)]
        job = self._processes.start_job(host, 1 + (action.size < 0.6), action.seed)
        job.elsewhere = self._files.is_away
        job.disturbed = job.elsewhere or bool(racing)
        for other in racing:
            other.disturbed = True
        return job

    def _end(self, job: RunningJob) -> None:
        self._processes.end_job(job)
        self._look()

    def _start_afresh(self, action: Action, *, everything: bool = False) -> bool:
        """Nothing is in the way of the job that is started now, so it must load, and the newest there is. Processes of
        yesterday may stay, as on other hosts: those that are stopped, and half of the times those that run. Not those
        whose attempt was counted in another folder: their next agent may take that number here in the same moment."""
        self._files.put_back()
        for job in self._processes.running():
            if not action.stays or job.elsewhere or not self._has_loaded(job):
                self._end(job)
        if everything:
            self._processes.kill(self._processes.agents())
        job = self._start(action)
        job.disturbed = False
        self._wait_until(partial(self._has_loaded, job), job)
        return True

    def _progress(self) -> int:
        return self.judge.counts["saves"] + self.judge.counts["commits"]

    def _has_gone_on(self, progress: int) -> bool:
        return self._progress() >= progress or not self._processes.running()

    def _has_loaded(self, job: RunningJob) -> bool:
        return self._loaded[job.name] >= len(job.ranks)

    def _is_done_starting(self, job: RunningJob) -> bool:
        return self._has_loaded(job) or not job.alive

    def _wait_until(self, condition: Callable[[], bool], job: RunningJob) -> None:
        there = self._wait_for(lambda: condition() or not job.alive, _START_S) and condition()
        if not there and not self.problems:
            said = self._errors.get(job.name, "it said nothing")
            self.problems.append(f"{job.name} did not get as far as it must within {_START_S:.0f} s: {said}")

    def _wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Reads the ledger until the condition holds; False when ``seconds`` pass first. Returns at once on problems."""
        deadline = time.monotonic() + PATIENCE * seconds
        self._look()
        while not condition() and not self.problems:
            if time.monotonic() > deadline:
                return False
            self._pause.wait(0.02)
            self._look()
        return True

    def _end_well(self) -> None:
        """The last job saves, ends by itself, and is read once more."""
        job = self._processes.jobs[-1]
        before = self.judge.counts["commits"]
        self._wait_until(lambda: self.judge.counts["commits"] >= before + 2, job)
        for rank in job.alive:
            send(rank.pid, signal.SIGTERM)
        for rank in job.ranks:
            rank.wait(timeout_s=_START_S)
        reader = self._processes.start_reader(1, 8)
        reader.wait(timeout_s=_START_S)
        self._look()

    # -- actions --------------------------------------------------------------------------------------------------

    def _carry_out(self, action: Action) -> bool:
        processes, files = self._processes, self._files
        where = steps_folder(self.directory)
        actions: dict[str, Callable[[], bool]] = {
            "kill a rank": lambda: self._on_a_rank(action, lambda rank: processes.kill([rank.pid]) > 0),
            "kill an agent": lambda: self._on_an_agent(action, lambda pid: processes.kill([pid]) > 0),
            "kill a job": lambda: self._on_a_job(action, self._kill_job),
            "kill everything": self._kill_everything,
            "stop a rank": lambda: self._on_a_rank(action, lambda rank: self._stop(rank.pid)),
            "stop an agent": lambda: self._on_an_agent(action, self._stop),
            "stop a reader": lambda: self._on_a_reader(action, lambda reader: self._stop(reader.pid)),
            "wake one": lambda: self._wake_one(action),
            "wake all": lambda: processes.wake_all() > 0,
            "fork": lambda: self._signal_a_job(action, signal.SIGUSR1),
            "turn the clock": lambda: self._turn_clock(action),
            "start a second job": lambda: self._start_another(action),
            "start two jobs at once": lambda: self._start_two(action),
            "end a job": lambda: self._signal_a_job(action, signal.SIGTERM),
            "roll back": lambda: self._roll_back(action),
            "start afresh": lambda: self._start_afresh(action),
            "move the folder": lambda: self._move(action, self.directory, None),
            "move the steps": lambda: self._move(action, where, None),
            "move a step": lambda: self._move_step(action, put_file=False),
            "put a file in place of a step": lambda: self._move_step(action, put_file=True),
            "put a file in place of the steps": lambda: self._move(action, where, None, put_file=True),
            "put back": files.put_back,
            "flip bits": lambda: files.damage(action.pick, action.size, flip_bits),
            "cut a file": lambda: self._cut(action),
            "blank a block": lambda: files.damage(action.pick, action.size, blank),
            "remove a file": lambda: files.remove(action.pick, action.size),
            "read": lambda: self._read(action),
        }
        return actions[action.kind]()

    def _on_a_job(self, action: Action, what: Callable[[RunningJob], bool]) -> bool:
        jobs = self._processes.running()
        return bool(jobs) and what(jobs[int(action.pick * len(jobs))])

    def _on_a_rank(self, action: Action, what: Callable[[WorkerProcess], bool]) -> bool:
        ranks = [(job, rank) for job in self._processes.running() for rank in job.alive]
        if not ranks:
            return False
        job, rank = ranks[int(action.pick * len(ranks))]
        job.disturbed = True
        return what(rank)

    def _on_an_agent(self, action: Action, what: Callable[[int], bool]) -> bool:
        agents = self._processes.agents()
        return bool(agents) and what(agents[int(action.pick * len(agents))])

    def _on_a_reader(self, action: Action, what: Callable[[WorkerProcess], bool]) -> bool:
        readers = self._processes.readers
        return bool(readers) and what(readers[int(action.pick * len(readers))])

    def _kill_job(self, job: RunningJob) -> bool:
        self._end(job)
        return True

    def _kill_everything(self) -> bool:
        running = self._processes.running()
        for job in running:
            self._end(job)
        return self._processes.kill(self._processes.agents()) + len(running) > 0

    def _stop(self, pid: int) -> bool:
        return self._processes.stop(pid)

    def _wake_one(self, action: Action) -> bool:
        stopped = list(self._processes.stopped)
        if not stopped:
            return False
        self._processes.wake(stopped[int(action.pick * len(stopped))])
        return True

    def _signal_a_job(self, action: Action, number: signal.Signals) -> bool:
        return self._on_a_job(action, lambda job: self._order(job, number))

    def _order(self, job: RunningJob, number: signal.Signals) -> bool:
        return self._started[job.name] == len(job.ranks) and all(send(rank.pid, number) for rank in job.alive)

    def _roll_back(self, action: Action) -> bool:
        # Only where one rank decides: signals reach two ranks at different steps.
        return self._on_a_job(action, lambda job: len(job.ranks) == 1 and self._order(job, signal.SIGHUP))

    def _turn_clock(self, action: Action) -> bool:
        far = (action.size - 0.5) * 2
        set_clock(str(self._clock), far * (10.0 if action.pick < 0.3 else 7200.0 if action.pick < 0.6 else 3e7))
        return True

    def _start_another(self, action: Action) -> bool:
        job = self._start(action)
        if action.stays:  # both go on
            self._wait_for(partial(self._is_done_starting, job), _SOON_S)
        return True

    def _start_two(self, action: Action) -> bool:
        self._start(action)
        self._start(action)
        return True

    def _move(self, action: Action, place: Path, keys: list[str] | None, *, put_file: bool = False) -> bool:
        if self._files.is_away or not self._files.move(place, keys, put_file=put_file):
            return False
        for job in self._processes.jobs:
            job.disturbed |= not self._has_loaded(job)
        if not action.stays:
            self._pause.wait(action.size * 0.3)
            self._files.put_back()
        return True

    def _move_step(self, action: Action, *, put_file: bool) -> bool:
        folders = committed_folders(self.directory)
        if not folders:
            return False
        key = sorted(folders)[int(action.pick * len(folders))]
        return self._move(action, folders[key], [key], put_file=put_file)

    def _cut(self, action: Action) -> bool:
        self._cuts = True
        return self._files.damage(action.pick, action.size, cut)

    def _read(self, action: Action) -> bool:
        self._processes.start_reader(action.seed, 2 + int(action.size * 12))
        return True
