"""Observations of a host that the supervisor may not have stored, kept across connections. Pure: no input, no
output."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from resiliency.runtime.messages.observations import Observation

__all__ = ["Outbox"]

logger = logging.getLogger(__name__)

_MOST = 1000
#: Most observations in one message, and most bytes of their text. JSON may need twelve bytes for a character, and the
#: rest of an observation counts as 1024.
_BATCH, _MOST_BYTES, _BYTES_OF_A_LETTER, _BYTES_OF_A_REST = 64, 128 * 1024, 12, 1024


class Outbox:
    """Keeps observations until they need not be sent again. Thread: one.

    An observation of a generation is sent on every new connection until the generation is over: a supervisor that was
        killed may
    have received it and not stored it, and one that has stored it does not count it twice. An observation of the host
    alone is sent again only until a supervisor has confirmed it.
    """

    def __init__(self) -> None:
        self._kept: list[Observation] = []
        self._unsent: list[Observation] = []
        self._in_flight: dict[int, tuple[Observation, ...]] = {}
        self._number = 0
        self._complained = False

    def add(self, one: Observation) -> bool:
        """Adds an observation to send. Returns False when it is known already."""
        if one.workload and any(
            known.identity == one.identity and known.generation == one.generation for known in self._kept
        ):
            return False
        self._kept.append(one)
        self._unsent.append(one)
        while len(self._kept) > _MOST:
            forgotten = self._kept.pop(0)
            self._unsent = [known for known in self._unsent if known is not forgotten]
            if not self._complained:
                self._complained = True
                logger.error("the supervisor is away, and more than %d observations wait; the oldest are lost", _MOST)
        return True

    def generation_is(self, workload: str, generation: int) -> None:
        """Forgets the observations of generations that are over."""

        def holds(one: Observation) -> bool:
            return not one.workload or (one.workload == workload and one.generation >= generation)

        self._kept = [one for one in self._kept if holds(one)]
        self._unsent = [one for one in self._unsent if holds(one)]

    def connected(self) -> None:
        """There is a new connection: everything that is kept must be sent on it."""
        self._in_flight.clear()
        self._unsent = list(self._kept)
        self._complained = False

    def take(self) -> tuple[int, tuple[Observation, ...]] | None:
        """Returns a number and the observations to send next; None when there are none."""
        if not self._unsent:
            return None
        count, size = 0, 0
        for one in self._unsent[:_BATCH]:
            size += _BYTES_OF_A_LETTER * (len(one.detail) + len(one.device)) + _BYTES_OF_A_REST
            if count and size > _MOST_BYTES:
                break
            count += 1
        batch, self._unsent = tuple(self._unsent[:count]), self._unsent[count:]
        self._number += 1
        self._in_flight[self._number] = batch
        return self._number, batch

    def received(self, number: int) -> None:
        """The supervisor has received everything up to this number."""
        for sent in [known for known in self._in_flight if known <= number]:
            batch = self._in_flight.pop(sent)
            self._kept = [one for one in self._kept if one.workload or not any(one is got for got in batch)]

    @property
    def kept(self) -> Sequence[Observation]:
        return tuple(self._kept)
