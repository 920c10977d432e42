"""Hosts obey no supervisor of a lower term than they have obeyed. One with a new state file learns from them how high its
term must be; one whose file has been in use does not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from resiliency.supervisor import store as store_module
from resiliency.supervisor.connection import ConnectionSettings, SupervisorConnection
from resiliency.supervisor.messages import (
    PROTOCOL_VERSION,
    Desired,
    Hello,
    Message,
    Refused,
    Report,
    Welcome,
    pack,
    unpack,
)
from resiliency.supervisor.outbox import Outbox
from resiliency.supervisor.server import Supervisor

from .fake_monitors import job, leading, monitors, settings, until, url_of

#: Seconds of a clock that is ahead of this one's.
HEARD = 10**12


def run(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work(), 60))


class Monitor:
    """A host monitor's connection, and what it must not forget."""

    def __init__(self, url: str, name: str, term: int) -> None:
        self.term, self.obeyed = term, list[Desired]()
        self.connection = SupervisorConnection(
            ConnectionSettings(urls=(url,)),
            Hello(version=PROTOCOL_VERSION, host=name, incarnation=name),
            outbox=Outbox(),
            report=lambda: Report(number=0),
            obey=self.obeyed.append,
            term=self._term,
        )

    def _term(self, term: int | None) -> int:
        self.term = max(self.term, term or 0)
        return self.term

    async def __aenter__(self) -> Monitor:
        self._running = asyncio.create_task(self.connection.run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)


async def greeted(supervisor: Supervisor, term: int) -> Message:
    """The first answer to a host that has obeyed this term."""
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(url_of(supervisor) + "/v1/monitor") as socket,
    ):
        await socket.send_str(pack(Hello(version=PROTOCOL_VERSION, host="x", incarnation="x", term=term)))
        return unpack((await socket.receive(10)).data)


def test_a_supervisor_whose_state_was_lost_and_whose_clock_is_behind_is_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module.time, "time", lambda: 1000.0)

    async def work() -> None:
        async with leading(settings(tmp_path)) as supervisor:
            assert supervisor.service is not None and supervisor.service.term == 1001
            url = url_of(supervisor)
            # One that is new here has been taken already; of the others the first makes the term rise, once.
            async with Monitor(url, "new", 0) as new:
                await until(lambda: new.obeyed)
                async with Monitor(url, "b", HEARD) as b, Monitor(url, "c", HEARD - 1) as c:
                    await until(lambda: b.obeyed and c.obeyed and new.obeyed[-1].term > HEARD - 1)
                    await until(lambda: {each.obeyed[-1].term for each in (new, b, c)} == {b.term})
                    assert b.term in (HEARD + 1, HEARD + 2), "once for each that it was below of, and no more"

    run(work)


def test_a_leader_that_was_replaced_with_another_state_file_is_refused_when_it_is_revived(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()

    async def work() -> None:
        async with (
            leading(settings(tmp_path, job(replicas=1))) as old,
            monitors(url_of(old), "a"),
        ):
            assert old.service is not None
            service, term = old.service, old.service.term
            await until(lambda: old.store.has_given_places())
            # Elsewhere another one was started with an empty file, and "b" has obeyed that.
            async with leading(settings(tmp_path / "new", job(replicas=1))) as new:
                assert isinstance(await greeted(new, term + 100), Refused)
                await until(lambda: new.service is not None and new.service.term > term + 100)
                async with Monitor(url_of(new), "b", term) as b:
                    await until(lambda: b.obeyed)
            async with Monitor(url_of(old), "b", b.term) as host:
                await until(lambda: host.connection._said)
                assert "another one was started with another state file, and leads" in host.connection._said
                assert host.obeyed == [] and host.term == b.term and "b" not in {h.name for h in service.sensor.hosts()}
            assert old.service is service and service.term == term
        # Nor when it is started again.
        async with leading(settings(tmp_path, job(replicas=1))) as old:
            answer = await greeted(old, HEARD)
            assert isinstance(answer, Refused) and "move its state file away" in answer.reason
            assert isinstance(await greeted(old, 0), Welcome)

    run(work)


@pytest.mark.parametrize("term", [1 << 53, 1 << 80])
def test_a_term_that_is_none_changes_nothing(tmp_path: Path, term: int) -> None:
    async def work() -> None:
        async with leading(settings(tmp_path)) as supervisor:
            service = supervisor.service
            answer = await greeted(supervisor, term)
            assert isinstance(answer, Refused) and "is not valid" in answer.reason
            assert isinstance(await greeted(supervisor, 0), Welcome) and supervisor.service is service

    run(work)


def test_a_supervisor_that_only_says_what_it_would_do_takes_no_hosts_from_another(tmp_path: Path) -> None:
    async def work() -> None:
        async with leading(settings(tmp_path, dry_run=True)) as supervisor:
            answer = await greeted(supervisor, HEARD)
            assert isinstance(answer, Refused) and "leads" in answer.reason

    run(work)
