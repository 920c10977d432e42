"""The agent tells the ranks that asked of its work for a save, and nobody else; a new agent is asked again."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from resiliency.agent._traces import Traces
from resiliency.agent.messages import Notice, Traced, TraceEnded
from resiliency.checkpoint.save_trace import FinishedTrace, SaveTrace
from resiliency.spans import Spans, traced
from resiliency.storage.stage import Stage
from resiliency.storage.step_id import StepId
from resiliency.testing.checkpoints import QUICK, make_checkpointer, make_state

STEP, OTHER = StepId(7, 1, "0a0b0c"), StepId(8, 1, "0a0b0c")


class Heard:
    def __init__(self) -> None:
        self.messages: list[tuple[int, Notice]] = []
        self.traces = Traces(lambda rank, message: self.messages.append((rank, message)))

    def names(self, rank: int) -> list[str]:
        return [one.name for who, one in self.messages if who == rank and isinstance(one, Traced)]


def test_only_ranks_that_asked_hear_of_the_save_they_asked_about() -> None:
    heard = Heard()
    with heard.traces.span("before", STEP):
        heard.traces.begin(0, STEP)
    heard.traces.begin(1, STEP)
    heard.traces.begin(1, STEP)  # again, by a rank that has lost its connection
    with heard.traces.span("fsync", STEP, tier="local"), heard.traces.span("of another", OTHER):
        pass
    with heard.traces.span("prune"):
        pass
    heard.traces.end(0, STEP)
    with heard.traces.span("late", STEP):
        pass
    heard.traces.end(1, STEP)
    with heard.traces.span("later", STEP), heard.traces.span("later still"):
        pass
    assert heard.names(0) == ["fsync", "prune"] and heard.names(1) == ["fsync", "prune", "late"]
    assert [who for who, one in heard.messages if one == TraceEnded(id=STEP)] == [0, 1]
    first = heard.messages[0][1]
    assert isinstance(first, Traced) and first.facts == {"tier": "local"} and first.pid == os.getpid()
    assert 0 < first.began_ns <= first.ended_ns


def test_ranks_that_never_say_the_end_do_not_pile_up() -> None:
    heard = Heard()
    for step in range(40):
        heard.traces.begin(0, StepId(step, 1, "0a0b0c"))
    with heard.traces.span("old", StepId(1, 1, "0a0b0c")), heard.traces.span("new", StepId(39, 1, "0a0b0c")):
        pass
    assert heard.names(0) == ["new"]


def test_work_that_fails_is_a_span_with_its_error_and_raises() -> None:
    heard = Heard()
    heard.traces.begin(0, STEP)
    with pytest.raises(OSError, match="full"), heard.traces.span("record", STEP):
        raise OSError("full")
    [(_, message)] = heard.messages
    assert isinstance(message, Traced) and message.facts == {"error": "OSError: full"}


def test_what_is_not_traced_costs_one_object_that_does_nothing() -> None:
    spans = Spans()
    assert spans.span("a", STEP) is spans.span("b") is traced(None, "c")


def test_an_agent_that_takes_over_is_asked_again(tmp_path: Path) -> None:
    """The first one has read neither the request nor the seal when it is killed."""
    finished: list[FinishedTrace] = []
    options = replace(QUICK, agent="process", drain_timeout=timedelta(seconds=10))
    checkpointer = make_checkpointer(tmp_path / "local", options=options)
    try:
        checkpointer.open()
        process = checkpointer.session.client._process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        trace = SaveTrace(step=1, rank=0, write=finished.append, timeout_s=30)
        ticket = checkpointer.save(1, make_state(1), trace=trace)
        assert ticket is not None
        os.kill(process.pid, signal.SIGKILL)
        ticket.wait(Stage.DURABLE, timeout=timedelta(seconds=20))
    finally:
        checkpointer.close()
    [found] = finished
    assert found.outcome == "complete"
    of_agents = {span.pid: span.name for span in found.spans if span.pid != os.getpid()}
    assert of_agents and process.pid not in of_agents


def test_closing_ends_a_trace_that_waits_for_nothing_that_comes(tmp_path: Path) -> None:
    finished: list[FinishedTrace] = []
    trace = SaveTrace(step=1, rank=0, write=finished.append, timeout_s=60)
    trace.close(timeout_s=10)
    trace.close(timeout_s=10)
    assert trace.written and [one.outcome for one in finished] == [
        "the checkpointer was closed before the save had reached all its tiers"
    ]


def test_a_writer_that_raises_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def fail(trace: FinishedTrace) -> None:
        raise ValueError("a defect")

    trace = SaveTrace(step=1, rank=0, write=fail, timeout_s=60)
    trace.close(timeout_s=10)
    assert "the trace of step 1 could not be written" in caplog.text and "a defect" in caplog.text
