"""A supervisor and monitors of hosts, over real WebSockets, in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from resiliency.supervisor.model import StepKind, WorkloadState
from resiliency.supervisor.server import Supervisor

from .fake_monitors import leading, monitors, settings, until, url_of


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 60))


def is_running(supervisor: Supervisor, epoch: int = 1) -> bool:
    assert supervisor.service is not None
    workload = supervisor.service.decided.workloads.get("job")
    return workload is not None and workload.state is WorkloadState.RUNNING and workload.epoch == epoch


def remedies(supervisor: Supervisor) -> list[str]:
    assert supervisor.service is not None
    plans = supervisor.service.controller.plans
    return [str(plans[number].remedy.kind) for number in sorted(plans)]


def test_two_monitors_get_places_and_the_address_of_the_first_and_train(tmp_path: Path) -> None:
    async def work() -> None:
        async with leading(settings(tmp_path)) as supervisor, monitors(url_of(supervisor), "a", "b") as (a, b):
            await until(lambda: is_running(supervisor))
            assert a.desired is not None and b.desired is not None
            assert (a.desired.place.node_rank, b.desired.place.node_rank) == (0, 1)
            assert a.desired.place.hosts == ("a", "b") and b.desired.master == "10.0.0.1:20001"
            assert a.asked == [] or {kind for _, _, kind in a.asked} == {StepKind.VERIFY}
            a.ended = b.ended = True
            await until(lambda: a.desired.completed and b.desired.completed)
            assert a.desired.place is None

    run(work)
