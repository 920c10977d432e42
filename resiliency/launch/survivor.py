"""A rank that stays in its process when a peer dies: it leaves what it does, and meets the others again."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, Generic, ParamSpec, TypeVar

from resiliency.errors import ConfigError, ResiliencyError
from resiliency.launch import heartbeat
from resiliency.launch.attempt_state import process_state
from resiliency.launch.channel import receive, send
from resiliency.launch.gloo_waits import GlooWaits
from resiliency.launch.leaving import (
    abort_collectives,
    child_processes,
    is_importing,
    leave_attempt,
    looks_like_a_lost_peer,
    may_be_interrupted,
    signal_handlers,
    waits_for_peers_only,
)
from resiliency.launch.peer_connections import PeerConnections
from resiliency.launch.start_times import script_begins
from resiliency.settings import LAUNCHER_VARIABLE, all_variables, set_variable

__all__ = ["AttemptEnded", "restartable"]

logger = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

#: Seconds for the launcher to say whether there is another attempt, after an error that looks like a lost peer. It says
#: so when it has seen who failed; it may be stopped, or busy with ranks that do not end.
_WORD_TIMEOUT_S = 30.0
#: Seconds until a thread that did not leave is interrupted again: what it runs may go on after any exception.
_AGAIN_S = 5.0
#: Seconds until operations are aborted again, because what a thread waits on is not seen while it runs, and until it
#: is interrupted again when that had no effect.
_SOON_S = 0.05
#: Seconds for which a thread may be in a place where it is not to be interrupted, and in an import. What is half
#: imported may fail in the next attempt, which costs a restart, and torch imports its compiler for seconds when the
#: first model of DDP is made. Less than the launcher waits.
_SPARED_S, _SPARED_IMPORTING_S = 2.0, 8.0
#: Seconds for which the main thread may wait in native code when all that it could wait for has been ended, less where
#: that can only be peers: a wait of gloo may outlive the connection to a dead one, and ``gloo_waits`` does not find it
#: in every torch. What it may compute meanwhile: signals take some.
_STUCK_S, _STUCK_FOR_PEERS_S, _STUCK_CPU_S = 2.0, 0.5, 0.02
#: Characters of an error, with where it was raised, that the launcher shows.
_MAX_ERROR = 4000
#: Number of the start that made this process.
_FIRST = -1
#: Interrupts the main thread. Nobody uses it: not Python, torch, Lightning (SIGUSR1, SIGUSR2) or debuggers.
_SIGNAL = signal.SIGRTMIN + 10


class AttemptEnded(BaseException):
    """Raised in the main thread of a rank, wherever it is, to make it leave an attempt in which a peer has died.

    Not an ``Exception``, so that code that goes on after errors does not swallow it.
    """


def restartable(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Lets ``function`` be run again in this process when another rank has died, instead of starting a new process.

    Under ``resiliency run``, when a rank dies, the others leave ``function`` by an exception (:class:`AttemptEnded`, or
    the error that the lost peer caused), drop process groups and worker processes of data loaders, and call it again
    with the environment of the next attempt. Only the lost rank is a new process. Imports and the CUDA context are
    kept. Anywhere else this is ``function``.

    ``function`` must build all that belongs to an attempt: process group, model, trainer, data loaders; and resume from
    the newest checkpoint::

        @restartable
        def main():
            trainer = Trainer(callbacks=[ModelCheckpoint(dirpath="checkpoints")])
            trainer.fit(Model(), data)

        main()

    What modules hold is kept. Before the call there must be no collective operation, because only new processes run
    what is there. Threads that ``function`` started are not ended.

    Thread: main. One call in a process can be run again, the first. Collective: no. A rank that does not leave within
    10 s (``--leave-timeout``) is killed, and a new process takes its place.

    Raises:
        ConfigError: a call of ``function`` runs nothing: it is a coroutine function or a generator.
    """
    if (
        inspect.iscoroutinefunction(function)
        or inspect.isgeneratorfunction(function)
        or inspect.isasyncgenfunction(function)
    ):
        raise ConfigError(
            f"restartable({function.__qualname__}): a call of it only makes a coroutine or a generator, and what that"
            " does later is not run again; decorate a plain function that runs it, as with asyncio.run"
        )

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        survivor = _Survivor.join()
        if survivor is None:
            return function(*args, **kwargs)
        return survivor.run(lambda: function(*args, **kwargs))

    return run


@dataclass(frozen=True)
class _Returned(Generic[Result]):
    value: Result


class _Survivor:
    """This process's connection to the launcher.

    Starts of ranks are numbered by the launcher; -1 is the one that made this process. Threads: the main thread runs
    the function; a daemon thread listens.
    """

    _joined_pid = 0

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._number = _FIRST
        #: The main thread is in the function.
        self._inside = False
        self._changed = threading.Condition()
        #: The last start that this rank was told to leave.
        self._to_leave = _FIRST - 1
        #: The last one that it has left.
        self._left = _FIRST - 1
        #: Nobody will be told to leave any more.
        self._no_restart = False
        #: Monotonic seconds when the main thread was told to leave: it is left alone where an exception would do harm.
        self._told_s = 0.0
        #: Monotonic seconds when it is to be interrupted next. At once, as long as it has not raised anything: a signal
        #: that comes just before a system call does not end that.
        self._interrupt_at_s = 0.0
        #: It has been interrupted, so it runs Python code.
        self._heard = False
        #: Messages for the main thread; None: the launcher is gone.
        self._orders: queue.SimpleQueue[tuple[dict[str, Any], list[int]] | None] = queue.SimpleQueue()

    @classmethod
    def join(cls) -> _Survivor | None:
        """Connects to the launcher; None where there is none, or when this call cannot be run again."""
        address = all_variables().get(LAUNCHER_VARIABLE, "")
        if not address:
            return None
        if threading.current_thread() is not threading.main_thread():
            logger.warning("restartable() was called outside the main thread: this process ends when a peer dies")
            return None
        if cls._joined_pid == os.getpid():
            logger.warning("a second call of a restartable function: this process ends when a peer dies")
            return None
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect("\0" + address)
        except OSError as error:
            logger.warning("the launcher cannot be reached (%s): this process ends when a peer dies", error)
            connection.close()
            return None
        cls._joined_pid = os.getpid()
        return cls(connection)

    def run(self, function: Callable[[], Result]) -> Result:
        """Calls ``function`` until it has ended in an attempt that has not."""
        before, hook = signal.signal(_SIGNAL, self._interrupt), sys.unraisablehook
        sys.unraisablehook = functools.partial(self._swallowed, hook)
        threading.Thread(target=self._listen, name="resiliency-launcher", daemon=True).start()
        try:
            children, handlers, state = child_processes(), signal_handlers(), process_state()
            while True:
                self._say("inside")
                ended = self._call(function)
                if isinstance(ended, _Returned):
                    return ended.value
                state.restore()  # before the handler of an alarm is gone
                leave_attempt(ended, children=children, handlers=handlers)
                del ended
                state.restore()  # after the clean-ups of what was taken apart
                self._meet_again()
        finally:
            with self._changed:  # ends the thread that interrupts, also when this rank has not left
                self._left = max(self._left, self._to_leave)
                self._changed.notify_all()
            signal.signal(_SIGNAL, before)
            sys.unraisablehook = hook
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)  # ends the thread that listens

    def _call(self, function: Callable[[], Result]) -> _Returned[Result] | BaseException:
        """What it returns, or what ended it when it is to be called again.

        Raises:
            BaseException: of ``function``, when that is not because the attempt has ended.
        """
        try:
            try:
                self._inside = True
                if self._is_to_leave():
                    raise AttemptEnded("a peer died when this attempt began")
                result = function()
            finally:
                self._inside = False
        except BaseException as error:  # Boundary: whatever it raises after it was told to leave is how it left.
            if looks_like_a_lost_peer(error):
                self._say("lost_peer", error=_text_of(error)[-_MAX_ERROR:])
                with self._changed:
                    self._changed.wait_for(lambda: self._is_to_leave() or self._no_restart, _WORD_TIMEOUT_S)
            if not self._is_to_leave():
                raise
            heartbeat.pause()
            return error
        if self._may_end():
            return _Returned(result)
        return AttemptEnded("a peer died when this rank had finished")

    def _has_left(self) -> None:
        with self._changed:
            self._left = self._number
            self._changed.notify_all()

    def _is_to_leave(self) -> bool:
        return self._to_leave >= self._number

    def _may_end(self) -> bool:
        """True when the launcher agrees that this rank has finished, False when the attempt has failed. Blocks: for
        its answer."""
        self._say("finished")
        order = self._orders.get()
        if order is not None and order[0]["kind"] == "start":
            self._orders.put(order)  # it was told to leave at the same time
        return not self._is_to_leave()

    def _meet_again(self) -> None:
        """Waits for the next attempt, and takes its environment and output. Blocks: until the launcher starts it."""
        while self._is_to_leave():
            self._has_left()  # and given up what it held; also one that has ended before it was begun here
            order = self._orders.get()
            if order is None or (order[0]["kind"] == "no_restart" and self._no_restart):
                raise ResiliencyError("the launcher ends the job, so there is no further attempt")
            message, output = order
            if message["kind"] != "start":
                continue
            self._number = message["number"]
            for name, value in message["environment"].items():
                set_variable(name, value)
            for number, fd in enumerate(output, start=1):
                with suppress(AttributeError, OSError, ValueError):  # None, broken or closed
                    (sys.stdout if number == 1 else sys.stderr).flush()
                os.dup2(fd, number)
                os.close(fd)
        heartbeat.start_anew()
        script_begins()
        logger.info("this process goes on in the next attempt")

    def _say(self, kind: str, **more: str) -> None:
        with suppress(OSError):  # no launcher: no further attempt, and nothing to be told
            send(self._connection, {"kind": kind, "number": self._number, **more})

    # -- other threads ------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            while (received := receive(self._connection)) is not None:
                if received[0]["kind"] == "leave":
                    self._leave(received[0]["number"])
                    continue
                if received[0]["kind"] == "no_restart":
                    self._expect_no_restart()
                self._orders.put(received)
        except (OSError, ValueError) as error:
            logger.debug("the connection to the launcher has ended: %s", error)
        self._expect_no_restart()
        self._orders.put(None)

    def _expect_no_restart(self) -> None:
        with self._changed:
            self._no_restart = True
            self._changed.notify_all()

    def _leave(self, number: int) -> None:
        with self._changed:
            self._to_leave = number
            self._no_restart = False  # of a launcher that thought so, until hosts came or went
            self._changed.notify_all()
        threading.Thread(target=self._interrupt_until_left, args=(number,), daemon=True).start()

    def _interrupt_until_left(self, number: int) -> None:
        main = threading.main_thread().ident
        assert main is not None
        connections, gloo_waits, waits, stuck_s, cpu_s = PeerConnections(), GlooWaits(), False, 0.0, _cpu_s(main)
        self._told_s, self._interrupt_at_s, self._heard = time.monotonic(), 0.0, False
        with self._changed:
            while self._left < number:
                # The lock is held, so that it does not go on meanwhile: groups of its next attempt are not aborted.
                # Also when it has left the function: groups wait for their operations as they are destroyed.
                abort_collectives(connections, groups=self._inside, forming=waits)
                if self._inside and time.monotonic() >= self._interrupt_at_s:
                    signal.pthread_kill(main, _SIGNAL)
                self._changed.wait_for(lambda: self._left >= number, _SOON_S)
                if self._left < number:
                    gloo_waits.end(closed=connections.closed)
                waits = self._inside and not self._heard and _cpu_s(main) - cpu_s < _STUCK_CPU_S
                stuck_s = stuck_s + _SOON_S if waits else 0.0
                for_peers = stuck_s >= _STUCK_FOR_PEERS_S and waits_for_peers_only(sys._current_frames().get(main))
                if for_peers or stuck_s >= _STUCK_S:
                    _end_stuck(main)

    # -- the main thread, wherever it is ------------------------------------------------------------------------------

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if not (self._inside and self._is_to_leave()):
            return
        self._heard = True
        now, outermost = time.monotonic(), _Survivor._call.__code__
        if now < self._told_s + _SPARED_S and not may_be_interrupted(frame, outermost):
            return
        if now < self._told_s + _SPARED_IMPORTING_S and is_importing(frame, outermost):
            return
        self._interrupt_at_s = now + _AGAIN_S
        raise AttemptEnded("another rank has died: this one leaves its attempt and begins the next one")

    def _swallowed(self, hook: Callable[[Any], Any], unraisable: Any) -> None:
        """In the place of ``sys.unraisablehook``: takes what was raised where Python cannot let it go on, as in a
        callback of a weak reference."""
        if isinstance(unraisable.exc_value, AttemptEnded):
            self._interrupt_at_s = 0.0
        else:
            hook(unraisable)


def _text_of(error: BaseException) -> str:
    """The error and where it was raised, without frames of this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


def _cpu_s(thread: int) -> float:
    """Seconds that a thread of this process has computed."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def _end_stuck(thread: int) -> None:
    """Ends a process that would be killed later: its place is given to a new one at once."""
    frame = sys._current_frames().get(thread)
    where = f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})" if frame is not None else "unknown"
    logger.warning(
        "this rank waits in native code that cannot be interrupted, for something that no longer comes, in %s; it ends",
        where,
    )
    sys.stderr.flush()
    os._exit(1)
