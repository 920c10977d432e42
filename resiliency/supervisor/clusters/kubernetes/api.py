"""A small client of the Kubernetes API: requests that are repeated while the server is busy or away, and lists that are
followed by watches.

Plain aiohttp, which the supervisor has anyway: the six verbs that it needs are exact about resource versions, uids and
retries, and a general client would take 15 to 160 MB. Sources: kubernetes.io/docs/reference/using-api/api-concepts
(resource versions, watches, bookmarks, 410) and what an API server of 1.36 was seen to answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from resiliency.errors import ConfigError, ResiliencyError
from resiliency.settings import kubernetes_service

__all__ = ["Access", "ApiError", "ApiUnavailable", "KubernetesApi"]

logger = logging.getLogger(__name__)

#: Where a pod finds its ServiceAccount.
_POD_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"
#: Seconds that one request may take, and after which one is given up that is repeated.
_REQUEST_S, _GIVE_UP_S = 10.0, 30.0
#: Seconds between two tries: the first wait, doubled up to the longest. A watch that has lived for the third resets it.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _LIVED_S = 0.2, 10.0, 1.0
#: Objects in one answer of a list.
_PAGE = 500
#: Seconds after which the server ends a watch, and after which a watch without a word is taken for dead. Bookmarks
#: come about once a minute.
_WATCH_S, _SILENT_S = 300, 100.0
#: Longest line of a watch, in bytes: one object. The server's own limit is 1.5 MB.
_MOST_LINE = 8 << 20

T = TypeVar("T")


class ApiError(ResiliencyError):
    """The API server has refused a request.

    Attributes:
        status: of HTTP: 403 a missing right, 404 no such object, 409 a conflict, ...
    """

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class ApiUnavailable(ApiError):
    """The API server cannot be reached, or is too busy, for longer than the request may wait."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """Where the API server is, and as whom it is asked.

    Attributes:
        token_file: read again for each request, because a pod's token is replaced every hour.
        namespace: this process's own.
    """

    server: str
    token_file: str
    ca_file: str
    namespace: str

    @classmethod
    def of_pod(cls, *, server: str = "", token_file: str = "", ca_file: str = "", namespace: str = "") -> Access:
        """The access that this pod's ServiceAccount has. Values that are given are used instead.

        Raises:
            ConfigError: this process runs in no pod, and not everything was given; or a file cannot be read.
        """
        service = kubernetes_service()
        if not server and not service:
            raise ConfigError(
                "cluster: kubernetes: this process runs in no pod (KUBERNETES_SERVICE_HOST is not set); run it from the"
                " chart, or name `server`, `token_file`, `ca_file` and `namespace` under `kubernetes:`"
            )
        token_file, ca_file = token_file or f"{_POD_FOLDER}/token", ca_file or f"{_POD_FOLDER}/ca.crt"
        try:
            namespace = namespace or Path(_POD_FOLDER, "namespace").read_text().strip()
            for file in (token_file, ca_file):
                Path(file).read_bytes()  # says now what else each request would say
        except OSError as error:
            raise ConfigError(
                f"kubernetes: {error.filename}: {error.strerror}; the pod needs its ServiceAccount's token"
                " (automountServiceAccountToken: true); elsewhere name `token_file`, `ca_file` and `namespace`"
            ) from error
        server = (server or f"https://{service}").rstrip("/")
        return cls(server=server, token_file=token_file, ca_file=ca_file, namespace=namespace)


class KubernetesApi:
    """Asks the API server. Thread: the event loop's."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def request(
        self,
        verb: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        query: Mapping[str, str] | None = None,
        kind: str = "application/json",
        give_up_s: float = _GIVE_UP_S,
    ) -> dict[str, Any]:
        """Sends a request and returns the object that the server answers.

        While the server is away or busy (429, 5xx) it is sent again: what changes something carries a resource version
        or a uid, so that a second time does no harm. Blocks: up to ``give_up_s`` seconds.

        Raises:
            ApiError: the server refuses it.
            ApiUnavailable: there was no answer in time.
        """
        until_s, pause_s = time.monotonic() + give_up_s, _FIRST_PAUSE_S
        while True:
            try:
                timeout = aiohttp.ClientTimeout(total=max(0.1, min(_REQUEST_S, until_s - time.monotonic())))
                async with self._open().request(
                    verb,
                    self.access.server + path,
                    params=query,
                    data=None if body is None else json.dumps(body),
                    headers={**self._who(), "Content-Type": kind},
                    timeout=timeout,
                ) as answer:
                    text = await answer.text()
                    if answer.status < 300:
                        found: dict[str, Any] = json.loads(text)
                        return found
                    error = _refused(verb, path, answer.status, text)
                    if answer.status != 429 and answer.status < 500:
                        raise error
                    pause_s = max(pause_s, _seconds(answer.headers.get("Retry-After", "")))
            except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as cause:
                error = ApiUnavailable(f"{verb} {path}: {type(cause).__name__} {cause}".rstrip(), status=0)
            if time.monotonic() + pause_s > until_s:
                raise ApiUnavailable(f"{error} (tried for {give_up_s:.0f} s)", status=error.status)
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def follow(
        self,
        path: str,
        keep: Callable[[dict[str, Any]], T | None],
        changed: Callable[[str, T | None], None],
        *,
        query: Mapping[str, str] | None = None,
    ) -> None:
        """Follows all objects of a kind until it is cancelled.

        Lists them, then watches, and lists again whenever a watch cannot go on.

        Args:
            keep: returns what is wanted of an object; None: it is as if it were gone.
            changed: called with an object's uid and what was kept of it, when that is new or different; with None when
                the object is gone.
        """
        known: dict[str, T] = {}
        pause_s, problem, version = _FIRST_PAUSE_S, "", ""

        def take(item: dict[str, Any], *, gone: bool = False) -> None:
            uid = item["metadata"]["uid"]
            value = None if gone else keep(item)
            if value != known.get(uid):
                known.pop(uid, None) if value is None else known.update({uid: value})
                changed(uid, value)

        def opened() -> None:
            nonlocal problem
            if problem:
                logger.warning("%s is followed again", path)
            problem = ""

        while True:
            began_s = time.monotonic()
            try:
                if not version:
                    uids = set()
                    async for item in self._pages(path, query):
                        version = item.pop("listed at", "")
                        if not version:
                            take(item)
                            uids.add(item["metadata"]["uid"])
                    for uid in known.keys() - uids:
                        del known[uid]
                        changed(uid, None)
                version = await self._watch(path, query, version, opened, take)
            except ApiError as error:
                if not problem:
                    logger.error("%s cannot be followed: %s; what is known stays, and it is tried again", path, error)
                problem = str(error)
            if time.monotonic() - began_s >= _LIVED_S:
                pause_s = _FIRST_PAUSE_S
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _pages(self, path: str, query: Mapping[str, str] | None) -> Any:
        """Yields all objects, and last ``{"listed at": VERSION}``."""
        more = ""
        while True:
            page = await self.request(
                "GET", path, query={**(query or {}), "limit": str(_PAGE), **({"continue": more} if more else {})}
            )
            for item in page.get("items") or ():
                yield item
            more = page["metadata"].get("continue", "")
            if not more:
                yield {"listed at": page["metadata"]["resourceVersion"]}
                return

    async def _watch(
        self,
        path: str,
        query: Mapping[str, str] | None,
        version: str,
        opened: Callable[[], None],
        take: Callable[..., None],
    ) -> str:
        """Watches from a resource version on. Returns the version to go on from; "": the list must be read again."""
        words = {**(query or {}), "watch": "1", "allowWatchBookmarks": "true", "resourceVersion": version}
        words["timeoutSeconds"] = str(_WATCH_S)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_REQUEST_S, sock_read=_SILENT_S)
        try:
            async with self._open().get(
                self.access.server + path, params=words, headers=self._who(), timeout=timeout
            ) as answer:
                if answer.status == 410:
                    return ""
                if answer.status >= 300:
                    raise _refused("WATCH", path, answer.status, await answer.text())
                opened()
                async for line in answer.content:
                    event = json.loads(line)
                    item, kind = event["object"], event["type"]
                    if kind == "ERROR":  # 410, within an answer of status 200: the version is too old
                        if item.get("code") != 410:
                            logger.warning("the watch of %s ends: %s", path, item.get("message", item))
                        return ""
                    if kind != "BOOKMARK":
                        take(item, gone=kind == "DELETED")
                    version = item["metadata"]["resourceVersion"]
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
            logger.debug("the watch of %s ended: %s", path, error)
        return version  # up to the last whole event

    def _who(self) -> dict[str, str]:
        try:
            token = Path(self.access.token_file).read_text().strip()
        except OSError as error:
            raise ApiUnavailable(f"{self.access.token_file}: {error.strerror}", status=0) from error
        return {"Authorization": f"Bearer {token}", "Accept": "application/json"}

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            context = ssl.create_default_context(cafile=self.access.ca_file)
            connector = aiohttp.TCPConnector(ssl=context, limit=16)
            self._session = aiohttp.ClientSession(connector=connector, read_bufsize=_MOST_LINE)
        return self._session


def _refused(verb: str, path: str, status: int, text: str) -> ApiError:
    try:
        reason = json.loads(text)["message"]
    except (ValueError, KeyError, TypeError):
        reason = text[:300]
    return ApiError(f"{verb} {path}: {status}: {reason}", status=status)


def _seconds(text: str) -> float:
    return min(float(text), _LONGEST_PAUSE_S) if text.isdecimal() else 0.0
