"""The messages between a launcher and the monitor of its host, checked field by field. Each is one JSON object.

What the monitor wants is level-triggered, like all that a supervisor sends: receiving it twice, or late, changes
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from resiliency.runtime.messages.monitor import RankReport
from resiliency.runtime.messages.places import Place, store_address
from resiliency.runtime.typed_json import from_jsonable, to_jsonable

__all__ = [
    "REPORT_S",
    "Completed",
    "Control",
    "Controlled",
    "Ended",
    "FromLauncher",
    "FromMonitor",
    "Lost",
    "LostPeers",
    "Master",
    "NoPlace",
    "Pages",
    "Running",
    "Save",
    "Saved",
    "Stacks",
    "Waiting",
    "ended_early_text",
    "kind_of",
    "of_launcher",
    "of_monitor",
    "pack",
]

#: Seconds between two progress reports of a launcher about its ranks; its monitor passes on the newest one.
REPORT_S = 0.25
_MOST_RANKS = 4096


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """The launcher has no ranks, and waits for a place in a later generation.

    Attributes:
        warm: it can fork ranks at once.
    """

    generation: int = 0
    warm: bool = True


@dataclass(frozen=True, kw_only=True)
class Master:
    """The launcher is node rank 0, and its store listens at ``address``."""

    generation: int
    address: str

    def __post_init__(self) -> None:
        store_address(self.address)


@dataclass(frozen=True, kw_only=True)
class Running:
    """The launcher has started its ranks.

    Attributes:
        ranks: local rank -> [global rank, process id].
    """

    generation: int
    ranks: Mapping[str, Any]

    def pids(self) -> dict[int, int]:
        """Process ids by global rank.

        Raises:
            ValueError: ``ranks`` does not have that shape.
        """
        found = {}
        for pair in self.ranks.values():
            if not (isinstance(pair, list) and len(pair) == 2 and all(type(one) is int and one >= 0 for one in pair)):
                raise ValueError(f"ranks must be [global rank, process id] each, not {pair!r:.80}")
            found[pair[0]] = pair[1]
        return found


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A rank has failed."""

    generation: int
    rank: int
    exit_code: int | None = None
    signal: int | None = None
    reason: str = ""
    preempted: bool = False


@dataclass(frozen=True, kw_only=True)
class LostPeers:
    """Ranks wait after an error that says a peer is lost, and no rank of this host has failed.

    Attributes:
        ended: ranks of this host that have ended with status 0 before.
    """

    generation: int
    ranks: tuple[int, ...] = ()
    ended: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Pages:
    """The heartbeats of the launcher's ranks."""

    generation: int
    ranks: tuple[RankReport, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Ended:
    """All ranks of the launcher have finished."""

    generation: int
    preempted: bool = False


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Answers a request to save.

    Attributes:
        problem: why no checkpoint was committed; "": one was.
    """

    generation: int = 0
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Control:
    """A request of another process than the launcher (``resiliency inject``): puts a fault into this monitor, or asks
    for its ranks."""

    action: str
    seconds: float = 0.0
    device: str = ""
    code: int = 0
    count: int = 0


@dataclass(frozen=True, kw_only=True)
class Controlled:
    """The monitor's answer to a :class:`Control`.

    Attributes:
        problem: why the fault was not put in; "": it was.
        ranks: process id by global rank, where the ranks were asked for.
    """

    host: str
    problem: str = ""
    ranks: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class NoPlace:
    """The monitor wants that the launcher has no ranks. The contrary is wanted with a :class:`Place`."""


@dataclass(frozen=True, kw_only=True)
class Completed:
    """The monitor wants the launcher to end: the job is completed."""


@dataclass(frozen=True, kw_only=True)
class Stacks:
    """The monitor wants the ranks to write their stacks, once."""


@dataclass(frozen=True, kw_only=True)
class Save:
    """The monitor wants all ranks to save after this optimizer step, and an answer (:class:`Saved`)."""

    step: int


def ended_early_text(ranks: Sequence[int]) -> str:
    """Why others have lost a peer, in words; "" where no rank has ended."""
    if not ranks:
        return ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} ended with status 0 before the others"


FromLauncher = Waiting | Master | Running | Lost | LostPeers | Pages | Ended | Saved
FromMonitor = Place | NoPlace | Completed | Stacks | Save | Controlled
_OF_LAUNCHER: dict[str, Any] = {
    "waiting": Waiting,
    "master": Master,
    "running": Running,
    "lost": Lost,
    "lost_peers": LostPeers,
    "pages": Pages,
    "ended": Ended,
    "saved": Saved,
    "control": Control,
}
_OF_MONITOR: dict[str, Any] = {
    "place": Place,
    "no_place": NoPlace,
    "completed": Completed,
    "stacks": Stacks,
    "save": Save,
    "controlled": Controlled,
}
_NAMES = {kind: name for kinds in (_OF_LAUNCHER, _OF_MONITOR) for name, kind in kinds.items()}
assert _NAMES.keys() == {*get_args(FromLauncher), Control, *get_args(FromMonitor)}


def kind_of(message: FromLauncher | Control | FromMonitor) -> str:
    """The name of the message's kind, as it is sent."""
    return _NAMES[type(message)]


def pack(message: FromLauncher | Control | FromMonitor) -> dict[str, Any]:
    """A message as the object that is sent."""
    return {"kind": kind_of(message), **to_jsonable(message)}


def of_launcher(fields: Any) -> FromLauncher | Control:
    """Checks a message to a monitor. Ignores unknown fields, because the other end may be newer.

    Raises:
        ValueError: it is no such message; the error says why.
    """
    found: FromLauncher | Control = _unpacked(fields, _OF_LAUNCHER)
    if isinstance(found, Running):
        found.pids()
    if isinstance(found, (Running, Pages)) and len(found.ranks) > _MOST_RANKS:
        raise ValueError(f"{len(found.ranks)} ranks of one host")
    return found


def of_monitor(fields: Any) -> FromMonitor:
    """Checks a message of a monitor, as :func:`of_launcher` does."""
    found: FromMonitor = _unpacked(fields, _OF_MONITOR)
    if isinstance(found, Save) and found.step < 0:
        raise ValueError(f"step={found.step} is less than 0")
    return found


def _unpacked(fields: Any, kinds: Mapping[str, Any]) -> Any:
    if not isinstance(fields, dict):
        raise ValueError(f"not an object but {type(fields).__name__}")
    name = fields.get("kind")
    if not isinstance(name, str) or name not in kinds:
        raise ValueError(f"kind={name!r:.80} is none of {', '.join(kinds)}")
    kind = kinds[name]
    return from_jsonable(kind, {name: value for name, value in fields.items() if name in kind.__dataclass_fields__})
