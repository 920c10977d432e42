"""Warns the user of how a rank's saves fare: once when a spell of failures begins, once when saves work again, and at
the end of the job with the number of saves given up.

A spell is a run of failures on one tier. The agent notifies the rank of its own failures, because the agent's log is a
file that nobody reads.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from resiliency.checkpoint.ticket import LOCAL
from resiliency.storage.stage import Stage

__all__ = ["SaveHealth"]

logger = logging.getLogger(__name__)

#: Key of the spell of failing fsyncs.
_FSYNC = "fsync"
_FULL = tuple(os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT))
#: Most refused names that are warned of; a name may differ from save to save.
_MOST_NAMES = 20
#: Most steps named in one message.
_NAMED = 5


@dataclass
class _Spell:
    """A run of failures on one tier: their kinds, the steps that were given up, and whether this rank warned."""

    kinds: set[str] = field(default_factory=set)
    lost: list[int] = field(default_factory=list)
    told: bool = False


class SaveHealth:
    """Counts and warns for one rank. Thread: training.

    Args:
        rank: of this process.
        speaks: this rank warns of what all ranks of its host are notified of; one rank per host does.
    """

    def __init__(self, rank: int, *, speaks: bool) -> None:
        self._rank, self._speaks = rank, speaks
        self._spells: dict[str, _Spell] = {}
        self._skipped = self._too_slow = False
        self._refused: set[tuple[str, str]] = set()
        # By tier:
        self._saves: Counter[str] = Counter()
        self._given_up: Counter[str] = Counter()
        self._reasons: dict[str, str] = {}  # the last one

    def begin(self, tiers: Iterable[str]) -> None:
        """Counts a save that was started, for each of its tiers."""
        self._saves.update(tiers)

    def skip(self, step: int, reason: str) -> None:
        """Reports a save that was skipped because the previous one was not recorded. Warns the first time only: an
        occasional skip does no harm."""
        self._saves[LOCAL] += 1
        self._count(LOCAL, reason)
        level = logging.DEBUG if self._skipped else logging.WARNING
        self._skipped = True
        text = "rank %d: no checkpoint at step %d: %s; training goes on, the next save tries again"
        logger.log(level, text, self._rank, step, reason)

    def fail(self, step: int, reason: str, *, kind: str, own: bool = True) -> None:
        """A save failed on the local tier.

        Args:
            kind: failures of one kind cause one warning per spell. A full disk is one kind, wherever it shows.
            own: the failure is of this rank's own part; otherwise all ranks of the host are notified of it.
        """
        self._count(LOCAL, reason)
        self._warn(
            LOCAL,
            "full" if any(text in reason for text in _FULL) else kind,
            own,
            f"rank {self._rank}: checkpoint of step {step} failed: {reason}; training goes on, the next save tries"
            " again",
        )
        self._spells[LOCAL].lost.append(step)

    def not_durable(self, step: int, reason: str) -> None:
        """Reports a save that was committed on the local tier, but whose fsync failed."""
        self._warn(
            _FSYNC,
            "fsync",
            False,
            f"rank {self._rank}: step {step} is committed but may not survive a power loss: {reason}",
        )

    def fail_remote(self, tier: str, step: int, reason: str, *, retrying: bool, gave_way: bool) -> None:
        """Reports a save that did not reach a remote tier, or, when ``retrying``, has not yet."""
        if retrying:
            self._warn(
                tier,
                "down",
                False,
                f"rank {self._rank}: step {step} is not stored on {tier} yet: {reason}; it is tried again with growing"
                " pauses, training goes on, and meanwhile only the newest step waits for it",
            )
            return
        self._count(tier, reason)
        text = f"rank {self._rank}: step {step} will not be stored on {tier}: {reason}; the local copy stays"
        if gave_way:
            text = (
                f"rank {self._rank}: step {step} will not be stored on {tier}: {reason}, so that waiting steps do not"
                " fill the local tier"
            )
        if gave_way and tier not in self._spells:
            # The tier works, but a save to it takes longer than the time between two saves. This is not a spell, as it
            # does not end.
            if self._speaks and not self._too_slow:
                logger.warning("%s. Save to it less often (logged once)", text)
            self._too_slow = True
            return
        self._warn(tier, "lost", False, text)
        self._spells[tier].lost.append(step)

    def refuse_name(self, tier: str, step: int, name: str, reason: str) -> None:
        """Reports that a save did not get one of its names on a tier. Warns once per name."""
        if self._speaks and (tier, name) not in self._refused and len(self._refused) < _MOST_NAMES:
            self._refused.add((tier, name))
            text = "rank %d: step %d was not given the name %r on %s: %s"
            logger.warning(text, self._rank, step, name, tier, reason)

    def reach(self, tier: str, step: int, stage: Stage) -> None:
        """Reports that a save has reached COMMITTED or DURABLE on a tier, which ends a spell."""
        synced = tier == LOCAL and stage is Stage.DURABLE
        spell = self._spells.pop(_FSYNC if synced else tier, None)
        if spell is None or not (self._speaks or spell.told):
            return
        given_up = f"; given up meanwhile: {_listed(spell.lost)}" if spell.lost else ""
        what = "fsyncs work" if synced else "saves work" if tier == LOCAL else f"{tier} works"
        logger.warning("rank %d: %s again, with step %d%s", self._rank, what, step, given_up)

    def summarise(self) -> None:
        """Warns, at the end, of the number of saves given up per tier."""
        for tier, count in self._given_up.items() if self._speaks else ():
            where = "" if tier == LOCAL else f" to {tier}"
            text = "rank %d: %d of %d saves%s were given up: %s"
            logger.warning(text, self._rank, count, self._saves[tier], where, self._reasons[tier])

    def _count(self, tier: str, reason: str) -> None:
        self._given_up[tier] += 1
        self._reasons[tier] = reason

    def _warn(self, tier: str, kind: str, own: bool, text: str) -> None:
        spell = self._spells.setdefault(tier, _Spell())
        warns = kind not in spell.kinds and (own or self._speaks)
        spell.kinds.add(kind)
        spell.told = spell.told or warns
        logger.log(logging.WARNING if warns else logging.DEBUG, "%s", text)


def _listed(steps: list[int]) -> str:
    named = ", ".join(map(str, steps[:_NAMED]))
    more = f" and {len(steps) - _NAMED} more" if len(steps) > _NAMED else ""
    return f"{'step' if len(steps) == 1 else 'steps'} {named}{more}"
