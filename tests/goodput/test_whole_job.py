"""The account holds the whole job: from its launcher's start to its processes' end."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from resiliency.events import EventKind
from resiliency.goodput.ledger import account
from resiliency.goodput.taxonomy import Bucket
from resiliency.runtime.job_log import JobLog
from resiliency.telemetry.reader import read_logs

from .scripted import START, Job


def test_the_account_begins_with_torchrun_and_ends_with_the_last_process() -> None:
    job = Job()
    job.alive = job.ranks
    job.advance(7.0, Bucket.FIRST_START)  # torchrun, then the imports of its ranks
    job.attempt += 1
    for rank in range(4):
        job.emit(EventKind.JOB_STARTED, rank, world_size=4, since_launcher_s=7.0, since_process_s=4.5)
    job.advance(1.0, Bucket.FIRST_START)
    for rank in range(4):
        job.emit(EventKind.TRAIN_STARTED, rank, step=0, world_size=4)
    job.training = True
    job.steps(30)
    job.finish()
    job.advance(2.0, Bucket.IDLE)
    for rank in range(4):
        job.emit(EventKind.PROCESS_ENDED, rank)
    ledger = job.ledger()
    assert (ledger.start, ledger.end) == (START, START + 70.0)
    assert ledger.wall[Bucket.FIRST_START] == 8_000_000
    assert ledger.wall[Bucket.IDLE] == 2_000_000
    assert ledger.goodput == pytest.approx(60 / 70)


def test_a_launcher_that_restarts_its_ranks_counts_once() -> None:
    job = Job()
    job.now += 5.0
    for load in (None, 20):
        job.start(load=load)
        for event in job.events:
            if event.kind == EventKind.JOB_STARTED and not event.fields.get("since_launcher_s"):
                event.fields["since_launcher_s"] = event.time - START  # type: ignore[index]
        job.steps(20)
        if load is None:
            job.save()
            job.fail(detection=1.0)
    job.finish()
    ledger = job.ledger()
    assert ledger.start == START
    assert ledger.wall[Bucket.FIRST_START] == 35_000_000
    assert len(ledger.timings) == 2


@pytest.mark.parametrize("absurd", [-5.0, 1e8, float("inf"), "soon"])
def test_an_absurd_age_of_a_launcher_is_none(absurd: object) -> None:
    job = Job()
    job.start()
    job.events[0].fields["since_launcher_s"] = absurd  # type: ignore[index]
    job.steps(5)
    job.finish()
    assert job.ledger().start == START


SCRIPT = """
import sys, time
from resiliency.events import EventWriter, JsonlSink
from resiliency.runtime.start_times import start_fields
from resiliency.runtime.process_end import tell_end
from resiliency.telemetry.step_events import StepEvents
from resiliency.telemetry.step_observer import StepObserver

sink = JsonlSink(sys.argv[1])
writer = EventWriter(run="job", attempt=0, rank=0, host="h", sinks=(sink,))
tell_end(sys.argv[1], writer)
log, observer = StepEvents(writer), StepObserver()
observer.subscribe(log)
log.job_started(world_size=1, **start_fields())
observer.training_started(0)
for step in (1, 2):
    observer.batch_started()
    observer.batch_ended(step)
observer.training_ended(2)
log.job_terminated("finished")
writer.close()
time.sleep(0.3)
print(time.time(), flush=True)
"""
PARENT = """
import subprocess, sys, time
print(time.time(), flush=True)
time.sleep(0.3)
code = subprocess.run([sys.executable, *sys.argv[1:3]]).returncode
print(time.time())
sys.exit(code)
"""
#: Of a process's start the kernel tells hundredths of a second.
_TICK_S = 0.02


@pytest.mark.parametrize("launcher", ["torchrun", "notebook"])
def test_the_account_agrees_with_a_stopwatch_around_the_launcher(
    tmp_path: Path, launcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.delenv("RESILIENCY_LAUNCHER", raising=False)
    script, log = tmp_path / "script.py", tmp_path / "rank-00000.jsonl"
    script.write_text(SCRIPT)
    began = time.time()
    words = [sys.executable, "-c", PARENT, script, log, launcher]
    ran = subprocess.run(words, check=True, timeout=60, stdout=subprocess.PIPE, text=True)
    launched, script_over, all_over = map(float, ran.stdout.split())
    ledger = account(read_logs([log]).collector.runs["job"])
    assert ledger.wall[Bucket.IDLE] >= 300_000, "the process went on after its fit"
    if launcher == "torchrun":  # two moments around each: the machine may be busy
        assert began - _TICK_S <= ledger.start <= launched + _TICK_S
        assert script_over <= ledger.end <= all_over
    else:
        assert ledger.start > launched + 0.29, "a notebook is no launcher"


def test_the_launchers_own_imports_are_time_of_the_job(tmp_path: Path) -> None:
    log = JobLog()
    before = time.time()
    log.emit(EventKind.LAUNCHER_STARTED, since_process_s=3.0)
    after = time.time()
    log.emit(EventKind.LAUNCHER_ENDED)
    log.is_at(str(tmp_path), run="job", attempt=1)
    log.close()
    ledger = account(read_logs([tmp_path]).collector.runs["job"])
    assert before - 3.0 - _TICK_S <= ledger.start <= after - 3.0 + _TICK_S


def test_a_launcher_tells_its_own_age(tmp_path: Path) -> None:
    log = JobLog()
    log.emit(EventKind.LAUNCHER_STARTED)
    log.is_at(str(tmp_path), run="job", attempt=1)
    log.close()
    (line,) = [path.read_text() for path in tmp_path.iterdir()]
    assert '"since_process_s":' in line
