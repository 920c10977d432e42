"""Deletes from the local tier what retention lets go and what was asked to be deleted."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from resiliency.agent._removal import Remover
from resiliency.agent._reporter import Reporter
from resiliency.agent.config import AgentConfig
from resiliency.agent.local_steps import LocalSteps
from resiliency.errors import TierError
from resiliency.storage.catalog import read_name
from resiliency.storage.manifest import StepId
from resiliency.storage.retention import DeleteRequest, live_names, steps_to_delete
from resiliency.storage.tiers.base import Tier

__all__ = ["LocalPruner"]


class LocalPruner:
    """Thread: :meth:`request` from any, :meth:`prune` from one at a time.

    Args:
        config: of this attempt.
        tier: the local tier.
        steps: what lies there.
        remover: deletes a step.
        report: says what was deleted.
    """

    def __init__(self, config: AgentConfig, tier: Tier, steps: LocalSteps, remover: Remover, report: Reporter) -> None:
        self._config, self._tier, self._steps, self._remover, self._report = config, tier, steps, remover, report
        self._requests: dict[str, DeleteRequest] = {}
        self._lock = threading.Lock()

    def request(self, requests: Mapping[str, DeleteRequest]) -> None:
        """Names to be deleted once that is safe."""
        with self._lock:
            self._requests.update(requests)

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    def prune(self) -> None:
        """Deletes what may go now. What cannot be deleted is warned of once and tried again at the next call."""
        tier = self._config.local
        with self._steps.lock:
            safe = [step.committed for step in self._steps.select() if step.is_safe and step.committed is not None]
            if not safe:
                return
            newest = max(step.id for step in safe)
            with self._lock:
                due = {name: request.upto for name, request in self._requests.items() if request.is_due(newest)}
            kept = self._steps.select(lambda step: step.pins > 0 or (step.committed is not None and not step.durable))
            doomed = steps_to_delete(
                safe,
                [step.id for step in self._steps.select(lambda step: step.committed is None)],
                keep=tier.keep,
                keep_named=tier.keep_named,
                deleted=due,
                busy={step.id for step in kept},
            )
        for step_id in doomed:
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
                return
            self._steps.remove(step_id)
            self._report.log_deleted(step_id, tier.name)
        try:
            self._drop_dead_names(newest, due)
        except TierError as error:
            self._report.warn_once("prune", "a name could not be removed from %s: %s", tier.address, error)

    def _drop_dead_names(self, newest: StepId, due: Mapping[str, StepId]) -> None:
        """Removes name files that point to no step any more although the step is kept (pinned, or under another
        name), and requests that are done."""
        committed = [step for step in self._steps.select() if step.committed is not None]
        safe = [step.committed for step in committed if step.durable and step.committed is not None]
        live = live_names(safe, deleted=due)
        for name in {name for step in safe for name in step.names} - live.keys():
            pointer = read_name(self._tier, name)
            if pointer is not None and pointer.run == self._config.run and pointer.id < newest:
                self._tier.delete(name)
        with self._lock:
            for name, upto in due.items():
                if not any(step.committed and name in step.committed.names and step.id <= upto for step in committed):
                    self._requests.pop(name, None)
