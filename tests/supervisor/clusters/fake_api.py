"""An API server of Kubernetes in the event loop of the test, which can be told to misbehave.

It knows nodes, pods, jobs, JobSets, leases and reviews of tokens, and of each what the supervisor uses: lists in pages, watches
with bookmarks, resource versions, merge patches, preconditions. What it answers is what a server of 1.36 was seen to
answer, see ``test_contract.py``, which runs against both.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from resiliency.supervisor.clusters.kubernetes.api import Access

__all__ = ["JOBSET", "NODES", "Drop", "FakeApi", "Fault", "Refuse", "Silence", "merged"]

Object = dict[str, Any]

NODES, JOBSET = "/api/v1/nodes", "jobset.sigs.k8s.io/jobset-name"
_PATH = re.compile(r"(/api/v1|/apis/[a-z0-9.-]+/v1(?:alpha2)?)(/namespaces/[a-z0-9-]+)?/([a-z]+)(?:/([A-Za-z0-9.-]+))?")
_HANGS_S = 60.0


@dataclass(frozen=True)
class Refuse:
    """It answers with a status."""

    status: int
    retry_after: str = ""


@dataclass(frozen=True)
class Drop:
    """It ends the connection without an answer. Attributes: done: it has done first what was asked for."""

    done: bool = False


@dataclass(frozen=True)
class Silence:
    """It answers nothing until it is asked to end."""


Fault = Refuse | Drop | Silence


@dataclass(eq=False)
class _Watch:
    collection: str
    selector: str
    lines: asyncio.Queue[bytes | None | Exception] = field(default_factory=asyncio.Queue)


class FakeApi:
    """Thread: the event loop's, within ``async with``.

    Attributes:
        most_items: of one page of a list, whatever limit was asked for.
        gone_as_status: a watch from a version that is forgotten is refused with status 410; else it begins with
            status 200 and an event that says so.
        tokens: who may ask at all.
        may_not: verbs and resources that whoever asks has no right to, as reviews of access say.
        reviews: what a review of a token says, by token; others are unknown.
        asked: verb and path of each request that came, watches with verb "WATCH".
        writes: verb, path and status of each request that was to change something, without reviews.
    """

    def __init__(self, ca: Path, certificate: tuple[str, str], folder: Path) -> None:
        self._token_file = folder / "token"
        self._ca, self._certificate = str(ca), certificate
        self.most_items, self.gone_as_status = 1 << 30, False
        self.tokens = {"first"}
        self.reviews: dict[str, Object] = {}
        self.may_not: set[tuple[str, str]] = set()
        self.asked: list[tuple[str, str]] = []
        self.writes: list[tuple[str, str, int]] = []
        self.objects: dict[str, dict[str, Object]] = {}
        self._version, self._oldest = 100, 100
        self._events: list[tuple[int, str, str, Object]] = []
        self._snapshots: dict[str, tuple[int, list[Object]]] = {}
        self._watches: list[_Watch] = []
        self._faults: list[tuple[Callable[[str, str], bool], Fault, int]] = []
        self._before: list[tuple[str, Callable[[], None]]] = []
        self._uids = itertools.count(1)
        self._runner: web.ServerRunner | None = None
        self.port = 0

    async def __aenter__(self) -> FakeApi:
        self._token_file.write_text("first\n")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self._certificate)
        self._runner = web.ServerRunner(web.Server(self._answer), shutdown_timeout=0.1)  # type: ignore[arg-type]
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._runner is not None
        self.end_watches()
        self._faults.clear()
        await self._runner.cleanup()

    @property
    def access(self) -> Access:
        server = f"https://127.0.0.1:{self.port}"
        return Access(server=server, token_file=str(self._token_file), ca_file=self._ca, namespace="system")

    # -- what is there ------------------------------------------------------------------------------------------------

    def put(self, path: str, item: Object) -> Object:
        """Makes or replaces an object, as somebody else would."""
        name = item["metadata"]["name"]
        before = self.objects.setdefault(path, {}).get(name)
        self._version += 1
        made = copy.deepcopy(item)
        metadata = made["metadata"]
        metadata["uid"] = before["metadata"]["uid"] if before else metadata.get("uid") or f"uid-{next(self._uids)}"
        metadata["resourceVersion"] = str(self._version)
        self.objects[path][name] = made
        self._publish(path, "MODIFIED" if before else "ADDED", made)
        return made

    def change(self, path: str, name: str, changes: Object) -> Object:
        """Merges changes into an object, as somebody else would."""
        return self.put(path, merged(self.objects[path][name], changes))

    def remove(self, path: str, name: str) -> None:
        self._version += 1
        gone = copy.deepcopy(self.objects[path].pop(name))
        gone["metadata"]["resourceVersion"] = str(self._version)
        self._publish(path, "DELETED", gone)

    def _publish(self, path: str, kind: str, item: Object) -> None:
        self._events.append((self._version, path, kind, item))
        for watch in self._watches:
            if watch.collection == path and _selected(item, watch.selector):
                watch.lines.put_nowait(_line(kind, item))

    # -- misbehaviour -------------------------------------------------------------------------------------------------

    def fail(
        self, fault: Fault, matching: Callable[[str, str], bool] = lambda verb, path: True, times: int = 1
    ) -> None:
        """Of the next requests that match (by verb and path) so many meet this."""
        self._faults.append((matching, fault, times))

    def mend(self) -> None:
        self._faults.clear()
        self._before.clear()

    def meanwhile(self, verb: str, do: Callable[[], None]) -> None:
        """Something happens right before the next request with this verb is handled."""
        self._before.append((verb, do))

    def forget(self) -> None:
        """What was there before now: watches and pages that would need it cannot go on. Something else has changed."""
        self._version += 1
        self._oldest = self._version
        self._snapshots.clear()

    def watch_error(self, code: int) -> None:
        """All watches get an event that says why they end, and end."""
        self._to_watches(_line("ERROR", {"kind": "Status", "code": code, "message": "too old resource version"}), None)

    def cut_watches(self, *, within_a_line: bool = False) -> None:
        """Their connections end; or their answers end, as if they were complete, after the first bytes of an event."""
        self._to_watches(*([b'{"type":"MODIFIED","object":{"metad', None] if within_a_line else [ConnectionError()]))

    def end_watches(self) -> None:
        """In good order."""
        self._to_watches(None)

    def bookmark(self) -> None:
        for watch in self._watches:
            watch.lines.put_nowait(self._bookmark(watch.collection))

    def replace_token(self, token: str, *, on_disk: bool = True) -> None:
        """The old one is refused from now on; the new one is in the client's file, or will be."""
        self.tokens = {token}
        if on_disk:
            self._token_file.write_text(token)

    @property
    def watches(self) -> list[str]:
        """Paths that are watched."""
        return [each.collection for each in self._watches]

    def _to_watches(self, *lines: bytes | None | Exception) -> None:
        for watch in self._watches:
            for line in lines:
                watch.lines.put_nowait(line)

    def _bookmark(self, path: str) -> bytes:
        return _line("BOOKMARK", {"metadata": {"resourceVersion": str(self._version)}})

    def _fault(self, verb: str, path: str) -> Fault | None:
        for at, (matching, fault, times) in enumerate(self._faults):
            if matching(verb, path):
                self._faults[at : at + 1] = [(matching, fault, times - 1)] if times > 1 else []
                return fault
        return None

    # -- answers ------------------------------------------------------------------------------------------------------

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        verb = "WATCH" if "watch" in request.query else request.method
        self.asked.append((verb, request.path))
        for at, (when, do) in enumerate(self._before):
            if when == verb:
                del self._before[at]
                do()
                break
        body = await request.text()
        fault = self._fault(verb, request.path)
        if isinstance(fault, Silence):
            await asyncio.sleep(_HANGS_S)
        if isinstance(fault, Drop) and not fault.done:
            return _cut(request)
        if isinstance(fault, Refuse):
            headers = {"Retry-After": fault.retry_after} if fault.retry_after else {}
            return _status(fault.status, "told to", headers)
        if request.headers.get("Authorization", "") not in {f"Bearer {token}" for token in self.tokens}:
            return _status(401, "Unauthorized")
        if verb == "WATCH":
            return await self._watch(request)
        answer = self._do(request, json.loads(body) if body else {})
        if request.method != "GET" and not request.path.endswith("reviews"):
            self.writes.append((request.method, request.path, answer.status))
        return _cut(request) if isinstance(fault, Drop) else answer

    def _do(self, request: web.BaseRequest, body: Object) -> web.Response:
        if request.path == "/version":
            return web.json_response({"major": "1", "minor": "36"})
        if request.path == "/apis/jobset.x-k8s.io":
            return web.json_response({"versions": [{"version": "v1alpha2"}]})
        found = _PATH.fullmatch(request.path)
        if found is None:
            return _status(404, "the server could not find the requested resource")
        name = found[4] or ""
        path = request.path.removesuffix(f"/{name}") if name else request.path
        if found[3] == "selfsubjectaccessreviews":
            asked = body["spec"]["resourceAttributes"]
            is_allowed = (asked["verb"], asked["resource"]) not in self.may_not
            return web.json_response({**body, "status": {"allowed": is_allowed}}, status=201)
        if ("list", found[3]) in self.may_not and not name and request.method == "GET":
            return _status(403, f"{found[3]} is forbidden")
        if found[3] == "tokenreviews":
            return web.json_response({**body, "status": self._review(body["spec"])}, status=201)
        if not name:
            if request.method == "POST" and "dryRun" in request.query:
                return web.json_response(body, status=201)
            return self._list(request, path) if request.method == "GET" else self._create(path, body)
        item = self.objects.get(path, {}).get(name)
        if item is None:
            return _status(404, f'{found[3]} "{name}" not found')
        if request.method == "GET":
            return web.json_response(item)
        if request.method == "DELETE":
            return self._delete(path, item, body)
        version = body.get("metadata", {}).get("resourceVersion")
        if version is not None and version != item["metadata"]["resourceVersion"]:
            return _status(409, "the object has been modified; please apply your changes to the latest version")
        uid = item["metadata"]["uid"]
        if request.method == "PATCH" and body.get("metadata", {}).get("uid", uid) != uid:
            return _status(422, "metadata.uid: Invalid value: field is immutable")
        made = merged(item, body) if request.method == "PATCH" else body
        if request.method == "PATCH" and request.content_type != "application/merge-patch+json":
            return _status(415, "the body is no merge patch")
        return web.json_response(item if made == item else self.put(path, made))

    def _create(self, path: str, body: Object) -> web.Response:
        if body["metadata"]["name"] in self.objects.get(path, {}):
            return _status(409, "already exists")
        return web.json_response(self.put(path, body), status=201)

    def _delete(self, path: str, item: Object, options: Object) -> web.Response:
        uid = options.get("preconditions", {}).get("uid", item["metadata"]["uid"])
        if uid != item["metadata"]["uid"]:
            return _status(409, f"the UID in the precondition ({uid}) does not match the UID in record")
        if options.get("gracePeriodSeconds", 30) == 0:
            self.remove(path, item["metadata"]["name"])
            return web.json_response(item)
        return web.json_response(self.put(path, merged(item, {"metadata": {"deletionTimestamp": "now"}})))

    def _review(self, spec: Object) -> Object:
        found = self.reviews.get(spec["token"])
        if found is None:
            return {"authenticated": False, "user": {}, "error": "invalid bearer token"}
        common = [each for each in spec["audiences"] if each in found["audiences"]]
        if not common:
            return {"authenticated": False, "user": {}, "error": f"token audiences {found['audiences']} are invalid"}
        return {"authenticated": True, "user": found["user"], "audiences": common}

    def _list(self, request: web.BaseRequest, path: str) -> web.Response:
        more = request.query.get("continue", "")
        if more and more not in self._snapshots:
            return _status(410, "The provided continue parameter is too old")
        if more:
            version, items = self._snapshots.pop(more)
        else:
            selector = request.query.get("labelSelector", "")
            everything = self.objects.get(path, {}).values()
            version, items = self._version, [each for each in everything if _selected(each, selector)]
        count = min(self.most_items, int(request.query.get("limit", "0")) or len(items))
        metadata = {"resourceVersion": str(version)}
        if items[count:]:
            metadata["continue"] = f"{version}-{len(self._snapshots)}-{len(items)}"
            self._snapshots[metadata["continue"]] = version, copy.deepcopy(items[count:])
        return web.json_response({"kind": "List", "metadata": metadata, "items": items[:count]})

    async def _watch(self, request: web.BaseRequest) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        if since < self._oldest and self.gone_as_status:
            return _status(410, "too old resource version")
        answer = web.StreamResponse(headers={"Content-Type": "application/json"})
        await answer.prepare(request)
        watch = _Watch(request.path, request.query.get("labelSelector", ""))
        if since < self._oldest:
            watch.lines.put_nowait(_line("ERROR", {"kind": "Status", "code": 410, "message": "too old"}))
            watch.lines.put_nowait(None)
        for version, path, kind, item in self._events:
            if version > since and path == watch.collection and _selected(item, watch.selector):
                watch.lines.put_nowait(_line(kind, item))
        self._watches.append(watch)
        try:
            while (line := await watch.lines.get()) is not None:
                if isinstance(line, Exception):
                    return _cut(request)
                await answer.write(line)
        except ConnectionError:  # the client has ended it
            return answer
        finally:
            self._watches.remove(watch)
        return answer


def _cut(request: web.BaseRequest) -> web.Response:
    if request.transport is not None:
        request.transport.close()  # after what was written
    return web.Response()


def _status(code: int, message: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"kind": "Status", "code": code, "message": message}, status=code, headers=headers)


def _line(kind: str, item: Object) -> bytes:
    return json.dumps({"type": kind, "object": item}).encode() + b"\n"


def _selected(item: Object, selector: str) -> bool:
    return not selector or selector in (item["metadata"].get("labels") or {})


def merged(item: Object, changes: Object) -> Object:
    """A JSON merge patch (RFC 7396)."""
    made = dict(item)
    for key, value in changes.items():
        if value is None:
            made.pop(key, None)
        elif isinstance(value, dict):
            made[key] = merged(made[key] if isinstance(made.get(key), dict) else {}, value)
        else:
            made[key] = value
    return made
