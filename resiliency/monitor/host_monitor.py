"""The host monitor, one process per host: it makes the host do what the supervisor wants, and reports what is true
there.

It starts one launcher, keeps it running, gives it the place that the supervisor names, and reports at once what happens
to ranks and devices. Training does not need it: when it is killed, the launcher and its ranks run on, and the next
monitor of the same state folder takes them over.

A generation is given to one launcher, once. When that launcher has ended, or was told to leave the generation, the
monitor reports its ranks as lost until the supervisor names another generation, so that two launchers never have ranks
of one place.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from resiliency.monitor.asks import Asks, NotYet
from resiliency.monitor.checks import Problem, device_count, problems_of_host, reset_devices
from resiliency.monitor.connection import ConnectionSettings, SupervisorConnection
from resiliency.monitor.launcher_link import LauncherLink
from resiliency.monitor.launcher_process import (
    LauncherProcess,
    adopt_launcher,
    end_processes,
    find_launcher,
    identities_of,
    start_launcher,
)
from resiliency.monitor.network_fault import NetworkFault
from resiliency.monitor.outbox import Outbox
from resiliency.monitor.settings import MonitorSettings
from resiliency.monitor.state import Given, LauncherId, MonitorState, StateFolder
from resiliency.monitor.watchdogs.base import Watchdog
from resiliency.monitor.watchdogs.ecc import ecc_finding
from resiliency.monitor.watchdogs.registry import Watchdogs
from resiliency.monitor.watchdogs.xid import xid_finding
from resiliency.runtime.messages.launcher import (
    Completed,
    Control,
    Controlled,
    Ended,
    FromLauncher,
    FromMonitor,
    Lost,
    LostPeers,
    Master,
    NoPlace,
    Pages,
    Running,
    Save,
    Saved,
    Waiting,
    ended_early_text,
)
from resiliency.runtime.messages.monitor import (
    MONITOR_ENDS,
    NO_PLAN,
    PROTOCOL_VERSION,
    Ask,
    Desired,
    Hello,
    RankReport,
    Report,
    StepKind,
)
from resiliency.runtime.messages.observations import DeviceClass, Observation, ObservationKind
from resiliency.runtime.messages.places import Place
from resiliency.runtime.processes import is_stopped
from resiliency.runtime.tasks import end_tasks, is_set_within
from resiliency.settings import all_variables

__all__ = ["HostMonitor"]

logger = logging.getLogger(__name__)

#: Seconds until a launcher that has died is started again: the first wait, doubled with each death, and the longest. A
#: launcher that has lived for the third resets the count.
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S, _LIVED_S = 0.5, 30.0, 30.0
#: This many deaths of the launcher in a row are reported as a problem of the host.
_MANY_DEATHS = 3
#: Ranks have lost a peer: seconds that the peer's host has to report why, before this monitor reports it.
_LOST_PEERS_S = 5.0
#: A rank was killed: longest wait, in seconds, for the kernel's log to say whether the kernel has done it.
_KERNEL_SAYS_S = 1.0
#: Seconds for the watchdogs to see what a reset of devices has itself written to the kernel's log.
_RESET_SAYS_S = 5.0
#: Seconds that a launcher has to end by itself once all jobs are completed.
_COMPLETED_S = 60.0
#: Seconds until a launcher that did not read a message is told again.
_RETRY_S = 1.0
#: A launcher that a signal has stopped, and that has a place to take, is killed after this many seconds. One whose
#: ranks train is left alone, because a debugger may have stopped it.
_STOPPED_S = 10.0
#: Seconds that a launcher may take to import, because all hosts may read one shared disk at once. A host that joins is
#: not reported as faulty before.
_WARM_S = 600.0
_LONGEST_REASON = 1000
_LONGEST_PARTITION_S = 86400.0
_LONGEST_DEVICE, _MOST_XIDS, _ON_PURPOSE = 64, 10_000, "injected fault"


@dataclass(kw_only=True)
class _Seen:
    """What the present launcher has reported of its generation."""

    workload: str = ""
    generation: int = 0
    master: str = ""
    ended: bool = False
    preempted: bool = False
    running: dict[int, int] = field(default_factory=dict)
    pages: tuple[RankReport, ...] = ()


class HostMonitor:
    """Runs the monitor of one host. Thread: one, with an event loop.

    Args:
        watchdogs: checks of this host that run all the time.
        cable: cuts this host off, where a test may; None: an injected partition only ends the connection to the
            supervisor.
    """

    def __init__(
        self,
        settings: MonitorSettings,
        connection: ConnectionSettings,
        watchdogs: Sequence[Watchdog] = (),
        cable: NetworkFault | None = None,
    ) -> None:
        self._settings, self._connection_settings, self._given_watchdogs = settings, connection, tuple(watchdogs)
        self._folder = StateFolder(settings.state_dir, settings.host)
        self._state = MonitorState()
        self._outbox = Outbox()
        self._want: Desired | None = None
        self._launcher: LauncherProcess | None = None
        self._seen = _Seen()
        self._warm = asyncio.Event()
        self._changed = asyncio.Event()
        self._stopping = asyncio.Event()
        self._number = -1
        self._deaths = 0
        self._not_before_s = 0.0
        self._retry_at_s: float | None = None
        self._completed_at_s: float | None = None
        #: Since when the launcher has been stopped while it has a place to take; monotonic seconds.
        self._stopped_since_s: float | None = None
        #: The last message that was sent on the launcher's present connection.
        self._told: FromMonitor | None = None
        self._is_resetting = False
        #: The connection is new, and lasting faults were not reported on it yet.
        self._says_faults = False
        self._saving: asyncio.Future[Problem] | None = None
        self._lost_peers: asyncio.TimerHandle | None = None
        #: Ranks that were killed, and will be reported as soon as the kernel's log has been read.
        self._asking_kernel: set[asyncio.Task[None]] = set()
        self._cable = cable
        #: Timer that plugs the pulled cable in again.
        self._partition: asyncio.TimerHandle | None = None
        self._complained: set[tuple[str, int, str]] = set()

    # -- life ---------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Asks :meth:`run` to end the launcher, give its ranks their time to save, and return. Thread: the event
        loop's."""
        self._stopping.set()
        self._changed.set()

    async def run(self) -> int:
        """Runs until :meth:`stop`. Returns the exit status.

        Raises:
            ConfigError: another monitor of this state folder runs, or the folder cannot be used.
        """
        self._state = self._folder.open()
        self._link = LauncherLink(
            self._folder.socket_name,
            launcher_pid=lambda: None if self._launcher is None else self._launcher.identity.pid,
            heard=self._heard,
            connected=self._launcher_connected,
            control=self._controlled,
        )
        self._watchdogs = Watchdogs(
            self._given_watchdogs,
            host=self._settings.host,
            state=self._state,
            save=self._save,
            observed=self._observe,
        )
        hello = Hello(
            version=PROTOCOL_VERSION,
            host=self._settings.host,
            incarnation=secrets.token_hex(8),
            address=self._settings.address,
            block=self._settings.block,
        )
        self._connection = SupervisorConnection(
            self._connection_settings,
            hello,
            outbox=self._outbox,
            report=self._report,
            obey=self._obey,
            term=self._term,
            connected=self._is_taken,
        )
        kinds = {
            StepKind.VERIFY: self._verify,
            StepKind.CHECKPOINT: self._checkpoint,
            StepKind.RESET_DEVICES: self._reset_devices,
            StepKind.SIGNAL: self._signal,
        }
        self._asks = Asks(self._state, self._save, kinds, self._connection.answer)
        tasks: list[asyncio.Task[None]] = []
        try:
            self._take_over()
            self._link.open()
            self._watchdogs.start()
            tasks = [asyncio.create_task(self._connection.run()), asyncio.create_task(self._keep_true())]
            stopping = asyncio.create_task(self._stopping.wait())
            try:
                done, _ = await asyncio.wait({*tasks, stopping}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                stopping.cancel()
            for task in tasks:
                if task in done:
                    task.result()  # raises an unforeseen error
            await self._end(tasks[1])
            return 0
        finally:
            await end_tasks([*tasks, *self._asking_kernel])
            await self._close()

    async def _end(self, keeping: asyncio.Task[None]) -> None:
        """Ends the launcher. The connection to the supervisor stays open meanwhile."""
        await end_tasks([keeping])
        if self._launcher is not None and not self._launcher.ended.is_set():
            logger.info(
                "ending; the launcher is told to end, and has %.0f s for its ranks to save", self._settings.stop_s
            )
            self._connection.say_soon()
            await self._launcher.end(self._settings.stop_s)
            self._launcher_has_ended(self._launcher)
        self._state.launcher = None
        self._save()
        if self._connection.is_connected:
            self._connection.say_soon()
            await asyncio.sleep(0.1)  # time to send the last report; nothing depends on it

    async def _close(self) -> None:
        if self._lost_peers is not None:
            self._lost_peers.cancel()
        if self._partition is not None:
            self._plug_in()
        if self._cable is not None:
            self._cable.close()
        await self._asks.close()
        await self._watchdogs.close()
        self._link.close()
        if self._launcher is not None:
            self._launcher.let_go()
        self._folder.close()

    def _save(self) -> bool:
        return self._folder.save(self._state)

    # -- the launcher -------------------------------------------------------------------------------------------------

    def _take_over(self) -> None:
        """Adopts the launcher that an earlier monitor has left running, if there is one."""
        known = self._state.launcher or find_launcher(self._folder.socket_name)
        if known is None:
            return
        self._launcher = adopt_launcher(known)
        if self._launcher is None:
            logger.info("the launcher of the monitor before this one has ended")
            if left := end_processes(self._state.ranks):  # ranks that were not forked: the kernel has not ended those
                logger.warning("%d of its ranks were left, and are killed", left)
            return
        logger.info("taking over the launcher of the monitor before this one, process %d", known.pid)
        if self._state.launcher != known:
            self._state.launcher = known
            self._save()
        for given in self._state.given.values():
            if given.launcher == known and not given.withdrawn:
                self._seen = _Seen(workload=given.workload, generation=given.generation)

    def _start_launcher(self) -> None:
        command = [self._folder.socket_name if word == "{endpoint}" else word for word in self._settings.command]

        def written(identity: LauncherId) -> bool:
            self._state.launcher = identity
            return self._save()

        self._seen = _Seen()
        self._set_warm(False)
        self._completed_at_s = None
        try:
            self._launcher = start_launcher(command, all_variables(), written)
        except OSError as error:
            logger.error("the launcher cannot be started: %s", error)
            self._launcher = None
        if self._launcher is None:
            self._back_off()
        else:
            logger.info("started the launcher, process %d", self._launcher.identity.pid)

    def _back_off(self) -> None:
        self._not_before_s = time.monotonic() + min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** min(self._deaths, 16))
        self._deaths += 1

    def _launcher_has_ended(self, launcher: LauncherProcess) -> None:
        """Clears up after the launcher. The kernel has ended the ranks that were forked from it; this ends the
        others."""
        self._link.hear_last_words()
        launcher.end_ranks()
        end_processes(self._state.ranks)  # ranks of an adopted launcher that ended before it had reported them
        self._launcher = None
        self._set_warm(False)
        seen = self._seen
        self._see_anew(_Seen())
        if self._saving is not None and not self._saving.done():
            self._saving.set_result("the launcher has ended")
        completed = self._want is not None and self._want.completed
        if completed or self._stopping.is_set() or self._is_resetting:
            logger.info("the launcher %s", launcher.how_it_ended)
        else:
            logger.error("the launcher %s", launcher.how_it_ended)
            if time.monotonic() - launcher.started_s >= _LIVED_S:
                self._deaths = 0
            self._back_off()
        if seen.running and not seen.ended:
            for rank in seen.running:
                self._lost(seen, rank, f"its launcher {launcher.how_it_ended}")
        self._connection.say_soon()

    # -- keeping the host as wanted -----------------------------------------------------------------------------------

    async def _keep_true(self) -> None:
        """Makes the host as wanted whenever something has changed or something is due. Runs until it is cancelled."""
        while True:
            self._changed.clear()
            await self._make_true()
            due = [each for each in (self._retry_at_s, self._completed_at_s) if each is not None]
            if self._launcher is None and not self._is_at_rest:
                due.append(self._not_before_s)
            wait_s = max(0.0, min(due) - time.monotonic()) if due else None
            waits: list[asyncio.Task[object]] = [asyncio.create_task(self._changed.wait())]
            if self._launcher is not None:
                waits.append(asyncio.create_task(self._launcher.ended.wait()))
            try:
                await asyncio.wait(waits, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in waits:
                    each.cancel()

    @property
    def _is_at_rest(self) -> bool:
        """No launcher is wanted now."""
        return self._settings.watch_only or self._is_resetting or (self._want is not None and self._want.completed)

    async def _make_true(self) -> None:
        self._retry_at_s = None
        if self._settings.watch_only:
            return
        launcher = self._launcher
        if launcher is not None and launcher.ended.is_set():
            self._launcher_has_ended(launcher)
            launcher = None
        if self._want is not None and self._want.completed:
            await self._complete(launcher)
            return
        self._completed_at_s = None
        if launcher is None:
            if not self._is_resetting and time.monotonic() >= self._not_before_s:
                self._start_launcher()
                launcher = self._launcher
            if launcher is None:
                self._notice_lost_generation()
                return
        if self._want is None:
            return  # the present state stays until a supervisor says otherwise
        if self._want.place is None:
            self._withdraw(launcher)
        else:
            await self._place(launcher, self._want.place)

    async def _complete(self, launcher: LauncherProcess | None) -> None:
        if launcher is None:
            if self._settings.exit_when_completed:
                self.stop()
            return
        now_s = time.monotonic()
        if self._completed_at_s is None:
            self._completed_at_s = now_s + _COMPLETED_S
        elif now_s >= self._completed_at_s:
            logger.warning("the job is completed, and the launcher has not ended within %.0f s", _COMPLETED_S)
            await launcher.end(self._settings.grace_s)
            self._changed.set()
            return
        self._tell(Completed())

    def _withdraw(self, launcher: LauncherProcess) -> None:
        for given in list(self._state.given.values()):
            if given.launcher == launcher.identity and not given.withdrawn:
                self._state.give(replace(given, withdrawn=True))
                self._save()
        if self._seen.generation:
            self._see_anew(_Seen())
            self._connection.say_soon()
        self._tell(NoPlace())

    async def _place(self, launcher: LauncherProcess, place: Place) -> None:
        given = self._state.given.get(place.workload)
        if given is not None and place.generation < given.generation:
            if self._complain(place, f"generation {given.generation} was given to this host already"):
                self._connection.say_soon()
            return
        if given is None or place.generation > given.generation:
            mine = [one for one in self._state.given.values() if one.launcher == launcher.identity]
            # A launcher does not know other workloads; their generations are counted independently.
            if (place.fresh and mine) or any(one.workload != place.workload for one in mine):
                logger.info("generation %d of %s wants a fresh launcher", place.generation, place.workload)
                self._link.drop_launcher()
                await launcher.end(self._settings.grace_s)
                self._launcher_was_replaced(launcher)
                return
            if not self._link.is_connected:
                return  # it is told once it has connected
            given = Given(
                workload=place.workload,
                generation=place.generation,
                launcher=launcher.identity,
                node_rank=place.node_rank,
                nodes=place.nodes,
                replicas=place.replicas,
            )
            self._state.give(given)
            self._save()
            self._see_anew(_Seen(workload=place.workload, generation=place.generation))
            self._outbox.generation_is(place.workload, place.generation)
            logger.info(
                "generation %d of %s: node rank %d of %d",
                place.generation,
                place.workload,
                place.node_rank,
                place.nodes,
            )
            self._connection.say_soon()
        elif given.launcher != launcher.identity or given.withdrawn:
            self._notice_lost_generation()
            return
        own = self._seen.master if place.node_rank == 0 else ""
        self._tell(replace(place, master=place.master or own))
        await self._end_if_stopped(launcher)

    async def _end_if_stopped(self, launcher: LauncherProcess) -> None:
        """Kills the launcher when it has been stopped by a signal for too long before taking its place, because all
        other hosts wait for it."""
        if self._seen.running or self._seen.ended or not is_stopped(launcher.identity.pid):
            self._stopped_since_s = None
            if not self._seen.running and not self._seen.ended:
                self._look_again(_RETRY_S)
            return
        now_s = time.monotonic()
        if self._stopped_since_s is None:
            self._stopped_since_s = now_s
        if now_s - self._stopped_since_s < _STOPPED_S:
            self._look_again(_RETRY_S)
            return
        logger.error("the launcher has a place to take, and a signal has stopped it; it is killed")
        self._stopped_since_s = None
        await launcher.end(0.0)
        self._changed.set()

    def _look_again(self, after_s: float) -> None:
        due_s = time.monotonic() + after_s
        self._retry_at_s = due_s if self._retry_at_s is None else min(self._retry_at_s, due_s)

    def _tell(self, message: FromMonitor) -> None:
        """Sends a message once on each connection of the launcher; schedules it again when the launcher does not
        read."""
        if not self._link.is_connected or message == self._told:
            return
        if self._link.tell(message):
            self._told = message
        else:
            self._retry_at_s = time.monotonic() + _RETRY_S

    def _launcher_was_replaced(self, launcher: LauncherProcess) -> None:
        """Clears up after a launcher that was ended on purpose, so its ranks are not reported as lost."""
        self._launcher = None
        self._see_anew(_Seen())
        self._deaths, self._not_before_s = 0, 0.0
        self._changed.set()

    def _notice_lost_generation(self) -> None:
        """Reports the ranks of the wanted generation as lost if its launcher is gone or has left that generation: they
        never train again."""
        place = None if self._want is None else self._want.place
        given = None if place is None else self._state.given.get(place.workload)
        if place is None or given is None or given.generation != place.generation:
            return
        if self._launcher is not None and given.launcher == self._launcher.identity and not given.withdrawn:
            return
        known = (one for one in self._outbox.kept if one.kind is ObservationKind.WORKER_LOST)
        if self._asking_kernel or any(
            one.workload == place.workload and one.generation == place.generation for one in known
        ):
            return
        why = "they were told to leave it" if given.withdrawn else "their launcher is gone"
        self._observe(
            Observation(
                kind=ObservationKind.WORKER_LOST,
                host=self._settings.host,
                workload=place.workload,
                generation=place.generation,
                detail=f"ranks of this generation are lost: {why}",
            )
        )

    def _complain(self, place: Place, why: str) -> bool:
        """Logs that a place is refused. Returns False when that was logged before."""
        key = place.workload, place.generation, why
        if key in self._complained:
            return False
        self._complained.add(key)
        logger.error("generation %d of %s is not obeyed: %s", place.generation, place.workload, why)
        return True

    def _see_anew(self, seen: _Seen) -> None:
        self._seen = seen
        if self._lost_peers is not None:
            self._lost_peers.cancel()
            self._lost_peers = None

    # -- messages of the supervisor -----------------------------------------------------------------------------------

    def _term(self, term: int | None) -> int:
        """Returns the highest term so far. A higher one is written to disk before anything of it is obeyed."""
        if term is not None and term > self._state.term:
            self._state.term = term
            self._save()
        return self._state.term

    def _obey(self, desired: Desired) -> None:
        self._want = desired
        self._say_lasting_faults()
        self._asks.wanted(desired.asks)
        self._changed.set()

    def _report(self) -> Report:
        self._number += 1
        seen = self._seen
        workload, generation = (seen.workload, seen.generation) if seen.generation else self._refused_for()
        given = self._state.given.get(seen.workload)
        has_place = given is not None and seen.generation == given.generation and not given.withdrawn
        return Report(
            number=self._number,
            workload=workload,
            generation=generation,
            master=seen.master,
            ended=seen.ended,
            preempted=seen.preempted,
            ranks=seen.pages,
            problem=self._problem()[:_LONGEST_REASON],
            devices=device_count(),
            node_rank=given.node_rank if given is not None and has_place else -1,
            nodes=given.nodes if given is not None and has_place else 0,
            replicas=given.replicas if given is not None and has_place else 0,
        )

    def _refused_for(self) -> tuple[str, int]:
        """The workload and generation that made this host refuse the older generation it was given, to be reported to
        the supervisor; "" and 0 when it refuses none."""
        place = None if self._want is None else self._want.place
        given = None if place is None else self._state.given.get(place.workload)
        if place is None or given is None or place.generation >= given.generation:
            return "", 0
        return given.workload, given.generation

    def _is_taken(self) -> None:
        self._says_faults = True

    def _say_lasting_faults(self) -> None:
        """Reports lasting faults once on each connection, because a supervisor that was killed may have received them
        and not stored them. For a host without a place every report names them as its problem."""
        if not self._says_faults or self._want is None or self._want.place is None:
            return
        self._says_faults = False
        waiting = {one.identity for one in self._outbox.kept}
        for one in self._watchdogs.asking_for_reset():
            if one.identity not in waiting:
                self._observe(one)

    def _problem(self) -> Problem:
        # While the host has a place, a fault that a reset mends is no problem of the host: it is observed, and the
        # supervisor asks for the reset.
        has_place = self._want is not None and self._want.place is not None
        found = [self._folder.problem, *self._watchdogs.problems(resettable=not has_place)]
        if self._stopping.is_set() and not self._settings.watch_only:  # hosts are none the worse without watchdogs
            found.append(MONITOR_ENDS)
        lives = self._launcher is not None and time.monotonic() - self._launcher.started_s >= _LIVED_S
        if self._deaths >= _MANY_DEATHS and not lives:
            found.append(f"its launcher has died {self._deaths} times in a row")
        return "; ".join(filter(None, found))

    def _observe(self, one: Observation) -> None:
        if self._is_resetting and one.device_class is DeviceClass.RESET:
            return  # said after the reset, if it is not mended by it
        if self._outbox.add(one):
            self._connection.say_soon()

    # -- messages of the launcher -------------------------------------------------------------------------------------

    def _set_warm(self, warm: bool) -> None:
        """Whether the launcher could start ranks at once, or has."""
        if warm and not self._warm.is_set():
            self._warm.set()
            self._folder.show_ready(True)
        elif not warm:
            self._warm.clear()
            self._folder.show_ready(False)

    def _launcher_connected(self, is_connected: bool) -> None:
        self._told = None
        if is_connected:
            logger.info("the launcher has connected")
        self._changed.set()

    def _heard(self, message: FromLauncher) -> None:
        if not isinstance(message, Waiting) or message.warm:
            self._set_warm(True)
        if isinstance(message, Saved):
            if self._saving is not None and not self._saving.done():
                self._saving.set_result(message.problem)
            return
        if isinstance(message, Waiting):
            self._hears_waiting(message)
            return
        if message.generation != self._seen.generation or not self._seen.generation:
            logger.debug(
                "the launcher speaks of generation %d, which is over: %s", message.generation, type(message).__name__
            )
            return
        if isinstance(message, Pages):
            self._seen.pages = message.ranks
            return  # sent with the next report
        if isinstance(message, Master):
            self._seen.master = message.address
        elif isinstance(message, Running):
            self._hears_running(message)
        elif isinstance(message, Lost):
            self._hears_lost(message)
        elif isinstance(message, LostPeers):
            self._hears_lost_peers(message)
        elif isinstance(message, Ended):
            self._seen.ended, self._seen.preempted = True, message.preempted
            self._seen.running.clear()
        self._connection.say_soon()

    def _hears_waiting(self, message: Waiting) -> None:
        """The launcher waits without ranks. If it had ranks of this generation and no loss was reported, reports them
        as lost: an earlier monitor, which was killed, may have heard why."""
        seen = self._seen
        if message.generation and message.generation == seen.generation and not seen.ended:
            seen.running.clear()
            seen.pages = ()
            said = any(one.workload == seen.workload and one.generation == seen.generation for one in self._outbox.kept)
            if self._lost_peers is None and not said and not self._asking_kernel:
                self._lost(seen, None, "the launcher has no ranks of this generation any more")
        self._changed.set()

    def _hears_running(self, message: Running) -> None:
        self._seen.running = message.pids()
        self._seen.ended = self._seen.preempted = False
        if self._launcher is not None:
            self._launcher.watch_ranks(list(self._seen.running.values()))
        ranks = identities_of(self._seen.running.values())
        if ranks != self._state.ranks:
            self._state.ranks = ranks
            self._save()

    def _hears_lost(self, message: Lost) -> None:
        process = self._seen.running.pop(message.rank, 0)
        if message.signal is not None:
            how = f"signal {message.signal}"
        elif message.exit_code is not None:
            how = f"exit status {message.exit_code}"
        else:
            how = "it is gone"
        left = " (it was told to go, and has saved)" if message.preempted else ""
        detail = f"{how}{left}{': ' if message.reason else ''}{message.reason}"
        if message.signal == signal.SIGKILL and process and self._watchdogs.hear_of_kills:
            task = asyncio.create_task(self._was_killed(self._seen, message.rank, process, detail))
            self._asking_kernel.add(task)
            task.add_done_callback(self._asking_kernel.discard)
        else:
            code = message.exit_code if message.signal is None else -message.signal
            self._lost(self._seen, message.rank, detail, code)

    async def _was_killed(self, seen: _Seen, rank: int, process: int, detail: str) -> None:
        """Reports a rank that was killed, with the kernel's reason if it is the kernel that has killed it."""
        why = await self._watchdogs.why_killed(process, _KERNEL_SAYS_S)
        if why:
            logger.error(
                "rank %d (process %d) was killed by the kernel, which was out of memory: %s", rank, process, why
            )
            detail = f"{detail}: the kernel was out of memory: {why}"
        self._lost(seen, rank, detail, -signal.SIGKILL)

    def _hears_lost_peers(self, message: LostPeers) -> None:
        """The host of a lost peer reports why. If no host does, this one reports it after a delay; otherwise the job
        would wait in vain."""
        if self._lost_peers is None:
            generation = self._seen.generation
            ranks = ", ".join(map(str, message.ranks[:16]))
            loop = asyncio.get_running_loop()
            early = ended_early_text(message.ended)
            self._lost_peers = loop.call_later(_LOST_PEERS_S, self._nobody_was_lost, generation, ranks, early)

    def _nobody_was_lost(self, generation: int, ranks: str, early: str) -> None:
        self._lost_peers = None
        seen = self._seen
        if seen.generation != generation:
            return
        self._observe(
            Observation(
                kind=ObservationKind.NO_PROGRESS,
                host=self._settings.host,
                workload=seen.workload,
                generation=generation,
                detail=f"ranks {ranks} have lost a peer, and {early or 'no host has reported a lost rank'}",
            )
        )

    def _lost(self, seen: _Seen, rank: int | None, detail: str, exit_code: int | None = None) -> None:
        self._observe(
            Observation(
                kind=ObservationKind.WORKER_LOST,
                host=self._settings.host,
                workload=seen.workload,
                generation=seen.generation,
                rank=rank,
                exit_code=exit_code,
                detail=detail[:_LONGEST_REASON],
            )
        )

    # -- asks of the supervisor ---------------------------------------------------------------------------------------

    async def _verify(self, ask: Ask, within_s: float) -> Problem:
        def state_is_written() -> Problem:
            self._save()
            return self._folder.problem

        problem = await problems_of_host(
            self._watchdogs, within_s, launcher_is_warm=self._launcher_is_warm, state_is_written=state_is_written
        )
        launcher = self._launcher
        if ask.plan == NO_PLAN and launcher is not None and not self._warm.is_set():
            lived_s = time.monotonic() - launcher.started_s
            if lived_s < _WARM_S and not self._deaths and not self._problem():
                raise NotYet(f"the launcher imports since {lived_s:.0f} s")
        return problem

    async def _launcher_is_warm(self, within_s: float) -> Problem:
        if self._want is not None and self._want.completed:
            return ""
        if await is_set_within(self._warm, within_s) and self._link.is_connected:
            return ""
        return f"the launcher was not ready within {within_s:.1f} s"

    async def _checkpoint(self, ask: Ask, within_s: float) -> Problem:
        if not self._seen.running:
            return "no ranks run on this host"
        self._saving = asyncio.get_running_loop().create_future()
        if not self._link.tell(Save(step=ask.step)):
            return "the launcher cannot be told"
        try:
            return await asyncio.wait_for(self._saving, within_s)
        except asyncio.TimeoutError:
            return f"the launcher has not said within {within_s:.1f} s that its ranks have saved"

    async def _signal(self, ask: Ask, within_s: float) -> Problem:
        """Sends the signal to the ranks that still run; ranks that have ended are no problem."""
        if ask.signal not in signal.valid_signals() or ask.signal in (signal.SIGKILL, signal.SIGSTOP):
            return f"{ask.signal} is no signal that a rank can handle"
        if self._launcher is not None:
            self._launcher.signal_ranks(ask.signal)
        return ""

    async def _reset_devices(self, ask: Ask, within_s: float) -> Problem:
        """Resets the faulty devices. The launcher and its ranks are ended before, because they have the devices
        open."""
        devices = self._watchdogs.faulty()
        self._is_resetting = True
        try:
            launcher = self._launcher
            if launcher is not None:
                await launcher.end(min(self._settings.grace_s, within_s / 2))
            problem = await reset_devices(self._settings.reset_command, devices, within_s)
            if not problem:
                await self._watchdogs.look_all(_RESET_SAYS_S)  # links that go down with a device are no new fault
                self._watchdogs.were_reset(devices)
                self._says_faults = True  # of other devices, seen meanwhile
            return problem
        finally:
            self._is_resetting = False
            self._not_before_s = 0.0
            self._changed.set()

    # -- faults on purpose --------------------------------------------------------------------------------------------

    def _controlled(self, message: Control) -> Controlled:
        problem, ranks = "", {}
        if message.action == "ranks":
            ranks = {str(rank): pid for rank, pid in self._seen.running.items()}
        elif message.action == "partition" and 0 < message.seconds <= _LONGEST_PARTITION_S:
            problem = self._cut_off(message.seconds)
        elif message.action == "xid" and 0 < message.code < _MOST_XIDS and message.device:
            self._watchdogs.put_in(xid_finding(message.device[:_LONGEST_DEVICE], message.code, _ON_PURPOSE))
        elif message.action == "ecc" and message.count > 0 and message.device:
            self._watchdogs.put_in(ecc_finding(message.device[:_LONGEST_DEVICE], message.count, _ON_PURPOSE))
        else:
            problem = f"{message.action!r} for {message.seconds:g} s is no fault of a monitor"
        return Controlled(host=self._settings.host, problem=problem, ranks=ranks)

    def _cut_off(self, seconds: float) -> Problem:
        """Cuts this host off from the supervisor, and, where the host has a network of its own, from all other
        hosts."""
        if self._cable is None:
            logger.warning("a fault is put in: no connection to the supervisor for %.1f s", seconds)
            self._connection.block(seconds)
            return ""
        try:
            self._cable.pull()
        except OSError as error:
            return f"the cable of this host cannot be pulled: {error}"
        logger.warning("a fault is put in: this host is cut off from all others for %.1f s", seconds)
        if self._partition is not None:
            self._partition.cancel()
        self._partition = asyncio.get_running_loop().call_later(seconds, self._plug_in)
        return ""

    def _plug_in(self) -> None:
        if self._partition is not None:
            self._partition.cancel()
            self._partition = None
        if self._cable is None:
            return
        try:
            self._cable.plug_in()
            logger.warning("this host is connected to the others again")
        except OSError as error:  # the switch is gone, and all hosts with it
            logger.error("this host stays cut off: %s", error)
