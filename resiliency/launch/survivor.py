"""A rank's process that goes on when a peer dies: it leaves the attempt, and takes part in the next one."""

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
from resiliency.launch.attempt_state import process_state
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
from resiliency.runtime import heartbeat
from resiliency.runtime.channel import receive, send
from resiliency.runtime.start_times import script_begins
from resiliency.settings import LAUNCHER_VARIABLE, all_variables, set_variable

__all__ = ["AttemptEnded", "restartable"]

logger = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

#: Seconds that the launcher gets to say, after an error that looks like a lost peer, whether there is another attempt.
#: It says so when it knows who failed; it may be stopped, or busy with ranks that do not end.
_WORD_TIMEOUT_S = 30.0
#: Seconds until a thread that has not left is interrupted again: the code that it runs may go on after any exception.
_AGAIN_S = 5.0
#: Seconds until operations are aborted again, because what a thread waits on cannot be seen while it runs, and until
#: the thread is interrupted again when that had no effect.
_SOON_S = 0.05
#: Seconds for which a thread is spared while it runs code where an exception would do harm, and while it imports. A
#: half finished import may fail in the next attempt, which costs a restart, and torch imports its compiler for seconds
#: when the first DDP model is made. Shorter than the launcher's own deadline.
_SPARED_S, _SPARED_IMPORTING_S = 2.0, 8.0
#: Seconds for which the main thread may wait in native code; the second number where it can only wait for peers: an
#: operation of gloo whose direct neighbours are alive cannot be ended from outside. The third is the CPU time that
#: handling signals may take meanwhile.
_STUCK_S, _STUCK_FOR_PEERS_S, _STUCK_CPU_S = 2.0, 0.5, 0.02
#: Most characters of an error, with its traceback, that the launcher shows.
_MAX_ERROR = 4000
#: Number of the start that made this process.
_FIRST = -1
#: Interrupts the main thread. No one else uses this signal: not Python, torch, Lightning (SIGUSR1, SIGUSR2) or
#: debuggers.
_SIGNAL = signal.SIGRTMIN + 10


class AttemptEnded(BaseException):
    """Raised in the main thread of a rank, wherever it is, to make it leave an attempt in which a peer has died.

    Not an ``Exception``, so that code that catches errors and goes on does not swallow it.
    """


def restartable(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Lets ``function`` be run again in this process when another rank has died, instead of starting a new process.

    Under ``resiliency run``, when a rank dies, the others leave ``function`` by an exception (:class:`AttemptEnded`, or
    the error that the lost peer caused), drop process groups and worker processes of data loaders, and call it again
    with the environment of the next attempt. Only the lost rank is a new process. Imports and the CUDA context are
    kept. Without ``resiliency run`` the decorated function behaves like ``function``.

    ``function`` must build all that belongs to an attempt: process group, model, trainer, data loaders; and resume from
    the newest checkpoint::

        @restartable
        def main():
            trainer = Trainer(callbacks=[ModelCheckpoint(dirpath="checkpoints")])
            trainer.fit(Model(), data)

        main()

    What modules hold is kept. There must be no collective operation before the call, because only new processes run the
    code before it. Threads that ``function`` started are not ended.

    Thread: main. Only the first call in a process can be run again. Collective: no. A rank that does not leave within
        10 s (``--leave-timeout``) is killed, and a new process takes its place.

    Raises:
        ConfigError: ``function`` is a coroutine function or a generator, so that calling it would run nothing.
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

    The launcher numbers the starts of ranks; -1 is the start that made this process. Threads: the main thread runs the
    function, a daemon thread receives messages, and another one interrupts the main thread while it is to leave.
    """

    _joined_pid = 0

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._number = _FIRST
        #: True while the main thread runs the function.
        self._inside = False
        self._changed = threading.Condition()
        #: Number of the last start that this rank was told to leave.
        self._to_leave = _FIRST - 1
        #: Number of the last start that it has left.
        self._left = _FIRST - 1
        #: The launcher has said that no rank will be told to leave any more.
        self._no_restart = False
        #: Monotonic seconds when the main thread was told to leave; shortly after, it is spared where an exception
        #: would do harm.
        self._told_s = 0.0
        #: Monotonic seconds when the main thread is to be interrupted next. At once as long as no exception was raised,
        #: because a signal that comes just before a system call does not end that call.
        self._interrupt_at_s = 0.0
        #: The main thread has handled the signal, so it runs Python code and is not stuck in native code.
        self._heard = False
        #: Messages for the main thread; None: the launcher is gone.
        self._orders: queue.SimpleQueue[tuple[dict[str, Any], list[int]] | None] = queue.SimpleQueue()

    @classmethod
    def join(cls) -> _Survivor | None:
        """Connects to the launcher; None without a launcher, or when this call cannot be run again. Blocks: no."""
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
        """Calls ``function`` again and again, until a call ends in an attempt that has not failed; returns its
        result."""
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
                state.restore()  # before leave_attempt restores the handler of an alarm
                leave_attempt(ended, children=children, handlers=handlers)
                del ended
                state.restore()  # after clean-up code that ran while objects were released
                self._meet_again()
        finally:
            with self._changed:  # ends the interrupting thread, also when this rank has not left
                self._left = max(self._left, self._to_leave)
                self._changed.notify_all()
            signal.signal(_SIGNAL, before)
            sys.unraisablehook = hook
            with suppress(OSError):
                self._connection.shutdown(socket.SHUT_RDWR)  # ends the listening thread

    def _call(self, function: Callable[[], Result]) -> _Returned[Result] | BaseException:
        """The function's result, or the exception that ended it when it is to be called again.

        Raises:
            BaseException: raised by ``function`` for another reason than the end of the attempt.
        """
        try:
            try:
                self._inside = True
                if self._is_to_leave():
                    raise AttemptEnded("a peer died when this attempt began")
                result = function()
            finally:
                self._inside = False
        except BaseException as error:  # Boundary: any exception after an order to leave is how the function left.
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
        """Asks the launcher whether this rank has finished: True when it agrees, False when the attempt has failed.
        Blocks: until it answers.
        """
        self._say("finished")
        order = self._orders.get()
        if order is not None and order[0]["kind"] == "start":
            self._orders.put(order)  # the order to leave came at the same time
        return not self._is_to_leave()

    def _meet_again(self) -> None:
        """Waits for the next attempt, and takes over its environment and output. Blocks: until the launcher starts it.

        Raises:
            ResiliencyError: the launcher has ended, or says that no attempt follows.
        """
        while self._is_to_leave():
            self._has_left()  # everything was released; also skips a start that was superseded before it began here
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
        with suppress(OSError):  # without a launcher there is no further attempt, and nobody to tell
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
            self._no_restart = False  # a launcher may say so, and change its mind when hosts come or go
            self._changed.notify_all()
        threading.Thread(target=self._interrupt_until_left, args=(number,), daemon=True).start()

    def _interrupt_until_left(self, number: int) -> None:
        main = threading.main_thread().ident
        assert main is not None
        stuck_s, cpu_s = 0.0, _cpu_s(main)
        self._told_s, self._interrupt_at_s, self._heard = time.monotonic(), 0.0, False
        with self._changed:
            while self._left < number:
                # The lock is held, so that the main thread cannot go on meanwhile: groups of its next attempt must not
                # be aborted.
                if self._inside:
                    abort_collectives()
                if self._inside and time.monotonic() >= self._interrupt_at_s:
                    signal.pthread_kill(main, _SIGNAL)
                self._changed.wait_for(lambda: self._left >= number, _SOON_S)
                waits = self._inside and not self._heard and _cpu_s(main) - cpu_s < _STUCK_CPU_S
                stuck_s = stuck_s + _SOON_S if waits else 0.0
                for_peers = stuck_s >= _STUCK_FOR_PEERS_S and waits_for_peers_only(sys._current_frames().get(main))
                if for_peers or stuck_s >= _STUCK_S:
                    _end_stuck(main)

    # -- in the main thread, between any two byte codes ---------------------------------------------------------------

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
        """Replaces ``sys.unraisablehook``: notices an interrupt that Python swallowed because it came where no
        exception can propagate, as in a callback of a weak reference, and has it repeated at once."""
        if isinstance(unraisable.exc_value, AttemptEnded):
            self._interrupt_at_s = 0.0
        else:
            hook(unraisable)


def _text_of(error: BaseException) -> str:
    """The error with its traceback, without frames of this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


def _cpu_s(thread: int) -> float:
    """CPU seconds that a thread of this process has used."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread))


def _end_stuck(thread: int) -> None:
    """Ends this process at once, because the launcher would kill it later; a new process takes its place."""
    frame = sys._current_frames().get(thread)
    where = f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})" if frame is not None else "unknown"
    logger.warning(
        "this rank is stuck in native code that cannot be interrupted, called in %s; its process ends, and the launcher"
        " starts a new one",
        where,
    )
    sys.stderr.flush()
    os._exit(1)
