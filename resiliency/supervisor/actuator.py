"""Carries out what the supervisor does itself: it runs the user's hook program, which is a step of a plan, and calls
the cluster, which no plan waits for."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from resiliency.runtime.messages.monitor import StepKind
from resiliency.settings import all_variables
from resiliency.supervisor.clusters.base import Cluster
from resiliency.supervisor.model import Plan, RemedyKind, Workload

__all__ = ["Actuator"]

logger = logging.getLogger(__name__)

#: Seconds between SIGTERM and SIGKILL for a hook that takes too long.
_GRACE_S = 5.0
#: Seconds that the cluster has to take what it is told beside all plans, and until it is told again.
_ASIDE_S, _AGAIN_S = 60.0, 30.0
#: How many bytes of a hook's output are logged, and how often its output is read after it has ended.
_SHOWN_BYTES, _MOST_READS = 2000, 16


class Actuator:
    """Runs each such step as a task. Thread: the event loop's.

    Args:
        hook: command line of the user's program; empty: there is none. After a kill of the supervisor it is run again
            for the same plan, so it must tolerate a second run; it gets the plan's number.
        ended: called with the plan's number, the index of the step, and the problem ("": the step succeeded).
    """

    def __init__(
        self,
        *,
        hook: tuple[str, ...],
        cluster: Cluster,
        ended: Callable[[int, int, str], None],
    ) -> None:
        self._hook, self._cluster, self._ended = hook, cluster, ended
        self._tasks: dict[tuple[int, int], asyncio.Task[None]] = {}
        #: What the cluster is told beside all plans, and when it was told last.
        self._asides: dict[str, asyncio.Task[None]] = {}
        self._told_s: dict[str, float] = {}
        #: These were cancelled and have not ended yet.
        self._ending: set[asyncio.Task[None]] = set()

    def carry_out(self, plans: Mapping[int, Plan], workloads: Mapping[str, Workload]) -> None:
        """Starts the present steps of these plans, which are stored already, and cancels steps that no plan wants any
        more."""
        wanted = {
            (plan.number, plan.at): plan
            for plan in plans.values()
            if plan.step is not None and plan.step.kind is StepKind.HOOK
        }
        for key in self._tasks.keys() - wanted.keys():
            task = self._tasks.pop(key)
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        for key in wanted.keys() - self._tasks.keys():
            plan = wanted[key]
            workload = workloads[plan.workload]
            self._tasks[key] = asyncio.create_task(self._run(plan, workload), name=f"plan-{plan.number}")

    def take_out(self, host: str, reason: str, now_s: float, *, is_dead: bool) -> None:
        """Tells the cluster not to use a host; again after ``_AGAIN_S`` if it is still there."""
        what = f"{host} is not taken out"
        self._aside(what, lambda: self._cluster.take_out(host, reason, is_dead=is_dead), now_s)

    def give_up(self, job: str, reason: str, now_s: float) -> None:
        """Tells the cluster that a job has failed for good; again after ``_AGAIN_S``, because it may be away."""
        what = f"the cluster does not know that job {job} is given up"
        self._aside(what, lambda: self._cluster.give_up(job, reason), now_s)

    def renew(self, workload: Workload, now_s: float) -> None:
        """Has the cluster carry out the latest of the workload's last resorts."""
        kind = workload.resorts[-1]
        what = f"{workload.name}: {kind} is not done"
        whole = kind is RemedyKind.RENEW_JOB
        self._aside(what, lambda: self._cluster.renew(workload.job, whole=whole, reason=workload.reason), now_s)

    def keep(self, job: str, text: str, now_s: float) -> None:
        """Has the cluster keep a text with a job; again after ``_AGAIN_S``, because it may be away."""
        what = f"the cluster does not know which workloads of job {job} were stopped"
        self._aside(what, lambda: self._cluster.keep(job, text), now_s)

    def _aside(self, what: str, work: Callable[[], Coroutine[Any, Any, str]], now_s: float) -> None:
        if what in self._asides or now_s - self._told_s.get(what, float("-inf")) < _AGAIN_S:
            return
        self._told_s = {each: at_s for each, at_s in self._told_s.items() if now_s - at_s < _AGAIN_S}
        self._told_s[what] = now_s

        async def run() -> None:
            try:
                if problem := await asyncio.wait_for(work(), _ASIDE_S):
                    logger.error("%s: %s", what, problem)
            except asyncio.TimeoutError:
                logger.error("%s within %.0f s", what, _ASIDE_S)
            except Exception:  # Boundary: an error of a backend.
                logger.exception("%s", what)
            finally:
                self._asides.pop(what, None)

        self._asides[what] = asyncio.create_task(run())

    async def close(self) -> None:
        """Cancels the running steps and waits for their end. Blocks: up to ``_GRACE_S`` for a hook that ignores
        SIGTERM."""
        tasks = [*self._tasks.values(), *self._asides.values(), *self._ending]
        self._tasks.clear()
        for task in tasks:
            if task not in self._ending:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, plan: Plan, workload: Workload) -> None:
        step = plan.step
        assert step is not None
        try:
            problem = await asyncio.wait_for(self._run_hook(plan, workload), step.timeout_s)
        except asyncio.TimeoutError:
            problem = f"{step.kind} took longer than {step.timeout_s:.0f} s"
        self._ended(plan.number, plan.at, problem)

    async def _run_hook(self, plan: Plan, workload: Workload) -> str:
        output = _Output()
        try:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._hook,
                    env={**all_variables(), **_variables(plan, workload)},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output.end,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                return f"the hook {self._hook[0]} cannot be started: {error.strerror}"
            finally:
                output.is_given()
            try:
                status = await process.wait()
            finally:
                if process.returncode is None:
                    await _end(process)
        finally:
            text = output.close()
        if text:
            logger.info("plan %d: the hook says: %s", plan.number, text)
        return "" if status == 0 else f"the hook {self._hook[0]} ended with status {status}"


class _Output:
    """Keeps the last output of a program. :meth:`close` does not wait for the end of the output, because a child that
    the program has left running may hold the pipe open for ever. Thread: the event loop's.

    Attributes:
        end: the file descriptor that the program writes to.
    """

    def __init__(self) -> None:
        self._read, self.end = os.pipe()
        os.set_blocking(self._read, False)
        self._last = b""
        asyncio.get_running_loop().add_reader(self._read, self._take)

    def is_given(self) -> None:
        os.close(self.end)

    def _take(self) -> bool:
        try:
            data = os.read(self._read, 65536)
        except BlockingIOError:
            return False
        if not data:
            asyncio.get_running_loop().remove_reader(self._read)
        self._last = (self._last + data)[-_SHOWN_BYTES:]
        return bool(data)

    def close(self) -> str:
        """Returns the last output, up to ``_SHOWN_BYTES``, without surrounding white space."""
        for _ in range(_MOST_READS):
            if not self._take():
                break
        asyncio.get_running_loop().remove_reader(self._read)
        os.close(self._read)
        return self._last.decode(errors="replace").strip()


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends the program and every process left in its session: SIGTERM, then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            await asyncio.wait_for(asyncio.shield(process.wait()), _GRACE_S)
        except asyncio.TimeoutError:
            continue
        return


def _variables(plan: Plan, workload: Workload) -> dict[str, str]:
    """Environment variables that tell the hook about the plan."""
    return {
        "RESILIENCY_WORKLOAD": plan.workload,
        "RESILIENCY_PLAN": str(plan.number),
        "RESILIENCY_INCIDENT": str(plan.incident),
        "RESILIENCY_REMEDY": str(plan.remedy.kind),
        "RESILIENCY_REASON": plan.remedy.reason,
        "RESILIENCY_GENERATION": str(plan.generation),
        "RESILIENCY_HOSTS": ",".join(plan.places),
        "RESILIENCY_HOSTS_OUT": ",".join(plan.remedy.out),
        "RESILIENCY_REPLICAS": str(len(plan.places) // workload.spec.hosts_per_replica),
        "RESILIENCY_REPLICAS_BEFORE": str(workload.replicas),
    }
