"""Strangers at the supervisor's port cannot fill its log."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import aiohttp
import pytest

from resiliency.runtime.messages.monitor import Report, pack
from resiliency.supervisor.said_rarely import SaidRarely

from .fake_monitors import leading, settings, url_of

GARBAGE = (
    bytes(64),
    b"\xff" * 20_000,
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTP/1.1\r\nA\x00: b\r\n\r\n",
)
HERE = "resiliency.supervisor.said_rarely"


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_garbage_is_one_line_with_its_sender_and_no_traceback(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with leading(settings(tmp_path)) as supervisor:
            assert supervisor.address is not None
            for garbage in GARBAGE * 4:
                reader, writer = await asyncio.open_connection(*supervisor.address)
                writer.write(garbage)
                await asyncio.wait_for(reader.read(), 10)  # until it is cut off
                writer.close()

    asyncio.run(main())
    (line,) = warnings(caplog)
    assert line.startswith("127.0.0.1 has sent what is no HTTP request (")
    assert not any(record.exc_info for record in caplog.records) and "Traceback" not in caplog.text


def test_what_a_stranger_says_over_a_websocket_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with leading(settings(tmp_path)) as supervisor, aiohttp.ClientSession() as session:
            for number in range(5):
                async with session.ws_connect(url_of(supervisor) + "/v1/monitor") as socket:
                    await socket.send_str(pack(Report(number=number)) if number % 2 else f"garbage {number}")
                    assert "Refused" in (await socket.receive()).data

    asyncio.run(main())
    (line,) = warnings(caplog)
    assert line.startswith("refused a connection from 127.0.0.1: ")


def test_a_failure_of_the_supervisor_itself_keeps_its_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with leading(settings(tmp_path)) as supervisor, aiohttp.ClientSession() as session:
            monkeypatch.setattr(type(supervisor.service), "connected", None)  # is called, and cannot be
            async with session.get(url_of(supervisor) + "/metrics") as answer:
                assert answer.status == 500

    asyncio.run(main())
    assert "Traceback" in caplog.text and "NoneType" in caplog.text


def test_what_was_left_out_is_counted_and_said_later(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    rarely = SaidRarely(logging.getLogger(HERE), clock=lambda: now)
    for number in range(1000):
        rarely.warning("10.0.0.1", f"bad {number}\nforged line")
        rarely.warning(f"10.1.{number}", "bad as well")
    said = warnings(caplog)
    assert len(said) == 20 and said[0] == "bad 0 forged line"
    caplog.clear()
    now = 61.0
    rarely.warning("10.0.0.1", "bad again")
    assert warnings(caplog) == ["1980 more warnings like those within 61 s were not written", "bad again"]
