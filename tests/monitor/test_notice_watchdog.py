"""A machine that is told to go gets no ranks while its notice stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from resiliency.monitor.watchdogs.notice import NoticeWatchdog
from resiliency.preemption.sources import metadata_address, notices_of
from resiliency.runtime.messages.monitor import Ask, StepKind
from resiliency.runtime.messages.observations import ObservationKind
from tests.metadata_server import Metadata, metadata_server  # noqa: F401 - a fixture
from tests.monitor.monitored import Host, on_host
from tests.ports import free_port


@pytest.mark.parametrize(
    ("key", "value"), [("preempted", "TRUE"), ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE")]
)
def test_a_notices_of_the_cloud_takes_the_host_out_until_it_is_over(key: str, value: str, metadata: Metadata) -> None:
    watchdog = NoticeWatchdog(metadata_server=metadata.address)
    assert watchdog.look() == []
    before = metadata.values[key]
    metadata.set(key, value)
    (found,) = watchdog.look()
    assert found.takes_host_out and found.detail == f"the machine is told to go: the metadata server, {key}={value}"
    metadata.set(key, before)
    assert watchdog.look() == []


def test_a_server_that_does_not_answer_is_said_once_and_asked_again(
    metadata: Metadata,
    caplog: pytest.LogCaptureFixture,
) -> None:
    metadata.fails = True
    watchdog = NoticeWatchdog(metadata_server=metadata.address)
    assert watchdog.look() == watchdog.look() == [] and caplog.text.count("does not answer") == 2, "of each key"
    metadata.fails = False
    metadata.set("preempted", "TRUE")
    assert len(watchdog.look()) == 1
    silent = NoticeWatchdog(metadata_server=f"http://127.0.0.1:{free_port()}/computeMetadata/v1")
    assert silent.look() == []


@pytest.mark.parametrize("status", [404, 503])
@pytest.mark.parametrize(
    ("missing", "key", "value"),
    [("preempted", "maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE"), ("maintenance-event", "preempted", "TRUE")],
)
def test_a_key_without_an_answer_hides_no_other_and_is_said_once(
    missing: str, key: str, value: str, status: int, metadata: Metadata, caplog: pytest.LogCaptureFixture
) -> None:
    metadata.statuses[missing] = status
    watchdog = NoticeWatchdog(metadata_server=metadata.address)
    assert watchdog.look() == watchdog.look() == []
    metadata.set(key, value)
    (found,) = watchdog.look()
    assert found.takes_host_out and f"{key}={value}" in found.detail
    (said,) = caplog.messages
    assert f"instance/{missing}" in said and str(status) in said
    metadata.statuses.clear()
    watchdog.look()
    metadata.statuses[missing] = status
    watchdog.look()
    assert len(caplog.messages) == 2, "it had answered"


@pytest.mark.parametrize(
    ("key", "value", "goes"),
    [
        ("preempted", "FALSE", False),
        ("preempted", "TRUE", True),
        ("maintenance-event", "NONE", False),
        ("maintenance-event", "MIGRATE_ON_HOST_MAINTENANCE", False),
        ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE", True),
        ("maintenance-event", "OF_ANOTHER_YEAR", True),
    ],
)
def test_what_each_value_means(key: str, value: str, goes: bool, metadata: Metadata) -> None:
    metadata.set(key, value)
    assert bool(NoticeWatchdog(metadata_server=metadata.address).look()) is goes


def test_addresses_that_are_none_are_refused() -> None:
    assert metadata_address("") is None and metadata_address("http://a/b") == "http://a/b"
    with pytest.raises(ValueError, match="no address of a metadata server"):
        notices_of("ftp://a/b")


def test_a_host_with_a_notice_passes_no_check_and_is_given_back_when_it_is_removed(tmp_path: Path) -> None:
    async def scenario(host: Host) -> None:
        notice = tmp_path / "notice"
        watchdog = NoticeWatchdog(str(notice), "")
        watchdog.interval_s = 0.02
        host.watchdogs = [watchdog]
        host.start_monitor()
        notice.touch()
        (seen,) = await host.supervisor.observed(1)
        assert seen.kind is ObservationKind.HOST_UNHEALTHY and str(notice) in seen.detail
        await host.supervisor.report(lambda one: str(notice) in one.problem)
        await host.supervisor.want(asks=(Ask(plan=1, at=0, kind=StepKind.VERIFY, timeout_s=5),))
        await host.supervisor.until(lambda: host.supervisor.answers)
        assert str(notice) in host.supervisor.answers[-1].problem
        notice.unlink()
        await host.supervisor.report(lambda one: not one.problem, since=len(host.supervisor.heard))

    on_host(tmp_path, scenario)
