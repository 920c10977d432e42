"""The launcher below a supervisor: it reports what happens to its ranks, and takes the place that it is given next.

The supervisor decides what this launcher decides by itself elsewhere: whether and how often ranks are restarted,
whether a rank hangs, and which hosts take part.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    Worker,
    WorkerGroup,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

from resiliency.events import EventKind
from resiliency.launch.elastic import StandbyAgent, StandbyOptions, last_lines, reason_of, short
from resiliency.launch.host_reports import HostReports
from resiliency.launch.orders import Wish
from resiliency.launch.rank_handlers import Kept, kill_group
from resiliency.launch.rank_sights import STACKS_S, RankSights, ask_for_stacks
from resiliency.launch.supervised import SupervisedRendezvous
from resiliency.runtime.exit_codes import PREEMPTED
from resiliency.runtime.messages.launcher import REPORT_S, ended_early_text
from resiliency.runtime.messages.places import Place
from resiliency.runtime.processes import pidfds_of, reap_others, wait_for_any
from resiliency.settings import (
    ATTEMPT_VARIABLE,
    JOB_VARIABLE,
    REPLICAS_BEFORE_VARIABLE,
    REPLICAS_VARIABLE,
    STARTS_VARIABLE,
    all_variables,
)

__all__ = ["SupervisedAgent"]

logger = logging.getLogger(__name__)

#: Torch counts restarts down from this number; the difference gives the generation.
_MOST_GENERATIONS = 2**31 - 1
#: Most seconds between two looks at the ranks' progress while a wanted save is awaited; otherwise REPORT_S.
_SAVED_S = 0.1
#: Most seconds until a wait looks again, whatever it waits for.
_LONGEST_S = 10.0
#: Seconds; see :attr:`SupervisedAgent._cause_s`.
_CAUSE_S = 2.0
#: Stacks written fewer than this many seconds ago are not requested again before a rank is killed.
_FRESH_STACKS_S = 10.0


class SupervisedAgent(StandbyAgent):
    """The agent of such a launcher; see the module. Thread: the launcher's main thread.

    Args:
        options: as for several hosts, and without a hang timeout.
        arguments, named: passed on to torch's class; the rendezvous must be a :class:`SupervisedRendezvous`.
    """

    def __init__(self, options: StandbyOptions, *arguments: Any, **named: Any) -> None:
        super().__init__(options, *arguments, **named)
        spec = self._worker_group.spec
        assert isinstance(spec.rdzv_handler, SupervisedRendezvous)
        self._monitor = spec.rdzv_handler
        self._monitor.stores.keep_s = self._stores.keep_s
        spec.max_restarts = self._remaining_restarts = _MOST_GENERATIONS
        self._reports = HostReports(self._monitor.link)
        self._sights = RankSights(self._links)
        self._report_at_s = self._stacks_at_s = -math.inf
        #: The optimizer step after which the monitor wants a save that not all ranks have committed yet; None: none.
        self._saves_after: int | None = None

    # -- from place to place ------------------------------------------------------------------------------------------

    def _invoke_run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Replaces torch's loop, which would count restarts, and end when ranks have finished or failed. Blocks: until
        the supervisor says that the job is completed."""
        group = self._worker_group
        _handle_signals()
        try:
            self._initialize_workers(group)
            while True:
                result = self._monitor_workers(group)
                group.state = result.state
                if result.state is WorkerState.SUCCEEDED:
                    self._reports.ended(preempted=False)
                elif result.state is not WorkerState.HEALTHY:
                    self._say_failed()
                elif not self._monitor.num_nodes_waiting():
                    continue
                self._restart_workers(group)
        except RendezvousGracefulExitError as completed:
            logger.info("%s", completed)
            done = {worker.global_rank: None for worker in group.workers}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=done)

    def _say_failed(self) -> None:
        if self.preempted:
            self._reports.ended(preempted=True)
        elif not self._reports.has_said_why:
            for worker in self._worker_group.workers:
                self._reports.lost(
                    worker.global_rank, 1, reason="torch's elastic agent reported a failure and named no rank"
                )

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        orders = self._monitor.orders
        if orders.wish in (Wish.NO_PLACE, Wish.COMPLETED):
            self._shutdown(timeout=self._shutdown_timeout)
        else:
            if orders.is_to_start and orders.place is not None:
                self._kill(orders.place.replace)
            self._tell_to_leave()
            self._wait_for_falls()  # for ranks that end because a peer on another host is gone
            self._restarts = True
            try:  # the attempt is over: nobody waits longer for these ranks than for those whose process goes on
                self._shutdown(timeout=min(self._shutdown_timeout, math.ceil(self._options.leave_timeout_s)))
            finally:
                self._restarts = False
        worker_group.state = WorkerState.STOPPED
        self._initialize_workers(worker_group)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._wait_for_place()
        super()._rendezvous(worker_group)
        self._remaining_restarts = _MOST_GENERATIONS - (self._place.generation - 1)

    @property
    def _place(self) -> Place:
        """The place that was taken last."""
        assert self._monitor.orders.current is not None
        return self._monitor.orders.current

    def _wait_for_place(self) -> None:
        """Blocks: until the monitor has given a place; reports meanwhile that this host waits.

        Raises:
            RendezvousGracefulExitError: the job is completed.
        """
        warm = self._is_warm()
        self._reports.waiting(warm=warm)
        self._monitor.serve()
        while not self._monitor.is_ready():
            if self._monitor.orders.wish is Wish.NO_PLACE:
                self._end_those_that_stay()
            self._links.serve()
            self._replace_zygote()
            if self._is_warm() != warm:
                warm = not warm
                self._reports.waiting(warm=warm)
            zygote = [] if self._zygote is None else self._zygote.fds()
            with pidfds_of(self._living_zygote()) as pidfds:
                fds = [*pidfds, *zygote, *self._links.fds(), *self._monitor.link.fds()]
                wait_for_any(fds, self._monitor.link.seconds_to_look(_LONGEST_S))
            reap_others()
            self._monitor.serve()
            self._answer()

    def _is_warm(self) -> bool:
        """True when ranks would start at once; also without a zygote, because nothing can be prepared for fresh
        interpreters."""
        return self._zygote is None or self._zygote.is_warm()

    def _end_those_that_stay(self) -> None:
        """Ends the processes that were kept for a next attempt on this host, because there is none."""
        kept = list(self._kept.values())
        if kept:
            self._shutdown(timeout=self._shutdown_timeout)
        for process in kept:
            self._links.forget(process.pid)

    # -- how ranks are started ----------------------------------------------------------------------------------------

    def _assign_worker_ranks(self, store: Any, group_rank: int, group_world_size: int, spec: Any) -> list[Worker]:
        """Computes the ranks: all hosts of a workload have the same number. Torch would ask each host, and wait for a
        lost one."""
        count = spec.local_world_size
        first, total = group_rank * count, group_world_size * count
        return [
            Worker(
                local_rank=local_rank,
                global_rank=first + local_rank,
                role_rank=first + local_rank,
                world_size=total,
                role_world_size=total,
            )
            for local_rank in range(count)
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.preempted, self._saves_after = False, None
        self._reports.started(self._place.generation)
        ids = super()._start_workers(worker_group)
        self._say_running()
        return ids

    def _variables(self) -> dict[str, str]:
        place = self._place
        return {
            **super()._variables(),
            STARTS_VARIABLE: str(place.generation - 1),  # the same on all hosts
            JOB_VARIABLE: place.workload,
            ATTEMPT_VARIABLE: str(place.generation),
            REPLICAS_VARIABLE: str(place.replicas),
            REPLICAS_BEFORE_VARIABLE: str(place.replicas_before),
        }

    # -- how they are watched -----------------------------------------------------------------------------------------

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        self._monitor.serve()
        self._answer()
        if result.state is WorkerState.HEALTHY:
            self._say_running()
            workers = worker_group.workers
            waiting = (workers[local_rank].global_rank for local_rank in self._lost_peers())
            self._reports.lost_peers(waiting, ended=self._ended_well())
            self._say_saved()
            now = time.monotonic()
            if now >= self._report_at_s:
                self._report_at_s = now + REPORT_S
                self._reports.pages(self._sights.look(self._running_ranks())[0], now_s=now)
        return result

    def _other_fds(self) -> list[int]:
        return self._monitor.link.fds()

    def _longest_wait_s(self) -> float:
        report_s = max(0.0, self._report_at_s - time.monotonic())
        if self._saves_after is not None:
            report_s = min(report_s, _SAVED_S)
        return min(self._monitor.link.seconds_to_look(report_s), self._seconds_to_deadline())

    @property
    def _cause_s(self) -> float:
        """Seconds for a rank of this host to fail after others have lost a peer; then all leave the attempt and wait. A
        rank that waited inside its attempt would give up after half a minute, and the next place may take longer."""
        return _CAUSE_S

    def _restarts_left(self) -> int | None:
        return None

    def _note_failures(self, codes: Mapping[int, int]) -> None:
        super()._note_failures(codes)
        context: Any = self._pcontext
        for local_rank, code in codes.items():
            if code != PREEMPTED:
                rank = self._worker_group.workers[local_rank].global_rank
                said = last_lines(dict(getattr(context, "stderrs", {})).get(local_rank, ""), count=1)
                reason = reason_of(context._failures[local_rank].error_file_data) or short("".join(said).strip())
                early = ended_early_text(self._ended_well())
                reason = "; ".join(filter(None, (reason, early)))
                self._reports.lost(rank, code, reason=reason, preempted=self.preempted)

    def _ended_well(self) -> list[int]:
        """Ranks of this host that have ended with status 0, by themselves."""
        workers, handlers = self._worker_group.workers, self._handlers()
        return [
            workers[local_rank].global_rank
            for local_rank, handler in handlers.items()
            if handler.proc.poll() == 0 and not isinstance(handler.proc, Kept)
        ]

    def _say_running(self) -> None:
        workers = self._worker_group.workers
        self._reports.running(
            {
                local_rank: (workers[local_rank].global_rank, handler.proc.pid)
                for local_rank, handler in self._handlers().items()
            }
        )

    # -- what the monitor asks for ------------------------------------------------------------------------------------

    def _answer(self) -> None:
        if self._monitor.asks_for_stacks:
            self._monitor.asks_for_stacks = False
            self._stacks_at_s = time.monotonic()
            ask_for_stacks(self._links, self._running_ranks())
        step, self._monitor.save_after = self._monitor.save_after, None
        if step is None:
            return
        running = self._running_ranks()
        deaf = [rank for rank, process in running.items() if not self._links.want_save(process.pid, step)]
        if deaf or not running:
            reason = "no rank runs" if not running else f"rank {deaf[0]} has no callback that saves on request"
            logger.info("a save after step %d was requested: %s; the job's newest own checkpoint is used", step, reason)
            self._reports.saved(problem=reason)
            return
        self._saves_after = step

    def _say_saved(self) -> None:
        """Reports, once, that all ranks of this host know the wanted save to be committed."""
        step, running = self._saves_after, self._running_ranks()
        if step is None or not running:
            return
        committed = min(self._links.newest_committed(process.pid) for process in running.values())
        if committed >= step:
            self._saves_after = None
            self._reports.saved()

    def _kill(self, ranks: tuple[int, ...]) -> None:
        """Kills hung ranks, after all ranks have written their stacks. Blocks: up to a second."""
        running = self._running_ranks()
        hung = {rank: process for rank, process in running.items() if rank in ranks}
        if not hung:
            return
        if time.monotonic() - self._stacks_at_s > _FRESH_STACKS_S:
            ask_for_stacks(self._links, running)
            threading.Event().wait(STACKS_S)
        for rank, process in hung.items():
            logger.error(
                "rank %d (process %d) is replaced: it hangs, as the supervisor has found, and is killed. The stacks of"
                " all ranks of this host are in their standard error",
                rank,
                process.pid,
            )
            kill_group(process)
            self._log.emit(EventKind.WORKER_LOST, worker=rank, signal=int(signal.SIGKILL))


def _handle_signals() -> None:
    """Handles signals as torch does from the start of ranks on, so that they also end a launcher that waits for a
    place."""
    for name in all_variables().get("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM,SIGINT,SIGHUP,SIGQUIT").split(","):
        number = getattr(signal, name.strip(), None)
        if isinstance(number, signal.Signals):
            signal.signal(number, _raise)


def _raise(number: int, frame: FrameType | None) -> None:
    raise SignalException(f"process {os.getpid()} got signal {number}", sigval=signal.Signals(number))
