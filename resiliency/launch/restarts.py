"""Decides when the next attempt begins, and words the log messages about the one that failed. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["RankFailure", "delay_before_restart", "first_failure", "failure_text", "lost_peer_text"]

_FIRST_DELAY_S, _MAX_DELAY_S = 1.0, 60.0


@dataclass(frozen=True, kw_only=True)
class RankFailure:
    """How a rank ended.

    Attributes:
        exit_code: negative when a signal ended it.
        timestamp: seconds since the epoch, from its error file, or when its end was noticed.
        seen_first: its end was seen in the launcher's first look after the first rank's end.
        log: path of its standard error; "" when it is not kept.
        hung: the launcher has killed it because it hung.
    """

    rank: int
    pid: int
    exit_code: int
    timestamp: float
    seen_first: bool = True
    message: str = ""
    log: str = ""
    hung: bool = False


def delay_before_restart(lengths_s: Sequence[float], *, quick_s: float) -> float:
    """Seconds to wait before the next attempt, from the lengths of all attempts so far in seconds.

    The first restart is immediate, and so is each one after an attempt that ran for at least ``quick_s``. Consecutive
    attempts that failed sooner are a crash loop: their delays are 1, 2, 4, up to 60 seconds.
    """
    quick = 0
    for length_s in reversed(lengths_s):
        if length_s >= quick_s:
            break
        quick += 1
    return min(_MAX_DELAY_S, _FIRST_DELAY_S * 2 ** min(quick - 2, 10)) if quick >= 2 else 0.0


def first_failure(failures: Mapping[int, RankFailure]) -> RankFailure:
    """The rank that failed by itself; the others fail because a peer is gone, or because SIGTERM told them to end."""

    def order(failure: RankFailure) -> tuple[bool, int, float, int]:
        # When a busy launcher sees several ends at once: a rank that a signal ended did not fail because of a peer.
        kind = 2 if failure.exit_code == -signal.SIGTERM else 0 if failure.exit_code < 0 else 1
        return not failure.seen_first, kind, failure.timestamp, failure.rank

    return min(failures.values(), key=order)


def failure_text(
    failure: RankFailure,
    *,
    attempt: int,
    ran_s: float,
    restarts_left: int | None,
    last_lines: Sequence[str],
    staying: int = 0,
) -> str:
    """The log message about an attempt that failed.

    Args:
        restarts_left: None: somebody else decides what follows.
        staying: number of ranks of this host whose processes go on.
    """
    how = f"exited with {failure.exit_code}"
    if failure.exit_code < 0:
        how = "was killed because it hung," if failure.hung else f"was ended by {_signal_name(-failure.exit_code)}"
    lines = [f"rank {failure.rank} (process {failure.pid}) {how} {ran_s:.1f} s after the start of attempt {attempt}"]
    if failure.message:
        lines[0] += f": {failure.message}"
    if restarts_left is not None:
        lines[0] += f"; {restarts_left or 'no'} restart{'' if restarts_left == 1 else 's'} left"
    if staying:
        who = (
            "the process of 1 rank of this host goes"
            if staying == 1
            else f"the processes of {staying} ranks of this host go"
        )
        lines[0] += f"; {who} on in the next attempt"
    if last_lines:
        lines.append(f"its last lines, of {failure.log}:")
        lines += [f"  {line}" for line in last_lines]
    return "\n".join(lines)


def lost_peer_text(errors: Mapping[int, str], *, ended: Sequence[int], within_s: float, one_host: bool) -> str:
    """The log message when ranks have lost a peer and wait, and no rank of this host has failed.

    Args:
        errors: by rank of this host that has lost a peer, its error with the traceback.
        ended: ranks of this host that have ended with status 0.
        within_s: seconds without a failed rank since then.
    """
    text = f"{_ranks(errors)} lost a peer, and no rank of this host has failed within {within_s:.0f} s"
    if ended:
        text += f"; {_ranks(ended)} ended with status 0 before the others"
    elif not one_host:
        text += "; a rank of another host may be gone"
    lines = [f"{text}: the launcher restarts all ranks"]
    for rank in sorted(errors):
        *where, last = errors[rank].splitlines() or [""]
        lines += [f"  rank {rank}: {last}", *(f"    {line}" for line in where)]
    return "\n".join(lines)


def _ranks(ranks: Iterable[int]) -> str:
    found = sorted(ranks)
    return f"rank {found[0]} has" if len(found) == 1 else f"ranks {', '.join(map(str, found))} have"


def _signal_name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    return f"{name} (out of memory?)" if name == "SIGKILL" else name
