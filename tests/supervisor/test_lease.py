"""Who leads, of those that have one state file."""

from __future__ import annotations

import contextlib
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from resiliency import faultpoints
from resiliency.errors import ConfigError
from resiliency.supervisor import lease as lease_module
from resiliency.supervisor.lease import SqliteLease
from resiliency.supervisor.records import Changes
from resiliency.supervisor.sqlite_store import SqliteStore, StateFileGone
from resiliency.supervisor.store import LeadershipLost, StateUnavailable

LEASE_S = 5.0


class Clock:
    """Monotonic seconds of all processes of a host."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Two:
    """Two supervisors with one state file."""

    def __init__(self, path: Path) -> None:
        self.clock = Clock()
        self.stores = SqliteStore(str(path)), SqliteStore(str(path))
        self.leader, self.other = (SqliteLease(each, lease_s=LEASE_S, clock=self.clock) for each in self.stores)

    def held(self) -> tuple[bool, bool]:
        return self.leader.is_held(), self.other.is_held()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    made = Two(tmp_path / "s.db")
    yield made
    faultpoints.arm("")
    for store in made.stores:
        store.close()


def test_one_of_two_gets_it_and_keeps_it_while_it_renews_it(two: Two) -> None:
    assert two.leader.acquire() and two.other.acquire() is None
    assert "process" in two.other.holder
    for _ in range(10):
        two.clock.now_s += LEASE_S - 0.1
        two.leader.renew()
        assert two.other.acquire() is None and two.held() == (True, False)


def test_one_that_does_not_renew_it_may_not_act_before_another_one_may(two: Two) -> None:
    term = two.leader.acquire()
    two.clock.now_s += 1.0
    assert two.other.acquire() is None
    two.clock.now_s += LEASE_S - 1.0
    assert two.held() == (False, False) and two.other.acquire() is None
    two.clock.now_s += 1.0
    later = two.other.acquire()
    assert term and later and later > term and two.held() == (False, True)
    with pytest.raises(LeadershipLost, match=f"leads, in term {later}; this was {term}"):
        two.leader.renew()
    two.leader.release()
    assert two.held() == (False, True) and two.leader.acquire() is None


def test_one_that_nobody_has_replaced_goes_on_in_its_term(two: Two) -> None:
    term = two.leader.acquire()
    two.clock.now_s += 10 * LEASE_S
    assert two.held() == (False, False)
    two.leader.renew()
    assert two.held() == (True, False) and two.other.acquire() is None
    assert two.leader.acquire() is None, "it is held, in the term that was said"
    two.leader.release()
    assert term is not None and (two.leader.acquire() or 0) > term


def test_a_slow_disk_lengthens_no_lease(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder counts from before it wrote, another one from after it read."""
    two.leader.acquire()

    def slowly(name: str) -> None:
        two.clock.now_s += LEASE_S

    with monkeypatch.context() as slow:
        slow.setattr(lease_module, "hit", slowly)
        two.leader.renew()
    assert two.held() == (False, False)

    read = two.other._read

    def slowly_read() -> object:
        two.clock.now_s += LEASE_S
        two.leader.renew()
        return read()

    monkeypatch.setattr(two.other, "_read", slowly_read)
    assert two.other.acquire() is None
    monkeypatch.setattr(two.other, "_read", read)
    two.clock.now_s += LEASE_S - 0.1
    assert two.other.acquire() is None and two.held() == (True, False)


@pytest.mark.parametrize("wall_s", [0.0, 1e9, 4e9])
def test_no_jump_of_the_wall_clock_takes_a_lease_or_makes_a_term_smaller(
    two: Two, monkeypatch: pytest.MonkeyPatch, wall_s: float
) -> None:
    term = two.leader.acquire()
    monkeypatch.setattr(lease_module.time, "time", lambda: wall_s)
    assert two.other.acquire() is None and two.held() == (True, False)
    two.clock.now_s += LEASE_S
    later = two.other.acquire()
    assert term is not None and later == max(term + 1, int(wall_s))


def test_one_that_gives_it_back_is_followed_at_once(two: Two) -> None:
    term = two.leader.acquire()
    assert two.other.acquire() is None
    two.leader.release()
    two.leader.release()
    assert not two.leader.is_held() and (two.other.acquire() or 0) > (term or 0)


def test_of_two_that_try_at_once_one_gets_it(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    read = two.other._read

    def meanwhile() -> object:
        found = read()
        assert two.leader.acquire()
        return found

    monkeypatch.setattr(two.other, "_read", meanwhile)
    assert two.other.acquire() is None and two.held() == (True, False)


def test_a_full_disk_ends_no_leadership_and_lets_nobody_act(two: Two) -> None:
    two.leader.acquire()
    faultpoints.arm("supervisor.lease.write:full@*")
    two.clock.now_s += LEASE_S
    two.other.acquire()
    two.clock.now_s += LEASE_S
    for each in (two.leader.renew, two.other.acquire):
        with pytest.raises(StateUnavailable, match="Errno 28"):
            each()
    two.leader.release()
    assert two.held() == (False, False)
    faultpoints.arm("")
    two.leader.renew()
    assert two.held() == (True, False)


def test_a_file_that_another_process_has_locked_is_tried_again(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that is stopped within a transaction holds the file."""
    writer = sqlite3.connect(two.stores[0].path, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    two.stores[0]._db.execute("PRAGMA busy_timeout=1")
    with pytest.raises(StateUnavailable, match="locked"):
        two.leader.acquire()
    writer.execute("ROLLBACK")
    assert two.leader.acquire()
    writer.close()


@pytest.mark.parametrize("with_another", [False, True])
def test_a_file_that_is_not_in_its_place_any_more_ends_both(two: Two, tmp_path: Path, with_another: bool) -> None:
    two.leader.acquire()
    Path(two.stores[0].path).unlink()
    if with_another:
        SqliteStore(two.stores[0].path).close()
    for each in (two.leader.renew, two.other.acquire, two.stores[0].load):
        with pytest.raises(StateFileGone, match="was removed, or another .* Start the supervisor again"):
            each()
    two.leader.release()


HOLDER = """
import sys
from resiliency.supervisor.records import Changes
from resiliency.supervisor.lease import SqliteLease
from resiliency.supervisor.sqlite_store import SqliteStore
from resiliency.supervisor.store import LeadershipLost
store = SqliteStore(sys.argv[1])
lease = SqliteLease(store, lease_s=0.5)
term = lease.acquire()
store.fence(term)
print(term, flush=True)
for line in sys.stdin:
    try:
        if line == "act\\n":
            print(lease.is_held(), flush=True)
            store.commit(term, Changes())
        else:
            lease.renew()
        print("done", flush=True)
    except LeadershipLost as error:
        print("lost", flush=True)
"""


@pytest.mark.parametrize("point", ["", "supervisor.store.begin:stop", "supervisor.store.committed:stop"])
def test_a_process_that_is_stopped_in_the_middle_of_an_act_does_not_go_on_with_it(tmp_path: Path, point: str) -> None:
    """Of two processes. It is stopped from outside, before a transaction (of that nothing is stored), or after one."""
    path = tmp_path / "s.db"
    command = [sys.executable, "-c", HOLDER, str(path)]
    env = {"RESILIENCY_FAULTS": point, "PATH": ""}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=env, text=True, **pipes) as one, contextlib.ExitStack() as stack:  # type: ignore[call-overload]
        stack.callback(one.kill)
        assert one.stdin is not None and one.stdout is not None
        term = int(one.stdout.readline())
        if not point:
            one.send_signal(signal.SIGSTOP)
        one.stdin.write("act\nrenew\nact\n")
        one.stdin.flush()
        end_s = time.monotonic() + 30
        while psutil.Process(one.pid).status() != psutil.STATUS_STOPPED:
            assert one.poll() is None and time.monotonic() < end_s
        store = SqliteStore(str(path))
        lease = SqliteLease(store, lease_s=30.0)
        while (later := lease.acquire()) is None:
            assert one.poll() is None and time.monotonic() < end_s
        assert later > term
        store.fence(later)
        one.send_signal(signal.SIGCONT)
        said, _ = one.communicate(timeout=60)
        first = {"": ["False", "lost"], "supervisor.store.begin:stop": ["True", "lost"]}
        expected = first.get(point, ["True", "done"])  # what was stored before the other one began is its to go on with
        assert said.split() == [*expected, "lost", "False", "lost"]
        store.commit(later, Changes())
        lease.release()
        store.close()


def test_a_file_that_is_damaged_in_use_ends_the_supervisor_with_the_reason(two: Two, tmp_path: Path) -> None:
    """It would never lead again, nor let another one, if it waited for the file to get well."""
    two.leader.acquire()
    for name in ("s.db-wal", "s.db"):
        with open(tmp_path / name, "r+b") as file:
            file.write(b"\xff" * 16384)
    with pytest.raises(StateFileGone, match="damaged"):
        two.other.acquire()


def test_a_file_without_its_lease_is_called_damaged(two: Two, tmp_path: Path) -> None:
    with two.stores[0].writing() as db:
        db.execute("DELETE FROM lease")
    with pytest.raises(ConfigError, match="damaged .it has no lease"):
        two.leader.acquire()
