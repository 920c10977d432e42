"""When the next attempt begins, and what is said of the one that failed. Pure."""

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
        timestamp: seconds since 1970, of its error file, or of when its end was noticed.
        seen_first: its end was there when the launcher looked for the first time after the first end of all.
        log: path of its standard error; empty when nobody keeps it.
        hung: the launcher has killed it for that.
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
    """The rank that failed by itself: the others fail because a peer is gone, or are told to end (SIGTERM)."""

    def order(failure: RankFailure) -> tuple[bool, int, float, int]:
        # Of several ends that a launcher that was busy has seen at once, one by a signal is not because of a peer.
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
    """What is said of an attempt that failed.

    Args:
        restarts_left: None: somebody else decides what follows.
        staying: ranks of this host that go on in their processes.
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
        lines[0] += f"; {staying} rank{'' if staying == 1 else 's'} of this host stay{'s' if staying == 1 else ''}"
    if last_lines:
        lines.append(f"its last lines, of {failure.log}:")
        lines += [f"  {line}" for line in last_lines]
    return "\n".join(lines)


def lost_peer_text(errors: Mapping[int, str], *, ended: Sequence[int], within_s: float, one_host: bool) -> str:
    """What is said when ranks have lost a peer and wait, and none has failed.

    Args:
        errors: of the ranks of this host that have lost one, with their tracebacks.
        ended: ranks of this host that have ended with status 0.
        within_s: for how long no rank has failed since.
    """
    text = f"{_ranks(errors)} lost a peer, and no rank of this host has failed within {within_s:.0f} s"
    if ended:
        text += f"; {_ranks(ended)} ended with status 0 before the others"
    elif not one_host:
        text += "; a rank of another host may be gone"
    lines = [f"{text}: all begin again"]
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
