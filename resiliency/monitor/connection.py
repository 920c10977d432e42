"""The monitor's connection to the supervisor. It is opened again for ever; training does not depend on it."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import random
import ssl
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from resiliency.errors import AgentError, ConfigError
from resiliency.monitor.leader_search import (
    NoLeader,
    OpenConnection,
    message_of,
    open_where_one_leads,
    words_of,
)
from resiliency.monitor.outbox import Outbox
from resiliency.regular_file import open_regular
from resiliency.runtime.addresses import supervisor_urls
from resiliency.runtime.messages.monitor import Desired, Hello, Observed, Report, StepEnded, pack
from resiliency.runtime.tasks import end_tasks, is_set_within

__all__ = ["ConnectionSettings", "SupervisorConnection"]

logger = logging.getLogger(__name__)

#: Seconds between two attempts to connect: the first wait, doubled each time, and the longest.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 10.0
#: The longest wait between two attempts, in periods, once the supervisor has named its period. A supervisor that was
#: started again waits its host timeout plus a period, together more than two periods, before it takes silent hosts as
#: lost. So does one that hears hosts again after a fault of the network.
_LONGEST_WAIT_PERIODS = 2
_SHORTEST_PERIOD_S, _LONGEST_PERIOD_S = 0.05, 60.0
#: A supervisor that has answered no ping for this many periods, and for at least this many seconds, is given up.
_SILENT_PERIODS, _SILENT_S = 3, 10.0
#: When the supervisor has answered nothing for this many periods its connection is kept, and the other addresses are
#: asked, twice a period, whether a supervisor leads there.
_DOUBTED_PERIODS = 1.5
_MOST_TOKEN_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class ConnectionSettings:
    """Where the supervisor is, and how this host proves who it is.

    Attributes:
        urls: ``https://host:port`` of every supervisor that shares the state file; the one that leads is found.
        token_file: read at each connection, so that the token can be changed; "": no token.
        ca_file: certificates that the supervisor's is checked with; "": the system's.
        cert_file, key_file: this host's certificate and key, where the supervisor asks for one.
        plain_http: the token may cross a network unencrypted.
    """

    urls: tuple[str, ...]
    token_file: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    plain_http: bool = False

    def __post_init__(self) -> None:
        for url in supervisor_urls(self.urls):
            parts = urlsplit(url)
            if parts.scheme == "http" and self.token_file and not self.plain_http and not _is_loopback(parts.hostname):
                raise ConfigError(
                    f"--supervisor {url}: whoever is on the way could read the token; use https, or pass"
                    " --insecure-plain-http"
                )
        if bool(self.cert_file) != bool(self.key_file):
            raise ConfigError("pass both --cert and --key, or neither")

    def token(self) -> str:
        """Returns the token, or "" when no token file is set. Blocks: one small read.

        Raises:
            ConfigError: the file cannot be read, or does not hold exactly one token.
        """
        if not self.token_file:
            return ""
        try:
            with os.fdopen(open_regular(self.token_file), "rb") as file:
                if os.fstat(file.fileno()).st_mode & 0o077:
                    logger.warning("others may read the token file %s; chmod 600 it", self.token_file)
                text = file.read(_MOST_TOKEN_BYTES + 1).decode("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the token file {self.token_file} cannot be read: {error}") from error
        if not text or len(text) > _MOST_TOKEN_BYTES or not text.isprintable() or " " in text:
            raise ConfigError(f"the token file {self.token_file} must hold one token, in one line")
        return text

    def ssl_context(self) -> ssl.SSLContext | None:
        """Returns the TLS context, or None when no address is https.

        Raises:
            ConfigError: a certificate cannot be read.
        """
        if not any(urlsplit(url).scheme == "https" for url in self.urls):
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
            if self.cert_file:
                context.load_cert_chain(self.cert_file, self.key_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"the certificates for {', '.join(self.urls)} cannot be read: {error}") from error
        return context


def _is_loopback(host: str | None) -> bool:
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"


class SupervisorConnection:
    """Talks to the supervisor that leads. Thread: one, with an event loop.

    Args:
        hello: the first message on each connection, sent with the present term.
        report: returns the host's present report, with a new number.
        obey: called with each :class:`Desired` whose term is not lower than the highest term heard so far.
        term: returns the highest term heard so far; called with a higher one, it stores that first.
        connected: called when a supervisor has accepted this host, before the first report is sent.
    """

    def __init__(
        self,
        settings: ConnectionSettings,
        hello: Hello,
        *,
        outbox: Outbox,
        report: Callable[[], Report],
        obey: Callable[[Desired], None],
        term: Callable[[int | None], int],
        connected: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings, self._hello, self._connected = settings, hello, connected
        self._outbox, self._report, self._obey, self._term = outbox, report, obey, term
        self._answers: list[StepEnded] = []
        self._news = asyncio.Event()
        self._heard_s = 0.0
        self._longest_wait_s = _LONGEST_WAIT_S
        #: Addresses; the supervisor that led last comes first.
        self._urls = supervisor_urls(settings.urls)
        self._blocked_until_s = 0.0
        self._said = ""
        self._lower_said = 0
        self.is_connected = False

    # -- what is sent -------------------------------------------------------------------------------------------------

    def say_soon(self) -> None:
        """Something has changed: sends a report now instead of at the next period."""
        self._news.set()

    def answer(self, ended: StepEnded) -> None:
        """Sends the result of a step on the present connection. Without one it is dropped, because the supervisor asks
        again on its next connection."""
        if self.is_connected:
            self._answers.append(ended)
            self._news.set()

    def block(self, seconds: float) -> None:
        """Closes the connection and opens none for this many seconds. For tests of a network that is cut."""
        self._blocked_until_s = time.monotonic() + seconds
        self._news.set()

    # -- the connection -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Connects again and again until it is cancelled. Raises: CancelledError only."""
        wait_s = _FIRST_WAIT_S
        while True:
            blocked_s = self._blocked_until_s - time.monotonic()
            if blocked_s > 0:
                await asyncio.sleep(blocked_s)
            began_s, longest_s = time.monotonic(), self._longest_wait_s
            try:
                await self._round()
                problem = "it has closed the connection"
            except asyncio.CancelledError:
                raise
            except Exception as error:
                problem = words_of(error)
                if isinstance(error, NoLeader) and error.stands_by:  # it leads soon: no long wait
                    longest_s = min(longest_s, self._longest_wait_s / _LONGEST_WAIT_PERIODS)
            self.is_connected = False
            if problem != self._said:
                self._said = problem
                logger.warning(
                    "no connection to the supervisor at %s: %s; training goes on, and this is tried again for ever",
                    ", ".join(self._urls),
                    problem,
                )
            if time.monotonic() - began_s > self._longest_wait_s:
                wait_s = _FIRST_WAIT_S
            wait_s = min(longest_s, self._longest_wait_s, wait_s)
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s *= 2

    async def _round(self) -> None:
        """Tries all addresses once. Talks to the supervisor that leads, and then to any that takes over from it, until
        the last of these connections ends."""
        opened: OpenConnection | None = await self._open(self._urls, self._check_term)
        while opened is not None:
            # Ask this supervisor first the next time.
            self._urls = (opened.url, *(url for url in self._urls if url != opened.url))
            following = None
            try:
                following = await self._talk(opened)
            finally:
                self.is_connected = False
                await opened.close(farewell=following is None)
            opened = following

    async def _open(self, urls: Sequence[str], check_term: Callable[[int], None]) -> OpenConnection:
        return await open_where_one_leads(
            urls,
            replace(self._hello, term=self._term(None)),
            token=self._settings.token(),
            ssl_context=self._settings.ssl_context(),
            check_term=check_term,
        )

    async def _talk(self, opened: OpenConnection) -> OpenConnection | None:
        """Talks to a supervisor until another one has taken over, and returns the connection to that one. Raises an
        error when the connection ends."""
        socket, welcome = opened.socket, opened.welcome
        self._check_term(welcome.term)
        period_s = min(max(welcome.period_s, _SHORTEST_PERIOD_S), _LONGEST_PERIOD_S)
        self._longest_wait_s = min(_LONGEST_WAIT_S, _LONGEST_WAIT_PERIODS * period_s)
        logger.info("connected to the supervisor at %s, term %d", opened.url, welcome.term)
        self._said = ""
        self._answers.clear()
        self._outbox.connected()
        self._connected()
        self._news.set()
        self._heard_s = time.monotonic()
        self.is_connected = True
        reading = asyncio.create_task(self._read(socket, welcome.term))
        writing = asyncio.create_task(self._write(socket, period_s))
        looking = asyncio.create_task(self._look_elsewhere(opened, period_s))
        following: OpenConnection | None = None
        try:
            done, _ = await asyncio.wait({reading, writing, looking}, return_when=asyncio.FIRST_COMPLETED)
            if looking in done and looking.exception() is None:
                following = looking.result()
            else:
                for task in done:
                    task.result()
        finally:
            await end_tasks([reading, writing, looking])
            if following is None and not looking.cancelled() and looking.exception() is None:
                await looking.result().close(farewell=False)
        return following

    async def _look_elsewhere(self, opened: OpenConnection, period_s: float) -> OpenConnection:
        """Waits until this supervisor answers no more and another one leads; returns the connection to that one. It
        does not wait for the connection to close, because a process that a signal has stopped keeps its connections
        open."""
        others = [url for url in self._urls if url != opened.url]
        if not others:
            await asyncio.Event().wait()

        def is_later(term: int) -> None:
            self._check_term(term)
            if term <= opened.welcome.term:
                raise AgentError(f"its term {term} is that of the supervisor that does not answer, so it does not lead")

        while True:
            quiet_s = time.monotonic() - self._heard_s
            if quiet_s < _DOUBTED_PERIODS * period_s:
                await asyncio.sleep(_DOUBTED_PERIODS * period_s - quiet_s)
                continue
            try:
                found = await self._open(others, is_later)
            except (NoLeader, ConfigError) as error:
                logger.debug("nobody else leads: %s", error)
                await asyncio.sleep(period_s / 2)
                continue
            logger.warning("%s has not answered for %.1f s, and %s leads", opened.url, quiet_s, found.url)
            return found

    def _check_term(self, term: int) -> None:
        seen = self._term(None)
        if term < seen:
            raise AgentError(f"its term is {term}, and one of term {seen} was heard: it is not the leader any more")
        if term > seen:
            self._term(term)

    async def _read(self, socket: Any, term: int) -> None:
        import aiohttp

        while True:
            received = await socket.receive()
            self._heard_s = time.monotonic()
            if received.type is aiohttp.WSMsgType.PING:
                await socket.pong(received.data)
            elif received.type is aiohttp.WSMsgType.PONG:
                with suppress(ValueError):
                    self._outbox.received(int(received.data or b"0"))
            else:
                message = message_of(received)
                if not isinstance(message, Desired):
                    raise AgentError(f"it has sent {type(message).__name__}, which is no message for a monitor")
                if message.term < term:
                    raise AgentError(
                        f"its term was {term} when it was connected, and is {message.term} in this message"
                    )
                self._check_term(message.term)
                self._obey(message)

    async def _write(self, socket: Any, period_s: float) -> None:
        silent_s = max(_SILENT_S, _SILENT_PERIODS * period_s)
        while True:
            if self._blocked_until_s > time.monotonic():
                raise AgentError("the connection was cut on purpose, by an injected partition")
            self._news.clear()
            await self._send(socket, pack(self._report()), silent_s)
            answers, self._answers = self._answers, []
            for ended in answers:
                await self._send(socket, pack(ended), silent_s)
            last = 0
            while (batch := self._outbox.take()) is not None:
                last, observations = batch
                await self._send(socket, pack(Observed(observations=observations)), silent_s)
            await asyncio.wait_for(socket.ping(str(last).encode()), silent_s)
            if time.monotonic() - self._heard_s > silent_s:
                raise AgentError(f"it has answered nothing for {silent_s:.0f} s")
            await is_set_within(self._news, period_s)

    @staticmethod
    async def _send(socket: Any, text: str, within_s: float) -> None:
        """Sends within a deadline, because a supervisor that a signal has stopped does not read."""
        await asyncio.wait_for(socket.send_str(text), within_s)
