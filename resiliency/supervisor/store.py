"""The supervisor's state: what is stored before anything is done about it, and who may store.

A set of changes is stored whole or not at all, in the name of the leader's term. Once a higher term has begun, a lower
one stores nothing any more (fencing): a leader that was replaced without noticing changes nothing, and learns of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from resiliency.errors import ResiliencyError
from resiliency.supervisor.model import Host, Incident, Plan, Workload
from resiliency.supervisor.records import Changes

__all__ = ["HistoryEvent", "LeadershipLost", "StateStore", "StateUnavailable", "Stored"]


class LeadershipLost(ResiliencyError):
    """Another supervisor leads. This one must not send anything to anybody any more."""


class StateUnavailable(ResiliencyError):
    """The state cannot be read or written now (a full disk, for example). Trying again later can help."""


@dataclass(frozen=True, kw_only=True)
class HistoryEvent:
    """A line of the supervisor's history.

    Attributes:
        number: 0 before it is stored.
        at: UTC seconds.
        text: for people.
    """

    at: float
    kind: str
    text: str
    workload: str = ""
    host: str = ""
    incident: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    number: int = 0


@dataclass(kw_only=True)
class Stored:
    """Everything that a new leader starts from."""

    workloads: list[Workload] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    hosts: list[Host] = field(default_factory=list)


class StateStore(Protocol):
    """Where the state is kept. Thread: any; calls wait for each other. Blocks: for the disk.

    Every verb raises :class:`StateUnavailable` when it cannot be carried out now.

    Attributes:
        path: what messages call it.
    """

    path: str

    def fence(self, term: int) -> None:
        """From now on no lower term stores anything.

        Raises:
            LeadershipLost: a higher term has begun already.
        """
        ...

    def load(self) -> Stored:
        """Reads everything.

        Raises:
            ConfigError: a row cannot be read.
        """
        ...

    def commit(
        self,
        term: int,
        changes: Changes,
        hosts: Mapping[str, Host | None] | None = None,
        events: Sequence[HistoryEvent] = (),
    ) -> None:
        """Stores everything or nothing. It is on disk when this returns.

        Args:
            hosts: by name; None for a host that is forgotten.

        Raises:
            LeadershipLost: ``term`` is over.
        """
        ...

    def events(
        self, *, after: int = 0, limit: int = 200, workload: str = "", host: str = "", incident: int | None = None
    ) -> list[HistoryEvent]:
        """The newest events that match, oldest first."""
        ...

    def close(self) -> None: ...
