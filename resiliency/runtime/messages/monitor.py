"""The messages between the supervisor and the host monitors, and their encoding: one JSON object for each.

The supervisor never sends commands to run. It sends the state that it wants (:class:`Desired`), again and again, and a
monitor makes it so; a message that comes twice, late, or from a supervisor that was replaced does no harm. Every
message is checked field by field, and its size is limited.

Unknown fields are refused, so a new field or a new kind of message needs a higher version. The version of a first
message is checked before its other fields, which another version may have changed; :class:`Refused` has one field in
all versions, so that the reason can always be told.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from typing import Any, get_args

from resiliency.errors import AgentError
from resiliency.runtime.messages.observations import Observation
from resiliency.runtime.messages.places import Place
from resiliency.runtime.typed_json import from_jsonable, to_jsonable

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
    "StepKind",
    "Welcome",
    "pack",
    "unpack",
]

PROTOCOL_VERSION = 5
#: Plan number of an ask that belongs to no plan: the check of a host that joins. Plans are numbered from 1.
NO_PLAN = 0
#: The problem that a host reports when its monitor was told to end.
MONITOR_ENDS = "its monitor was told to end"
#: Longest message. A host of 1,024 ranks sends less.
MAX_MESSAGE_BYTES = 256 * 1024


@dataclass(frozen=True, kw_only=True)
class Hello:
    """A monitor's first message.

    Attributes:
        incarnation: random name of the monitor's process.
        address: where other hosts reach this one.
        block: failure domain, see :class:`~resiliency.supervisor.model.Host`.
        term: the highest term of a supervisor that the monitor has obeyed; 0: none.
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
        term: of the supervisor's leadership; a monitor obeys no supervisor of a lower term than it has seen.
        period_s: seconds between two reports.
    """

    version: int
    term: int
    period_s: float


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Says why the sender's message was refused. The connection is closed then."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """The content of a rank's heartbeat page, see :mod:`resiliency.runtime.heartbeat_page`.

    Attributes:
        quiet_s: seconds since its last sign of life.
        longest_s: the longest time between two beats so far.
        stopped_s: for how long a signal has stopped it.
        saved: the newest step that it knows to be committed; -1: none.
        own_s: seconds of its own work since its attempt began.
        own_steps: number of optimizer steps in that time; 0: the rank does not measure its own work.
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
    """A heartbeat: the present state of the host.

    Attributes:
        number: counts up from 0 in each incarnation.
        workload, generation: of the place that the launcher has taken; "" and 0: none. A host that was given an older
            generation than it has had reports the one it has had, so that the supervisor numbers later generations
        above it. master: "address:port" of the store of that generation; only node rank 0 reports it.
        ended: all ranks of the generation have finished.
        preempted: they have saved and left because they were told to go.
        problem: why the host cannot have ranks now; "": it can.
        devices: GPUs that the driver has; 0: there is no driver.
        node_rank, nodes, replicas: of the place, see :class:`~resiliency.runtime.messages.places.Place`; -1, 0 and 0:
            none. A supervisor that does not know the job's ranks takes them over by these.
    """

    number: int
    workload: str = ""
    generation: int = 0
    master: str = ""
    ended: bool = False
    preempted: bool = False
    ranks: tuple[RankReport, ...] = ()
    problem: str = ""
    devices: int = 0
    node_rank: int = -1
    nodes: int = 0
    replicas: int = 0


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What was seen on the host. Sent at once."""

    observations: tuple[Observation, ...]


class StepKind(str, Enum):
    """Each kind has one effect, which can be asked for again without harm."""

    CHECKPOINT = "checkpoint"  # ranks save after a step that is still ahead of them
    VERIFY = "verify"  # hosts check themselves
    RESET_DEVICES = "reset_devices"
    SIGNAL = "signal"  # ranks get the user's signal
    HOOK = "hook"  # the user's program
    CLUSTER_OUT = "cluster_out"  # in plans stored long ago; the cluster is told beside all plans
    PLACE = "place"  # hosts are told their places, until each has confirmed its place
    PROGRESS = "progress"  # ranks have trained a step

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, kw_only=True)
class Ask:
    """A step of a plan that the host is to carry out (VERIFY, CHECKPOINT, RESET_DEVICES, SIGNAL), answered with
    :class:`StepEnded`. An ask that was answered already is answered again, and not carried out again.

    Attributes:
        generation: of the plan. It tells plans of equal number apart: when the supervisor's state file is lost plans
            are numbered from 1 again, and generations are not.
        step: for CHECKPOINT: ranks save after this optimizer step, which none of them has done yet.
        signal: for SIGNAL: its number.
    """

    plan: int
    at: int
    kind: StepKind
    timeout_s: float
    generation: int = 0
    step: int = -1
    signal: int = 0


@dataclass(frozen=True, kw_only=True)
class StepEnded:
    """The result of an :class:`Ask`.

    Attributes:
        plan, at, generation: those of the :class:`Ask`.
        problem: why the step failed; "": it was done.
    """

    plan: int
    at: int
    generation: int = 0
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class Desired:
    """The complete state that the supervisor wants of the host.

    Attributes:
        term: see :class:`Welcome`.
        place: None: the host has no ranks.
        completed: all workloads have ended, and none of them can need this host: its launcher can end.
    """

    term: int
    place: Place | None = None
    asks: tuple[Ask, ...] = ()
    completed: bool = False


Message = Hello | Welcome | Refused | Report | Observed | StepEnded | Desired
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in get_args(Message)}


def pack(message: Message) -> str:
    """A message as text."""
    return json.dumps({"type": type(message).__name__, **to_jsonable(message)}, separators=(",", ":"))


def unpack(text: str | bytes) -> Message:
    """Parses and checks a text.

    Raises:
        AgentError: it is no message of this protocol; the error says why.
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
    "generation": (int,),
    "master": (str,),
    "ended": (bool,),
    "preempted": (bool,),
    "problem": (str,),
    "devices": (int,),
    "node_rank": (int,),
    "nodes": (int,),
    "replicas": (int,),
}
assert _RANK_KINDS.keys() == RankReport.__dataclass_fields__.keys()
assert _REPORT_KINDS.keys() == Report.__dataclass_fields__.keys() - {"ranks"}


def _flat(kind: Any, kinds: dict[str, tuple[type, ...]], fields: Any) -> Any:
    """Does the same as :func:`from_jsonable` in a tenth of the time, because tens of thousands arrive each second."""
    if type(fields) is dict and fields.keys() == kinds.keys():
        for name, allowed in kinds.items():
            if type(fields[name]) not in allowed:
                break
        else:
            made = object.__new__(kind)
            made.__dict__.update(fields)
            return made
    return from_jsonable(kind, fields)
