"""Listens for preemption notices during one fit on one rank, and interrupts the rank if it is stuck."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Sequence
from datetime import timedelta
from types import FrameType
from typing import Any

from resiliency.callbacks.checkpointing.saver import CheckpointSaver
from resiliency.checkpoint.checkpointer import default_coordinator
from resiliency.checkpoint.coordinator import StoreCoordinator
from resiliency.events import EventKind
from resiliency.faultpoints import hit
from resiliency.launch.leaving import abort_collectives, looks_like_a_lost_peer, may_be_interrupted
from resiliency.plugins import _lightning
from resiliency.preemption.board import Board, own_connection
from resiliency.preemption.notice import Notice
from resiliency.preemption.signals import Signals
from resiliency.preemption.sources import FileSource, MetadataSource
from resiliency.preemption.stop import Stop, end_process

__all__ = ["NoticeWatch", "Preempted"]

logger = logging.getLogger(__name__)

#: Time for the other ranks to receive a notice and publish their position. Short is enough, because threads of these
#: ranks do that, whatever the ranks train at the moment.
_AGREE_TIMEOUT = timedelta(seconds=3)
#: Seconds that a failing rank waits for a notice that may be the cause of its failure.
_SOON_S = 1.0
#: Signal that interrupts the main thread. Neither Python, torch, Lightning nor :mod:`resiliency.launch` uses it.
_INTERRUPT = signal.SIGRTMIN + 11
#: A code object that no frame runs.
_NOWHERE = (lambda: None).__code__


class Preempted(SystemExit):
    """Ends a preempted job, which has saved what it could. ``code`` is the exit code of the process."""


class NoticeWatch:
    """Listens for preemption notices during one fit on one rank, from construction to :meth:`close`.

    Attributes:
        saver: saver of the callback that saves; None before training, and when Lightning's own code saves.
        stepping: True while an optimizer step may be half done.
        interrupted: True once the main thread was interrupted.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        grace_s: float,
        signals: Sequence[int],
        notice_file: str | None,
        metadata_server: str | None,
        exit_code: int,
    ) -> None:
        self.saver: CheckpointSaver | None = None
        self.stepping = self.interrupted = False
        self._aborted = False  # this object has ended the waits for other ranks
        self._rank, self._grace_s, self._exit_code = trainer.global_rank, grace_s, exit_code
        #: The first exception that a signal handler of the user has raised; it ends the fit after the save.
        self.users_exit: BaseException | None = None
        self._noticed_it = threading.Event()
        self._main = threading.main_thread().ident
        coordinator = default_coordinator(trainer.global_rank, trainer.world_size)
        gather = coordinator
        if isinstance(coordinator, StoreCoordinator):
            gather = StoreCoordinator(
                own_connection(coordinator.store),
                rank=coordinator.rank,
                world_size=coordinator.world_size,
                prefix=coordinator.prefix,
            )
        self._board: Board | None = None

        def announce(notice: Notice) -> None:
            if self._board is not None:
                self._board.announce(notice)

        def published(mine: int) -> list[int]:
            timeout = min(_AGREE_TIMEOUT, timedelta(seconds=grace_s / 3))
            return [int(one) for one in gather.all_gather("stop", str(mine).encode(), timeout=timeout)]

        self.stop = Stop(
            rank=self._rank,
            announce=announce,
            gather=published,
            noticed=self._noticed,
            interrupt=self._interrupt,
            end=lambda: end_process(exit_code),
        )
        if isinstance(coordinator, StoreCoordinator):
            self._board = Board(
                coordinator.store,
                prefix=coordinator.prefix,
                rank=coordinator.rank,
                world_size=coordinator.world_size,
                told=self.stop.tell,
            )
        self._restore_broadcast = _lightning.stop_asking_for_sigterm(trainer)
        #: The handlers that the signals had before.
        self.handlers_before = {number: signal.getsignal(number) for number in signals}
        self._user_handlers = {
            number: _lightning.users_handler(trainer, number, handler)
            for number, handler in self.handlers_before.items()
        }
        self._before_interrupt: Any = None
        #: Held while the signal is sent: without its handler, which Lightning's teardown and close() take away, it
        #: would end the process.
        self._interrupting = threading.Lock()
        self._may_interrupt = threading.current_thread() is threading.main_thread()
        if self._may_interrupt:
            self._before_interrupt = signal.signal(_INTERRUPT, self._interrupted) or signal.SIG_DFL
        self._signals: Signals | None = None
        if signals:
            self._signals = Signals(signals, self._told_by_signal, self._handle, self._user_handlers)
        self._sources: list[FileSource | MetadataSource] = []
        if notice_file is not None:
            self._sources.append(FileSource(notice_file, self._told_by_source))
        if metadata_server is not None:
            self._sources.append(MetadataSource(metadata_server, self._told_by_source))

    # -- notices, called in threads of their sources

    def _told_by_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        self.stop.tell(Notice(source=name, rank=self._rank, grace_s=self._grace_s, signal=number))

    def _told_by_source(self, source: str) -> None:
        self.stop.tell(Notice(source=source, rank=self._rank, grace_s=self._grace_s))

    def _noticed(self, notice: Notice) -> None:
        self._noticed_it.set()
        logger.warning(
            "%s told rank %d that the job is to go: all ranks save and leave within %.0f s",
            notice.source,
            notice.rank,
            notice.grace_s,
        )
        saver = self.saver
        if saver is not None and saver.engine is not None:
            events = saver.engine.session.events
            events.emit(EventKind.PREEMPTION_NOTICE, source=notice.source, told=notice.rank, deadline_s=notice.grace_s)

    def told_because_of(self, exception: BaseException) -> bool:
        """True when the exception comes from a preemption of the whole job: all ranks have received the notice, or
        this rank waited for the others for so long that it was interrupted.

        False when only this rank was told to end, because another rank has failed.

        Blocks: up to 1 s for the notice, if the exception is an error that the same signal may have caused in another
        rank or a data loader worker and that came faster than the signal; and up to 1 s for the other ranks to answer.
        """
        if isinstance(exception, Preempted):
            return True
        lost_peer = looks_like_a_lost_peer(exception)
        if lost_peer and self._aborted:
            return True
        caused = lost_peer or "DataLoader worker" in str(exception)
        # When a rank has failed, a launcher also ends its peers with a signal; but the failed rank does not answer.
        return self._noticed_it.wait(_SOON_S if caused else 0.0) and self.stop.agreed(timeout_s=_SOON_S)

    # -- interruption

    def _interrupt(self) -> None:
        # Set before, because the main thread may handle the error of an aborted wait before the signal reaches it.
        self._aborted = True
        abort_collectives()
        hit("preemption.interrupt", rank=self._rank)
        with self._interrupting:
            if self._may_interrupt and self._main is not None:
                signal.pthread_kill(self._main, _INTERRUPT)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        """Signal handler in the main thread: raises :class:`Preempted` where the thread may be interrupted."""
        if may_be_interrupted(frame, _NOWHERE) and not _lightning.is_handling_exception(frame):
            self.interrupted = True
            raise Preempted(self._exit_code)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Calls the user's handler of a signal, in the main thread."""
        handler = self._user_handlers.get(number)
        if not callable(handler):
            return
        try:
            handler(number, frame)
        except BaseException as error:  # Boundary: the user's handler wants to end the process; first all ranks save.
            self.users_exit = self.users_exit or error

    def leaves(self) -> None:
        """The main thread has left what it did: from now on it is not interrupted. Idempotent. Thread: any."""
        self.stop.leaves()
        with self._interrupting:
            self._may_interrupt = False

    def close(self) -> None:
        """Stops listening and restores the signal handlers. Idempotent. Blocks: up to 1 s for each thread."""
        self.leaves()
        self.stop.close()
        for source in self._sources:
            source.close()
        if self._signals is not None:
            self._signals.close()
        if self._board is not None:
            self._board.close()
        if self._before_interrupt is not None and signal.getsignal(_INTERRUPT) == self._interrupted:
            signal.signal(_INTERRUPT, self._before_interrupt)
        self._restore_broadcast()
