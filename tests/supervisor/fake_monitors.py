"""Monitors that speak to a real supervisor over WebSockets, and a supervisor in the event loop of the test."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp

from resiliency.runtime.messages.monitor import (
    PROTOCOL_VERSION,
    Desired,
    Hello,
    Message,
    Observed,
    RankReport,
    Refused,
    Report,
    StepEnded,
    StepKind,
    Welcome,
    pack,
    unpack,
)
from resiliency.runtime.messages.observations import Observation, ObservationKind
from resiliency.supervisor.clusters.base import Cluster
from resiliency.supervisor.model import WorkloadSpec
from resiliency.supervisor.sensor import SensorSettings
from resiliency.supervisor.server import Supervisor
from resiliency.supervisor.settings import SupervisorSettings
from tests.patience import PATIENCE

PERIOD_S, TIMEOUT_S = 0.2, 0.8
DEADLINE_S = 15.0


def job(**values: Any) -> WorkloadSpec:
    given = {"name": "job", "replicas": 2, "dwell_s": 0.3, "correlate_s": 0.05, "start_timeout_s": 20.0, **values}
    return WorkloadSpec(**given)


def settings(folder: Path, *specs: WorkloadSpec, **values: Any) -> SupervisorSettings:
    given: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "state": str(folder / "supervisor.db"),
        "workloads": list(specs) or [job()],
        "sensor": SensorSettings(period_s=PERIOD_S, timeout_s=TIMEOUT_S, quarantine_s=60.0, thaw_s=0.3),
        "insecure_no_authentication": True,
        "handshake_timeout_s": 0.5,
        "lease_s": 2.0,
        **values,
    }
    return SupervisorSettings(**given)


@contextlib.asynccontextmanager
async def leading(
    made: SupervisorSettings, *, cluster: Cluster | None = None, **more: Any
) -> AsyncIterator[Supervisor]:
    """One that leads, in a cluster of the test's if one is given."""
    supervisor = Supervisor(made, **more)
    if cluster is not None:
        supervisor.backend = lambda settings: (cluster, None)
    running = asyncio.create_task(supervisor.run())
    try:
        await until(lambda: supervisor.service is not None or running.done())
        if running.done():
            running.result()
        yield supervisor
    finally:
        supervisor.stop()
        await asyncio.wait_for(running, DEADLINE_S)


async def until(condition: Callable[[], Any], *, within_s: float = DEADLINE_S) -> Any:
    end = time.monotonic() + PATIENCE * within_s
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {within_s} s"
        await asyncio.sleep(0.01)
    return found


class FakeMonitor:
    """A host that makes true what it is told, and trains.

    Attributes:
        desired: what it was told last.
        healthy: it passes checks; "": what is wrong otherwise.
        answers: kinds of asks that it answers.
        asked: all asks, as often as they came.
        trains: its ranks make steps.
        shows: what their pages say otherwise.
        devices: how many it has.
    """

    def __init__(
        self, url: str, name: str, *, token: str = "", ranks: int = 1, incarnation: str = "1", devices: int = 0
    ) -> None:
        self.url, self.name, self.token, self.ranks = url.replace("http", "ws", 1), name, token, ranks
        self.incarnation = incarnation
        self.desired: Desired | None = None
        self.desires: list[Desired] = []
        self.welcome: Welcome | None = None
        self.refused = ""
        self.problem = ""
        self.answers = set(StepKind)
        self.asked: list[tuple[int, int, StepKind]] = []
        self.trains, self.obeys = True, True
        self.shows: dict[str, float] = {}
        self.devices = devices
        self.step, self.ended, self.number = 0, False, 0
        self.place: Any = None
        self.began_at = 0
        self.socket: aiohttp.ClientWebSocketResponse | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> FakeMonitor:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.die()

    async def die(self) -> None:
        """Without a word."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def send(self, message: Message) -> None:
        assert self.socket is not None
        await self.socket.send_str(pack(message))

    async def saw(self, kind: ObservationKind, **fields: Any) -> None:
        generation, workload = (self.place.generation, self.place.workload) if self.place else (0, "")
        given = {"host": self.name, "workload": workload, "generation": generation, **fields}
        await self.send(Observed(observations=(Observation(kind=kind, **given),)))

    async def _run(self) -> None:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        async with aiohttp.ClientSession() as session:
            while not self.refused:
                try:
                    async with session.ws_connect(f"{self.url}/v1/monitor", headers=headers) as self.socket:
                        await self._speak()
                except aiohttp.WSServerHandshakeError as error:
                    if error.status != 503:
                        self.refused = f"{error.status}"
                        return
                except (aiohttp.ClientError, ConnectionError, asyncio.TimeoutError):
                    pass
                await asyncio.sleep(0.05)

    async def _speak(self) -> None:
        assert self.socket is not None
        await self.send(
            Hello(version=PROTOCOL_VERSION, host=self.name, incarnation=self.incarnation, address="10.0.0.1")
        )
        beating = asyncio.create_task(self._beat())
        try:
            async for received in self.socket:
                if received.type is aiohttp.WSMsgType.TEXT:
                    await self._hear(unpack(received.data))
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)

    async def _hear(self, message: Message) -> None:
        if isinstance(message, Welcome):
            self.welcome = message
        elif isinstance(message, Refused):
            self.refused = message.reason
        elif isinstance(message, Desired):
            if self.desired is not None and message.term < self.desired.term:
                return
            self.desired = message
            self.desires.append(message)
            if self.obeys and message.place != self.place:
                self.place, self.ended, self.began_at = message.place, False, self.step
                await self.report()
            for ask in message.asks:
                self.asked.append((ask.plan, ask.at, ask.kind))
                if ask.kind in self.answers:
                    await self.send(
                        StepEnded(plan=ask.plan, at=ask.at, generation=ask.generation, problem=self.problem)
                    )

    async def _beat(self) -> None:
        while True:
            await self.report()
            await asyncio.sleep(PERIOD_S / 2)

    async def report(self, **fields: Any) -> None:
        place = self.place
        if place is not None and self.trains and place.master:
            self.step += 1
        beats = max(0, self.step - self.began_at)
        first = 0 if place is None else place.node_rank * self.ranks
        ranks = tuple(
            RankReport(
                **{"beats": beats, "step": self.step, "longest_s": 0.01, **self.shows},
                rank=first + number,
                watched=beats > 0,
            )
            for number in range(self.ranks if place is not None else 0)
        )
        self.number += 1
        given: dict[str, Any] = {
            "number": self.number,
            "workload": place.workload if place else "",
            "generation": place.generation if place else 0,
            "master": f"10.0.0.1:{20000 + place.generation}" if place and place.node_rank == 0 else "",
            "ended": self.ended,
            "ranks": ranks,
            "devices": self.devices,
            **fields,
        }
        await self.send(Report(**given))


@contextlib.asynccontextmanager
async def monitors(url: str, *names: str, **values: Any) -> AsyncIterator[list[FakeMonitor]]:
    made = [FakeMonitor(url, name, **values) for name in names]
    async with contextlib.AsyncExitStack() as stack:
        for one in made:
            await stack.enter_async_context(one)
        yield made


def url_of(supervisor: Supervisor) -> str:
    assert supervisor.address is not None
    return f"http://{supervisor.address[0]}:{supervisor.address[1]}"


async def asked(supervisor: Supervisor, path: str, *, method: str = "GET", token: str = "") -> tuple[int, Any]:
    """Status and answer of a request."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url_of(supervisor) + path, headers=headers) as answer,
    ):
        text = await answer.text()
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, text
