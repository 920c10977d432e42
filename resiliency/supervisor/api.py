"""The supervisor's HTTP interface for operators: JSON, metrics, and the status page."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from aiohttp import web

from resiliency.runtime.addresses import STANDS_BY, STANDS_BY_STATUS
from resiliency.supervisor.page import render_page
from resiliency.supervisor.service import Service
from resiliency.supervisor.views import event_view, explain_view, now_of, status_view

if TYPE_CHECKING:
    from resiliency.supervisor.server import Supervisor

__all__ = ["add_routes"]

logger = logging.getLogger(__name__)

_MOST_EVENTS = 2000
_MOST_REASON = 500
_ASK = {"WWW-Authenticate": 'Basic realm="resiliency supervisor", charset="UTF-8"'}
#: Headers of the status page: it loads nothing from elsewhere, and no other page may frame it.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline';"
    " connect-src 'self'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_Answer = Callable[[web.Request, Service], Awaitable[web.StreamResponse]]


def add_routes(app: web.Application, supervisor: Supervisor) -> None:
    """Adds every route except the monitors' WebSocket."""
    api = _Api(supervisor)
    get, post = app.router.add_get, app.router.add_post
    get("/healthz", api.healthz)
    get("/readyz", api.readyz)
    get("/metrics", api.looks(api.metrics))
    get("/", api.looks(api.leader(api.page)))
    get("/v1/status", api.looks(api.leader(api.status)))
    get("/v1/events", api.looks(api.leader(api.events)))
    get("/v1/explain/{incident}", api.looks(api.leader(api.explain)))
    post("/v1/hosts/{name}/drain", api.acts(api.leader(api.drain)))
    post("/v1/hosts/{name}/uncordon", api.acts(api.leader(api.uncordon)))
    post("/v1/workloads/{name}/stop", api.acts(api.leader(api.stop)))
    post("/v1/workloads/{name}/start", api.acts(api.leader(api.start)))


class _Api:
    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    # -- access checks ------------------------------------------------------------------------------------------------

    def looks(self, handler: _Handler) -> _Handler:
        """Wraps a handler that only reads: operators may also use a browser's password."""
        return self._for_operators(handler, to_look=True)

    def acts(self, handler: _Handler) -> _Handler:
        return self._for_operators(handler, to_look=False)

    def _for_operators(self, handler: _Handler, *, to_look: bool) -> _Handler:
        async def checked(request: web.Request) -> web.StreamResponse:
            header = request.headers.get("Authorization", "")
            if not self._supervisor.authority.allows_operator(header, to_look=to_look):
                return _error(401, "the operators' token is needed: --token-file FILE", headers=_ASK if to_look else {})
            return await handler(request)

        return checked

    def leader(self, answer: _Answer) -> _Handler:
        async def asked(request: web.Request) -> web.StreamResponse:
            service = self._supervisor.service
            if service is None or (request.method != "GET" and not service.leads()):
                return _error(STANDS_BY_STATUS, STANDS_BY)
            return await answer(request, service)

        return asked

    # -- probes -------------------------------------------------------------------------------------------------------

    async def healthz(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text="ok\n")

    async def readyz(self, request: web.Request) -> web.StreamResponse:
        service = self._supervisor.service
        if service is None:
            return web.Response(status=503, text="stands by\n")
        if service.journal.problem:
            return web.Response(status=503, text="the state file cannot be written\n")
        if not service.leads():
            return web.Response(status=503, text="the lease was not renewed in time\n")
        return web.Response(text="leads\n")

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        text = self._supervisor.metrics.text()
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    # -- reading ------------------------------------------------------------------------------------------------------

    async def page(self, request: web.Request, service: Service) -> web.StreamResponse:
        events = await asyncio.to_thread(self._supervisor.store.events, limit=300)
        text = render_page(status_view(service), [event_view(event) for event in events])
        return web.Response(text=text, content_type="text/html", headers=_PAGE_HEADERS)

    async def status(self, request: web.Request, service: Service) -> web.StreamResponse:
        return web.json_response(status_view(service, with_hosts=request.query.get("hosts") != "0"))

    async def events(self, request: web.Request, service: Service) -> web.StreamResponse:
        query = request.query
        try:
            after, limit = int(query.get("after", 0)), int(query.get("limit", 200))
            incident = int(query["incident"]) if "incident" in query else None
        except ValueError:
            return _error(400, "after, limit and incident are whole numbers")
        if not (0 <= after < 1 << 62 and 1 <= limit <= _MOST_EVENTS and (incident is None or 0 <= incident < 1 << 62)):
            return _error(400, f"pass a limit from 1 to {_MOST_EVENTS}, and numbers of events and incidents from 0")
        found = await asyncio.to_thread(
            self._supervisor.store.events,
            after=after,
            limit=limit,
            workload=query.get("workload", ""),
            host=query.get("host", ""),
            incident=incident,
        )
        return web.json_response({"events": [event_view(event) for event in found]})

    async def explain(self, request: web.Request, service: Service) -> web.StreamResponse:
        word = request.match_info["incident"]
        number = int(word) if re.fullmatch(r"\d{1,18}", word) else -1
        if word == "last":
            number = max(service.controller.incidents, default=-1)
        found = explain_view(service, number)
        if found is None and word == "last":
            now = "; ".join(now_of(service, name) for name in service.controller.workloads)
            return _error(404, f"there was no incident; {now}")
        if found is None:
            return _error(404, f"there is no incident {word[:40]}; `resiliency supervisor status` lists the latest")
        return web.json_response(found)

    # -- acting -------------------------------------------------------------------------------------------------------

    async def drain(self, request: web.Request, service: Service) -> web.StreamResponse:
        name = request.match_info["name"]
        if not service.drain(name, _reason(request)):
            return _error(404, f"no host {name[:80]!r} has joined")
        placed = service.decided.place(name)
        if placed is None:
            return _done(f"{name} is cordoned; it has no ranks")
        return _done(f"{name} is cordoned; {placed[0].name} leaves it as soon as a spare is ready")

    async def uncordon(self, request: web.Request, service: Service) -> web.StreamResponse:
        name = request.match_info["name"]
        if not service.uncordon(name):
            state = service.sensor.state_of(name)
            known = f"{name[:80]} is {state}, not cordoned" if state else f"no host {name[:80]!r} has joined"
            return _error(409 if state else 404, known)
        return _done(f"{name} is checked, and is ready then")

    async def stop(self, request: web.Request, service: Service) -> web.StreamResponse:
        name = request.match_info["name"]
        if not service.stop_workload(name, _reason(request)):
            return _error(404, f"no workload {name[:80]!r} runs; there are: {_names(service)}")
        return _done(f"{name} is stopped for good; `resiliency supervisor start {name}` begins it again")

    async def start(self, request: web.Request, service: Service) -> web.StreamResponse:
        name = request.match_info["name"]
        if not service.start_workload(name):
            return _error(
                409, f"no workload {name[:80]!r} of the settings file has ended; there are: {_names(service)}"
            )
        return _done(f"{name} begins again as soon as its hosts are ready")


def _names(service: Service) -> str:
    found = [f"{each.name} ({each.state})" for each in service.controller.workloads.values()]
    return ", ".join(found) or "none"


def _reason(request: web.Request) -> str:
    return request.query.get("reason", "")[:_MOST_REASON]


def _done(text: str) -> web.Response:
    return web.json_response({"done": text})


def _error(status: int, text: str, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"error": text}, status=status, headers=headers)
