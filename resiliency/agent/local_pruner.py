"""Deletes steps from the local tier: those that retention does not keep, and those requested by name."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from resiliency.agent._fence import Fence
from resiliency.agent._removal import Remover
from resiliency.agent._reporter import Reporter
from resiliency.agent.commit import is_in_place
from resiliency.agent.config import AgentConfig
from resiliency.agent.local_steps import LocalSteps
from resiliency.errors import TierError
from resiliency.storage.names import delete_names, read_name
from resiliency.storage.retention import DeleteRequest, Hold, due_requests, live_names, steps_to_delete
from resiliency.storage.step_id import StepId
from resiliency.storage.tiers.base import Tier

__all__ = ["LocalPruner"]


class LocalPruner:
    """Decides which steps are deleted, and deletes them. Thread: :meth:`request` from any, :meth:`prune` from one at a
    time.

    Args:
        config: of this attempt.
        tier: the local tier.
        steps: the steps on the local tier.
        remover: deletes a step.
        report: reports deletions and failures.
        fence: of this attempt.
    """

    def __init__(
        self, config: AgentConfig, tier: Tier, steps: LocalSteps, remover: Remover, report: Reporter, fence: Fence
    ) -> None:
        self._fence = fence
        self._config, self._tier, self._steps, self._remover, self._report = config, tier, steps, remover, report
        self._requests: dict[str, DeleteRequest] = {}
        self._held: Hold | None = None
        self._lock = threading.Lock()

    def hold(self, hold: Hold) -> None:
        """Keeps this step and its names until a step that follows it is durable."""
        with self._lock:
            self._held = hold

    def request(self, requests: Mapping[str, DeleteRequest]) -> None:
        """Adds names to delete once the step they wait for is durable."""
        with self._lock:
            self._requests.update(requests)

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    def prune(self) -> None:
        """Deletes what may be deleted now. The first failure is logged as a warning, and the next call tries again.

        Raises:
            AgentError: a later attempt has started.
        """
        tier = self._config.local
        self._forget_what_is_gone()
        with self._steps.lock:
            committed = self._steps.select(lambda step: step.committed is not None)
            durable = [step.committed for step in committed if step.committed is not None and step.durable]
            if not durable:
                return
            newest = max(step.id for step in durable)
            # Until a save of this attempt is durable, nothing is deleted for its age: the newest step may be damaged,
            # and the ranks may be reading older ones.
            started = any(step.id.of_attempt(self._config.attempt, self._config.token) for step in durable)
            with self._lock:
                held = self._held.held(durable) if self._held is not None else frozenset()
                # While a start syncs the steps that it found, a request also covers those that are not durable yet.
                due = due_requests(self._requests, durable, held, committed=[step.id for step in committed])
            unfinished = [step.id for step in self._steps.select(lambda step: step.committed is None)]
            kept = self._steps.select(lambda step: step.pins > 0 or (step.committed is not None and not step.durable))
            busy = {step.id for step in kept} | held
            to_delete = steps_to_delete(
                durable,
                unfinished if started else [],
                keep=tier.keep if started else None,
                keep_named=tier.keep_named,
                deleted=due,
                busy=busy,
            )
            if started:  # agents of earlier attempts commit nothing here any more, whatever their step's number
                over = [step for step in unfinished if step > newest and step.attempt < self._config.attempt]
                to_delete += [step for step in over if step not in busy]
        failed = False
        for step_id in to_delete:
            try:
                step = self._steps.get(step_id)
                self._remover.delete(step_id, step.committed.names if step is not None and step.committed else ())
            except (OSError, TierError) as error:
                self._report.warn_once(
                    "prune",
                    "step %d could not be deleted from %s: %s; it is tried again after the next commit",
                    step_id.step,
                    tier.address,
                    error,
                )
                failed = True  # this step stays, and the others are still deleted
                continue
            self._steps.remove(step_id)
            self._report.log_deleted(step_id, tier.name)
        if self._delete_dangling_names(newest, due) and not failed:
            self._report.recovered("prune")

    def _forget_what_is_gone(self) -> None:
        """Forgets the newest steps whose files are gone, so that no older step is deleted because of them; warns
        once."""
        while durable := self._steps.select(lambda step: step.committed is not None and step.durable):
            newest = durable[-1]
            assert newest.committed is not None
            if is_in_place(self._tier, newest.committed, self._config.local_ranks):
                return
            self._steps.remove(newest.id)
            self._report.warn_once(
                "gone",
                "step %d is not in %s any more, although nothing here has deleted it; what is older is kept until a"
                " newer step is durable. Look who moves or deletes files there",
                newest.id.step,
                self._config.local.address,
            )

    def _delete_dangling_names(self, newest: StepId, due: Mapping[str, StepId]) -> bool:
        """Deletes name files whose deletion was requested while their step is kept (pinned, or under another name), and
        forgets requests that are done. False when a name could not be deleted."""
        worked = True
        committed = [step for step in self._steps.select() if step.committed is not None]
        durable = [step.committed for step in committed if step.durable and step.committed is not None]
        live = live_names(durable, deleted=due)
        for name in {name for step in durable for name in step.names} - live.keys():
            try:
                pointer = read_name(self._tier, name)
                if pointer is not None and pointer.run == self._config.run and pointer.id < newest:
                    self._fence.check()
                    delete_names(self._tier, self._config.run, [name])
            except TierError as error:
                where = self._config.local.address
                self._report.warn_once("prune", "a name could not be removed from %s: %s", where, error)
                worked = False
        with self._lock:
            for name, upto in due.items():
                if not any(step.committed and name in step.committed.names and step.id <= upto for step in committed):
                    self._requests.pop(name, None)
        return worked
