"""The supervisor's side of a monitor's WebSocket."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from aiohttp import WSMessage, WSMsgType, web

from resiliency.errors import AgentError
from resiliency.runtime.addresses import STANDS_BY
from resiliency.runtime.messages.monitor import (
    MAX_MESSAGE_BYTES,
    PROTOCOL_VERSION,
    Hello,
    Observed,
    Refused,
    Report,
    StepEnded,
    Welcome,
    pack,
    unpack,
)
from resiliency.supervisor.auth import Authority
from resiliency.supervisor.claims import Forged
from resiliency.supervisor.said_rarely import SaidRarely
from resiliency.supervisor.service import Service

__all__ = ["MonitorSocket"]

logger = logging.getLogger(__name__)

#: Seconds that a peer has to take a message; then it is cut off.
_SEND_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 1.0


class MonitorSocket:
    """One connection, from Hello to its end. Thread: the event loop's.

    Args:
        patterns: names of hosts that the client may speak for.
        service: returns the service while this supervisor leads; None otherwise.
        rarely: logs that messages were refused, at a limited rate.
        node: the client is no host of a job: it watches this machine for all hosts that run there.
    """

    def __init__(
        self,
        request: web.Request,
        patterns: Sequence[str],
        service: Callable[[], Service | None],
        handshake_s: float,
        *,
        rarely: SaidRarely,
        node: str = "",
    ) -> None:
        self.host, self.incarnation = "", ""
        self._node = node
        self._rarely = rarely
        self._request, self._patterns, self._service, self._handshake_s = request, patterns, service, handshake_s
        self._socket = web.WebSocketResponse(
            max_msg_size=MAX_MESSAGE_BYTES, compress=False, autoping=True, timeout=_CLOSE_TIMEOUT_S
        )
        self._next: str | None = None
        self._sender: asyncio.Task[None] | None = None
        self._closed = False

    async def serve(self) -> web.WebSocketResponse:
        """Serves the connection until either end closes it."""
        await self._socket.prepare(self._request)
        service: Service | None = None
        try:
            service = await self._greet()
            if service is not None:
                await self._listen(service)
        except (Forged, AgentError) as error:
            await self._refuse(str(error), service)
        except (ConnectionError, asyncio.TimeoutError) as error:
            logger.debug("%s: %s", self.host or self._request.remote, error)
        finally:
            if service is not None and not self._node:
                service.disconnect(self)
            self._closed = True
            if self._sender is not None:
                self._sender.cancel()
            self._abort()
        return self._socket

    async def _greet(self) -> Service | None:
        try:
            first = await asyncio.wait_for(self._socket.receive(), self._handshake_s)
        except asyncio.TimeoutError:
            raise Forged(f"no Hello within {self._handshake_s:.0f} s") from None
        if first.type in _ENDS:
            return None
        hello = unpack(_text(first))
        if not isinstance(hello, Hello):
            raise Forged(f"the first message is a Hello, not a {type(hello).__name__}")
        if not Authority.may_speak_for(self._patterns, hello.host):
            raise Forged(f"this token or certificate is not that of a host named {hello.host[:80]!r}")
        if not 0 < len(hello.incarnation) <= 200:
            raise Forged("an incarnation is a random text of 1 to 200 characters")
        service = self._service()
        if service is None or not service.may_lead():
            raise Forged(STANDS_BY)
        self.host, self.incarnation = hello.host, hello.incarnation
        if hello.term > service.term:
            raise Forged(
                f"this host has obeyed a supervisor of term {hello.term}, and the term of this one is {service.term}:"
                " another one leads with another state file, or the clock of this one is behind. End the one that is"
                " not wanted, or set the clock and start this one again"
            )
        welcome = Welcome(version=PROTOCOL_VERSION, term=service.term, period_s=service.settings.sensor.period_s)
        await self._socket.send_str(pack(welcome))
        if self._service() is not service:
            raise Forged("this supervisor leads no more")
        if not self._node:
            service.connect(self, address=hello.address, block=hello.block, term=hello.term)
        return service

    async def _listen(self, service: Service) -> None:
        handled, counts = service.watch_handled, service.counts.messages
        async for received in self._socket:
            began_s = time.perf_counter()
            if self._service() is not service or not (self._node or service.is_current(self)):
                return
            message = unpack(_text(received))
            if self._node:
                service.node_says(self._node, message)
            elif isinstance(message, Report):
                service.report(self, message)
            elif isinstance(message, Observed):
                service.observed(self, message)
            elif isinstance(message, StepEnded):
                service.step_ended(self, message)
            else:
                raise Forged(f"a monitor does not send {type(message).__name__}")
            counts[type(message).__name__] += 1
            handled(time.perf_counter() - began_s)

    async def _refuse(self, reason: str, service: Service | None) -> None:
        # For an unknown client log rarely by its address alone, because the reason may quote what it sent.
        text = f"refused {self.host or f'a connection from {self._request.remote}'}: {reason}"
        self._rarely.warning(text if self.host else str(self._request.remote), text)
        if service is not None:
            service.counts.refused["message"] += 1
        if self._closed:
            return
        self._closed = True
        if self._sender is not None:
            self._sender.cancel()
        try:
            await asyncio.wait_for(self._socket.send_str(pack(Refused(reason=reason[:500]))), _CLOSE_TIMEOUT_S)
            await asyncio.wait_for(self._socket.close(code=1008), 2 * _CLOSE_TIMEOUT_S)
        except (ConnectionError, asyncio.TimeoutError, RuntimeError) as error:
            logger.debug("%s: %s", self._request.remote, error)

    # -- for the service ----------------------------------------------------------------------------------------------

    def offer(self, text: str) -> None:
        """See :class:`~resiliency.supervisor.service.Link`."""
        if self._closed:
            return
        self._next = text
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())

    async def _send(self) -> None:
        try:
            while self._next is not None and not self._closed:
                text, self._next = self._next, None
                await asyncio.wait_for(self._write(text), _SEND_TIMEOUT_S)
        except asyncio.TimeoutError:
            self.close("it does not read what it is sent")
        except (ConnectionError, RuntimeError) as error:
            logger.debug("%s: %s", self.host, error)

    async def _write(self, text: str) -> None:
        # Asked again here: the process may have been stopped, and replaced, since the message was offered.
        service = self._service()
        if service is None or not service.leads():
            self.close("this supervisor leads no more")
            return
        await self._socket.send_str(text)

    def close(self, reason: str) -> None:
        """See :class:`~resiliency.supervisor.service.Link`."""
        if self._closed:
            return
        logger.info("the connection of %s is cut: %s", self.host, reason)
        self._closed = True
        self._abort()

    def _abort(self) -> None:
        """Closes the connection at once, without waiting for a peer that may be gone."""
        if self._request.transport is not None:
            with suppress(AttributeError):  # of a TLS transport of Python 3.11 that is closed already
                self._request.transport.abort()


_ENDS = (WSMsgType.CLOSE, WSMsgType.CLOSING, WSMsgType.CLOSED, WSMsgType.ERROR)


def _text(message: WSMessage) -> str:
    if message.type is not WSMsgType.TEXT:
        raise Forged(f"messages are text, not {message.type.name}")
    text: str = message.data
    return text
