"""Steps that the supervisor carries out itself: the user's program, and what the cluster is told."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Mapping

from resiliency.settings import all_variables
from resiliency.supervisor.clusters.base import Cluster
from resiliency.supervisor.model import Plan, StepKind, Workload

__all__ = ["Actuator"]

logger = logging.getLogger(__name__)

#: Between SIGTERM and SIGKILL for a program that takes too long.
_GRACE_S = 5.0
#: Of what a program has printed, for the log; and how often its output is read when it has ended.
_SHOWN_BYTES, _MOST_READS = 2000, 16


class Actuator:
    """See the module. Thread: the event loop's.

    Args:
        hook: words of the user's program; empty: there is none. After a kill of the supervisor it is run again for the
            same plan, whose number it gets: it must stand that.
        ended: told plan number, index of the step, and what went wrong ("": nothing).
    """

    def __init__(self, *, hook: tuple[str, ...], cluster: Cluster, ended: Callable[[int, int, str], None]) -> None:
        self._hook, self._cluster, self._ended = hook, cluster, ended
        self._tasks: dict[tuple[int, int], asyncio.Task[None]] = {}
        #: Given up, and not ended yet.
        self._ending: set[asyncio.Task[None]] = set()

    def carry_out(self, plans: Mapping[int, Plan], workloads: Mapping[str, Workload]) -> None:
        """Begins what is to be done by these plans, which are stored, and ends what is not any more."""
        wanted = {
            (plan.number, plan.at): plan
            for plan in plans.values()
            if plan.step is not None and plan.step.kind in (StepKind.HOOK, StepKind.CLUSTER_OUT)
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

    async def close(self) -> None:
        """Ends what is being done. Blocks: for the grace of a program."""
        tasks = [*self._tasks.values(), *self._ending]
        self._tasks.clear()
        for task in tasks:
            if task not in self._ending:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, plan: Plan, workload: Workload) -> None:
        step = plan.step
        assert step is not None
        try:
            if step.kind is StepKind.HOOK:
                work = self._run_hook(plan, workload)
            else:
                work = self._cluster.take_out(step.hosts, plan.remedy.reason)
            problem = await asyncio.wait_for(work, step.timeout_s)
        except asyncio.TimeoutError:
            problem = f"{step.kind} took longer than {step.timeout_s:.0f} s"
        except Exception as error:  # Boundary: a backend's trouble is the step's, and the plan says what follows.
            logger.exception("plan %d: %s failed", plan.number, step.kind)
            problem = f"{step.kind}: {type(error).__name__}: {error}"
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
    """The last of what a program prints, until it ends: one that it has left running may hold its output for ever.
    Thread: the event loop's.

    Attributes:
        end: that the program is given.
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
        """Returns: what was printed."""
        for _ in range(_MOST_READS):
            if not self._take():
                break
        asyncio.get_running_loop().remove_reader(self._read)
        os.close(self._read)
        return self._last.decode(errors="replace").strip()


async def _end(process: asyncio.subprocess.Process) -> None:
    """With what it has started and left in its session."""
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
    """What the user's program is told."""
    return {
        "RESILIENCY_WORKLOAD": plan.workload,
        "RESILIENCY_PLAN": str(plan.number),
        "RESILIENCY_INCIDENT": str(plan.incident),
        "RESILIENCY_REMEDY": str(plan.remedy.kind),
        "RESILIENCY_REASON": plan.remedy.reason,
        "RESILIENCY_EPOCH": str(plan.epoch),
        "RESILIENCY_HOSTS": ",".join(plan.places),
        "RESILIENCY_HOSTS_OUT": ",".join(plan.remedy.out),
        "RESILIENCY_REPLICAS": str(len(plan.places) // workload.spec.hosts_per_replica),
        "RESILIENCY_REPLICAS_BEFORE": str(workload.replicas),
    }
