"""Hosts obey no supervisor of a lower term than they have obeyed. One with a new state file, or an old copy, begins above
it; one that was replaced elsewhere does not."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from resiliency.runtime.messages.monitor import PROTOCOL_VERSION, Hello, Message, Refused, Welcome, pack, unpack
from resiliency.supervisor import lease as lease_module
from resiliency.supervisor.server import Supervisor

from .fake_monitors import leading, settings, url_of


def run(work: Any) -> None:
    asyncio.run(asyncio.wait_for(work(), 60))


async def greeted(supervisor: Supervisor, term: int) -> Message:
    """The first answer to a host that has obeyed this term."""
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(url_of(supervisor) + "/v1/monitor") as socket,
    ):
        await socket.send_str(pack(Hello(version=PROTOCOL_VERSION, host="x", incarnation="x", term=term)))
        return unpack((await socket.receive(10)).data)


def test_a_new_state_file_and_an_old_copy_begin_above_the_terms_that_were_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        with monkeypatch.context() as earlier:
            earlier.setattr(lease_module.time, "time", lambda: 1_000_000.0)
            async with leading(settings(tmp_path)) as supervisor:
                assert supervisor.service is not None and supervisor.service.term == 1_000_000
        (tmp_path / "copy").mkdir()
        (tmp_path / "copy" / "supervisor.db").write_bytes((tmp_path / "supervisor.db").read_bytes())
        (tmp_path / "new").mkdir()
        obeyed = int(time.time())
        for folder in ("copy", "new"):
            async with leading(settings(tmp_path / folder)) as supervisor:
                assert isinstance(await greeted(supervisor, obeyed), Welcome)

    run(work)


def test_a_host_that_has_obeyed_a_higher_term_is_refused_and_it_is_said_what_to_do(tmp_path: Path) -> None:
    """The supervisor was replaced elsewhere, with another state file, and is revived; or its clock is behind."""

    async def work() -> None:
        async with leading(settings(tmp_path)) as supervisor:
            service = supervisor.service
            answer = await greeted(supervisor, 1 << 80)
            assert isinstance(answer, Refused) and "End the one that is not wanted, or set the clock" in answer.reason
            assert isinstance(await greeted(supervisor, 0), Welcome) and supervisor.service is service

    run(work)
