"""Torch's elastic agent with its own way to start ranks, to detect their end, and to restart them.

Torch does: flags, rendezvous, ranks and environment, log files, error files, events, signals, exit codes. This file
replaces, for the reasons given (measured by ``benchmarks/restart.py``):

* ranks are forked from a zygote, because a fresh interpreter needs seconds to import torch and Lightning;
* the end of a rank is seen at once, through its pidfd;
* a restart on one host skips the rendezvous, because the hosts have not changed; each attempt gets its own store;
* ranks whose process can run the next attempt (:func:`~resiliency.launch.survivor.restartable`) are told to leave the
  attempt, not killed, because a new CUDA context costs seconds.
"""

from __future__ import annotations

import inspect
import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any, cast

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from resiliency.events import EventKind
from resiliency.launch.attempt_stores import AttemptStores
from resiliency.launch.fresh import parse_command
from resiliency.launch.hang_watch import HangKiller
from resiliency.launch.preload import modules_to_preload
from resiliency.launch.rank_handlers import Kept, RankHandler, StillRunning, handlers_made_by, kill_group
from resiliency.launch.rank_links import RankLink, RankLinks
from resiliency.launch.restarts import RankFailure, delay_before_restart, failure_text, first_failure, lost_peer_text
from resiliency.launch.zygote import CannotFork, HostZygote
from resiliency.runtime.exit_codes import PREEMPTED
from resiliency.runtime.job_log import JobLog
from resiliency.runtime.processes import pidfds_of, reap_others, wait_for_any
from resiliency.settings import LAUNCHER_VARIABLE, STARTS_VARIABLE, all_variables

__all__ = ["StandbyAgent", "StandbyOptions", "last_lines", "reason_of", "short"]

logger = logging.getLogger(__name__)

#: Seconds between two looks at the ranks while nothing happens; an event ends the wait earlier.
_QUIET_S = 1.0
#: Seconds that the peers of a failed rank get to end by themselves.
_FALL_S = 1.0
#: Seconds to wait, after a rank of this host has lost a peer, for a rank of this host to fail, or (where there are
#: other hosts) for another host to announce a new rendezvous.
_CAUSE_S, _CAUSE_ELSEWHERE_S = 2.0, 5.0
_TAIL_BYTES = 16 * 1024
#: Characters of a failure reason to show; torch's report has the whole text.
_MOST_OF_A_REASON = 300
#: Limit for one job, so that imports that end the process are not retried for ever.
_MOST_ZYGOTES = 1000
#: What torch's own can be told.
_TORCHS_SHUTDOWN = inspect.signature(LocalElasticAgent._shutdown).parameters


@dataclass(frozen=True, kw_only=True)
class StandbyOptions:
    """How :class:`StandbyAgent` starts, watches and restarts ranks.

    Attributes:
        standby: fork ranks from a zygote; False: every rank is a fresh interpreter.
        preload: modules to import in advance, after those that the script was found to import.
        crash_loop_s: after consecutive attempts that each failed sooner than this many seconds, the delay before the
            next one grows.
        hang_timeout_s: a rank that has made no progress for this many seconds, and for ten times its longest step, is
            killed; 0: never.
        leave_timeout_s: seconds that a rank whose process goes on gets to leave its attempt.
        one_host: the job has exactly one host, so nothing about the hosts changes between attempts.
    """

    standby: bool
    preload: tuple[str, ...]
    crash_loop_s: float
    hang_timeout_s: float
    leave_timeout_s: float
    one_host: bool


class StandbyAgent(LocalElasticAgent):
    """Starts, watches and restarts the ranks of one host; see the module. Thread: the launcher's main thread.

    Args:
        options: settings of this library.
        arguments, named: passed on to torch's class.
    """

    #: Seconds; of the class where torch knows none.
    _shutdown_timeout: int = 30

    def __init__(self, options: StandbyOptions, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._options = options
        spec = self._worker_group.spec
        # Torch's loop sleeps for monitor_interval and then looks; here the look itself waits instead.
        self._interval_s, spec.monitor_interval = float(spec.monitor_interval), 0
        self._zygote: HostZygote | None = None
        self._zygotes = 1
        self._told_why = False
        self._stores = AttemptStores(keep_s=options.leave_timeout_s + _FALL_S)
        #: Number of ranks that ran at the last look; if fewer run now, the next look does not wait.
        self._running = 0
        self._began_s = 0.0
        #: Seconds that each attempt so far ran until a rank failed.
        self._lengths_s: list[float] = []
        self._log = JobLog()
        self._log.emit(EventKind.LAUNCHER_STARTED)
        self._links = RankLinks(fork=self._fork, log=self._log_is_at)
        self._hangs = HangKiller(self._links, floor_s=options.hang_timeout_s, report=self._log_hang)
        #: Ranks that were killed in this attempt because they hung.
        self._hung: set[int] = set()
        #: A rank of this host ended with PREEMPTED: it was told to go, and has left after a save.
        self.preempted = False
        #: True while ranks are stopped in order to be restarted.
        self._restarts = False
        #: By local rank: processes that were told to leave their attempt, to run the next one.
        self._kept: dict[int, Any] = {}
        #: Number of the current start of the ranks, from 0; -1: none yet.
        self._start_number = -1
        self._start_zygote()

    # -- how ranks are started ----------------------------------------------------------------------------------------

    def _start_zygote(self) -> None:
        spec = self._worker_group.spec
        if not self._options.standby or not isinstance(spec.entrypoint, str):
            return
        words = (spec.entrypoint, *map(str, spec.args))
        command = parse_command(words)
        if isinstance(command, str):
            self._say_why(command)
            return
        modules = [*modules_to_preload(command, os.getcwd()), *self._options.preload]
        self._zygote = HostZygote(
            list(dict.fromkeys(modules)), standbys=spec.local_world_size, environment=all_variables(), words=words[1:]
        )

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._replace_zygote()
        self._start_number += 1
        count, kept = worker_group.spec.local_world_size, len(self._kept)
        self._log.emit(EventKind.RANKS_STARTED, count=count, kept=kept, starts=self._start_number)
        with handlers_made_by(self._handler):
            ids = cast(dict[int, Any], super()._start_workers(worker_group))
        self._end_kept()  # processes left without a rank: the host has fewer ranks now
        self._hung.clear()
        self._running, self._began_s = len(ids), time.monotonic()
        return ids

    def _replace_zygote(self) -> None:
        """Starts another zygote if one worked before and has ended, so that it is ready when a rank needs it."""
        if self._zygote is not None and self._zygote.has_died and self._zygotes < _MOST_ZYGOTES:
            self._zygotes += 1
            logger.warning("the process that forks ranks has ended; another one is started")
            self._zygote.close()
            self._start_zygote()

    def _living_zygote(self) -> list[subprocess.Popen[bytes]]:
        """The zygote's process while it runs; else empty."""
        zygote = self._zygote
        return [zygote.process] if zygote is not None and zygote.process.poll() is None else []

    def _handler(self, *arguments: Any, **named: Any) -> SubprocessHandler:
        return RankHandler(self, *arguments, **named)

    def start_rank(self, words: Sequence[str], environment: dict[str, str], *output: IO[str] | None) -> Any:
        """Starts a rank: in a process that was kept, else as a fork of the zygote. Returns its process, or None when
        torch must start a fresh interpreter. Adds this launcher's variables to ``environment``."""
        environment.update(self._variables())
        stdout, stderr = (None if file is None else file.fileno() for file in output)
        process = self._kept.pop(int(environment["LOCAL_RANK"]), None)
        if process is not None:
            link = self._link_of(process)
            files = (1 if stdout is None else stdout, 2 if stderr is None else stderr)
            if link is not None and self._links.start(link, self._start_number, environment, files):
                return process
            self._end(process)
        if self._zygote is None:
            return None
        try:
            return self._zygote.start(words, environment=environment, stdout=stdout, stderr=stderr)
        except CannotFork as error:
            self._say_why(str(error))
            return None

    def _variables(self) -> dict[str, str]:
        """Environment variables that ranks get in addition to torch's."""
        return {LAUNCHER_VARIABLE: self._links.address, STARTS_VARIABLE: str(self._start_number)}

    def _fork(self, request: Mapping[str, Any], fds: Sequence[int]) -> None:
        """Forks a process that is not a rank. If forking fails, its descriptors are closed, which tells the
        requester."""
        if self._zygote is not None:
            with suppress(CannotFork):
                self._zygote.start_function(request, fds)

    def _log_is_at(self, message: Mapping[str, Any]) -> None:
        self._log.is_at(str(message["folder"]), run=str(message["run"]), attempt=int(message["attempt"]))

    def _log_lost(self, codes: Mapping[int, int | None]) -> None:
        self._links.serve()
        for local_rank, code in codes.items():
            if code:
                how = {"signal": -code} if code < 0 else {"exit_code": code}
                self._log.emit(EventKind.WORKER_LOST, worker=self._worker_group.workers[local_rank].global_rank, **how)

    def _log_hang(self, rank: int, quiet_s: float) -> None:
        self._hung.add(rank)
        self._log.emit(EventKind.HANG_DETECTED, worker=rank, quiet_s=round(quiet_s, 3))

    def _say_why(self, reason: str) -> None:
        if not self._told_why:
            self._told_why = True
            logger.warning("ranks start as fresh interpreters, which takes seconds longer: %s", reason)

    # -- ranks that go on in their process ----------------------------------------------------------------------------

    def _link_of(self, process: Any) -> RankLink | None:
        """The link to a rank that can be told to leave; None when it has ended or has none."""
        return self._links.link_of(process.pid) if process.poll() is None else None

    def _tell_to_leave(self) -> None:
        """Tells the ranks whose process can go on to leave the attempt. Torch sees them as ended, so it does not kill
        them."""
        self._links.serve()
        for local_rank, handler in self._handlers().items():
            link = self._link_of(handler.proc)
            if link is not None and self._links.tell_to_leave(link, within_s=self._options.leave_timeout_s):
                self._kept[local_rank] = handler.proc
                handler.goes_on()

    def _end_kept(self) -> None:
        for process in self._kept.values():
            self._end(process)
        self._kept.clear()

    def _end(self, process: Any) -> None:
        kill_group(process)
        self._links.forget(process.pid)

    def _exit_codes(self) -> dict[int, int | None]:
        """Exit code by local rank, None while it runs.

        A rank that was told to leave, and ended instead or exceeded its deadline, does not count as failed: a new
        process replaces it.
        """
        self._links.serve()
        codes: dict[int, int | None] = {}
        for local_rank, handler in self._handlers().items():
            codes[local_rank] = code = handler.proc.poll()
            link = self._links.leaving(handler.proc.pid)
            if link is None or link.deadline is None:
                continue
            if code is not None or time.monotonic() >= link.deadline:
                logger.warning(
                    "local rank %d (process %d) %s, and a new process takes its place",
                    local_rank,
                    handler.proc.pid,
                    "ended when it was to leave its attempt"
                    if code is not None
                    else f"did not leave its attempt within {self._options.leave_timeout_s:.0f} s",
                )
                kill_group(handler.proc)
                self._links.serve()
                began = link.deadline is None  # began at the last moment: other ranks may have connected to it
                self._links.forget(handler.proc.pid)
                if began:
                    codes[local_rank] = handler.proc.poll()
                    continue
                handler.start_again()
                self._worker_group.workers[local_rank].id = handler.proc.pid
                codes[local_rank] = None
        return codes

    def _handlers(self) -> dict[int, RankHandler]:
        return dict(getattr(self._pcontext, "subprocess_handlers", {}))

    def _seconds_to_deadline(self) -> float:
        links = [self._links.leaving(handler.proc.pid) for handler in self._handlers().values()]
        deadlines = [link.deadline for link in links if link is not None and link.deadline is not None]
        deadlines += [since + self._cause_s for since, _ in self._lost_peers().values()]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else _QUIET_S

    @property
    def _cause_s(self) -> float:
        return _CAUSE_S if self._options.one_host else _CAUSE_ELSEWHERE_S

    def _lost_peers(self) -> dict[int, tuple[float, str]]:
        """Local ranks that report a lost peer and wait: rank -> (monotonic seconds of the report, error text)."""
        said = {rank: self._links.lost_peer(handler.proc.pid) for rank, handler in self._handlers().items()}
        return {rank: one for rank, one in said.items() if one is not None}

    # -- how the end of ranks is seen ---------------------------------------------------------------------------------

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Looks at the ranks once. Blocks: until a rank ends, a message comes, or :meth:`_longest_wait_s` has
        passed."""
        codes = self._exit_codes()
        if list(codes.values()).count(None) == self._running:
            self._replace_zygote()
            running = [handler.proc for local_rank, handler in self._handlers().items() if codes[local_rank] is None]
            with pidfds_of([*running, *self._living_zygote()]) as pidfds:
                wait_for_any([*pidfds, *self._links.fds(), *self._other_fds()], self._longest_wait_s())
        self._hangs.look(self._running_ranks())
        codes = self._exit_codes()
        self._running = list(codes.values()).count(None)
        ran_s = time.monotonic() - self._began_s  # torch gives the other ranks up to 30 s to end
        fallen: Mapping[int, int | None] = codes
        self._note_preempted()
        if any(codes.values()):
            self._log_lost(codes)
            self._note_failures({local_rank: code for local_rank, code in codes.items() if code})
            if self._remaining_restarts > 0:
                self._tell_to_leave()
            else:
                self._links.say_no_restart()
            fallen = self._let_peers_fall(codes)
        elif any(time.monotonic() >= since + self._cause_s for since, _ in self._lost_peers().values()):
            if self._remaining_restarts > 0:
                self._lengths_s.append(ran_s)
                self._say_that_peers_are_lost(codes)
                return RunResult(WorkerState.UNHEALTHY)  # torch restarts the ranks
            self._links.say_no_restart()
        logs = dict(getattr(self._pcontext, "stderrs", {}))
        with self._as_seen(fallen):
            result = cast(RunResult, super()._monitor_workers(worker_group))
        reap_others()
        if result.is_failed() and result.failures:
            self._lengths_s.append(ran_s)
            self._say_who_failed(result, logs, {local_rank for local_rank, code in codes.items() if code})
        return result

    def _other_fds(self) -> list[int]:
        """More file descriptors that end the wait when they become readable; for subclasses."""
        return []

    def _longest_wait_s(self) -> float:
        return min(_QUIET_S if self._options.one_host else self._interval_s, self._seconds_to_deadline())

    def _running_ranks(self) -> dict[int, Any]:
        """Running processes by global rank."""
        workers = self._worker_group.workers
        return {
            workers[local_rank].global_rank: handler.proc
            for local_rank, handler in self._handlers().items()
            if handler.proc.poll() is None
        }

    def _note_preempted(self) -> None:
        """No restart on this host once a rank was preempted: the machine goes away, or somebody else wants it."""
        if any(handler.proc.poll() == PREEMPTED for handler in self._handlers().values()):
            self.preempted = True
            self._remaining_restarts = 0

    def _note_failures(self, codes: Mapping[int, int]) -> None:
        """Records the ranks that failed first, before their peers fail too: torch reports the earliest failure."""
        context = cast(Any, self._pcontext)
        for local_rank, code in codes.items():
            pid, error_file = self._handlers()[local_rank].proc.pid, context.error_files[local_rank]
            context._failures[local_rank] = ProcessFailure(local_rank, pid, exitcode=code, error_file=error_file)
            context._running_local_ranks.discard(local_rank)

    def _let_peers_fall(self, codes: Mapping[int, int | None]) -> dict[int, int | None]:
        """Waits for the peers of a failed rank to end, and returns the exit codes by local rank then. Blocks: up to a
        second.

        Peers end by themselves when they miss the failed rank, or a little later. Torch sends SIGTERM next, and
        Lightning answers that with a collective operation: if it starts just as a peer ends, the rank waits in it until
        it is killed, 30 s later.
        """
        self._wait_for_falls()
        return {
            local_rank: handler.proc.poll() if codes[local_rank] is None else codes[local_rank]
            for local_rank, handler in self._handlers().items()
        }

    def _wait_for_falls(self) -> None:
        """Blocks until all ranks that were not told to leave have ended, at most a second."""
        deadline = time.monotonic() + _FALL_S
        while time.monotonic() < deadline:
            running = [handler.proc for handler in self._handlers().values() if handler.proc.poll() is None]
            if not running:
                break
            with pidfds_of(running) as pidfds:
                wait_for_any(pidfds, deadline - time.monotonic())

    @contextmanager
    def _as_seen(self, codes: Mapping[int, int | None]) -> Iterator[None]:
        """Hides from torch, which looks once more, the ranks that have ended since ``codes`` was read.

        Torch would count such a rank as failed although it may have been about to leave its attempt, and would end the
        others at once, before they are told to go on in their process.
        """
        handlers = [handler for local_rank, handler in self._handlers().items() if codes[local_rank] is None]
        seen = [(handler, StillRunning(handler.proc)) for handler in handlers if not isinstance(handler.proc, Kept)]
        for handler, running in seen:
            handler.proc = cast(Any, running)
        try:
            yield
        finally:
            for handler, running in seen:
                handler.proc = running.process

    def _say_that_peers_are_lost(self, codes: Mapping[int, int | None]) -> None:
        workers = self._worker_group.workers
        text = lost_peer_text(
            {workers[local_rank].global_rank: error for local_rank, (_, error) in self._lost_peers().items()},
            ended=[workers[local_rank].global_rank for local_rank, code in codes.items() if code == 0],
            within_s=self._cause_s,
            one_host=self._options.one_host,
        )
        logger.error("%s", text)

    def _say_who_failed(self, result: RunResult, logs: Mapping[int, str], seen_first: Set[int]) -> None:
        failures = {
            rank: RankFailure(
                rank=rank,
                pid=found.pid,
                exit_code=found.exitcode,
                timestamp=found.timestamp,
                seen_first=found.local_rank in seen_first,
                message=reason_of(found.error_file_data),
                log=logs.get(found.local_rank, ""),
                hung=rank in self._hung,
            )
            for rank, found in result.failures.items()
        }
        first = first_failure(failures)
        if first.exit_code == PREEMPTED:
            logger.warning(
                "rank %d was preempted: the ranks of this host have saved and ended, and this launcher does not restart"
                " them; start the job again to resume it",
                first.rank,
            )
            return
        attempt = self._worker_group.spec.max_restarts - self._remaining_restarts
        text = failure_text(
            first,
            attempt=attempt,
            ran_s=self._lengths_s[-1],
            restarts_left=self._restarts_left(),
            last_lines=last_lines(first.log),
            staying=len(self._kept),
        )
        logger.error("%s", text)

    def _restarts_left(self) -> int | None:
        """How many restarts are left; None in a subclass where somebody else decides."""
        return self._remaining_restarts

    # -- how ranks are started again ----------------------------------------------------------------------------------

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._tell_to_leave()
        self._restarts = True
        try:
            self._stop_workers(worker_group)
        finally:
            self._restarts = False
        worker_group.state = WorkerState.STOPPED
        delay_s = delay_before_restart(self._lengths_s, quick_s=self._options.crash_loop_s)
        if delay_s:
            logger.warning(
                "crash loop: the last attempts failed soon after their start; the next one starts in %.0f s", delay_s
            )
            threading.Event().wait(delay_s)  # a signal interrupts the wait by raising torch's exception
        self._initialize_workers(worker_group)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        shares = worker_group.spec.rdzv_handler.use_agent_store
        if not self._options.one_host or worker_group.store is None or not shares:
            super()._rendezvous(worker_group)
            return
        # The hosts and ranks stay the same; only the store is new.
        worker_group.master_port = self._stores.make().port

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30, **_: Any) -> None:
        if not self._restarts:
            self._links.say_no_restart()
            for local_rank, process in self._kept.items():
                self._handlers()[local_rank].proc = process  # so that torch ends it like the others
            self._kept.clear()
        if "timeout" in _TORCHS_SHUTDOWN:
            super()._shutdown(death_sig, timeout=timeout)
        else:
            # Torch 2.6 at least: what ends the processes is told the time, and the rendezvous is closed unless a
            # restart follows, though that is for torchrun to do: a host that was left out waits for its next place.
            if self._pcontext:
                self._pcontext.close(death_sig, timeout)
            cast(Any, super())._shutdown(death_sig, is_restart=True)
        self._note_preempted()
        reap_others()

    def close(self) -> None:
        """Closes the links and the launcher's log, and ends the zygote. Idempotent."""
        self._links.close()
        self._log.emit(EventKind.LAUNCHER_ENDED)
        self._log.close()
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None


def reason_of(error_file: Mapping[str, Any]) -> str:
    """First line of the exception in a torch error file, cut to a limit; "" when there is none: the rank has run in a
    fresh interpreter without torch's ``record``, or has not raised."""
    said = error_file.get("message", "")
    text = str(said.get("message", "") if isinstance(said, dict) else said)
    return short("" if text == "<NONE>" else text.strip().partition("\n")[0])


def short(line: str) -> str:
    """The line, cut to the length of a reason."""
    return line if len(line) <= _MOST_OF_A_REASON else f"{line[:_MOST_OF_A_REASON]} ..."


def last_lines(path: str, count: int = 20) -> list[str]:
    """The last lines of a log; empty when there is no log or it cannot be read."""
    if not path:
        return []
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []
