"""Torch's elastic agent, with another way to start ranks, to see their end, and to start them again.

What is torch's: flags, rendezvous, ranks and environment, log files, error files, events, signals, exit codes. What is
replaced, and why (measured by ``benchmarks/restart.py``):

* ranks are forked from a zygote: a fresh interpreter needs seconds to import torch and Lightning;
* the end of a rank ends the wait at once, through its pidfd;
* a restart on one host asks nobody: nothing about the hosts has changed. It gets a store of its own.
"""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, cast

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from resiliency.launch.fresh import parse_command
from resiliency.launch.preload import modules_to_preload
from resiliency.launch.processes import ForkedProcess, mark_own, reap_others, wait_for_any
from resiliency.launch.restarts import RankFailure, delay_before_restart, failure_text, first_failure
from resiliency.launch.zygote import CannotFork, Zygote
from resiliency.settings import all_variables

__all__ = ["StandbyAgent", "StandbyOptions"]

logger = logging.getLogger(__name__)

#: Seconds between two looks at ranks whose end is seen at once anyway.
_QUIET_S = 1.0
_TAIL_BYTES = 16 * 1024


@dataclass(frozen=True, kw_only=True)
class StandbyOptions:
    """
    Attributes:
        standby: False: every rank is a fresh interpreter.
        preload: modules to import in advance, after those that the script was found to import.
        crash_loop_s: attempts that fail sooner than this, one after the other, wait longer and longer.
        one_host: the job has one host and never more, so that nothing about the hosts changes between attempts.
    """

    standby: bool
    preload: tuple[str, ...]
    crash_loop_s: float
    one_host: bool


class StandbyAgent(LocalElasticAgent):
    """See the module.

    Args:
        options: ours.
        arguments, named: of torch's class.
    """

    def __init__(self, options: StandbyOptions, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._options = options
        spec = self._worker_group.spec
        # Torch's loop sleeps this long and looks then; here the look itself waits.
        self._interval_s, spec.monitor_interval = float(spec.monitor_interval), 0
        self._zygote: Zygote | None = None
        self._told_why = False
        self._attempt_store: TCPStore | None = None
        #: Ranks that ran at the last look; what ended since then is not waited for.
        self._running = 0
        self._began_s = 0.0
        #: How long each attempt so far has run until a rank failed.
        self._lengths_s: list[float] = []
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
        self._zygote = Zygote(
            list(dict.fromkeys(modules)), standbys=spec.local_world_size, environment=all_variables(), words=words[1:]
        )

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._replace_zygote()
        with _handlers_made_by(self._handler):
            ids = cast(dict[int, Any], super()._start_workers(worker_group))
        self._running, self._began_s = len(ids), time.monotonic()
        return ids

    def _replace_zygote(self) -> None:
        """Starts another zygote if there was a good one and it has ended, so that it is there when it is needed."""
        if self._zygote is not None and self._zygote.has_died:
            logger.warning("the process that forks ranks has ended; another one is started")
            self._zygote.close()
            self._start_zygote()

    def _living_zygote(self) -> list[subprocess.Popen[bytes]]:
        """Its process, while it runs."""
        zygote = self._zygote
        return [zygote.process] if zygote is not None and zygote.process.poll() is None else []

    def _handler(self, *arguments: Any, **named: Any) -> SubprocessHandler:
        return _Handler(self._start_rank, *arguments, **named)

    def _start_rank(self, words: Sequence[str], environment: Mapping[str, str], *output: IO[str] | None) -> Any:
        """A process, or None when it is to be a fresh interpreter."""
        if self._zygote is None:
            return None
        stdout, stderr = (None if file is None else file.fileno() for file in output)
        try:
            return self._zygote.start(words, environment=environment, stdout=stdout, stderr=stderr)
        except CannotFork as error:
            self._say_why(str(error))
            return None

    def _say_why(self, reason: str) -> None:
        if not self._told_why:
            self._told_why = True
            logger.warning("ranks start as fresh interpreters, which takes seconds longer: %s", reason)

    # -- how their end is seen ----------------------------------------------------------------------------------------

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Blocks until a rank has ended, or until it is time to look whether hosts want to join."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        running = [handler.proc for handler in handlers.values() if handler.proc.poll() is None]
        if len(running) == self._running:
            self._replace_zygote()
            with _pidfds_of([*running, *self._living_zygote()]) as pidfds:
                wait_for_any(pidfds, _QUIET_S if self._options.one_host else self._interval_s)
        self._running = sum(process.poll() is None for process in running)
        logs = dict(getattr(self._pcontext, "stderrs", {}))
        result = cast(RunResult, super()._monitor_workers(worker_group))
        reap_others()
        if result.is_failed() and result.failures:
            self._lengths_s.append(time.monotonic() - self._began_s)
            self._say_who_failed(result, logs)
        return result

    def _say_who_failed(self, result: RunResult, logs: Mapping[int, str]) -> None:
        failures = {
            rank: RankFailure(
                rank=rank,
                pid=found.pid,
                exit_code=found.exitcode,
                timestamp=found.timestamp,
                message=_reason(found.error_file_data),
                log=logs.get(found.local_rank, ""),
            )
            for rank, found in result.failures.items()
        }
        first = first_failure(failures)
        attempt = self._worker_group.spec.max_restarts - self._remaining_restarts
        text = failure_text(
            first,
            attempt=attempt,
            ran_s=self._lengths_s[-1],
            restarts_left=self._remaining_restarts,
            last_lines=_last_lines(first.log),
        )
        logger.error("%s", text)

    # -- how they are started again -----------------------------------------------------------------------------------

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._stop_workers(worker_group)
        worker_group.state = WorkerState.STOPPED
        delay_s = delay_before_restart(self._lengths_s, quick_s=self._options.crash_loop_s)
        if delay_s:
            logger.warning("attempts fail as soon as they begin; the next one waits for %.0f s", delay_s)
            threading.Event().wait(delay_s)  # a signal ends it with torch's exception
        self._initialize_workers(worker_group)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        shares = worker_group.spec.rdzv_handler.use_agent_store
        if not self._options.one_host or worker_group.store is None or not shares:
            super()._rendezvous(worker_group)
            return
        # The same host and ranks, and a store of their own: gloo would read addresses of the attempt before from a
        # store that is kept, and connect to processes that are gone.
        self._attempt_store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        worker_group.master_port = self._attempt_store.port

    def _shutdown(self, *arguments: Any, **named: Any) -> None:
        super()._shutdown(*arguments, **named)
        reap_others()

    def close(self) -> None:
        """Ends the zygote. Idempotent."""
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None


def _reason(error_file: Mapping[str, Any]) -> str:
    """The exception, where the script is decorated with torch's ``record``; else nothing."""
    said = error_file.get("message", "")
    text = str(said.get("message", "") if isinstance(said, dict) else said)
    return "" if text == "<NONE>" else text.strip().partition("\n")[0]


def _last_lines(path: str, count: int = 20) -> list[str]:
    """The end of a log, if there is one."""
    if not path:
        return []
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - _TAIL_BYTES))
            return file.read().decode(errors="replace").splitlines()[-count:]
    except OSError:
        return []


class _Handler(SubprocessHandler):
    """Torch's, around a forked process if there is one."""

    def __init__(self, start: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        self._start_forked = start
        super().__init__(*arguments, **named)

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        forked = self._start_forked(args, env, self._stdout, self._stderr)
        if forked is not None:
            return forked
        process = super()._popen(args, env)
        mark_own(process)
        return process


@contextmanager
def _handlers_made_by(make: Callable[..., SubprocessHandler]) -> Iterator[None]:
    """Torch looks this function up when it starts ranks."""
    module: Any = multiprocessing.api
    before = module.get_subprocess_handler
    module.get_subprocess_handler = make
    try:
        yield
    finally:
        module.get_subprocess_handler = before


@contextmanager
def _pidfds_of(processes: Sequence[ForkedProcess | subprocess.Popen[Any]]) -> Iterator[list[int]]:
    """A file descriptor for each process that runs, readable when it has ended."""
    opened: list[int] = []
    found: list[int] = []
    try:
        for process in processes:
            if isinstance(process, ForkedProcess):
                found.append(process.pidfd)
            else:
                # Its number means this process until somebody polls it.
                opened.append(os.pidfd_open(process.pid))
        yield found + opened
    finally:
        for fd in opened:
            os.close(fd)
