"""The status page, in a real browser, from a supervisor that serves it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from resiliency.runtime.messages.monitor import Observed
from resiliency.runtime.messages.observations import Observation, ObservationKind
from resiliency.supervisor.page import render_page
from resiliency.supervisor.views import event_view, status_view
from tests.goodput.browser import Browser

from .fake_monitors import job, leading, monitors, settings, until, url_of
from .test_service import is_running, run

EVIL = "<script>document.title='owned'</script>"


@pytest.mark.browser
@pytest.mark.long
def test_the_page_shows_a_failure_and_refreshes_itself_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    shot = os.environ.get("RESILIENCY_TESTS_SCREENSHOTS")

    def look(url: str, has_failed: Callable[[], None]) -> None:
        with Browser() as browser:
            size: dict[str, Any] = {"width": 1000, "height": 1300, "deviceScaleFactor": 1, "mobile": False}
            browser.call("Emulation.setDeviceMetricsOverride", **size)
            browser.call("Page.navigate", url=url + "/")
            wait(browser, "document.body && document.body.innerText.includes('running')")
            assert browser.evaluate("document.querySelectorAll('.track i, details').length") == 0  # of the start
            assert not browser.evaluate("document.body.innerText.includes('restart_in_job')")
            has_failed()
            wait(browser, "document.body.innerText.includes('restart_in_job helped')")
            assert browser.evaluate("document.querySelectorAll('.track i.plan').length") == 1
            assert browser.evaluate("document.title") == "Supervisor"
            assert browser.evaluate("document.body.innerText.includes('<script>')")
            wide = browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
            assert wide and browser.errors == []
            assert {one.split("?")[0].rstrip("/") for one in browser.requests} <= {url, url + "/favicon.ico"}
            if shot:
                Path(shot, "supervisor.png").write_bytes(browser.screenshot(width=1000, height=1300))

    async def work() -> None:
        async with (
            leading(settings(tmp_path, job(replicas=2))) as supervisor,
            monitors(url_of(supervisor), "node-1", "node-2", "node-3") as (a, b, c),
        ):
            await until(lambda: is_running(supervisor))
            loop = asyncio.get_running_loop()
            first = next(one for one in (a, b, c) if one.place is not None)
            seen = Observation(
                kind=ObservationKind.WORKER_LOST, host=first.name, workload="job", generation=1, rank=0, detail=EVIL
            )

            def fail() -> None:
                asyncio.run_coroutine_threadsafe(first.send(Observed(observations=(seen,))), loop).result(10)

            await asyncio.to_thread(look, url_of(supervisor), fail)

    run(work)


def wait(browser: Browser, condition: str) -> None:
    end = time.monotonic() + 20
    while not browser.evaluate(condition):
        assert time.monotonic() < end, f"{condition}: {browser.evaluate('document.body.innerText')}"
        time.sleep(0.05)


def test_the_page_of_a_supervisor_that_nobody_has_joined_says_so(tmp_path: Path) -> None:
    async def work() -> None:
        async with leading(settings(tmp_path)) as supervisor:
            assert supervisor.service is not None
            await until(supervisor.store.events)
            page = render_page(
                status_view(supervisor.service), [event_view(event) for event in supervisor.store.events()]
            )
            assert "No monitor has connected yet" in page and "src=" not in page and "http" not in page

    run(work)
