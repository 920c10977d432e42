"""A notice: the message of a source that the job must stop."""

from __future__ import annotations

import json
from dataclasses import dataclass

__all__ = ["Notice"]

_MOST_GRACE_S = 7 * 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class Notice:
    """The job must save and stop.

    Attributes:
        source: where the notice comes from, in words for the log.
        rank: the rank that received it.
        grace_s: seconds from then on until the processes may be killed.
        signal: number of the signal; 0: the notice did not come by signal.
    """

    source: str
    rank: int
    grace_s: float
    signal: int = 0

    def to_bytes(self) -> bytes:
        return json.dumps(vars(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Notice:
        """Parses what :meth:`to_bytes` returned.

        Raises:
            ValueError: it is no notice.
        """
        try:
            fields = json.loads(data)
            notice = cls(
                source=str(fields["source"]),
                rank=int(fields["rank"]),
                grace_s=float(fields["grace_s"]),
                signal=int(fields["signal"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"no notice: {data[:100]!r}") from error
        if not 0 <= notice.grace_s <= _MOST_GRACE_S:
            raise ValueError(f"a notice with a grace of {notice.grace_s} s")
        return notice
