"""NVRx's rank monitor is told the truth in the right order, from one thread, and never at the cost of a step."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from resiliency.errors import ConfigError
from resiliency.plugins import rank_monitor
from resiliency.plugins.rank_monitor import RankMonitor, Watched, make_client, next_calls, section_of, watched_by
from resiliency.runtime.heartbeat_page import Phase
from resiliency.testing.rank_monitor import RankMonitorClientDouble

DEADLINE_S = 20.0


@pytest.fixture(autouse=True)
def no_client_of_another_test() -> Iterator[None]:
    rank_monitor._clients.clear()
    yield
    rank_monitor._clients.clear()


def until(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not ready():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.002)


def config(**values: Any) -> SimpleNamespace:
    """As ft_launcher 0.4.1 makes it of no flags."""
    defaults = {
        "initial_rank_heartbeat_timeout": 3600.0,
        "rank_heartbeat_timeout": 2700.0,
        "rank_section_timeouts": {},
        "rank_out_of_section_timeout": None,
    }
    return SimpleNamespace(**(defaults | values))


SECTIONS = {"setup": 60.0, "step": 0.2, "checkpointing": 30.0}


# -- what is due, pure


def watched(*sections: str, out: bool = False, beats: bool = True) -> Watched:
    return Watched(sections=frozenset(sections), out_of_section=out, heartbeats=beats, every_s=1.0)


@pytest.mark.parametrize(
    ("opened", "wanted", "progressed", "by", "calls"),
    [
        (None, "setup", False, watched("setup"), [("start_section", "setup")]),
        ("setup", "setup", False, watched("setup"), []),
        ("setup", "step", True, watched("setup", "step"), [("end_section", "setup"), ("start_section", "step"), ("send_heartbeat",)]),
        ("step", "step", True, watched("step", beats=False), [("end_section", "step"), ("start_section", "step")]),
        ("step", "step", False, watched("step"), []),
        ("checkpointing", "checkpointing", True, watched("checkpointing", beats=False), []),
        ("step", None, False, watched("step"), [("end_section", "step")]),
        # A name that the launcher's configuration does not have is answered with an error by 0.4.1.
        (None, "checkpointing", False, watched("step"), []),
        ("step", "checkpointing", False, watched("step"), [("end_section", "step")]),
        (None, "step", True, watched(), [("send_heartbeat",)]),
        (None, "step", True, watched("checkpointing", out=True, beats=False), [("end_all_sections",)]),
        (None, "step", False, watched("checkpointing", out=True, beats=False), []),
        (None, None, False, watched("step"), []),
    ],
)  # fmt: skip
def test_calls_that_are_due(
    opened: str | None, wanted: str | None, progressed: bool, by: Watched, calls: list[tuple[str, ...]]
) -> None:
    assert next_calls(opened, wanted, progressed=progressed, watched=by) == calls


def test_what_is_watched_follows_from_the_configuration() -> None:
    plain = watched_by(config())
    assert plain == Watched(sections=frozenset(), out_of_section=False, heartbeats=True, every_s=1.0)
    short = watched_by(config(rank_heartbeat_timeout=5.0))
    assert short.every_s == 0.5, "ten words within the shortest timeout"
    sections = watched_by(
        config(
            initial_rank_heartbeat_timeout=None,
            rank_heartbeat_timeout=None,
            rank_section_timeouts={"step": 4.0, "setup": None},
            rank_out_of_section_timeout=3.0,
        )
    )
    assert sections.sections == {"step"} and sections.out_of_section and not sections.heartbeats
    assert sections.every_s == pytest.approx(0.3)
    assert watched_by(SimpleNamespace()).nothing and not plain.nothing


def test_phases_have_the_sections_that_nvrx_itself_uses() -> None:
    assert {section_of(phase) for phase in Phase} == {"setup", "step", "checkpointing", None}
    assert section_of(Phase.LOADING) == "setup" and section_of(Phase.SAVING) == "checkpointing"
    assert section_of(Phase.VALIDATION) == "step" and section_of(Phase.FAILED) is None


# -- the thread


def test_a_whole_fit_in_order() -> None:
    client = RankMonitorClientDouble(config(rank_section_timeouts=SECTIONS))
    monitor = RankMonitor(lambda: client)
    monitor.enter("setup")
    until(lambda: client.open == ["setup"])
    monitor.enter("step")
    until(lambda: client.open == ["step"])
    monitor.progressed()
    until(lambda: client.names.count("send_heartbeat") == 1)
    monitor.enter("checkpointing")
    until(lambda: client.open == ["checkpointing"])
    monitor.enter("step")
    until(lambda: client.open == ["step"])
    monitor.enter(None)
    until(lambda: client.open == [])
    monitor.close(shutdown=True)
    monitor.close(shutdown=True)
    assert client.calls[:2] == [("init_workload_monitoring",), ("start_section", "setup")]
    assert client.calls[-1] == ("shutdown_workload_monitoring",)
    sections = [call for call in client.calls if call[0].endswith("_section")]
    assert sections[:4] == [
        ("start_section", "setup"), ("end_section", "setup"), ("start_section", "step"), ("end_section", "step"),
    ]  # fmt: skip
    assert client.errors == [] and client.threads == {"resiliency-rank-monitor"}


def test_a_rank_that_makes_no_progress_says_nothing() -> None:
    client = RankMonitorClientDouble(config(rank_heartbeat_timeout=0.2))
    monitor = RankMonitor(lambda: client)
    monitor.progressed()
    until(lambda: client.names.count("send_heartbeat") == 1)
    threading.Event().wait(0.3)  # fifteen times as long as between two words
    assert client.names.count("send_heartbeat") == 1
    monitor.progressed()
    until(lambda: client.names.count("send_heartbeat") == 2)
    monitor.close(shutdown=True)


def test_many_steps_are_told_a_few_times_and_no_step_waits() -> None:
    client = RankMonitorClientDouble(config(rank_section_timeouts={"step": 3.0}), seconds=0.05)
    monitor = RankMonitor(lambda: client)
    monitor.enter("step")
    began = time.perf_counter()
    for _ in range(20_000):
        monitor.progressed()
    took = time.perf_counter() - began
    assert took / 20_000 < 50e-6, "a call of the client takes fifty milliseconds here"
    until(lambda: "send_heartbeat" in client.names)
    monitor.close(shutdown=True)
    assert client.names.count("send_heartbeat") <= 3 + took / 0.3
    assert client.errors == []


def test_after_an_exception_the_rank_stays_watched_and_the_next_fit_uses_the_same_connection() -> None:
    client = RankMonitorClientDouble(config(rank_section_timeouts=SECTIONS))
    monitor = RankMonitor(lambda: client)
    monitor.enter("step")
    until(lambda: client.open == ["step"])
    monitor.close(shutdown=False)
    assert client.open == [] and "shutdown_workload_monitoring" not in client.names
    again = RankMonitor(lambda: pytest.fail("a second connection of one rank"))
    again.enter("step")
    until(lambda: client.open == ["step"])
    again.close(shutdown=True)
    assert client.names.count("init_workload_monitoring") == 1 and client.errors == []
    other = RankMonitorClientDouble(config())
    RankMonitor(lambda: other).close(shutdown=True)
    assert other.names == ["init_workload_monitoring", "shutdown_workload_monitoring"]


def test_a_monitor_that_fails_is_said_once_and_costs_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    client = RankMonitorClientDouble(config(), fails_at="send_heartbeat")
    monitor = RankMonitor(lambda: client)
    for _ in range(3):
        monitor.progressed()
        threading.Event().wait(0.02)
    monitor.close(shutdown=True)
    assert caplog.text.count("reporting to NVRx's rank monitor has failed") == 1


def test_a_monitor_without_timeouts_is_said(caplog: pytest.LogCaptureFixture) -> None:
    client = RankMonitorClientDouble(config(initial_rank_heartbeat_timeout=None, rank_heartbeat_timeout=None))
    RankMonitor(lambda: client).close(shutdown=True)
    assert "--ft-rank-heartbeat-timeout" in caplog.text


def test_the_package_is_imported_when_it_is_needed_and_its_absence_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext", None)
    with pytest.raises(ConfigError, match=r"pip install 'resiliency\[nvrx\]'"):
        make_client()
    package, module = ModuleType("nvidia_resiliency_ext"), ModuleType("nvidia_resiliency_ext.fault_tolerance")
    module.RankMonitorClient = lambda: "made"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext", package)
    monkeypatch.setitem(sys.modules, "nvidia_resiliency_ext.fault_tolerance", module)
    assert make_client() == "made"
