"""Finds, among several addresses, the supervisor that leads, and opens the host monitor's connection to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from resiliency.errors import AgentError, ConfigError
from resiliency.runtime.addresses import STANDS_BY, STANDS_BY_STATUS
from resiliency.runtime.messages.monitor import (
    MAX_MESSAGE_BYTES,
    Hello,
    Message,
    Refused,
    Welcome,
    pack,
    unpack,
)
from resiliency.runtime.tasks import end_tasks

__all__ = ["NoLeader", "OpenConnection", "message_of", "open_connection", "open_where_one_leads", "words_of"]

logger = logging.getLogger(__name__)

MONITOR_PATH = "/v1/monitor"
_HANDSHAKE_S, _FAREWELL_S = 10.0, 0.5
#: Seconds after which the next address is asked as well, while an unanswered one is still waited for.
_NEXT_ADDRESS_S = 0.5


class NoLeader(AgentError):
    """No supervisor leads at any of the addresses.

    Attributes:
        stands_by: at one of them a supervisor stands by, and may lead soon.
    """

    def __init__(self, text: str, *, stands_by: bool) -> None:
        super().__init__(text)
        self.stands_by = stands_by


@dataclass(frozen=True, kw_only=True)
class OpenConnection:
    """A connection on which a supervisor has accepted this host."""

    url: str
    socket: Any
    session: Any
    welcome: Welcome

    async def close(self, *, farewell: bool = True) -> None:
        """Closes the connection. Blocks: up to 0.5 s.

        Args:
            farewell: False: sends no close frame, because the other side does not read.
        """
        await _close(self.session, self.socket if farewell else None)


async def open_connection(
    url: str, hello: Hello, *, token: str, ssl_context: Any, check_term: Callable[[int], None]
) -> OpenConnection:
    """Connects to one address. Blocks: 20 s at most.

    Raises:
        AgentError: the supervisor refuses this host, has a lower term than one obeyed before, or speaks another
            version.
        aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError: no supervisor answers there.
    """
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, connect=_HANDSHAKE_S, sock_connect=_HANDSHAKE_S)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    session = aiohttp.ClientSession(timeout=timeout, headers=headers)
    socket = None
    try:
        encrypted = ssl_context if urlsplit(url).scheme == "https" and ssl_context is not None else True
        connecting = session.ws_connect(
            url + MONITOR_PATH, ssl=encrypted, max_msg_size=MAX_MESSAGE_BYTES, autoping=False
        )
        socket = await asyncio.wait_for(connecting, _HANDSHAKE_S)
        await socket.send_str(pack(hello))
        welcome = message_of(await asyncio.wait_for(socket.receive(), _HANDSHAKE_S))
        if not isinstance(welcome, Welcome):
            raise AgentError(f"its first message is {type(welcome).__name__}, not Welcome")
        check_term(welcome.term)
    except BaseException:
        await _close(session, socket)
        raise
    return OpenConnection(url=url, socket=socket, session=session, welcome=welcome)


async def _close(session: Any, socket: Any) -> None:
    if socket is not None:
        closing = asyncio.create_task(socket.close())
        try:
            await asyncio.wait({closing}, timeout=_FAREWELL_S)
        finally:
            await end_tasks([closing])
    await session.close()


async def open_where_one_leads(
    urls: Sequence[str], hello: Hello, *, token: str, ssl_context: Any, check_term: Callable[[int], None]
) -> OpenConnection:
    """Returns a connection to the first address that accepts this host. The next address is asked at once when one
    refuses (it stands by, or there is no server), and after 0.5 s when one does not answer. Blocks: up to 20 s after
    the last address was asked.

    Args:
        check_term: raises AgentError when a supervisor of this term must not be obeyed.

    Raises:
        NoLeader: no address accepts this host; its text gives the reason of each.
    """
    waiting, running = list(urls), dict[asyncio.Task[OpenConnection], str]()
    problems: dict[str, BaseException] = {}
    try:
        while waiting or running:
            if waiting:
                url = waiting.pop(0)
                opening = open_connection(url, hello, token=token, ssl_context=ssl_context, check_term=check_term)
                running[asyncio.create_task(opening)] = url
            done, _ = await asyncio.wait(
                running, timeout=_NEXT_ADDRESS_S if waiting else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                problem = task.exception()
                if problem is None:
                    del running[task]
                    return task.result()
                problems[running.pop(task)] = problem
    finally:
        await _give_up(running)
    words = {url: words_of(problems[url]) + _hint(url, problems[url]) for url in urls}
    text = words[urls[0]] if len(urls) == 1 else "; ".join(f"{url}: {words[url]}" for url in urls)
    raise NoLeader(text, stands_by=any(_stands_by(each) for each in problems.values()))


async def _give_up(tasks: Iterable[asyncio.Task[OpenConnection]]) -> None:
    """Cancels the attempts at other addresses, and closes those that were accepted at the same moment."""
    given_up = list(tasks)
    for task in given_up:
        task.cancel()
    for found in await asyncio.gather(*given_up, return_exceptions=True):
        if isinstance(found, OpenConnection):
            await found.close(farewell=False)


def _hint(url: str, problem: BaseException) -> str:
    """Returns advice to pass a certificate, or "". A server that wants one cuts the connection off without a reason."""
    import aiohttp

    is_cut = isinstance(problem, (aiohttp.ServerDisconnectedError, ConnectionError))
    if not url.startswith("https:") or not is_cut:
        return ""
    return ": if its tls has a client_ca, this host needs a certificate that is signed by it (--cert, --key)"


def _stands_by(problem: BaseException) -> bool:
    return getattr(problem, "status", None) == STANDS_BY_STATUS


def words_of(problem: BaseException) -> str:
    """Why there is no connection, in words for the log."""
    import aiohttp

    if _stands_by(problem):
        return f"{STANDS_BY} (status {STANDS_BY_STATUS})"
    if isinstance(problem, aiohttp.ClientConnectorError):  # its own text names an object, and differs each time
        problem = problem.os_error
    if isinstance(problem, (aiohttp.ClientError, AgentError, ConfigError, OSError, asyncio.TimeoutError, ValueError)):
        return str(problem) or type(problem).__name__
    logger.error("the connection to the supervisor failed in a way that was not foreseen", exc_info=problem)
    return type(problem).__name__


def message_of(received: Any) -> Message:
    """Unpacks what was received.

    Raises:
        AgentError: it is no message, or the supervisor refuses this host.
    """
    import aiohttp

    if received.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSING, aiohttp.WSMsgType.CLOSED):
        code = f" with code {received.data}" if isinstance(received.data, int) else ""
        raise AgentError(f"it has closed the connection{code}")
    if received.type is aiohttp.WSMsgType.ERROR:
        raise AgentError(f"it has sent what is no WebSocket message: {received.data}")
    if received.type is not aiohttp.WSMsgType.TEXT:
        raise AgentError(f"it has sent a message of type {received.type!r}")
    message = unpack(received.data)
    if isinstance(message, Refused):
        raise AgentError(f"it refuses this host: {message.reason:.500}")
    return message
