"""What a supervisor logs is in the report: incidents name what was observed, and what was done about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from resiliency.cli.goodput import app
from resiliency.events import Event, EventKind
from resiliency.goodput import timing as timing_module
from resiliency.goodput.attempts import Attempt
from resiliency.goodput.incidents import Incident, incidents
from resiliency.goodput.ledger import account
from resiliency.goodput.timing import Timing
from resiliency.supervisor.event_log import EventLog
from resiliency.supervisor.store import HistoryEvent
from resiliency.telemetry.collect import Collector
from resiliency.telemetry.facts import Segment
from resiliency.telemetry.supervised import join_supervisors

from .scripted import START, Job, assert_matches
from .test_ledger_truth import crash, hot_swap


def told(job: Job, kind: str, at: float, **fields: Any) -> None:
    """A line of the supervisor, as resiliency/supervisor/event_log.py writes it."""
    job.events.append(
        Event(
            kind=kind,
            time=at,
            monotonic_s=at - START + 7000.0,
            run="workload-a",
            attempt=1,
            rank=-1,
            host="sup-0",
            fields={"text": "for people", **fields},
        )
    )


def swapped(*, observed: bool = True) -> Job:
    """hot_swap, as a supervisor saw it: a restart in the job came to nothing, a spare took the place."""
    job = hot_swap()
    (lost,) = [event.time for event in job.events if event.kind == EventKind.HOST_LOST]
    job.events = [event for event in job.events if event.kind != EventKind.HOST_LOST]
    told(job, EventKind.SUPERVISOR_LEADS, START, term=4)
    told(job, EventKind.INCIDENT_OPENED, lost, incident=3)
    if observed:
        fields = {"incident": 3, "observation": "host_silent", "lost_host": "host-2"}
        told(job, EventKind.HOST_LOST, lost, reason="no report for 2 s", **fields)
    told(
        job,
        EventKind.RESTART_REQUESTED,
        lost + 0.1,
        incident=3,
        plan=9,
        remedy="restart_in_job",
        reason="",
        next_epoch=2,
    )
    plan = {"incident": 3, "plan": 9, "remedy": "restart_in_job"}
    told(job, EventKind.PLAN_ENDED, lost + 1.1, **plan, outcome="overtaken", reason="host-2 is silent")
    told(job, EventKind.RESTART_REQUESTED, lost + 1.2, incident=3, plan=10, remedy="hot_swap", reason="", next_epoch=3)
    told(job, EventKind.HOST_SWAPPED, lost + 1.2, old="host-2", new="spare-0")
    told(job, EventKind.PLAN_ENDED, lost + 19.2, incident=3, plan=10, remedy="hot_swap", outcome="done", reason="")
    told(job, EventKind.INCIDENT_CLOSED, lost + 19.2, incident=3)
    return job


def only_incident(job: Job) -> Incident:
    collector = Collector()
    for event in job.events:
        collector.add(event)
    (run,) = join_supervisors(collector.runs).values()
    ledger = account(run)
    assert_matches(ledger, job)
    (incident,) = incidents(ledger)
    return incident


def test_a_swap_is_named_with_the_plan_before_it_and_how_long_it_took() -> None:
    incident = only_incident(swapped())
    assert (incident.what, incident.where) == ("Host lost: no report for 2 s", "host-2")
    assert incident.remedy == (
        "ranks replaced in the job, overtaken after 1.0 s (host-2 is silent), then hot swap of host-2 for spare-0,"
        " done after 18.0 s; resumed at step 100 from local"
    )


def test_a_fault_of_a_device_tells_more_than_a_lost_worker() -> None:
    job = crash()
    (lost,) = [event.time for event in job.events if event.kind == EventKind.WORKER_LOST]
    observed = {"incident": 1, "observation": "device_fault", "reason": "XID 79: the GPU has fallen off the bus"}
    told(job, EventKind.OBSERVED, lost, **observed)
    told(job, EventKind.OBSERVED, lost - 1.0, incident=1, observation="straggler", reason="slow")
    told(job, EventKind.RESTART_REQUESTED, lost, incident=1, plan=2, remedy="scale_down", reason="", next_epoch=2)
    told(job, EventKind.WORLD_RESIZED, lost, old=4, new=3)
    incident = only_incident(job)
    assert (incident.what, incident.where) == ("Device fault: XID 79: the GPU has fallen off the bus", "")
    assert incident.remedy.startswith("scaled down from 4 to 3 hosts (not ended in the log); resumed at step 100")


def test_a_straggler_explains_a_swap_and_no_death() -> None:
    slow = {"incident": 3, "observation": "straggler", "reason": "rank 2 works 1.4 times as long", "worker": 2}
    job = swapped(observed=False)
    (lost,) = [event.time for event in job.events if event.kind == EventKind.HOST_SWAPPED]
    told(job, EventKind.OBSERVED, lost - 2.0, **slow)
    incident = only_incident(job)
    assert (incident.what, incident.where) == ("Straggler: rank 2 works 1.4 times as long", "rank 2")
    job = crash()
    (lost,) = [event.time for event in job.events if event.kind == EventKind.WORKER_LOST]
    told(job, EventKind.OBSERVED, lost, **slow)
    assert only_incident(job).what == "Worker lost"


def test_an_incident_that_was_over_before_has_no_part_in_the_next() -> None:
    job = swapped()
    begun = START + 50
    told(job, EventKind.OBSERVED, begun, incident=1, observation="capacity", reason="capacity")
    told(job, EventKind.RESTART_REQUESTED, begun, incident=1, plan=1, remedy="scale_up", reason="hosts are there")
    told(job, EventKind.PLAN_ENDED, begun + 1, incident=1, plan=1, remedy="scale_up", outcome="done", reason="")
    assert only_incident(job) == only_incident(swapped())
    job = crash()
    told(job, EventKind.OBSERVED, begun, incident=1, observation="capacity", reason="capacity")
    assert only_incident(job).what == "Worker lost"


@pytest.mark.parametrize("last", [EventKind.PLAN_ENDED, EventKind.INCIDENT_CLOSED])
def test_what_began_an_attempt_that_is_lost_seconds_later_has_no_part_in_its_end(last: str) -> None:
    job = swapped()
    progress = max(event.time for event in job.events if event.kind == EventKind.STEP and event.attempt == 0)
    begun = progress - 4.0
    told(job, EventKind.OBSERVED, begun, incident=1, observation="capacity", reason="capacity")
    told(job, EventKind.RESTART_REQUESTED, begun, incident=1, plan=1, remedy="scale_up", reason="hosts are there")
    told(job, EventKind.PLAN_ENDED, begun + 1, incident=1, plan=1, remedy="scale_up", outcome="done", reason="")
    if last == EventKind.INCIDENT_CLOSED:
        told(job, last, begun + 1, incident=1)
    assert only_incident(job) == only_incident(swapped())


@pytest.mark.parametrize(
    ("lost_lines", "remedy"),
    [
        ((EventKind.RESTART_REQUESTED,), "hot swap of host-2 for spare-0, done; resumed at step 100 from local"),
        (
            (EventKind.RESTART_REQUESTED, EventKind.PLAN_ENDED),
            "swapped host-2 for spare-0 at step 100 from local",
        ),
    ],
)
def test_a_swap_is_not_called_what_was_done_to_begin_with(lost_lines: tuple[str, ...], remedy: str) -> None:
    """A supervisor that is killed leaves lines of its plan unwritten; the plan with which the job began is there."""
    job = swapped()
    job.events = [event for event in job.events if event.kind not in lost_lines or event.fields.get("plan") == 9]
    job.events = [event for event in job.events if event.fields.get("plan") != 9]
    begun = START + 1
    told(job, EventKind.OBSERVED, begun, incident=1, observation="capacity", reason="capacity")
    told(job, EventKind.RESTART_REQUESTED, begun, incident=1, plan=1, remedy="scale_up", reason="hosts are there")
    told(job, EventKind.PLAN_ENDED, begun + 30, incident=1, plan=1, remedy="scale_up", outcome="done", reason="")
    assert only_incident(job).remedy == remedy


def test_a_remedy_that_no_supervisor_has_told_of_is_in_words() -> None:
    job = hot_swap()
    (lost,) = [event.time for event in job.events if event.kind == EventKind.HOST_LOST]
    told(job, EventKind.RESTART_REQUESTED, lost + 0.5, remedy="hot_swap", reason="")
    assert only_incident(job).remedy == "hot swap: swapped host-2 for spare-0 at step 100 from local"


def test_without_an_observation_the_swap_itself_tells_where() -> None:
    incident = only_incident(swapped(observed=False))
    assert (incident.what, incident.where) == ("Host swapped", "host-2")


def test_the_supervisors_lines_belong_to_the_run_whose_ranks_name_the_workload() -> None:
    collector = Collector()
    other = Job(run="other", ranks=1)
    other.start()
    other.steps(5)
    job = swapped()
    for event in [*other.events, *job.events]:
        collector.add(event)
    assert set(join_supervisors(collector.runs)) == {"job", "other", "workload-a"}, "it cannot be known whose they are"
    for event in job.events:
        if event.kind == EventKind.JOB_STARTED:
            event.fields["workload"] = "workload-a"  # type: ignore[index]
            collector.add(event)
    joined = join_supervisors(collector.runs)
    assert set(joined) == {"job", "other"}
    assert len(joined["job"].marks) > len(collector.runs["job"].marks), "a copy: what was read stays as it was"
    assert set(join_supervisors(collector.runs)) == {"job", "other"}


def test_lines_as_the_supervisor_writes_them_are_read(tmp_path: Path) -> None:
    job = crash()
    job.write(tmp_path)
    (lost,) = [event.time for event in job.events if event.kind == EventKind.WORKER_LOST]
    log = EventLog(str(tmp_path))
    fields = {"incident": 1, "plan": 2, "remedy": "restart_workload", "reason": "a rank was lost", "next_epoch": 2}
    event = HistoryEvent(at=lost, kind=EventKind.RESTART_REQUESTED, workload="wl", text="plan 2", fields=fields)
    log.write(event, 1)
    log.close()
    (written,) = tmp_path.glob("supervisor-*.jsonl")
    line = json.loads(written.read_text())
    assert (line["job_name"], line["event_type"], line["remedy"]) == ("wl", "restart_requested", "restart_workload")
    line["timestamp"] = lost  # it is written as of now, years after this script
    written.write_text(json.dumps(line) + "\n")
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    (run,) = json.loads(result.output)["runs"]
    (incident,) = run["incidents"]
    assert incident["remedy"].startswith("restart of every process (not ended in the log); resumed at step 100")


@pytest.mark.parametrize("word", ["hot_swap", "made_up_remedy", ""])
def test_any_remedy_has_words(word: str) -> None:
    job = crash()
    (lost,) = [event.time for event in job.events if event.kind == EventKind.WORKER_LOST]
    told(job, EventKind.RESTART_REQUESTED, lost, incident=1, plan=2, remedy=word, reason="")
    assert only_incident(job).remedy.split(" (not")[0] in ("hot swap", "made up remedy", "restart")


def test_every_failure_of_a_crash_loop_is_an_incident() -> None:
    job = Job(ranks=1)
    for attempt in range(130):
        job.start(load=job.step if attempt else None, startup=1.0)
        job.steps(1)
        job.save()
        job.fail(detection=1.0)
    found = incidents(job.ledger())
    assert [one.attempt for one in found] == list(range(130))


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans(), st.booleans(), st.booleans()), max_size=9)
)
def test_what_is_lost_is_what_each_return_says_of_all_attempts_before_it(
    script: list[tuple[int, int, bool, bool, bool]],
) -> None:
    made = []
    for index, (position, steps, loaded, rollback, finished) in enumerate(script):
        segment = Segment(attempt=index, lane=0, host="", serial=index)
        segment.loaded, segment.rollback = (1.0 if loaded else None), rollback
        timing = Timing(Attempt(index, {0: [segment]}), index, (0.0, 1.0), None, 0.0)
        timing.position, timing.top = position, position + steps
        timing.outcome = "finished" if finished else "failed"
        made.append(timing)
    timing_module._lost(made)
    for index, earlier in enumerate(made):
        above, by = None, None
        for later in made[index + 1 :]:
            (segment,) = later.attempt.segments
            anew = segment.loaded is None and (earlier.outcome == "finished" or segment.rollback)
            reached = earlier.top if above is None else above
            assert later.position is not None and reached is not None
            if not anew and reached > later.position:
                above, by = later.position, later.index
        assert (earlier.lost_above, earlier.lost_by) == (above, by)
