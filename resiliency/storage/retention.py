"""Decides which names are live and which steps may be deleted. Pure.

A *name* ("step=100.ckpt", "last.ckpt") points to the newest committed step that lists it, unless a newer committed step
supersedes the name. A named step is kept while one of its names points to it; of the steps without a name, the ``keep``
newest are kept. On a tier with ``keep_named=False`` (a ramdisk, which must stay small) the ``keep`` newest steps are
kept, whatever their names. The newest committed step is always kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from resiliency.storage.manifest import StepRecords
from resiliency.storage.step_id import StepId

__all__ = ["DeleteRequest", "Hold", "due_requests", "live_names", "steps_to_delete"]


@dataclass(frozen=True, kw_only=True)
class DeleteRequest:
    """A request to delete a name.

    Attributes:
        upto: the newest step the request covers; later saves under the same name stay. None: all steps of attempts
            before ``attempt``.
        after: this step or a later one must be durable before anything is deleted; None: any step.
        attempt: the attempt that made the request; used without ``upto``.
    """

    upto: StepId | None
    after: StepId | None = None
    attempt: int = 0

    def newest_covered(self, known: Iterable[StepId]) -> StepId | None:
        """The newest step that the request covers; None when it covers none of the known ones."""
        if self.upto is not None:
            return self.upto
        return max((step for step in known if step.attempt < self.attempt), default=None)

    def is_due(self, newest_durable: StepId) -> bool:
        """True once ``after`` or a later step is durable."""
        return self.after is None or newest_durable >= self.after


@dataclass(frozen=True, kw_only=True)
class Hold:
    """The step that the job was loaded from: it is good, and newer steps may be damaged.

    Attributes:
        step: the step. It is kept until a step that the same attempt saved after it is safe.
        line: line of descent of the saves that follow it.
        attempt, token: the attempt that loaded it.
    """

    step: StepId
    line: int
    attempt: int
    token: str

    def held(self, safe: Iterable[StepRecords]) -> frozenset[StepId]:
        """The step, or nothing when one of ``safe``, which are durable, follows it."""
        for step in (found.id for found in safe):
            # The line may have become larger since, to match that of the same job in another folder.
            if step.of_attempt(self.attempt, self.token) and step.line >= self.line and step > self.step:
                return frozenset()
        return frozenset([self.step])


def due_requests(
    requests: Mapping[str, DeleteRequest],
    safe: Collection[StepRecords],
    held: Collection[StepId],
    *,
    committed: Iterable[StepId] = (),
) -> dict[str, StepId]:
    """Names that may be deleted now, each with the newest step the request covers.

    Args:
        requests: by name.
        safe: the durable steps.
        held: steps that keep their names for now.
        committed: steps that are committed and not durable yet; a request may cover them too.
    """
    if not safe:
        return {}
    live, newest = live_names(safe), max(step.id for step in safe)
    known = {step.id for step in safe}.union(committed)
    due: dict[str, StepId] = {}
    for name, request in requests.items():
        upto = request.newest_covered(known)
        if upto is not None and request.is_due(newest) and live.get(name) not in held:
            due[name] = upto
    return due


def live_names(committed: Iterable[StepRecords], *, deleted: Mapping[str, StepId] | None = None) -> dict[str, StepId]:
    """Name -> step it points to now.

    Args:
        committed: manifests of the committed steps, in any order.
        deleted: names whose deletion was requested, with the newest step the request covers.
    """
    names: dict[str, StepId] = {}
    for manifest in sorted(committed, key=lambda m: m.id):
        for name in manifest.supersedes:
            names.pop(name, None)
        for name in manifest.names:
            names[name] = manifest.id
    for name, upto in (deleted or {}).items():
        if name in names and names[name] <= upto:
            del names[name]
    return names


def steps_to_delete(
    committed: Collection[StepRecords],
    unfinished: Iterable[StepId],
    *,
    keep: int | None,
    keep_named: bool = True,
    deleted: Mapping[str, StepId] | None = None,
    busy: Collection[StepId] = (),
) -> list[StepId]:
    """Steps that may be deleted now, oldest first.

    Args:
        committed: manifests of the committed steps (on a local tier: of the durable ones).
        unfinished: the other steps; those older than the newest committed one may be deleted.
        keep: how many steps to keep by age; None: all.
        keep_named: whether a name keeps its step, see the module's docstring.
        deleted: as in :func:`live_names`.
        busy: steps being written or sent, and the one that the job was loaded from; they stay for now.
    """
    if not committed:
        return []
    ordered = sorted(committed, key=lambda m: m.id)
    newest = ordered[-1].id
    by_age = [m.id for m in ordered if not m.names or not keep_named]
    wanted = set(by_age if keep is None else by_age[-keep:])
    if keep_named:
        wanted |= set(live_names(ordered, deleted=deleted).values())
    deletable = [m.id for m in ordered if m.id != newest and m.id not in wanted and m.id not in busy]
    deletable += [step for step in unfinished if step < newest and step not in busy]
    return sorted(deletable)
