"""The trainer's side: finds or starts the host agent, and reconnects when it dies.

Only :meth:`AgentClient.open`, :meth:`AgentClient.flush` and :meth:`AgentClient.close` block, each with a deadline; the
training thread has another one call them, see :mod:`resiliency.to_thread`. When the connection breaks, a new agent is
started and every message not yet acknowledged is sent again. An agent that dies again and again is left alone for a
while: saves are skipped meanwhile, and a warning says so.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import get_args

from resiliency.agent._command import AGENT_WORD
from resiliency.agent._peer import Peer
from resiliency.agent._start import start_agent
from resiliency.agent._worker import no_thread
from resiliency.agent.config import AgentConfig
from resiliency.agent.embedded import EmbeddedAgent
from resiliency.agent.heard import HeardNotices
from resiliency.agent.messages import (
    Committed,
    Complete,
    Delete,
    Failed,
    FileReady,
    Flush,
    Flushed,
    GiveUp,
    Hello,
    Message,
    Notice,
    Recorded,
    Refused,
    Request,
    Rescan,
    Seal,
    Trace,
    Traced,
    TraceEnded,
    Welcome,
)
from resiliency.agent.protocol import PROTOCOL_VERSION, Framer, pack
from resiliency.errors import AgentError, DirectoryInUse
from resiliency.events import EventKind, EventWriter
from resiliency.runtime.closing import close_when_left
from resiliency.storage.stage import Stage
from resiliency.storage.step_id import StepId

__all__ = ["AgentClient"]

logger = logging.getLogger(__name__)

#: Seconds for a listening agent to answer Hello, in addition to those that it may take to finish its work.
_HELLO_TIMEOUT_S = 30.0
_CONNECT_TRIES = 5
#: Seconds that an agent which ends may hold the address while it answers no Hello, and the first pause between tries.
_ENDING_S, _FIRST_PAUSE_S = 15.0, 0.02
#: After more than this many lost agents within the window, no other one is started until the window has passed.
_MAX_LOSSES = 3
_LOSS_WINDOW_S = 120.0
#: Seconds that a flush waits for an agent to be started before its time.
_START_NOW_S = 10.0
#: Seconds for a killed agent to end. One that waits for a disk ends when the disk answers, and does nothing more.
_KILLED_S = 0.5
#: Seconds for the connection to close when the process leaves an attempt.
_LEAVE_TIMEOUT_S = 0.5


#: Agents that outlive their clients in this process; their exit status must still be collected.
_still_running: list[subprocess.Popen[bytes]] = []


class _HelloRefused(ConnectionError):
    """The agent closed the connection before it answered Hello."""


class AgentClient:
    """One rank's connection to its host agent.

    Args:
        config: of this attempt.
        rank: global rank of this process.
        events: the trainer's event log.
        embedded: run the agent in a thread of this process, if no agent serves the directory yet.

    Threads: public methods from one thread at a time (where no other is named); the thread ``resiliency-agent-link``
        receives.
    """

    def __init__(self, config: AgentConfig, rank: int, events: EventWriter, *, embedded: bool = False) -> None:
        self.config = config
        self.rank = rank
        self._events = events
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        #: Set when there may be something to :meth:`poll`; only :meth:`wait_message` waits for it.
        self._news = threading.Event()
        self._inbox: deque[Notice] = deque()
        self._take_file: Callable[[FileReady], None] | None = None
        self._woken = False
        self._traces: dict[StepId, Callable[[Notice], None]] = {}
        # The following are sent again to the next agent when this one dies; an agent may get any of them twice.
        self._unacknowledged: dict[StepId, Seal] = {}  # until recorded or failed
        self._completes: dict[StepId, Complete] = {}  # until committed or failed
        self._deletes: deque[Delete] = deque(maxlen=64)
        self._given_up: deque[GiveUp] = deque(maxlen=16)
        self._loaded: Rescan | None = None
        self._heard = HeardNotices(config.local.name)
        self._socket: socket.socket | None = None
        self._framer = Framer()  # belongs to this connection
        self._embed = embedded
        self._embedded: EmbeddedAgent | None = None
        #: Monotonic seconds when the next agent is started, after too many were lost; None: there is one, or soon.
        self._next_start: float | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        self._losses: deque[float] = deque()
        self._flushed: dict[int, bool] = {}
        self._flushes = 0

    @property
    def is_down(self) -> bool:
        """True while there is no agent, because too many were lost. Thread: any."""
        return self._next_start is not None

    # -- open ---------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Connects, after starting the agent if there is none. Collective: no.

        Blocks: up to 30 s for an agent that does not start, plus ``drain_s`` for one that still works for the previous
            attempt.

        Raises:
            AgentError: the agent refused this job (another job uses the directory), or the local tier cannot be used,
                or no agent can be started.
        """
        close_when_left(self, lambda client: client.close(timeout_s=_LEAVE_TIMEOUT_S))
        why, failures, pause_s = OSError("not tried"), 0, _FIRST_PAUSE_S
        pause, ending_until_s = threading.Event(), time.monotonic() + _ENDING_S
        while failures < _MAX_LOSSES:
            try:
                self._connect()
            except AgentError:
                raise
            except OSError as error:
                why = error
                if isinstance(error, _HelloRefused) and time.monotonic() < ending_until_s:
                    # An agent of an earlier job that ends. It holds the address until it has done its last work.
                    pause.wait(pause_s)
                    pause_s = min(2 * pause_s, 1.0)
                    continue
                failures += 1
                logger.info(
                    "rank %d: the checkpoint agent of %s did not start (%s)",
                    self.rank,
                    self.config.local.address,
                    error,
                )
                if isinstance(error, TimeoutError):
                    break  # another agent would be as slow
                continue
            thread = threading.Thread(target=self._receive, name="resiliency-agent-link", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the limit of threads is reached
                self._hang_up()
                raise
            self._thread = thread
            return
        if isinstance(why, _HelloRefused):
            self._refuse_to_share()
        raise AgentError(
            f"rank {self.rank}: no checkpoint agent can be started for {self.config.local.address}: {why}; see the"
            f" agent's log in {self.config.run_folder}/logs, or run it in the trainer with"
            " CheckpointerOptions(agent='embedded')"
        ) from why

    def _hang_up(self) -> None:
        """Closes the connection, which no thread reads."""
        with self._lock:
            connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()

    def _refuse_to_share(self) -> None:
        """Called when every Hello was closed without an answer. If an agent still listens, it serves another job.

        Raises:
            DirectoryInUse: an agent listens. Working beside it would mix the checkpoints of two jobs.
        """
        connection = self._dial()
        if connection is not None:
            connection.close()
            raise DirectoryInUse(
                f"rank {self.rank}: an agent that does not speak protocol {PROTOCOL_VERSION} serves"
                f" {self.config.local.address} as run {self.config.run!r} on this host: a job with another version of"
                " this library is using it; end that job, or give this one its own RESILIENCY_RUN or directory"
            )

    def _connect(self) -> None:
        """Connects and sends Hello.

        Raises:
            OSError: no agent can be reached or started.
            AgentError: the agent refused this job.
        """
        connection = self._dial() or self._start_and_dial()
        try:
            connection.settimeout(_HELLO_TIMEOUT_S)
            with self._lock:
                heard = self._heard.heard()
            hello = Hello(version=PROTOCOL_VERSION, rank=self.rank, config=self.config, heard=heard)
            with suppress(BrokenPipeError, ConnectionResetError):  # refused before it was read; the answer is there
                connection.sendall(pack(hello))
            framer = Framer()
            answer, *notices = self._hello_answer(connection, framer)
            if isinstance(answer, Refused):
                refused = f"rank {self.rank}: the checkpoint agent refused: {answer.reason}"
                raise DirectoryInUse(refused) if answer.in_use else AgentError(refused)
            if not isinstance(answer, Welcome):
                raise AgentError(f"rank {self.rank}: the checkpoint agent answered Hello with {type(answer).__name__}")
            self._accept(notices)
            connection.settimeout(None)
            # A hung agent must not stop the trainer: sending fails after a second, and the client reconnects.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 1, 0))
        except (BrokenPipeError, ConnectionResetError) as error:
            connection.close()
            raise _HelloRefused(f"the agent closed the connection before it answered Hello ({error})") from error
        except BaseException:
            connection.close()
            raise
        with self._lock:
            if self._closing:
                connection.close()  # close() has already run, so nobody else would
                raise ConnectionError("the trainer is closing")
            self._socket, self._framer = connection, framer
            for message in self._to_send_again():
                connection.sendall(pack(message))

    def _hello_answer(self, connection: socket.socket, framer: Framer) -> list[Message]:
        """The agent's answer to Hello, then the notices that came with it. Blocks: up to 30 s and ``drain_s``.

        Raises:
            OSError: no answer came: the agent closed the connection, or took too long, and was killed.
        """
        connection.settimeout(_HELLO_TIMEOUT_S + self.config.drain_s)
        try:
            while data := connection.recv(1 << 16):
                if messages := list(framer.feed(data)):
                    return messages
        except TimeoutError:
            self._kill_silent(connection)
            raise
        raise _HelloRefused("the agent closed the connection before it answered Hello")

    def _kill_silent(self, connection: socket.socket) -> None:
        """Kills an agent that does not answer Hello: the next one can do all its work. Blocks: until it is gone, half a
        second at most.

        Raises:
            ConnectionError: it is gone.
        """
        with Peer(connection) as agent:
            self._events.emit(EventKind.AGENT_LOST, losses=len(self._losses), reason="silent", agent_pid=agent.pid)
            if not _kill(agent):
                return
            logger.warning(
                "rank %d: the checkpoint agent of %s (pid %d) did not answer, and was killed; another one is started,"
                " which finishes its work",
                self.rank,
                self.config.local.address,
                agent.pid,
            )
        raise ConnectionError("it did not answer, and was killed")

    def _dial(self) -> socket.socket | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            connection.connect(self.config.address)
        except OSError:
            connection.close()
            return None
        return connection

    def _start_and_dial(self) -> socket.socket:
        pause = threading.Event()
        for attempt in range(_CONNECT_TRIES):
            if self._embed:
                self._start_embedded()
            else:
                process = start_agent(self.config, fork=attempt == 0)
                if process is not None:
                    self._reap()
                    self._process = process
            connection = self._dial()
            if connection is not None:
                return connection
            # The previous agent is exiting and still has the address; the next one can bind it in a moment.
            pause.wait(0.1 * 2**attempt)
        raise ConnectionError("no agent could be reached or started")

    def _start_embedded(self) -> None:
        """Raises AgentError when no thread can be started."""
        if self._embedded is not None:
            self._embedded.close(0.0)
        self._embedded = EmbeddedAgent(self.config)
        try:
            self._embedded.start()
        except OSError as error:
            logger.debug("the agent of another process serves %s (%s)", self.config.local.address, error)
        except RuntimeError as error:
            raise AgentError(f"rank {self.rank}: {no_thread(error)}") from error

    def _reap(self) -> None:
        if self._process is not None and self._process.poll() is None:
            _still_running.append(self._process)  # it was lost a moment ago, and is still ending
        self._process = None

    def _to_send_again(self) -> list[Request]:
        loaded = [self._loaded] if self._loaded is not None else []  # first: deletions must spare it
        traces = [Trace(id=step) for step in self._traces]
        sealed: list[Request] = [*self._unacknowledged.values(), *self._completes.values()]
        return [*loaded, *traces, *self._given_up, *sealed, *self._deletes]

    # -- messages -------------------------------------------------------------------------------------------------

    def send(self, message: Request) -> None:
        """Sends a message to the agent. Blocks: about a second at most. Never raises. Thread: any."""
        with self._lock:
            if isinstance(message, Seal):
                self._unacknowledged[message.id] = message
                self._heard.seal(message)
            elif isinstance(message, Complete):
                self._completes[message.id] = message
            elif isinstance(message, Delete):
                self._deletes.append(message)
            elif isinstance(message, GiveUp):
                self._given_up.append(message)
            elif isinstance(message, Rescan):
                self._loaded = message
            if self._socket is None:
                return  # the link thread is getting a new agent, and will send what must not be lost again
            try:
                self._socket.sendall(pack(message))
            except OSError as error:
                if error.errno is None:
                    raise  # not of the socket: a signal's handler has raised it
                logger.debug("the agent is gone; %s was not sent", type(message).__name__)
                self._break_link()

    def trace(self, step: StepId, take: Callable[[Notice], None]) -> None:
        """From now on calls ``take`` with each message about this save, including spans of the agent's work for it, on
        the thread that receives the message. ``take`` must not block. Thread: any."""
        with self._lock:
            self._traces[step] = take
            self.send(Trace(id=step))

    def stop_tracing(self, step: StepId) -> None:
        """Undoes :meth:`trace`. Idempotent. Thread: any."""
        with self._lock:
            self._traces.pop(step, None)

    def give_up_agent(self) -> None:
        """Kills an agent that does not answer, so that the link thread gets another: an agent that went on later would,
        with messages not yet read, overwrite what was saved since. If it cannot be killed, there is none for a while.

        Thread: training. Blocks: half a second at most.
        """
        with self._lock:
            if self._socket is None:
                return  # it was lost meanwhile, and the link thread is replacing it
            with Peer(self._socket) as agent:
                if not _kill(agent):
                    # It still has its address, so no other agent process can serve this directory.
                    self._losses.extend([time.monotonic()] * (_MAX_LOSSES + 1))
            self._break_link()

    def _break_link(self) -> None:
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                logger.debug("the link was down already", exc_info=True)

    def poll(self) -> Iterator[Notice]:
        """Yields the messages received, in order. Each is forgotten when the next is asked for, so that one that Ctrl-C
        keeps from being handled comes again. Thread: training. Blocks: no."""
        while self._inbox:
            yield self._inbox[0]
            self._inbox.popleft()

    def wait_message(self, timeout_s: float) -> bool:
        """Blocks until :meth:`poll` would return something or :meth:`wake` is called; False when ``timeout_s`` passes
        first."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._news.clear()
            left = max(0.0, deadline - time.monotonic())
            heard = bool(self._inbox) or self._woken
            if heard or left == 0:
                self._woken = False
                return heard
            self._news.wait(left)

    def wake(self) -> None:
        """Ends the current or next :meth:`wait_message`, for news that does not come from an agent. Thread: any.
        Blocks: no."""
        self._woken = True
        self._news.set()

    def _deliver(self, message: Notice) -> None:
        with self._lock:
            if self._traces:
                take = self._traces.get(getattr(message, "id", None))  # type: ignore[arg-type]
                if take is not None:
                    take(message)
            if isinstance(message, (Traced, TraceEnded)):
                return
            if isinstance(message, (Recorded, Failed)):
                self._unacknowledged.pop(message.id, None)
            if isinstance(message, Failed) and message.tier == self.config.local.name:
                self._completes.pop(message.id, None)
            elif isinstance(message, Committed):  # those before it were handled in their order
                self._completes = {step: sent for step, sent in self._completes.items() if step > message.id}
            self._heard.hear(message)
            if isinstance(message, Flushed):
                self._flushed[message.ticket] = message.done
            elif isinstance(message, FileReady) and self._take_file is not None:
                self._take_file(message)
                self._woken = True
            else:
                self._inbox.append(message)
            self._news.set()
            self._changed.notify_all()

    def give_files_to(self, take: Callable[[FileReady], None]) -> None:
        """From now on calls ``take`` with each prepared file as soon as its notice comes, and now with those already
        received, because a trainer may not poll before its next save. ``take`` must not block. Thread: any."""
        with self._lock:
            self._take_file = take
            others: list[Notice] = []
            for message in self._inbox:
                if isinstance(message, FileReady):
                    take(message)
                else:
                    others.append(message)
            self._inbox = deque(others)

    def _accept(self, messages: Iterable[Message]) -> None:
        for message in messages:
            if not isinstance(message, get_args(Notice)):
                raise AgentError(f"the agent sent {type(message).__name__}, which is no notice")
            self._deliver(message)

    def _receive(self) -> None:
        while True:
            connection, framer = self._socket, self._framer
            try:
                while connection is not None:
                    data = connection.recv(1 << 16)
                    if not data:
                        break
                    self._accept(framer.feed(data))
            except (OSError, AgentError):
                logger.debug("connection to the agent broke", exc_info=True)
            with self._lock:
                if connection is not None:
                    connection.close()
                self._socket = None
                if self._closing:
                    return
            if not self._recover():
                return

    def _recover(self) -> bool:
        """Gets a new agent after one was lost; False when the client is closing. Thread: link. Blocks: while none can
        be had."""
        while not self._closing:
            now = time.monotonic()
            self._losses.append(now)
            while now - self._losses[0] > _LOSS_WINDOW_S:
                self._losses.popleft()
            self._events.emit(EventKind.AGENT_LOST, losses=len(self._losses))
            if self.is_down or len(self._losses) > _MAX_LOSSES:
                self._rest(now + _LOSS_WINDOW_S)
            else:
                logger.warning(
                    "rank %d: the checkpoint agent of %s is gone; starting another, training goes on",
                    self.rank,
                    self.config.local.address,
                )
            for attempt in range(_MAX_LOSSES):
                if self._closing:
                    return False
                try:
                    self._connect()
                except (OSError, AgentError) as error:
                    # Often the new agent, started by another rank, died too: wait before the next try.
                    logger.info("rank %d: no new checkpoint agent yet (%s)", self.rank, error)
                    threading.Event().wait(0.1 * 2**attempt)
                    continue
                with self._lock:
                    rested, self._next_start = self._next_start is not None, None
                    self._changed.notify_all()
                if rested:
                    logger.warning("rank %d: there is a checkpoint agent again; saves go on", self.rank)
                return True
        return False

    def _rest(self, until: float) -> None:
        """Waits until the next agent may be started: until the time that is given, a flush, or close."""
        with self._lock:
            said, self._next_start = self._next_start is not None, until
            self._changed.notify_all()
            if not said:
                logger.warning(
                    "rank %d: the checkpoint agent of %s was lost %d times within two minutes: saves are skipped, and"
                    " every two minutes another agent is started; training goes on. The agent's log is in %s/logs",
                    self.rank,
                    self.config.local.address,
                    len(self._losses),
                    self.config.run_folder,
                )
            self._changed.wait_for(
                lambda: self._closing or (self._next_start or 0.0) <= time.monotonic(), until - time.monotonic()
            )

    # -- close ----------------------------------------------------------------------------------------------------

    def flush(self, stage: Stage, *, tier: str | None = None, timeout_s: float) -> bool:
        """Waits until everything sealed so far has reached a stage, see :class:`~resiliency.agent.messages.Flush`.

        Blocks: up to ``timeout_s``, plus a second for the agent's answer; with 0 the agent is still asked once. Returns
            False when the time passes first.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            if self._next_start is not None:  # no agent: try now whether one can be started
                self._next_start = 0.0
                self._changed.notify_all()
                if not self._changed.wait_for(lambda: self._next_start != 0.0, min(timeout_s, _START_NOW_S)):
                    return False
        while not self.is_down and not self._closing:
            answer = self._ask_flush(stage, tier, max(0.0, deadline - time.monotonic()))
            if answer is not None:
                return answer
            if time.monotonic() >= deadline:
                break
        return False

    def _ask_flush(self, stage: Stage, tier: str | None, left: float) -> bool | None:
        """Sends one Flush and waits for the answer; None when the link broke meanwhile, and the caller must send it
        again."""
        with self._lock:
            connection = self._socket
            if connection is None:
                self._changed.wait(min(left, 1.0))  # the link thread notifies when it has a new agent, or waits
                return None
            self._flushes += 1
            ticket = self._flushes
            try:
                connection.sendall(pack(Flush(ticket=ticket, stage=stage, tier=tier, timeout_s=left)))
            except OSError:
                self._changed.wait(min(left, 0.2))
                return None
            self._changed.wait_for(lambda: ticket in self._flushed or self._socket is not connection, left + 1.0)
            return self._flushed.pop(ticket, None)

    def close(self, *, timeout_s: float = 10.0, others_s: float = 0.0) -> None:
        """Disconnects; the agent exits when every rank has disconnected. Idempotent.

        Blocks: up to ``timeout_s``; if another rank has started the agent, up to ``others_s`` until the agent is gone.
        """
        deadline = time.monotonic() + timeout_s
        _still_running[:] = [agent for agent in _still_running if agent.poll() is None]
        with self._lock:
            self._closing = True
            self._changed.notify_all()
            connection, embedded, process = self._socket, self._embedded, self._process
            agent = Peer(connection) if connection is not None and (process is not None or others_s) else None
        if connection is not None:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                logger.debug("the agent had disconnected first", exc_info=True)
        if self._thread is not None:
            self._thread.join(timeout_s)
        if agent is not None:
            with agent:
                if agent.runs(AGENT_WORD):  # not a trainer in which the agent is embedded
                    until = deadline if process is not None else time.monotonic() + others_s
                    agent.wait_gone(until - time.monotonic())
        if process is not None:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.info(
                    "the checkpoint agent (pid %d) is still uploading; it exits when it has finished", process.pid
                )
                _still_running.append(process)
            self._process = None
        if embedded is not None:
            embedded.close(max(0.0, deadline - time.monotonic()))


def _kill(agent: Peer) -> bool:
    """Kills the process of an agent, unless another rank has just done that; False when it is a trainer, in which the
    agent is embedded, or still there. Blocks: half a second at most."""
    if agent.pid != os.getpid() and agent.runs(AGENT_WORD):
        agent.kill()
    return agent.pid != os.getpid() and agent.wait_gone(_KILLED_S)
