"""How a process kubelet talks to the API server, which may be away for minutes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

import aiohttp

from tests.cluster.client import ApiError, Cluster

__all__ = ["FAILURES", "MERGE", "Api", "Json", "log_fault", "logged", "now", "second"]

Json = Any

FAILURES = aiohttp.ClientError, asyncio.TimeoutError, ApiError
MERGE = "application/strategic-merge-patch+json"

logger = logging.getLogger("kubelet")


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def second() -> str:
    return now()[:19] + "Z"


class Api:
    """Requests to the API server, as the kubelet."""

    def __init__(self, cluster: Cluster) -> None:
        self.server = cluster.server
        trust = ssl.create_default_context(cafile=str(cluster.ca))
        trust.load_cert_chain(cluster.folder / "kubelet.crt", cluster.folder / "kubelet.key")
        connector = aiohttp.TCPConnector(ssl=trust, limit=0)
        self.session = aiohttp.ClientSession(connector=connector, read_bufsize=1 << 22)

    async def request(self, method: str, path: str, body: Json = None, kind: str = "application/json") -> Json:
        data = None if body is None else json.dumps(body)
        limit = aiohttp.ClientTimeout(total=10)
        address = self.server + path
        async with self.session.request(
            method, address, data=data, headers={"Content-Type": kind}, timeout=limit
        ) as answer:
            if answer.status >= 300:
                raise ApiError(answer.status, f"{method} {path}: {await answer.text()}")
            return await answer.json()

    async def follow(self, path: str, selector: str, changed: Callable[[dict[str, Json]], None]) -> None:
        """Calls ``changed`` with all objects by uid, at first and each time that one differs, for ever."""
        limit = aiohttp.ClientTimeout(total=None, sock_read=75)
        while True:
            with logged(f"watch of {path}"):
                listed = await self.request("GET", f"{path}?{selector}")
                objects = {item["metadata"]["uid"]: item for item in listed["items"]}
                changed(objects)
                version = listed["metadata"]["resourceVersion"]
                watch = f"{self.server}{path}?{selector}&watch=1&timeoutSeconds=60&resourceVersion={version}"
                async with self.session.get(watch, timeout=limit) as events:
                    async for line in events.content:
                        event = json.loads(line)
                        if event["type"] == "ERROR":
                            break
                        objects.pop(event["object"]["metadata"]["uid"], None)
                        if event["type"] != "DELETED":
                            objects[event["object"]["metadata"]["uid"]] = event["object"]
                        changed(objects)
            await asyncio.sleep(0.2)


@contextlib.contextmanager
def logged(what: str) -> Iterator[None]:
    """The API server may be away: it is asked again later."""
    try:
        yield
    except FAILURES as error:
        logger.warning("%s: %r", what, error)


def log_fault(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception():
        logger.error("a task ended", exc_info=task.exception())
