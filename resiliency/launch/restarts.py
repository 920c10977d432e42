"""When the next attempt begins, and what is said of the one that failed. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["RankFailure", "delay_before_restart", "first_failure", "failure_text"]

_FIRST_DELAY_S, _MAX_DELAY_S = 1.0, 60.0


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """How a rank ended.

    Attributes:
        exit_code: negative when a signal ended it.
        timestamp: seconds since 1970, of its error file, or of when its end was noticed.
        log: path of its standard error; empty when nobody keeps it.
        hung: the launcher has killed it for that.
    """

    rank: int
    pid: int
    exit_code: int
    timestamp: float
    message: str = ""
    log: str = ""
    hung: bool = False


def delay_before_restart(lengths_s: Sequence[float], *, quick_s: float) -> float:
    """Seconds to wait before the next attempt, by the lengths of all attempts so far.

    The first restart is immediate, and so is each after an attempt that ran for a while. Attempts in a row that fail
    sooner than ``quick_s`` are a crash loop: 1, 2, 4, up to 60 seconds.
    """
    quick = 0
    for length_s in reversed(lengths_s):
        if length_s >= quick_s:
            break
        quick += 1
    return min(_MAX_DELAY_S, _FIRST_DELAY_S * 2 ** min(quick - 2, 10)) if quick >= 2 else 0.0


def first_failure(failures: Mapping[int, RankFailure]) -> RankFailure:
    """The rank that failed by itself: the others are told to end (SIGTERM), or fail because a peer is gone."""

    def order(failure: RankFailure) -> tuple[int, float, int]:
        if failure.exit_code == -signal.SIGTERM:
            return 2, failure.timestamp, failure.rank
        # A rank that a signal has ended did not end because of a peer.
        return (0 if failure.exit_code < 0 else 1), failure.timestamp, failure.rank

    return min(failures.values(), key=order)


def failure_text(
    failure: RankFailure,
    *,
    attempt: int,
    ran_s: float,
    restarts_left: int,
    last_lines: Sequence[str],
    staying: int = 0,
) -> str:
    """What is said of an attempt that failed.

    Args:
        staying: ranks of this host that go on in their processes.
    """
    how = f"exited with {failure.exit_code}"
    if failure.exit_code < 0:
        how = "was killed because it hung," if failure.hung else f"was ended by {_signal_name(-failure.exit_code)}"
    lines = [f"rank {failure.rank} (process {failure.pid}) {how} {ran_s:.1f} s after the start of attempt {attempt}"]
    if failure.message:
        lines[0] += f": {failure.message}"
    lines[0] += f"; {restarts_left or 'no'} restart{'' if restarts_left == 1 else 's'} left"
    if staying:
        lines[0] += f"; {staying} rank{'' if staying == 1 else 's'} of this host stay{'s' if staying == 1 else ''}"
    if last_lines:
        lines.append(f"its last lines, of {failure.log}:")
        lines += [f"  {line}" for line in last_lines]
    return "\n".join(lines)


def _signal_name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    return f"{name} (out of memory?)" if name == "SIGKILL" else name
