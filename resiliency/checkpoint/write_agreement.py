"""The ranks' agreement on which of them writes which box of their write plans: rank 0 decides, and tells each rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta

from resiliency.checkpoint.coordinator import Coordinator
from resiliency.checkpoint.offered_boxes import share_out
from resiliency.checkpoint.rank_messages import (
    WritePlanAnswer,
    WritePlanBoxes,
    WritePlanHead,
    ask_first,
)
from resiliency.errors import ConfigError
from resiliency.storage.shard_file import Chunk

__all__ = ["Agreed", "LeftOut", "WriteAgreement"]


class LeftOut(Exception):
    """A rank leaves out the save of a write plan, so all ranks do; says why. Not seen by users."""


@dataclass(frozen=True)
class Agreed:
    """What was decided for the boxes of this rank.

    Attributes:
        boxes: that this rank offered.
        mine: numbers of those that it writes.
        digest: of the decision; equal on all ranks.
        keys: of all tensors; known to rank 0 only.
        of_ranks: the boxes that each rank writes, by rank; known to rank 0 only.
    """

    boxes: tuple[Chunk, ...]
    mine: tuple[int, ...]
    digest: str
    keys: tuple[str, ...] = ()
    of_ranks: tuple[tuple[Chunk, ...], ...] = ()


class WriteAgreement:
    """Agrees on the writing of write plans. Thread: training.

    At every save each rank sends rank 0 a digest, and does what rank 0 answers: use the last decision, or send all
    boxes. So what a rank remembers decides nothing alone.
    """

    def __init__(self) -> None:
        self._agreed: Agreed | None = None

    def agree(
        self,
        boxes: tuple[Chunk, ...],
        *,
        objects: Collection[str],
        coordinator: Coordinator,
        topic: str,
        timeout: timedelta,
        problem: str = "",
        skips: bool = False,
    ) -> Agreed:
        """Returns what this rank writes.

        Collective: yes. Blocks: up to ``timeout``, twice when boxes have changed.

        Args:
            boxes: that this rank offers.
            objects: names of this rank's objects.
            topic: unique for each save.
            problem: why this rank cannot save.
            skips: it only leaves the save out.

        Raises:
            ConfigError: a rank has a problem, or the boxes of the ranks do not fit together; on all ranks.
            LeftOut: a rank leaves out the save; on all ranks.
            Timeout: a rank is missing.
        """
        before = self._agreed
        known = before.digest if before is not None and before.boxes == boxes else ""
        head = WritePlanHead(known=known, problem=problem, skips=skips)

        def compare(heads: Sequence[WritePlanHead]) -> Sequence[WritePlanAnswer]:
            answer = _answer(heads)
            if answer.digest and before is not None:
                _refuse_names(objects, before.keys)
            return [answer] * len(heads)

        answer = ask_first(coordinator, f"{topic}/head", head, compare, timeout=timeout)
        _raise_problem(answer)
        if answer.digest and before is not None:
            return before
        keys: list[str] = []
        of_ranks: list[tuple[Chunk, ...]] = []

        def share(offers: Sequence[WritePlanBoxes]) -> Sequence[WritePlanAnswer]:
            offered = [offer.boxes() for offer in offers]
            decided = share_out(offered)
            _refuse_names(objects, decided.keys)
            keys.extend(decided.keys)
            for boxes_of_rank, mine in zip(offered, decided.shares, strict=True):
                of_ranks.append(tuple(boxes_of_rank[number] for number in mine))
            return [WritePlanAnswer(digest=decided.digest, mine=mine) for mine in decided.shares]

        answer = ask_first(coordinator, f"{topic}/boxes", WritePlanBoxes.of(boxes), share, timeout=timeout)
        _raise_problem(answer)
        self._agreed = Agreed(boxes, answer.mine, answer.digest, tuple(keys), tuple(of_ranks))
        return self._agreed


def _answer(heads: Sequence[WritePlanHead]) -> WritePlanAnswer:
    """What rank 0 answers to the first messages of all ranks."""
    problems: dict[str, list[int]] = {}
    for rank, head in enumerate(heads):
        if head.problem:
            problems.setdefault(head.problem, []).append(rank)
    if problems:
        text = "; ".join(f"{problem} (rank {', '.join(map(str, ranks))})" for problem, ranks in problems.items())
        return WritePlanAnswer(problem=text, skip=all(head.skips for head in heads if head.problem))
    known = {head.known for head in heads}
    return WritePlanAnswer(digest=known.pop() if len(known) == 1 else "")


def _raise_problem(answer: WritePlanAnswer) -> None:
    if answer.problem:
        raise (LeftOut if answer.skip else ConfigError)(answer.problem)


def _refuse_names(objects: Collection[str], keys: Sequence[str]) -> None:
    taken = next((name for name in objects if name in keys), None)
    if taken is not None:
        raise ConfigError(f"the object {taken!r} has the key of a tensor")
