"""The supervisor's process: it stands by, leads, and listens for connections. Needs aiohttp (extra ``supervisor``)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
import time
from asyncio.sslproto import SSLProtocol
from collections.abc import Awaitable, Callable, Coroutine
from glob import escape as glob_escape
from typing import Any

from aiohttp import web

from resiliency.errors import ConfigError
from resiliency.runtime.addresses import STANDS_BY, STANDS_BY_STATUS
from resiliency.runtime.tasks import end_tasks
from resiliency.supervisor.api import add_routes
from resiliency.supervisor.auth import Authority, server_context
from resiliency.supervisor.clusters.base import Cluster, ClusterUnavailable
from resiliency.supervisor.clusters.none import NoCluster
from resiliency.supervisor.clusters.registry import CLUSTERS
from resiliency.supervisor.lease import Lease, SqliteLease
from resiliency.supervisor.metrics import Metrics
from resiliency.supervisor.model import Workload
from resiliency.supervisor.monitor_socket import MonitorSocket
from resiliency.supervisor.policy import load_policy
from resiliency.supervisor.said_rarely import SaidRarely, ServerLog
from resiliency.supervisor.service import Service
from resiliency.supervisor.settings import SupervisorSettings, split_address
from resiliency.supervisor.sqlite_store import SqliteStore, open_or_begin_anew
from resiliency.supervisor.store import HistoryEvent, LeadershipLost, StateUnavailable

__all__ = ["Supervisor"]

logger = logging.getLogger(__name__)

_KEEPALIVE_S = 15.0
_MOST_BODY_BYTES = 16 * 1024
#: Seconds to wait for a former leader to free the address.
_BIND_S = 30.0
_BIND_AGAIN_S = 0.2
_COUNT_S = 0.5
#: Connections that the kernel queues, and those that are accepted at once: when thousands of hosts connect together,
#: messages of connected hosts are handled in between.
_BACKLOG, _ACCEPTED_AT_ONCE = 4096, 32
#: Of each connection. A record of TLS has up to 16 KiB; asyncio's own buffer of 256 takes 2.6 GB with 10,000 hosts.
_TLS_BUFFER_BYTES = 32 * 1024


class Supervisor:
    """A supervisor that stands by or leads. Thread: the event loop's.

    Args:
        log: called with every line of the history and its workload's generation, once it is stored.
        listens: called with host and port once it listens.
        until_ended: :meth:`run` returns when all workloads have ended, and their hosts know it.
        begin_again: when it leads for the first time, workloads of the file that have ended are started again.

    Raises:
        ConfigError: a file that it needs cannot be used.
    """

    def __init__(
        self,
        settings: SupervisorSettings,
        *,
        log: Callable[[HistoryEvent, int], None] = lambda event, generation: None,
        listens: Callable[[str, int], None] = lambda host, port: None,
        until_ended: bool = False,
        begin_again: bool = False,
    ) -> None:
        self._listens, self._until_ended, self._begin_again = listens, until_ended, begin_again
        #: All workloads, when :meth:`run` has returned because they have ended.
        self.ended: tuple[Workload, ...] | None = None
        self.settings = settings
        #: What makes the backend.
        self.backend = CLUSTERS[settings.cluster]
        self._cluster: Cluster = NoCluster()
        self._log = log
        self.authority = Authority.of(settings)
        self._tls = server_context(settings.tls)
        load_policy(settings.policy)  # reports a wrong policy now and not only when this supervisor leads
        self.service: Service | None = None
        self.metrics = Metrics(lambda: self.service)
        # On Kubernetes each replica has a file of its own, the Lease is elsewhere, and hosts know who has which ranks.
        self.store = (open_or_begin_anew if settings.cluster == "kubernetes" else SqliteStore)(settings.state)
        self.lease: Lease = SqliteLease(self.store, lease_s=settings.lease_s)
        self._stopping = asyncio.Event()
        self._rarely = SaidRarely(logger)
        #: Connections that have not sent a complete request yet, each with the timer that will cut it off.
        self._unproven: dict[asyncio.BaseProtocol, asyncio.TimerHandle] = {}
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        #: Number of connections: as counted last, plus those accepted since.
        self._connections, self._counted_s = 0, -1.0
        #: Host and port where it listens; None before.
        self.address: tuple[str, int] | None = None

    def stop(self) -> None:
        """Makes :meth:`run` return."""
        self._stopping.set()
        if self.service is not None:
            self.service.stop()

    async def run(self) -> None:
        """Stands by and leads, in turn, until :meth:`stop`.

        Raises:
            ConfigError: it cannot listen, or the stored state cannot be read.
        """
        self._cluster, lease = self.backend(self.settings)
        self.lease = lease or self.lease
        app = web.Application(middlewares=[self._prove], client_max_size=_MOST_BODY_BYTES)
        add_routes(app, self)
        app.router.add_get("/v1/monitor", self._monitor)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            keepalive_timeout=_KEEPALIVE_S,
            shutdown_timeout=1.0,
            logger=ServerLog(logger, self._rarely),
        )
        await self._runner.setup()
        try:
            with contextlib.suppress(OSError):  # the leader may hold the address
                await self._listen()
            while not self._stopping.is_set():
                term = await self._unless_stopped(self._stand_by())
                if term is None:
                    return
                await self._lead(term)
        finally:
            await self._close()

    async def _stand_by(self) -> int:
        """Waits until this supervisor leads, and returns its term."""
        said = problem = ""
        while True:
            try:
                term = await asyncio.to_thread(self.lease.acquire)
            except StateUnavailable as error:
                if not problem:
                    logger.error("the lease cannot be looked at: %s; this is tried again", error)
                problem = str(error)
            else:
                problem = ""
                if term is not None:
                    return term
                if said != self.lease.holder:
                    said = self.lease.holder
                    logger.info("%s leads; this one stands by", said or "nobody yet")
            await asyncio.sleep(self.lease.looks_every_s)

    async def _lead(self, term: int) -> None:
        try:
            if not await self._unless_stopped(self._listen_soon()):
                return
            self.service = service = Service(
                self.settings,
                self.store,
                self.lease,
                term,
                cluster=self._cluster,
                log=self._log,
                watch_handled=self.metrics.handled,
                watch_commit=self.metrics.committed,
                until_ended=self._until_ended,
                begin_again=self._begin_again,
            )
            self._begin_again = False
            logger.info("leads in term %d; listens on %s:%d", term, *(self.address or ("", 0)))
            await service.run()
            if self._until_ended and not self._stopping.is_set():
                self.ended = service.ended
                self._stopping.set()
        except (LeadershipLost, StateUnavailable) as error:
            logger.error("this supervisor leads no more, and stands by: %s", error)
        finally:
            self.service = None
            await asyncio.to_thread(self.lease.release)

    async def _unless_stopped(self, work: Coroutine[Any, Any, int]) -> int | None:
        """Returns what the work returned, or None when :meth:`stop` was called before it ended."""
        task = asyncio.create_task(work)
        stopped = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            await end_tasks([task, stopped])

    # -- listening ----------------------------------------------------------------------------------------------------

    async def _listen_soon(self) -> int:
        until_s = time.monotonic() + _BIND_S
        while True:
            try:
                await self._listen()
                return 1
            except OSError as error:
                # The leader that was replaced may be stopped by a signal and still hold the address.
                if error.errno != errno.EADDRINUSE or time.monotonic() > until_s:
                    raise ConfigError(
                        f"cannot listen on {self.settings.listen}: {error.strerror}; pass another address with --listen"
                    ) from error
            await asyncio.to_thread(self.lease.renew)
            await asyncio.sleep(_BIND_AGAIN_S)

    async def _listen(self) -> None:
        if self._server is not None:
            return
        host, port = split_address(self.settings.listen)
        if self._tls is not None:
            SSLProtocol.max_size = _TLS_BUFFER_BYTES  # type: ignore[attr-defined,unused-ignore]
        self._server = await asyncio.get_running_loop().create_server(
            self._protocol,
            host,
            port,
            ssl=self._tls,
            ssl_handshake_timeout=None if self._tls is None else self.settings.handshake_timeout_s,
            backlog=_ACCEPTED_AT_ONCE,
            reuse_address=True,
        )
        with socket.socket(fileno=os.dup(self._server.sockets[0].fileno())) as same:
            same.listen(_BACKLOG)
        bound = self._server.sockets[0].getsockname()
        self.address = bound[0], bound[1]
        self._listens(*self.address)

    def _protocol(self) -> asyncio.Protocol:
        """A protocol for a new connection, which is cut off when no complete request has come within the handshake
        timeout. With too many connections it is refused at once."""
        assert self._runner is not None and self._runner.server is not None
        loop = asyncio.get_running_loop()
        if loop.time() - self._counted_s > _COUNT_S:  # counting takes long when there are thousands
            self._counted_s, self._connections = loop.time(), len(self._runner.server.connections)
        if self._connections >= self.settings.most_connections:
            return _Refusing(self._rarely)
        self._connections += 1
        made = self._runner.server()
        self._unproven[made] = loop.call_later(self.settings.handshake_timeout_s, self._cut, made)
        return made

    def _cut(self, protocol: asyncio.BaseProtocol) -> None:
        self._unproven.pop(protocol, None)
        transport = getattr(protocol, "transport", None)
        if transport is not None:
            transport.abort()

    @web.middleware
    async def _prove(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        timer = self._unproven.pop(request.protocol, None)
        if timer is not None:
            timer.cancel()
        return await handler(request)

    async def _monitor(self, request: web.Request) -> web.StreamResponse:
        transport = request.transport
        certificate = None if transport is None else transport.get_extra_info("peercert")
        header = request.headers.get("Authorization", "")
        patterns, node = self.authority.monitor_patterns(header, certificate), ""
        if (
            not patterns
            and self._cluster.vouches
            and self.service is not None
            and (token := Authority.token_of(header))
        ):
            try:
                identity = await self._cluster.identify(token)
            except ClusterUnavailable as error:
                self._rarely.warning("review", f"a monitor at {request.remote} cannot be let in now: {error}")
                return web.json_response({"error": "the cluster cannot be asked now"}, status=503, headers=_LAST)
            patterns = [] if identity is None else [glob_escape(identity.host)]
            node = identity.node if identity is not None and identity.watches_node else ""
        if not patterns and self.service is not None:
            sender = str(request.remote)
            self._rarely.warning(sender, f"a monitor at {sender} has no token that is known here")
            return web.json_response({"error": "no token that is known here"}, status=401, headers=_LAST)
        if self.service is None:
            return web.json_response({"error": STANDS_BY}, status=STANDS_BY_STATUS, headers=_LAST)
        if request.headers.get("Upgrade", "").lower() != "websocket":
            return web.json_response({"error": "this is where monitors connect by WebSocket"}, status=426)
        if transport is not None and (plain := transport.get_extra_info("socket")) is not None:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        monitor = MonitorSocket(
            request,
            patterns,
            lambda: self.service,
            self.settings.handshake_timeout_s,
            rarely=self._rarely,
            node=node,
        )
        return await monitor.serve()

    async def _close(self) -> None:
        for timer in self._unproven.values():
            timer.cancel()
        self._unproven.clear()
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()
        await asyncio.to_thread(self.lease.release)
        await self._cluster.close()
        self.store.close()


_LAST = {"Connection": "close"}


class _Refusing(asyncio.Protocol):
    """Closes the connection at once, because there are too many."""

    def __init__(self, rarely: SaidRarely) -> None:
        self._rarely = rarely

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._rarely.warning(
            "too many connections", "a connection is refused: there are too many; raise `most_connections`"
        )
        assert isinstance(transport, asyncio.Transport)
        transport.abort()
