"""The agent's server: a unix socket, one thread per trainer rank; it ends after the last rank disconnects.

The first rank starts it: as a process in its own session and at lower CPU priority (:mod:`resiliency.agent._command`),
or in a thread (:mod:`resiliency.agent.embedded`). A rank counts as disconnected when its process has died, even if a
child still holds its socket. After the last rank the agent finishes the sealed saves, for up to ``drain_s``, and ends;
if no rank connects, it ends after 30 seconds. The socket is in Linux' abstract namespace, so a killed agent leaves no
file. Binding its address is the lock that keeps a second agent from serving the same directory.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from typing import get_args

from resiliency.agent._peer import Peer
from resiliency.agent._worker import no_thread
from resiliency.agent.config import AgentConfig
from resiliency.agent.core import HostAgent
from resiliency.agent.messages import Flush, Flushed, Hello, Message, Notice, Refused, Request, Welcome
from resiliency.agent.protocol import PROTOCOL_VERSION, Framer, config_from_json, pack
from resiliency.errors import AgentError, ConfigError, TierError
from resiliency.events import EventKind, EventWriter, JsonlSink, NullSink
from resiliency.faultpoints import hit
from resiliency.storage.stage import Stage

__all__ = ["EXIT_TAKEN", "AgentServer"]

logger = logging.getLogger(__name__)

#: Exit status when another agent already serves this directory.
EXIT_TAKEN = 3
_FIRST_CLIENT_S = 30.0
#: Seconds to wait for the death of a process whose connection has ended; the kernel closes connections first.
_DEATH_S = 0.2
#: Number of notices that are kept for a rank that is not connected.
_UNDELIVERED = 64
#: Seconds that ranks of an earlier attempt may stay connected before a new attempt is refused.
_OLD_CLIENTS_S = 20.0
#: Seconds that the thread that accepts connections gets to end, once the socket is shut.
_ACCEPT_END_S = 10.0


class AgentServer:
    """Accepts ranks and passes their messages to a :class:`HostAgent`. Thread: :meth:`run` on one of its own.

    Args:
        config: of the first attempt.
        listening: False: call :meth:`listen` before :meth:`run`.

    Raises:
        OSError: as :meth:`listen`.
    """

    def __init__(self, config: AgentConfig, *, listening: bool = True) -> None:
        self.config = config
        self._lock = threading.Condition()
        self._starting = threading.Lock()
        self._clients: dict[int, socket.socket] = {}
        #: Open connections, also those that have not said Hello.
        self._connections: set[socket.socket] = set()
        #: Rank -> notices for it while it was not connected, the newest.
        self._undelivered: dict[int, deque[Notice]] = {}
        #: Number of connections that have ended while it is not known yet whether the rank's process dies.
        self._ending = 0
        self._agent: HostAgent | None = None
        self._events: EventWriter | None = None
        self._had_client = False
        self._ended = False
        self._stopped = False
        self._accepting = threading.Thread(target=self._accept, name="resiliency-agent-accept", daemon=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        if listening:
            self.listen()

    def listen(self) -> None:
        """Binds the address, so that ranks can connect.

        Raises:
            OSError: it cannot be bound; EADDRINUSE: another agent serves it.
        """
        try:
            self._listener.bind(self.config.address)
        except OSError:
            self._listener.close()
            raise
        self._listener.listen(128)

    def close_listener(self) -> None:
        """Closes the socket that listens, in this process only. For a forked child, or a server that never ran."""
        self._listener.close()

    def stop(self, *, patience_s: float) -> None:
        """Makes :meth:`run` end once no rank is connected, at most ``patience_s`` later, without finishing the work:
        the next start does that. Thread: any. Blocks: until then, and for the running write."""
        with self._lock:
            self._lock.wait_for(lambda: not self._clients and not self._ending, patience_s)
            self._stopped = True
            self._lock.notify_all()
            self._hang_up()
            agent = self._agent
        if agent is not None:
            agent.close()

    def run(self) -> None:
        """Serves until the last rank has disconnected and the work is done, at most ``drain_s`` later. Blocks: until
        then."""
        try:
            self._run()
        finally:
            _shut(self._listener)
            if self._accepting.ident is not None:
                self._accepting.join(_ACCEPT_END_S)
            if self._agent is not None:
                self._agent.close()
            if self._events is not None:
                self._events.close()

    def _run(self) -> None:
        self._accepting.start()
        started = time.monotonic()
        with self._lock:
            while not self._had_client and not self._stopped:
                left = started + _FIRST_CLIENT_S - time.monotonic()
                if left <= 0:
                    logger.warning("no rank connected within %.0f s; the agent exits", _FIRST_CLIENT_S)
                    return
                self._lock.wait(left)
        while True:
            with self._lock:
                while (self._clients or self._ending) and not self._stopped:
                    self._lock.wait()
                agent = self._agent if not self._stopped else None
            if agent is not None and not agent.wait(Stage.DURABLE, timeout_s=self.config.drain_s) and not self._stopped:
                logger.warning(
                    "uploads were not finished %.0f s after the last rank disconnected; the next start resumes them",
                    self.config.drain_s,
                )
            with self._starting:
                # Ranks of a new attempt may have connected meanwhile, or may be connecting: the server ends only
                # without clients.
                with self._lock:
                    if self._clients and not self._stopped:
                        continue
                self._ended = True
                if self._agent is not None:
                    self._agent.close()  # while the address is held, so that no other agent starts meanwhile
                _shut(self._listener)
                return

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed: the agent is exiting
            with self._lock:
                self._connections.add(connection)
                if self._stopped:
                    self._hang_up()
            thread = threading.Thread(
                target=self._serve, args=(connection,), name="resiliency-agent-client", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:
                logger.warning("a rank is refused: %s", no_thread(error))
                _refuse(connection, no_thread(error))
                self._disconnected(None, connection)
                self._wait_for_nobody()

    def _hang_up(self) -> None:
        for connection in self._connections:
            with suppress(OSError):  # it has ended by itself
                connection.shutdown(socket.SHUT_RDWR)

    def _wait_for_nobody(self) -> None:
        """Called when a job is refused for good: without a rank that is connected, the agent ends now."""
        with self._lock:
            self._had_client = True
            self._lock.notify_all()

    def _serve(self, connection: socket.socket) -> None:
        rank: int | None = None
        same_user = False
        framer = Framer()
        try:
            with Peer(connection) as peer:
                _check_user(peer.user)
                same_user = True
                while data := peer.receive(1 << 16):
                    for message in framer.feed(data):
                        if isinstance(message, Hello):
                            if rank is not None:
                                raise AgentError(f"rank {rank} sent a second Hello")
                            rank = self._handle_hello(connection, message)
                            if rank is None:
                                return
                            assert self._agent is not None
                            self._agent.announce(rank)  # with the rank known here, so that an error disconnects it
                        else:
                            self._handle_request(rank, message)
                if rank is not None:
                    self._tell_if_lost(rank, peer, connection)
        except (AgentError, ConfigError, OSError) as error:
            # Boundary: a bad message or a broken connection ends this connection only.
            logger.warning("connection of rank %s ended: %s", rank, error)
            if rank is None and same_user:
                _refuse(connection, str(error))  # tells a trainer of another version why
        finally:
            self._disconnected(rank, connection)

    def _handle_request(self, rank: int | None, message: Message) -> None:
        if rank is None:
            raise AgentError(f"{type(message).__name__} came before Hello")
        if not isinstance(message, get_args(Request)):
            raise AgentError(f"rank {rank} sent {type(message).__name__}, which only agents send")
        if isinstance(message, Flush):
            self._flush(rank, message)
        else:
            assert self._agent is not None
            self._agent.handle(rank, message)

    def _handle_hello(self, connection: socket.socket, message: Hello) -> int | None:
        config, rank = message.config, message.rank
        if message.version != PROTOCOL_VERSION or config is None:
            reason = f"the agent has protocol version {PROTOCOL_VERSION}, rank {rank} has {message.version}"
            connection.sendall(pack(Refused(reason=reason)))
            return None
        # Handles one Hello at a time. Not under the clients' lock, which an agent that is being closed needs for its
        # messages.
        with self._starting:
            if self._ended or self._stopped:
                return None  # the rank starts the next agent, as if it had connected a moment later
            with self._lock:
                gone = self._lock.wait_for(
                    lambda: not self._clients or self.config.token == config.token or self._stopped, _OLD_CLIENTS_S
                )
            if not gone:
                reason = (
                    f"another job (attempt {self.config.attempt}, token {self.config.token}) is still using"
                    f" {config.local.address} as run {config.run!r} on this host; end it, or give this job its own"
                    " RESILIENCY_RUN or directory"
                )
                connection.sendall(pack(Refused(reason=reason, in_use=True)))
                return None
            try:
                self._start_agent(message, config)
            except (AgentError, TierError, OSError) as error:
                connection.sendall(pack(Refused(reason=str(error))))
                if isinstance(error, AgentError):
                    self._wait_for_nobody()
                return None
            with self._lock:
                connection.sendall(pack(Welcome(pid=os.getpid())))  # before the rank is registered for notices
                for notice in self._undelivered.pop(rank, ()):
                    connection.sendall(pack(notice))
                self._clients[rank] = connection
                self._had_client = True
                self._lock.notify_all()
        return rank

    def _start_agent(self, hello: Hello, config: AgentConfig) -> None:
        if self._agent is not None and self.config.token == config.token:
            return
        if self._agent is not None:
            # Commit what the previous attempt sealed before the new attempt lists the directory.
            self._agent.wait(Stage.DURABLE, tier=self._agent.config.local.name, timeout_s=config.drain_s)
            self._agent.close()
        self.config = config
        with self._lock:
            self._undelivered.clear()  # of the previous attempt
        sink = JsonlSink(config.events) if config.events else NullSink()
        events = EventWriter(run=config.run, attempt=config.attempt, rank=-1, host=config.node, sinks=(sink,))
        events.emit(EventKind.AGENT_STARTED, pid=os.getpid())
        if self._events is not None:
            self._events.close()
        self._agent, self._events = None, events
        agent = HostAgent(config, self._send, events, heard=hello.heard)
        try:
            agent.start()
        except BaseException:
            agent.close()
            raise
        self._agent = agent

    def _flush(self, rank: int, message: Flush) -> None:
        agent = self._agent
        assert agent is not None

        def wait() -> None:
            done = agent.wait(message.stage, tier=message.tier, timeout_s=message.timeout_s)
            self._send(rank, Flushed(ticket=message.ticket, done=done))

        try:
            threading.Thread(target=wait, name="resiliency-agent-flush", daemon=True).start()
        except RuntimeError:  # the limit of threads is reached: the rank's other messages wait, too
            wait()

    def _send(self, rank: int, message: Notice) -> None:
        with self._lock:
            connection = self._clients.get(rank)
            if connection is None:
                # An agent that has just started finishes what the one before has left while the ranks are connecting.
                self._undelivered.setdefault(rank, deque(maxlen=_UNDELIVERED)).append(message)
                return
        try:
            connection.sendall(pack(message))
        except OSError:
            logger.debug("rank %d has disconnected; %s was not sent", rank, type(message).__name__)

    def _tell_if_lost(self, rank: int, peer: Peer, connection: socket.socket) -> None:
        """Handles a rank that has hung up: writes an event if its process dies, unless the rank has said Bye: then the
        agent ends without that wait, for which the end of a fit would wait too. The rank is removed from the clients
        first, because one whose process goes on in the next attempt connects again."""
        with self._lock:
            agent = self._agent if self._clients.get(rank) is connection else None
            self._ending += 1
        try:
            self._disconnected(rank, connection)
            if agent is not None and not agent.has_left(rank) and peer.died(within_s=_DEATH_S):
                agent.tell_lost(rank, peer.pid)
        finally:
            with self._lock:
                self._ending -= 1
                self._lock.notify_all()

    def _disconnected(self, rank: int | None, connection: socket.socket) -> None:
        with self._lock:
            if rank is not None and self._clients.get(rank) is connection:
                del self._clients[rank]
            self._connections.discard(connection)
            self._lock.notify_all()
        connection.close()


def _refuse(connection: socket.socket, reason: str) -> None:
    try:
        connection.sendall(pack(Refused(reason=reason)))
    except OSError:
        logger.debug("the connection was closed before the refusal", exc_info=True)


def _shut(listener: socket.socket) -> None:
    try:
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in accept(), which close() alone would not
    except OSError:
        logger.debug("listener was shut already", exc_info=True)
    listener.close()


def _check_user(user: int) -> None:
    if user != os.getuid():
        raise AgentError(
            f"a process of user {user} tried to connect to the agent of user {os.getuid()}; it was refused"
        )


def main(arguments: list[str]) -> int:
    """Runs the agent process and returns its exit status. Arguments: the settings as JSON, and the file descriptor to
    which one byte is written when ranks can connect."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s pid=%(process)d: %(message)s")
    hit("agent.start")
    ready = int(arguments[1])
    try:
        # Training takes precedence when the cores are busy.
        os.nice(10)
    except OSError:
        logger.debug("priority cannot be lowered", exc_info=True)
    try:
        server = AgentServer(config_from_json(arguments[0]))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return EXIT_TAKEN
        raise
    os.write(ready, b"1")
    os.close(ready)
    server.run()
    return 0
