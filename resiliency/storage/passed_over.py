"""Finds the newer steps that a restore passes over, damaged or unfinished, and says why. Pure, no torch.

The order of steps is the planner's: it is called again with an inventory in which no step is damaged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from resiliency.storage.inventory import StepInventory
from resiliency.storage.manifest import MANIFEST, record_file
from resiliency.storage.restore_plan import RestorePlan
from resiliency.storage.step_id import StepId

__all__ = ["PassedOver", "steps_passed_over", "why_out_of_reach", "why_unfinished"]


@dataclass(frozen=True)
class PassedOver:
    """A step that was not restored: it is damaged, unfinished, or (``whole``) out of reach, and why, each text with the
    path of a file or folder."""

    step: StepId
    damaged: bool
    reasons: tuple[str, ...]
    whole: bool = False

    def __str__(self) -> str:
        more = f" (and {len(self.reasons) - 1} more)" if len(self.reasons) > 1 else ""
        what = "damaged" if self.damaged else "out of reach" if self.whole else "unfinished"
        return f"{self.step} is {what}: {self.reasons[0]}{more}"


def steps_passed_over(
    inventory: Sequence[StepInventory],
    taken: StepId | None,
    bad: Collection[tuple[StepId, str]],
    plan: Callable[[Sequence[StepInventory]], RestorePlan | None],
) -> list[PassedOver]:
    """The steps that come before ``taken`` and were not restored, the newest first.

    Args:
        inventory: of all sources.
        taken: the step that was restored; None: no step could be.
        bad: the step of each copy that was found to be bad, and why.
        plan: plans a restore from an inventory, without knowing which copies are bad.
    """
    left = [_whole(entry) for entry in inventory]
    passed = []
    while (found := plan(left)) is not None and found.step != taken:
        here = [entry for entry in inventory if entry.step == found.step]
        reasons = [*(why for step, why in bad if step == found.step), *(why for entry in here for why in entry.lost)]
        known = tuple(dict.fromkeys(reasons)) or ("no complete copy of it is left",)
        passed.append(PassedOver(found.step, damaged=True, reasons=known))
        left = [entry for entry in left if entry.step != found.step]
    unfinished = {entry.step for entry in inventory if taken is None or entry.step > taken}
    for step in unfinished - {one.step for one in passed}:
        here = [entry for entry in inventory if entry.step == step]
        if plan(here) is None:
            lost = tuple(dict.fromkeys(why for entry in here for why in entry.lost))
            apart = why_out_of_reach(here)
            why = lost or (apart or why_unfinished(here),)
            passed.append(PassedOver(step, damaged=bool(lost), reasons=why, whole=bool(apart)))
    return sorted(passed, key=lambda one: one.step, reverse=True)


def why_out_of_reach(entries: Sequence[StepInventory]) -> str:
    """Says where the shards of a step are that not every host can get; "" when some shards are nowhere.

    Args:
        entries: what the sources hold of that step; at least one.
    """
    if len({rank for entry in entries for rank in entry.ranks}) < max(1, *(entry.world_size for entry in entries)):
        return ""
    held = [f"shards {', '.join(map(str, entry.ranks))} in {entry.folder} of {entry.source.host}" for entry in entries]
    return f"each host needs all its shards, and cannot read the folders of other hosts: {'; '.join(held)}"


def why_unfinished(entries: Sequence[StepInventory]) -> str:
    """Names the first file that an unfinished step lacks.

    Args:
        entries: what the sources hold of that step; at least one.
    """
    first = max(entries, key=lambda entry: entry.world_size)
    if first.world_size == 0 and first.source.host is None:
        return f"{first.folder}{MANIFEST} is missing"
    there = {rank for entry in entries for rank in entry.ranks}
    rank = next((rank for rank in range(first.world_size) if rank not in there), 0)
    return f"{first.folder}{record_file(rank)} is missing, or does not tell of all bytes of its shard"


def _whole(entry: StepInventory) -> StepInventory:
    """The entry as it would be if no file of the step had been lost."""
    if not entry.lost:
        return entry
    world_size = max(1, entry.world_size)
    return dataclasses.replace(entry, world_size=world_size, ranks=tuple(range(world_size)), replicated=True)
