"""A host monitor under test: a supervisor that says what the test wants, and a launcher that does so too."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from resiliency.monitor.connection import ConnectionSettings
from resiliency.monitor.host_monitor import HostMonitor
from resiliency.monitor.settings import MonitorSettings
from resiliency.monitor.watchdogs.base import Watchdog
from resiliency.runtime.messages.monitor import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Desired,
    Hello,
    Observed,
    Report,
    StepEnded,
    Welcome,
    pack,
    unpack,
)
from resiliency.runtime.messages.observations import Observation
from resiliency.runtime.messages.places import Place

FAKE_LAUNCHER = str(Path(__file__).with_name("fake_launcher.py"))
TOKEN = "a-token-of-the-test"
#: For anything that is awaited; nothing here should take a tenth of it.
DEADLINE_S = 15.0


class FakeSupervisor:
    """Listens on a free port, and keeps what monitors say.

    Attributes:
        desired: is sent on every new connection, and whenever :meth:`want` is called.
        refuses: new connections are closed at once.
    """

    def __init__(self, *, term: int = 1, period_s: float = 0.1) -> None:
        self.term, self.period_s = term, period_s
        self.desired = Desired(term=term)
        self.heard: list[Any] = []
        self.tokens: list[str] = []
        self.connections = 0
        self.refuses = False
        self.first_words: str | None = None
        self._news = asyncio.Condition()
        self._sockets: set[web.WebSocketResponse] = set()
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/monitor", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        await web.SockSite(self._runner, listener).start()

    async def stop(self) -> None:
        for each in list(self._sockets):
            with suppress(Exception):
                await asyncio.wait_for(each.close(), 1)
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.connections += 1
        self.tokens.append(request.headers.get("Authorization", ""))
        answer = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES)
        await answer.prepare(request)
        if self.refuses:
            await answer.close()
            await self._notify()
            return answer
        self._sockets.add(answer)
        try:
            async for received in answer:
                if received.type is not aiohttp.WSMsgType.TEXT:
                    break
                message = unpack(received.data)
                self.heard.append(message)
                if isinstance(message, Hello):
                    if self.first_words is not None:
                        await answer.send_str(self.first_words)
                    await answer.send_str(
                        pack(Welcome(version=PROTOCOL_VERSION, term=self.term, period_s=self.period_s))
                    )
                    await answer.send_str(pack(self.desired))
                await self._notify()
        finally:
            self._sockets.discard(answer)
        return answer

    async def _notify(self) -> None:
        async with self._news:
            self._news.notify_all()

    async def want(self, **fields: Any) -> None:
        """The whole of what is to be true; the term is this supervisor's unless it is given."""
        self.desired = Desired(**{"term": self.term, **fields})
        await self.say(pack(self.desired))

    async def say(self, text: str) -> None:
        for each in list(self._sockets):
            with suppress(ConnectionError):
                await each.send_str(text)

    async def until(self, condition: Callable[[], Any]) -> Any:
        """Waits for what monitors say."""
        async with self._news:
            await asyncio.wait_for(self._news.wait_for(condition), DEADLINE_S)
        return condition()

    async def report(self, condition: Callable[[Report], Any], *, since: int = 0) -> Report:
        """The first report of which something is true."""
        found = await self.until(
            lambda: [one for one in self.heard[since:] if isinstance(one, Report) and condition(one)]
        )
        return found[0]

    @property
    def observations(self) -> list[Observation]:
        return [each for one in self.heard if isinstance(one, Observed) for each in one.observations]

    @property
    def answers(self) -> list[StepEnded]:
        return [one for one in self.heard if isinstance(one, StepEnded)]

    async def observed(self, count: int = 1) -> list[Observation]:
        return await self.until(lambda: self.observations if len(self.observations) >= count else None)


class Launchers:
    """The fake launchers of a test: what they were told, and what they are to do."""

    def __init__(self, folder: Path) -> None:
        self.address = str(folder / "test.sock")
        self.own = str(folder / "launcher.sock")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        self._socket.setblocking(False)
        self.events: list[dict[str, Any]] = []
        self._addresses: dict[int, str] = {}

    @property
    def command(self) -> tuple[str, ...]:
        return (sys.executable, "-S", "-E", FAKE_LAUNCHER, "{endpoint}", self.address, self.own)

    async def next(self, event: str, **fields: Any) -> dict[str, Any]:
        """The next such event; earlier ones are passed over."""

        async def wait() -> dict[str, Any]:
            while True:
                data = await asyncio.get_running_loop().sock_recv(self._socket, 65536)
                found = json.loads(data)
                self.events.append(found)
                if found["event"] == "started":
                    self._addresses[found["pid"]] = found["address"]
                told = found.get("message", {})
                if found["event"] == event and all(told.get(name) == value for name, value in fields.items()):
                    return found

        return await asyncio.wait_for(wait(), DEADLINE_S)

    @property
    def started(self) -> list[int]:
        return [one["pid"] for one in self.events if one["event"] == "started"]

    def do(self, pid: int, **command: Any) -> None:
        self._socket.sendto(json.dumps(command).encode(), self._addresses[pid])

    def say(self, pid: int, **message: Any) -> None:
        self.do(pid, do="say", message=message)

    def drain(self) -> list[dict[str, Any]]:
        """What has come meanwhile."""
        while True:
            try:
                found = json.loads(self._socket.recv(65536))
            except BlockingIOError:
                return self.events
            self.events.append(found)
            if found["event"] == "started":
                self._addresses[found["pid"]] = found["address"]

    def close(self) -> None:
        self.drain()
        self._socket.close()
        for pid in self.started:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def place(generation: int, *, node_rank: int = 0, nodes: int = 2, **fields: Any) -> Place:
    return Place(**{"workload": "job", "generation": generation, "node_rank": node_rank, "nodes": nodes, **fields})


class Host:
    """All of it, in one event loop."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.supervisor = FakeSupervisor()
        self.launchers = Launchers(folder)
        self.settings = MonitorSettings(
            host="host-a", command=self.launchers.command, state_dir=str(folder / "state"), grace_s=3.0, stop_s=3.0
        )
        token = folder / "token"
        token.write_text(TOKEN + "\n")
        token.chmod(0o600)
        self.token_file = str(token)
        self.watchdogs: list[Watchdog] = []
        self.monitor: HostMonitor | None = None
        self._running: asyncio.Task[int] | None = None

    def start_monitor(self, **settings: Any) -> None:
        connection = ConnectionSettings(urls=(self.supervisor.url,), token_file=self.token_file)
        self.monitor = HostMonitor(replace(self.settings, **settings), connection, self.watchdogs)
        self._running = asyncio.create_task(self.monitor.run())

    async def stop_monitor(self) -> int:
        assert self.monitor is not None and self._running is not None
        self.monitor.stop()
        running, self._running = self._running, None
        return await asyncio.wait_for(running, DEADLINE_S)

    async def abandon_monitor(self) -> None:
        """As if it were killed, as far as one process can: nothing is ended, and nothing is said."""
        assert self._running is not None
        running, self._running = self._running, None
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    async def ended(self) -> int:
        assert self._running is not None
        running, self._running = self._running, None
        return await asyncio.wait_for(running, DEADLINE_S)

    async def with_place(self, generation: int = 1, **fields: Any) -> dict[str, Any]:
        """Until the launcher has a place, and the supervisor knows; what the launcher was told."""
        await self.supervisor.want(place=place(generation, **fields))
        told = await self.launchers.next("told", kind="place", generation=generation)
        await self.supervisor.report(lambda one: one.generation == generation)
        return told


@asynccontextmanager
async def _host(folder: Path) -> AsyncIterator[Host]:
    host = Host(folder)
    await host.supervisor.start()
    try:
        yield host
    finally:
        if host._running is not None:
            if host._running.done():
                host._running.result()
            await host.stop_monitor()
        await host.supervisor.stop()
        host.launchers.close()


def on_host(folder: Path, scenario: Callable[[Host], Awaitable[None]]) -> None:
    """Runs a scenario to its end."""

    async def run() -> None:
        async with _host(folder) as host:
            await asyncio.wait_for(scenario(host), 3 * DEADLINE_S)

    asyncio.run(run())
