"""The messages between ranks, as frozen dataclasses, and their all-gather.

Each rank checks every message it receives. A message of another version of the library is refused with an error that
names the rank and the field; all ranks raise it, because every rank reads every message.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from resiliency.checkpoint.coordinator import Coordinator
from resiliency.runtime.typed_json import decode, encode
from resiliency.storage.inventory import StepInventory
from resiliency.storage.sources import BadCopy
from resiliency.storage.step_id import StepId

__all__ = [
    "AgentReady",
    "CopyProblem",
    "HeldBox",
    "HeldBoxes",
    "InventoryReport",
    "ProblemReport",
    "RankJoin",
    "SharedFolder",
    "gather",
]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RankJoin:
    """The first message of a rank in an attempt.

    Attributes:
        node: name of the host, see :class:`~resiliency.settings.Environment`.
        place: distinguishes hosts of the same name, see :func:`~resiliency.checkpoint._hosts.place_of`.
        largest_attempt: the largest attempt number found on the tiers this rank reads; 0 for none.
        largest_line: the largest line of descent found there; 0 for none.
        token: 6 hex digits drawn by this rank; rank 0's becomes the attempt's.
        problem: why a tier cannot be used; "" when all can.
        unsupported: the error about checkpoints in another version of the format; "" for none.
    """

    node: str
    place: str
    largest_attempt: int
    largest_line: int
    token: str
    problem: str = ""
    unsupported: str = ""


@dataclass(frozen=True, kw_only=True)
class SharedFolder:
    """Whether a rank sees the probe files that every host has written into its local tier."""

    seen: bool


@dataclass(frozen=True, kw_only=True)
class AgentReady:
    """Whether a rank has an agent.

    Attributes:
        problem: why there is no agent; "" when there is one.
        in_use: the reason is another job.
    """

    problem: str = ""
    in_use: bool = False


@dataclass(frozen=True, kw_only=True)
class InventoryReport:
    """The inventory of the tiers that one rank lists.

    Attributes:
        entries: one per source and step.
        saved: the newest save of this rank in this process, which may not be listed yet.
        problem: why a tier could not be listed; "" when all could.
    """

    entries: tuple[StepInventory, ...]
    saved: StepId | None = None
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class CopyProblem:
    """Why a copy of a shard cannot be used.

    Attributes:
        copy: the copy.
        reason: text for logs and errors.
        damaged: True when its bytes are wrong, False when a tier failed.
    """

    copy: BadCopy
    reason: str
    damaged: bool


@dataclass(frozen=True, kw_only=True)
class HeldBox:
    """A box of a tensor that a rank holds.

    Attributes:
        key: the tensor's key in the state.
        offsets: first index of the box in each dimension of the whole tensor.
        sizes: shape of the box.
        shape: shape of the whole tensor.
        dtype: torch dtype name ("float32").
        replicated: every rank holds the whole tensor.
    """

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    replicated: bool


@dataclass(frozen=True, kw_only=True)
class HeldBoxes:
    """All boxes that a rank holds of a sharded state."""

    boxes: tuple[HeldBox, ...]


@dataclass(frozen=True, kw_only=True)
class ProblemReport:
    """The bad copies one rank found in one phase of a restore."""

    problems: tuple[CopyProblem, ...]


def gather(coordinator: Coordinator, topic: str, message: T, *, timeout: timedelta) -> list[T]:
    """The message of every rank, indexed by rank, ``[world_size]``.

    Collective: yes. Blocks: until every rank has called, up to ``timeout``.

    Raises:
        Timeout: names the ranks that did not call.
        ConfigError: a rank sent a message of another kind or version; the error names the rank and the field.
    """
    if coordinator.world_size == 1:
        return [message]
    answers = coordinator.all_gather(topic, encode(message), timeout=timeout)
    return [decode(type(message), data, what=f"the {topic} of rank {rank}") for rank, data in enumerate(answers)]
