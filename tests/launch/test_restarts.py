"""When the next attempt begins, and who is said to have failed."""

from __future__ import annotations

import signal

import pytest

from resiliency.launch.restarts import RankFailure, delay_before_restart, failure_text, first_failure, lost_peer_text


@pytest.mark.parametrize(
    "lengths, delay",
    [
        ([], 0),
        ([0.1], 0),
        ([0.1, 0.1], 1),
        ([0.1, 0.1, 0.1], 2),
        ([3600, 0.1], 0),
        ([0.1, 0.1, 0.1, 3600], 0),
        ([0.1, 3600, 0.1, 0.1], 1),
        ([0.1] * 7, 32),
        ([0.1] * 8, 60),
        ([0.1] * 5000, 60),
    ],
)
def test_attempts_that_fail_at_once_wait_longer_and_longer(lengths: list[float], delay: float) -> None:
    assert delay_before_restart(lengths, quick_s=10) == delay
    assert delay_before_restart(lengths, quick_s=0) == 0


def failure(rank: int, code: int, at: float = 0.0, *, seen_first: bool = True) -> RankFailure:
    return RankFailure(rank=rank, pid=100 + rank, exit_code=code, timestamp=at, seen_first=seen_first)


@pytest.mark.parametrize(
    "failures, first",
    [
        ([failure(0, 1, 5.0), failure(1, -signal.SIGKILL, 6.0)], 1),
        ([failure(0, -signal.SIGTERM, 1.0), failure(1, 1, 6.0)], 1),
        ([failure(0, 1, 7.0), failure(1, 1, 6.0)], 1),
        ([failure(0, 1, 6.0), failure(1, 1, 6.0)], 0),
        ([failure(0, -signal.SIGTERM, 6.0)], 0),
        ([failure(0, 1, 6.0, seen_first=False), failure(1, 1, 6.0)], 1),
        ([failure(0, -signal.SIGABRT, 6.0, seen_first=False), failure(1, 1, 6.0)], 1),
        ([failure(0, 1, 6.0, seen_first=False), failure(1, -signal.SIGTERM, 6.0)], 1),
    ],
    ids=[
        "killed before its peer's error",
        "not who was told to end",
        "the earlier error",
        "the same time",
        "alone",
        "not the peer that fell",
        "not the peer whose watchdog aborted it",
        "told to end by somebody else",
    ],
)
def test_the_rank_that_failed_by_itself_is_named(failures: list[RankFailure], first: int) -> None:
    assert first_failure({one.rank: one for one in failures}).rank == first


def test_what_is_said_has_the_rank_the_reason_and_its_last_lines() -> None:
    one = RankFailure(rank=3, pid=7, exit_code=-9, timestamp=0.0, message="", log="/logs/3")
    text = failure_text(one, attempt=2, ran_s=12.34, restarts_left=0, last_lines=["a", "b"])
    assert text.splitlines() == [
        "rank 3 (process 7) was ended by SIGKILL (out of memory?) 12.3 s after the start of attempt 2; no restarts left",
        "its last lines, of /logs/3:",
        "  a",
        "  b",
    ]
    other = RankFailure(rank=0, pid=8, exit_code=3, timestamp=0.0, message="RuntimeError: no")
    assert failure_text(other, attempt=0, ran_s=1, restarts_left=1, last_lines=[]) == (
        "rank 0 (process 8) exited with 3 1.0 s after the start of attempt 0: RuntimeError: no; 1 restart left"
    )
    hung = RankFailure(rank=1, pid=9, exit_code=-9, timestamp=0.0, hung=True)
    assert failure_text(hung, attempt=0, ran_s=7, restarts_left=1, last_lines=[]) == (
        "rank 1 (process 9) was killed because it hung, 7.0 s after the start of attempt 0; 1 restart left"
    )
    assert "signal 77" in failure_text(failure(0, -77), attempt=0, ran_s=0, restarts_left=2, last_lines=[])


def test_what_is_said_of_lost_peers_has_their_errors_and_what_may_be_the_cause() -> None:
    errors = {2: "RuntimeError: closed", 0: "Traceback\n  in f\nConnectionError: refused"}
    assert lost_peer_text(errors, ended=[1], within_s=2, one_host=True).splitlines() == [
        "ranks 0, 2 have lost a peer, and no rank of this host has failed within 2 s; rank 1 has ended with status 0"
        " before the others: the launcher restarts all ranks",
        "  rank 0: ConnectionError: refused",
        "    Traceback",
        "      in f",
        "  rank 2: RuntimeError: closed",
    ]
    text = lost_peer_text({3: "RuntimeError: closed"}, ended=[], within_s=5, one_host=False)
    assert text.splitlines()[0] == (
        "rank 3 has lost a peer, and no rank of this host has failed within 5 s; a rank of another host may be gone: the launcher restarts all"
        " ranks"
    )
