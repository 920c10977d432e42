"""Host monitors of simulated pods, hundreds in one thread: each has the connection of a real one, and no ranks.

They prove who they are with tokens that are bound to their pods, obey the supervisor that leads, and train together as
:class:`~tests.cluster.training.Training` allows. Nodes die, are cut off, and come back as a test says.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import uuid
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from resiliency.monitor.connection import ConnectionSettings, SupervisorConnection
from resiliency.monitor.outbox import Outbox
from resiliency.runtime.messages.monitor import PROTOCOL_VERSION, Desired, Hello, RankReport, Report, StepEnded
from resiliency.runtime.messages.places import Place
from resiliency.runtime.tasks import end_tasks
from tests.cluster.client import Cluster
from tests.cluster.training import Training

__all__ = ["SimulatedHost", "SimulatedHosts"]

T = TypeVar("T")
AUDIENCE = "resiliency-supervisor"
STEP_S = 0.1


class SimulatedHost:
    """The host monitor of a pod. Thread: that of all simulated hosts.

    Attributes:
        place: of its ranks; None: it has none.
        term: the highest that it has obeyed.
        is_cut: nothing reaches it, and it reaches nobody; its ranks go on.
    """

    def __init__(self, pod: dict[str, Any], training: Training, urls: Sequence[str], ca: Path, token: Path) -> None:
        self.name, self.uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        self.node = pod["spec"]["nodeName"]
        self.place: Place | None = None
        self.term = 0
        self.is_cut = False
        self._training, self._token = training, token
        self._had = self._number = 0
        settings = ConnectionSettings(urls=tuple(urls), token_file=str(token), ca_file=str(ca))
        hello = Hello(version=PROTOCOL_VERSION, host=self.name, incarnation=uuid.uuid4().hex, address="10.0.0.1")
        self._connection = SupervisorConnection(
            settings, hello, outbox=Outbox(), report=self._report, obey=self._obey, term=self._heard
        )
        self._task: asyncio.Task[None] | None = None

    @property
    def is_connected(self) -> bool:
        return self._connection.is_connected

    def connect(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._connection.run())

    async def hang_up(self) -> None:
        """Is not heard of any more."""
        if self._task is not None:
            task, self._task = self._task, None
            task.cancel()  # once: it has a connection to close
            await asyncio.gather(task, return_exceptions=True)

    async def end(self) -> None:
        """Its pod is no more."""
        self._take(None)
        await self.hang_up()
        self._token.unlink(missing_ok=True)

    async def cut(self) -> None:
        self.is_cut = True
        if self.place is not None:
            self._training.is_away(self.name, self.place.generation, True)
        await self.hang_up()

    def mend(self) -> None:
        self.is_cut = False
        if self.place is not None:
            self._training.is_away(self.name, self.place.generation, False)
        self.connect()

    # -- what the connection asks -------------------------------------------------------------------------------------

    def _heard(self, term: int | None) -> int:
        self.term = max(self.term, term or 0)
        return self.term

    def _obey(self, desired: Desired) -> None:
        if desired.place is None or desired.place.generation >= self._had:
            self._take(desired.place)
        for ask in desired.asks:
            self._connection.answer(StepEnded(plan=ask.plan, at=ask.at, generation=ask.generation))

    def _take(self, place: Place | None) -> None:
        before, self.place = self.place, place
        if (before and before.generation) == (place and place.generation):
            return
        if before is not None:
            self._training.leaves(self.name, before.generation, before.node_rank)
        if place is not None:
            if place.generation == self._had:
                self._training.problems.append(f"{self.name} is given generation {self._had} again")
            self._had = place.generation
            self._training.takes(self.name, place.generation, place.node_rank, place.nodes)
        self._connection.say_soon()

    def _report(self) -> Report:
        self._number += 1
        place = self.place
        if place is None:
            return Report(number=self._number, devices=8)
        beats = self._training.steps_of(place.generation)
        step = self._training.step if beats else -1
        return Report(
            number=self._number,
            workload=place.workload,
            generation=place.generation,
            master="10.0.0.1:29500" if place.node_rank == 0 else "",
            ranks=(RankReport(rank=place.node_rank, beats=beats, step=step, watched=beats > 0, longest_s=0.1),),
            devices=8,
            node_rank=place.node_rank,
            nodes=place.nodes,
            replicas=place.replicas,
        )


class SimulatedHosts:
    """A host for each pod of a namespace that runs, in a thread of their own. Thread: any.

    Args:
        urls: of the supervisors.
        ca: certificate that theirs are checked with.
        account: ServiceAccount of the pods.
    """

    def __init__(
        self, cluster: Cluster, namespace: str, folder: Path, *, urls: Sequence[str], ca: Path, account: str
    ) -> None:
        self._cluster, self._namespace, self._folder = cluster, namespace, folder
        self._urls, self._ca, self._account = urls, ca, account
        self.training = Training()
        #: By name: one for each pod that runs, and those that were cut off from the cluster, which deletes their pods in vain.
        self.hosts: dict[str, SimulatedHost] = {}
        self._dead: set[str] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="simulated-hosts")
        self._thread.start()
        self._tasks: list[asyncio.Task[None]] = self._do(self._begin())

    def close(self) -> None:
        self._do(self._end_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def ask(self, question: Callable[[], T]) -> T:
        """What a function returns that may look at the hosts and their training."""

        async def answer() -> T:
            return question()

        return self._do(answer())

    def kill(self, names: Collection[str]) -> None:
        """The nodes of these hosts are dead. Only for the hosts: the cluster may be told with ``test/dead``."""

        async def kill() -> None:
            for host in [self.hosts[name] for name in names]:
                self._dead.add(host.node)
                await self._forget(host)

        self._do(kill())

    def cut(self, *names: str) -> None:
        """Nobody reaches these hosts any more, and they go on: also when their pods are deleted."""

        async def cut() -> None:
            await asyncio.gather(*(self.hosts[name].cut() for name in names))

        self._do(cut())

    def mend(self, *names: str) -> None:
        """They are reached again."""

        async def mend() -> None:
            for name in names:
                self.hosts[name].mend()

        self._do(mend())

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    async def _begin(self) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(work) for work in (self._follow(), self._train())]

    async def _end_all(self) -> None:
        await end_tasks(self._tasks)
        await asyncio.gather(*(host.end() for host in self.hosts.values()))

    async def _train(self) -> None:
        """Whoever has the first rank of a generation goes on, heard or not."""
        while True:
            for host in self.hosts.values():
                if host.place is not None and host.place.node_rank == 0 and host.place.master:
                    self.training.makes_step(host.place.generation)
            await asyncio.sleep(STEP_S)

    # -- pods ---------------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        pods = f"{self._cluster.server}/api/v1/namespaces/{self._namespace}/pods"
        connector = aiohttp.TCPConnector(ssl=self._cluster.administrator, limit=16)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20) as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError, OSError, ValueError, KeyError):
                    async with session.get(pods) as answer:
                        listed = await answer.json()
                    known = {item["metadata"]["uid"] for item in listed["items"]}
                    for host in [host for host in self.hosts.values() if host.uid not in known and not host.is_cut]:
                        await self._forget(host)
                    await asyncio.gather(*(self._see(session, item) for item in listed["items"]))
                    version = listed["metadata"]["resourceVersion"]
                    async with session.get(pods, params={"watch": "1", "resourceVersion": version}) as answer:
                        async for line in answer.content:
                            event = json.loads(line)
                            await self._see(session, event["object"], gone=event["type"] == "DELETED")
                await asyncio.sleep(0.2)

    async def _see(self, session: aiohttp.ClientSession, pod: dict[str, Any], *, gone: bool = False) -> None:
        name = pod["metadata"]["name"]
        host = self.hosts.get(name)
        runs = pod["status"]["phase"] == "Running" and not gone
        if host is not None and not runs and not host.is_cut:
            await self._forget(host)
        is_new = host is None and runs and "deletionTimestamp" not in pod["metadata"]
        if is_new and pod["spec"]["nodeName"] not in self._dead:
            token = await self._token(session, pod)
            self.hosts[name] = SimulatedHost(pod, self.training, self._urls, self._ca, token)
            self.hosts[name].connect()

    async def _forget(self, host: SimulatedHost) -> None:
        del self.hosts[host.name]
        await host.end()

    async def _token(self, session: aiohttp.ClientSession, pod: dict[str, Any]) -> Path:
        """A file with the token that the kubelet would project."""
        bound = {"kind": "Pod", "apiVersion": "v1", "name": pod["metadata"]["name"], "uid": pod["metadata"]["uid"]}
        path = f"/api/v1/namespaces/{self._namespace}/serviceaccounts/{self._account}/token"
        body = {"spec": {"audiences": [AUDIENCE], "boundObjectRef": bound}}
        async with session.post(self._cluster.server + path, json=body) as answer:
            made = await answer.json()
        file = self._folder / f"{pod['metadata']['uid']}.token"
        file.touch(mode=0o600)
        file.write_text(made["status"]["token"])
        return file
