"""Sets a step aside, over the restarts of one job, that the job cannot go on from.

Digests say that a step is what was saved, not that it is any good. Without this a job that dies of its newest step is
restarted with it until nobody restarts it any more (Megatron-LM #5281: 44 times). Two signs are taken: three
processes in a row ended while they restored the step, and the first loss after it is NaN. An error that is raised is
no sign, because it is more often the code's. Nothing is deleted, and another job takes the step again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from resiliency.callbacks.checkpointing.places import EngineKey
from resiliency.checkpoint.restore import Inventory
from resiliency.errors import TierError
from resiliency.settings import environment
from resiliency.storage.manifest import META_DIR
from resiliency.storage.step_id import StepId
from resiliency.storage.tiers.local import LocalTier
from resiliency.to_thread import to_thread

__all__ = ["Loads", "SetAside", "without"]

logger = logging.getLogger(__name__)

_FILE = "loads.json"
#: Processes in a row that end while they restore a step. One or two may have been ended from outside, by another rank's
#: failure or a preemption.
_ENDS = 3


@dataclass(frozen=True, kw_only=True)
class Loads:
    """What became of the loads of one job.

    Attributes:
        job: the job, see :class:`resiliency.settings.Launch`.
        loading: folder name of the step whose restore has begun and not ended; "": none.
        tries: number of restores of it in a row that have begun.
        aside: folder name of each step that was set aside -> why.
    """

    job: Mapping[str, str] = field(default_factory=dict)
    loading: str = ""
    tries: int = 0
    aside: Mapping[str, str] = field(default_factory=dict)

    def begun(self, step: StepId) -> Loads:
        return replace(self, loading=step.dirname, tries=self.tries + 1 if self.loading == step.dirname else 1)

    def ended(self) -> Loads:
        return replace(self, loading="", tries=0)

    def with_aside(self, step: str, why: str) -> Loads:
        return replace(self, aside={**self.aside, step: why})

    def judged(self) -> Loads:
        """At the start of a process: sets aside what earlier ones have not survived."""
        if not self.loading or self.tries < _ENDS:
            return self
        return self.with_aside(self.loading, f"{self.tries} processes in a row ended while they restored it").ended()


def without(inventory: Inventory, aside: Mapping[str, str]) -> Inventory:
    """The inventory as if the steps set aside were damaged; all of it when no other step can be restored."""
    hidden = {step for step, _ in inventory.steps if step.dirname in aside}
    left = tuple(one for one in inventory.steps if one[0] not in hidden)
    if not hidden or not left:
        return inventory
    # Counted as saved, they are steps that the job goes back from: what it saves next is newer than they are.
    saved = max([*hidden, *([inventory.saved] if inventory.saved is not None else [])])
    entries = tuple(entry for entry in inventory.entries if entry.step not in hidden)
    return Inventory(entries=entries, saved=saved, steps=left)


class SetAside:
    """Keeps the account of a job's loads, in a file in the run's folder on rank 0's host. Threads: training."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loads: dict[EngineKey, Loads] = {}  # on rank 0
        #: The step that is being restored, or was and no loss has been seen since.
        self._loaded: tuple[EngineKey, StepId] | None = None
        self._in_restore = False

    def filter(self, key: EngineKey, inventory: Inventory) -> Inventory:
        """Leaves out the steps that were set aside in this job; says so on rank 0. Collective: yes."""
        aside: Mapping[str, str] = {}
        if self._trainer.is_global_zero and inventory.steps:
            self._note(key, self._of(key).judged())
            aside = self._loads[key].aside
        aside = self._trainer.strategy.broadcast(aside)
        found = without(inventory, aside)
        if self._trainer.is_global_zero:
            for step, _ in inventory.steps:
                if step.dirname in aside and step > found.steps[0][0]:
                    logger.warning(
                        "%s of run %r in %s is set aside in this job: %s; %s is restored instead. A new job would take"
                        " it again: delete it if it is bad",
                        step,
                        key.run,
                        key.directory,
                        aside[step.dirname],
                        found.steps[0][0],
                    )
        return found

    def begin(self, key: EngineKey, step: StepId) -> None:
        """A restore of this step begins."""
        self._loaded, self._in_restore = (key, step), True
        if self._trainer.is_global_zero:
            self._note(key, self._of(key).begun(step))

    def end(self) -> None:
        """The restore has ended: training begins, or an error was raised. Idempotent."""
        if self._loaded is not None and self._in_restore and self._trainer.is_global_zero:
            key, _ = self._loaded
            self._note(key, self._of(key).ended())
        self._in_restore = False

    def see(self, loss: Tensor) -> None:
        """Looks at the first loss after a load, before its backward: code that raises on NaN may come first later."""
        if self._loaded is None:
            return
        (key, step), self._loaded = self._loaded, None
        if self._trainer.is_global_zero and bool(torch.isnan(loss).any()):
            logger.warning(
                "the first loss after %s of run %r was loaded is NaN: a restart of this job resumes from an older step",
                step,
                key.run,
            )
            self._note(key, self._of(key).with_aside(step.dirname, "the first loss after it was NaN"))

    def _of(self, key: EngineKey) -> Loads:
        """The account of this job, which an earlier process may have begun."""
        if key not in self._loads:
            self._loads[key] = _read(key)
        return self._loads[key]

    def _note(self, key: EngineKey, loads: Loads) -> None:
        before, self._loads[key] = self._loads[key], loads
        if loads != before and loads.job:  # without a job nothing restarts this process
            _write(key, loads)


def _file(key: EngineKey) -> str:
    return f"{META_DIR}/{key.run}/{_FILE}"


def _read(key: EngineKey) -> Loads:
    """What earlier processes of this job have written; an empty account if this is the first one."""
    launch, name = environment().launch, _file(key)
    try:
        found = Loads(**json.loads(to_thread(lambda: LocalTier(key.directory).read(name))))
    except FileNotFoundError:
        return Loads(job=launch.job)
    except (TierError, ValueError, TypeError) as error:
        logger.warning("%s in %s cannot be read, so that no step is set aside: %s", name, key.directory, error)
        return Loads(job=launch.job)
    return found if launch.continues(found.job) else Loads(job=launch.job)


def _write(key: EngineKey, loads: Loads) -> None:
    data = json.dumps({**asdict(loads), "job": dict(loads.job)}).encode()
    try:
        to_thread(lambda: LocalTier(key.directory).put_bytes(_file(key), data))
    except (TierError, OSError) as error:
        logger.warning("a step of which this job dies will not be set aside: %s", error)
