"""What to keep: pure decisions about deletion. Nothing here touches a disk.

A *name* ("step=100.ckpt", "last.ckpt") means the newest complete step that lists it, unless a newer complete step says
it supersedes the name. A named step lives while one of its names means it; unnamed steps live while they are among the
``keep`` newest of their kind. On a tier where names do not hold (a ramdisk, which must stay small) the ``keep`` newest
steps live, whatever their names. The newest complete step always lives.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from resiliency.storage.manifest import StepId, StepRecords

__all__ = ["DeleteRequest", "live_names", "steps_to_delete"]


@dataclass(frozen=True, kw_only=True)
class DeleteRequest:
    """A name whose deletion was asked for.

    Attributes:
        upto: what the name means up to this step is deleted; later saves under the same name are not meant.
        after: the step that must be safe first, or a later one; None: any.
    """

    upto: StepId
    after: StepId | None = None

    def is_due(self, newest_safe: StepId) -> bool:
        """True once the newest step that is safe is new enough."""
        return self.after is None or newest_safe >= self.after


def live_names(complete: Iterable[StepRecords], *, deleted: Mapping[str, StepId] | None = None) -> dict[str, StepId]:
    """Name -> step it means now.

    Args:
        complete: complete steps in any order.
        deleted: names whose deletion was asked for, with the newest step the request may remove.
    """
    names: dict[str, StepId] = {}
    for manifest in sorted(complete, key=lambda m: m.id):
        for name in manifest.supersedes:
            names.pop(name, None)
        for name in manifest.names:
            names[name] = manifest.id
    for name, upto in (deleted or {}).items():
        if name in names and names[name] <= upto:
            del names[name]
    return names


def steps_to_delete(
    complete: Collection[StepRecords],
    incomplete: Iterable[StepId],
    *,
    keep: int | None,
    keep_named: bool = True,
    deleted: Mapping[str, StepId] | None = None,
    busy: Collection[StepId] = (),
) -> list[StepId]:
    """Steps that may go now, oldest first.

    Args:
        complete: complete (and, where it matters, durable) steps.
        incomplete: steps that are not; those older than the newest complete one can never be needed again.
        keep: how many steps to keep by age; None: all.
        keep_named: see the module's docstring.
        deleted: as in :func:`live_names`.
        busy: steps being written or sent, which stay for now.
    """
    if not complete:
        return []
    ordered = sorted(complete, key=lambda m: m.id)
    newest = ordered[-1].id
    by_age = [m.id for m in ordered if not m.names or not keep_named]
    wanted = set(by_age if keep is None else by_age[-keep:])
    if keep_named:
        wanted |= set(live_names(ordered, deleted=deleted).values())
    doomed = [m.id for m in ordered if m.id != newest and m.id not in wanted and m.id not in busy]
    doomed += [step for step in incomplete if step < newest and step not in busy]
    return sorted(doomed)
