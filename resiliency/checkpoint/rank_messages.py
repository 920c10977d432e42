"""The messages between ranks, as frozen dataclasses, and their all-gather.

Each rank checks every message it receives. A message of another version of the library is refused with an error that
names the rank and the field; all ranks raise it, because every rank reads every message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import TypeVar

from resiliency.checkpoint.coordinator import Coordinator
from resiliency.errors import ConfigError
from resiliency.runtime.typed_json import decode, encode
from resiliency.state.tree import dtype_from_name
from resiliency.storage.inventory import StepInventory
from resiliency.storage.shard_file import Chunk
from resiliency.storage.sources import BadCopy
from resiliency.storage.step_id import StepId

__all__ = [
    "AgentReady",
    "CopyProblem",
    "InventoryReport",
    "ProblemReport",
    "RankJoin",
    "SharedFolder",
    "WritePlanAnswer",
    "WritePlanBoxes",
    "WritePlanHead",
    "ask_first",
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
        ranges: the bytes that are wrong, as far as they are known.
    """

    copy: BadCopy
    reason: str
    damaged: bool
    ranges: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class WritePlanHead:
    """The first message of a rank to rank 0 at each save of a write plan.

    Attributes:
        known: digest of the decision that this rank has for just these boxes; "" when it has none.
        problem: why this rank cannot take part; "" when it can.
        skips: the problem is no error: this rank leaves out the save.
    """

    known: str = ""
    problem: str = ""
    skips: bool = False


@dataclass(frozen=True, kw_only=True)
class WritePlanBoxes:
    """All boxes that a rank's write plan offers, as columns: an object for each would cost rank 0 ten times as much.

    Attributes:
        keys, dtypes: of the tensor of each box; torch dtype names ("float32").
        dimensions: of each box.
        offsets, sizes, shapes: of all boxes, one after the other; as in :class:`~resiliency.storage.shard_file.Chunk`.
    """

    keys: tuple[str, ...]
    dtypes: tuple[str, ...]
    dimensions: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shapes: tuple[int, ...]

    @classmethod
    def of(cls, boxes: Sequence[Chunk]) -> WritePlanBoxes:
        return cls(
            keys=tuple(box.key for box in boxes),
            dtypes=tuple(box.dtype for box in boxes),
            dimensions=tuple(len(box.shape) for box in boxes),
            offsets=tuple(chain.from_iterable(box.offsets for box in boxes)),
            sizes=tuple(chain.from_iterable(box.sizes for box in boxes)),
            shapes=tuple(chain.from_iterable(box.shape for box in boxes)),
        )

    def boxes(self) -> list[Chunk]:
        """The inverse of :meth:`of`.

        Raises:
            ConfigError: this torch does not know a dtype.
        """
        itemsizes = {name: dtype_from_name(name).itemsize for name in set(self.dtypes)}
        known: dict[tuple[int, ...], tuple[int, ...]] = {}
        one = known.setdefault  # equal tuples become one object, for memory and garbage collection
        found, at = [], 0
        for key, dtype, dimensions in zip(self.keys, self.dtypes, self.dimensions, strict=True):
            end = at + dimensions
            offsets, sizes, shape = self.offsets[at:end], self.sizes[at:end], self.shapes[at:end]
            found.append(
                Chunk(key, one(offsets, offsets), one(sizes, sizes), dtype, itemsizes[dtype], one(shape, shape))
            )
            at = end
        return found


@dataclass(frozen=True, kw_only=True)
class WritePlanAnswer:
    """What rank 0 answers.

    Attributes:
        digest: of the decision; "" when all ranks are to send their boxes.
        mine: numbers of the boxes that the asking rank writes.
        problem: why nobody can save; "" when all can.
        skip: the problem is no error: all ranks leave out the save.
    """

    digest: str = ""
    mine: tuple[int, ...] = ()
    problem: str = ""
    skip: bool = False


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


def ask_first(
    coordinator: Coordinator,
    topic: str,
    message: T,
    decide: Callable[[Sequence[T]], Sequence[WritePlanAnswer]],
    *,
    timeout: timedelta,
) -> WritePlanAnswer:
    """Sends a message to rank 0, and returns its answer.

    Collective: yes. Blocks: until every rank has called and rank 0 has decided, up to ``timeout``.

    Args:
        topic: unique for each exchange.
        decide: called on rank 0 with the messages of all ranks; returns the answer to each. A ConfigError that it
            raises is the answer to all.

    Raises:
        Timeout: names the ranks that did not call.
        ConfigError: a message of another version of this library; the error names the rank and the field.
    """

    def answers(messages: Sequence[T]) -> Sequence[WritePlanAnswer]:
        try:
            return decide(messages)
        except ConfigError as error:
            return [WritePlanAnswer(problem=str(error))] * coordinator.world_size

    if coordinator.world_size == 1:
        return answers([message])[0]

    def encoded(messages: Sequence[bytes]) -> list[bytes]:
        try:
            found = [
                decode(type(message), data, what=f"the {topic} of rank {rank}") for rank, data in enumerate(messages)
            ]
        except ConfigError as error:
            return [encode(WritePlanAnswer(problem=str(error)))] * coordinator.world_size
        return [encode(answer) for answer in answers(found)]

    data = coordinator.ask_first(topic, encode(message), encoded, timeout=timeout)
    return decode(WritePlanAnswer, data, what=f"rank 0's answer to the {topic}")
