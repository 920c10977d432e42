"""Checks what monitors say: nobody speaks of another host, or of what it cannot see. Pure: no input, no output, no
clock."""

from __future__ import annotations

from resiliency.runtime.messages.monitor import Message, Observed
from resiliency.runtime.messages.observations import Observation, ObservationKind
from resiliency.telemetry.plain_text import plain_line

__all__ = ["Forged", "check_host", "check_node", "of_host"]

#: Kinds of observations that a monitor may send.
_SEEN_BY_MONITORS = frozenset(
    {
        ObservationKind.WORKER_LOST,
        ObservationKind.WORKER_HUNG,
        ObservationKind.STRAGGLER,
        ObservationKind.HOST_UNHEALTHY,
        ObservationKind.DEVICE_FAULT,
        ObservationKind.DRAIN,
        ObservationKind.NO_PROGRESS,
    }
)
_SEEN_ON_NODES = frozenset({ObservationKind.HOST_UNHEALTHY, ObservationKind.DEVICE_FAULT, ObservationKind.DRAIN})


class Forged(Exception):
    """A message that its sender had no right to send; the text gives the reason. The connection is closed."""


def check_host(host: str, message: Observed) -> None:
    """Checks what the monitor of a host has seen.

    Raises:
        Forged: it is about another host, or of a kind that a monitor cannot see.
    """
    for one in message.observations:
        if one.host not in ("", host):
            raise Forged(f"the monitor of {host} speaks of {one.host}")
        if one.kind not in _SEEN_BY_MONITORS:
            raise Forged(f"a monitor does not see {one.kind}")
        if one.kind in (ObservationKind.WORKER_LOST, ObservationKind.WORKER_HUNG) and not one.workload:
            raise Forged(f"{one.kind} without a workload")


def check_node(node: str, message: Message) -> tuple[Observation, ...]:
    """Returns what the watchdogs of a machine have seen.

    Raises:
        Forged: it is nothing that watchdogs see, or of another machine.
    """
    if not isinstance(message, Observed):
        raise Forged(f"the watchdogs of a machine do not send {type(message).__name__}")
    for one in message.observations:
        if one.host not in ("", node):
            raise Forged(f"the watchdogs of {node} speak of {one.host}")
        if one.kind not in _SEEN_ON_NODES:
            raise Forged(f"watchdogs do not see {one.kind}")
    return message.observations


def of_host(one: Observation, host: str) -> Observation:
    """The observation, of this host, with texts of one bounded line."""
    return Observation(
        kind=one.kind,
        host=host,
        workload=one.workload,
        generation=one.generation,
        rank=one.rank,
        device=plain_line(one.device, 200),
        device_class=one.device_class,
        exit_code=one.exit_code,
        detail=plain_line(one.detail),
    )
