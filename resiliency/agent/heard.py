"""Remembers what agents have told a rank of its saves. When an agent dies, its rank tells the next one."""

from __future__ import annotations

from collections import deque
from typing import Any, TypeVar

from resiliency.agent.messages import Committed, Durable, Failed, Heard, Notice, Seal, TierSave
from resiliency.storage.step_id import StepId

__all__ = ["HeardNotices"]

_Key = TypeVar("_Key")

#: Number of failed saves that are remembered.
_FAILED = 16
#: Most saves whose tiers are remembered, until something is heard of them.
_AWAITED = 1000


class HeardNotices:
    """Keeps :class:`~resiliency.agent.messages.Heard` up to date. Thread: one at a time.

    Args:
        local: name of the local tier.
    """

    def __init__(self, local: str) -> None:
        self._local = local
        self._newest: dict[str, TierSave] = {}  # by tier
        self._failed: deque[StepId] = deque(maxlen=_FAILED)
        self._sealed: dict[StepId, tuple[str, ...]] = {}  # not committed yet -> remote tiers it goes to
        self._awaited: dict[TierSave, None] = {}  # in the order of their commits

    def seal(self, seal: Seal) -> None:
        """Notes what the rank has sent."""
        if seal.tiers:
            self._sealed[seal.id] = seal.tiers
            _forget(self._sealed, _AWAITED)

    def hear(self, message: Notice) -> None:
        """Notes what the rank has received."""
        if isinstance(message, (Committed, Durable)):
            before = self._newest.get(message.tier)
            if before is None or before.id < message.id:
                self._newest[message.tier] = TierSave(tier=message.tier, id=message.id)
        if isinstance(message, Committed):
            for tier in self._sealed.pop(message.id, ()):
                self._awaited[TierSave(tier=tier, id=message.id)] = None
            _forget(self._awaited, _AWAITED)
        elif isinstance(message, Durable):
            self._awaited.pop(TierSave(tier=message.tier, id=message.id), None)
        elif isinstance(message, Failed) and message.tier != self._local:
            if not message.retrying:
                self._awaited.pop(TierSave(tier=message.tier, id=message.id), None)
        elif isinstance(message, Failed):
            self._sealed.pop(message.id, None)
            newest = self._newest.get(self._local)
            if newest is None or newest.id < message.id:  # else it was committed, and its fsync failed
                self._failed.append(message.id)

    def heard(self) -> Heard:
        """What the next agent is told."""
        awaited = sorted(self._awaited, key=lambda save: save.id)
        return Heard(newest=tuple(self._newest.values()), failed=tuple(self._failed), awaited=tuple(awaited))


def _forget(entries: dict[_Key, Any], most: int) -> None:
    """Removes the first of too many."""
    while len(entries) > most:
        del entries[next(iter(entries))]
