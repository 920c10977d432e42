"""Finds the damaged steps that a restore passes over: those it would have taken instead, had they not been damaged.

Pure, no torch. The order of steps is the planner's: it is called again with an inventory in which no step is damaged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from resiliency.storage.inventory import StepInventory
from resiliency.storage.restore_plan import RestorePlan
from resiliency.storage.step_id import StepId

__all__ = ["steps_passed_over"]


def steps_passed_over(
    inventory: Sequence[StepInventory],
    taken: StepId | None,
    plan: Callable[[Sequence[StepInventory]], RestorePlan | None],
) -> list[StepId]:
    """The steps that come before ``taken`` and were not restored because of damage, in the planner's order.

    Args:
        inventory: of all sources.
        taken: the step that was restored; None: no step could be.
        plan: plans a restore from an inventory, without knowing which copies are bad.
    """
    left = [_whole(entry) for entry in inventory]
    passed: list[StepId] = []
    while (found := plan(left)) is not None and found.step != taken:
        passed.append(found.step)
        left = [entry for entry in left if entry.step != found.step]
    return passed


def _whole(entry: StepInventory) -> StepInventory:
    """The entry as it would be if no file of the step had been lost."""
    if not entry.lost:
        return entry
    world_size = max(1, entry.world_size)
    return dataclasses.replace(entry, world_size=world_size, ranks=tuple(range(world_size)), replicated=True)
