"""What the supervisor and the monitors of hosts say to each other, and their encoding: one JSON object each.

The supervisor never sends commands to run. It says what is to be true (:class:`Desired`), again and again, and a
monitor makes it so; being told twice, late, or by a supervisor that was replaced, does no harm. Every message is
checked field by field, and is bounded in size.

A field that is not known is refused, so a message that gets a new one, or a new kind, raises the version. It is looked
at before any other field of a first message, which may have others in another version; :class:`Refused` has one field
in all versions, so that it can always be said why.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, get_args

from resiliency.errors import AgentError
from resiliency.storage.typed_json import from_jsonable, to_jsonable
from resiliency.supervisor.model import Observation, Place, StepKind

__all__ = [
    "MAX_MESSAGE_BYTES",
    "MONITOR_ENDS",
    "NO_PLAN",
    "PROTOCOL_VERSION",
    "Ask",
    "Desired",
    "Hello",
    "Message",
    "Observed",
    "RankReport",
    "Refused",
    "Report",
    "StepEnded",
    "Welcome",
    "pack",
    "unpack",
]

PROTOCOL_VERSION = 2
#: The number of an ask that belongs to no plan: the check of a host that joins. Plans' numbers begin at 1.
NO_PLAN = 0
#: The problem of a host whose monitor was told to end, and has no other.
MONITOR_ENDS = "its monitor was told to end"
#: A host of 1,024 ranks says less than this.
MAX_MESSAGE_BYTES = 256 * 1024


@dataclass(frozen=True, kw_only=True)
class Hello:
    """A monitor's first message.

    Attributes:
        incarnation: of the monitor's process, random.
        address: that other hosts reach this one by.
        block: failure domain, see :class:`~resiliency.supervisor.model.Host`.
        term: the highest of a supervisor that it has obeyed; 0: none.
    """

    version: int
    host: str
    incarnation: str
    address: str = ""
    block: str = ""
    term: int = 0


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """The supervisor's first answer.

    Attributes:
        term: of its leadership; a monitor obeys no supervisor of a lower term than it has seen.
        period_s: between reports.
    """

    version: int
    term: int
    period_s: float


@dataclass(frozen=True, kw_only=True)
class Refused:
    """The answer to a message that is not taken. The connection is closed then."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """What a rank's heartbeat page says, see :mod:`resiliency.launch.heartbeat_page`.

    Attributes:
        quiet_s: since its last sign of life.
        longest_s: the longest time between two beats so far.
        stopped_s: for which a signal has stopped it.
        saved: the newest step that it knows to be committed; -1: none.
        own_s, own_steps: seconds of its own work since its attempt began, and in how many optimizer steps; 0 steps: it
            does not measure it.
    """

    rank: int
    beats: int = 0
    step: int = -1
    phase: str = ""
    watched: bool = False
    quiet_s: float = 0.0
    longest_s: float = 0.0
    stopped_s: float = 0.0
    saved: int = -1
    own_s: float = 0.0
    own_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class Report:
    """A heartbeat: what is true on the host.

    Attributes:
        number: counts up from 0 in each incarnation.
        workload, epoch: of the place that the launcher has taken; "" and 0: none. Of a host that is given an epoch of
            the past, the one that it has had: the supervisor's next ones are to be above it.
        master: "address:port" of the store of that epoch, said by node rank 0 alone.
        ended: all ranks of the epoch have finished.
        preempted: they have saved and left because they were told to go.
        problem: why the host cannot have ranks now; "": it can.
    """

    number: int
    workload: str = ""
    epoch: int = 0
    master: str = ""
    ended: bool = False
    preempted: bool = False
    ranks: tuple[RankReport, ...] = ()
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Things that were seen on the host. Sent at once."""

    observations: tuple[Observation, ...]


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A step of a plan that the host is to carry out (VERIFY, CHECKPOINT, RESET_DEVICES, SIGNAL), answered with
    :class:`StepEnded`. An ask that was answered is answered again, not carried out again.

    Attributes:
        epoch: of the plan. Plans are numbered anew when the supervisor's state file was lost, epochs are not: a monitor
            that remembers a plan of the same number is not misled.
        step: of CHECKPOINT: ranks save after this optimizer step, which none of them has done yet.
        signal: of SIGNAL: its number.
    """

    plan: int
    at: int
    kind: StepKind
    timeout_s: float
    epoch: int = 0
    step: int = -1
    signal: int = 0


@dataclass(frozen=True, kw_only=True)
class StepEnded:
    """
    Attributes:
        plan, at, epoch: of the :class:`Ask`.
        problem: "": it was done.
    """

    plan: int
    at: int
    epoch: int = 0
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Desired:
    """What is to be true on the host. The whole of it.

    Attributes:
        term: see :class:`Welcome`.
        place: None: the host has no ranks.
        master: "address:port" of the store of the place's epoch; "": node rank 0 has not said it yet.
        completed: all workloads have ended, and none of them can need this host: its launcher can end.
    """

    term: int
    place: Place | None = None
    master: str = ""
    asks: tuple[Ask, ...] = ()
    completed: bool = False


Message = Hello | Welcome | Refused | Report | Observed | StepEnded | Desired
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in get_args(Message)}


def pack(message: Message) -> str:
    """A message as text."""
    return json.dumps({"type": type(message).__name__, **to_jsonable(message)}, separators=(",", ":"))


def unpack(text: str | bytes) -> Message:
    """The message of a text.

    Raises:
        AgentError: it is not one of this protocol; the error says why.
    """
    if len(text) > MAX_MESSAGE_BYTES:
        raise AgentError(f"a message of {len(text)} bytes is longer than {MAX_MESSAGE_BYTES}")
    try:
        fields = json.loads(text)
        kind = _KINDS[fields.pop("type")]
        if kind is Hello or kind is Welcome:
            _check_version(fields.get("version"))
        if kind is Report and type(fields.get("ranks")) is list:
            ranks = tuple([_flat(RankReport, _RANK_KINDS, rank) for rank in fields.pop("ranks")])
            report: Report = _flat(Report, _REPORT_KINDS, fields)
            report.__dict__["ranks"] = ranks
            return report
        found: Message = from_jsonable(kind, fields)
        return found
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise AgentError(
            f"not a message of the supervisor's protocol ({type(error).__name__}: {error}): {text[:80]!r}"
        ) from error


def _check_version(version: Any) -> None:
    if type(version) is int and version != PROTOCOL_VERSION:
        raise AgentError(
            f"it speaks version {version} of the protocol of supervisor and monitors, and this side version"
            f" {PROTOCOL_VERSION}; install the same version of the library on both"
        )


_NUMBER = (float, int)
_RANK_KINDS: dict[str, tuple[type, ...]] = {
    "rank": (int,),
    "beats": (int,),
    "step": (int,),
    "phase": (str,),
    "watched": (bool,),
    "quiet_s": _NUMBER,
    "longest_s": _NUMBER,
    "stopped_s": _NUMBER,
    "saved": (int,),
    "own_s": _NUMBER,
    "own_steps": (int,),
}
_REPORT_KINDS: dict[str, tuple[type, ...]] = {
    "number": (int,),
    "workload": (str,),
    "epoch": (int,),
    "master": (str,),
    "ended": (bool,),
    "preempted": (bool,),
    "problem": (str,),
}
assert _RANK_KINDS.keys() == RankReport.__dataclass_fields__.keys()
assert _REPORT_KINDS.keys() == Report.__dataclass_fields__.keys() - {"ranks"}


def _flat(kind: Any, kinds: dict[str, tuple[type, ...]], fields: Any) -> Any:
    """As :func:`from_jsonable`, in a tenth of the time: there are tens of thousands of them a second."""
    if type(fields) is dict and fields.keys() == kinds.keys():
        for name, allowed in kinds.items():
            if type(fields[name]) not in allowed:
                break
        else:
            made = object.__new__(kind)
            made.__dict__.update(fields)
            return made
    return from_jsonable(kind, fields)
