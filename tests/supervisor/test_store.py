"""The state file: all of a set of changes or nothing, for the one that leads."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from resiliency.errors import ConfigError
from resiliency.runtime.messages.observations import Observation, ObservationKind
from resiliency.supervisor.lease import SqliteLease
from resiliency.supervisor.model import Host, HostState, Incident, Workload, WorkloadSpec
from resiliency.supervisor.records import Changes
from resiliency.supervisor.sqlite_store import SCHEMA_VERSION, SqliteStore
from resiliency.supervisor.store import HistoryEvent, LeadershipLost, StateUnavailable

SPEC = WorkloadSpec(name="job", replicas=2)
HOST = Host(name="a", incarnation="1", state=HostState.READY, heard_s=1.0)


def leading(path: Path, term: int = 7) -> tuple[SqliteStore, int]:
    store = SqliteStore(str(path))
    store.fence(term)
    return store, term


def incident(number: int, *, closed: bool = False) -> Incident:
    seen = Observation(kind=ObservationKind.WORKER_LOST, host="a", workload="job", generation=1, rank=3)
    return Incident(
        number=number,
        workload="job",
        opened_at_s=1.0,
        opened_at=2.0,
        observations=(seen,),
        closed_at_s=3.0 if closed else None,
    )


def test_what_was_stored_is_there_after_a_new_start(tmp_path: Path) -> None:
    store, term = leading(tmp_path / "s.db")
    workload = Workload(spec=SPEC, generation=3, places=("a", "b"), host_faults={"a": 2}, incident=1)
    changes = Changes(workloads={"job": workload}, incidents={1: incident(1)})
    store.commit(term, changes, {"a": HOST}, [HistoryEvent(at=1.0, kind="x", text="it was", fields={"rank": 3})])
    store.commit(term, Changes(), {"gone": None})
    store.close()
    again = SqliteStore(str(tmp_path / "s.db"))
    found = again.load()
    assert (found.workloads, found.incidents, found.hosts) == ([workload], [incident(1)], [HOST])
    assert [(one.number, one.text, one.fields) for one in again.events()] == [(1, "it was", {"rank": 3})]
    again.close()


def test_one_that_was_replaced_writes_nothing(tmp_path: Path) -> None:
    store, term = leading(tmp_path / "s.db")
    other = SqliteStore(str(tmp_path / "s.db"))
    other.fence(term + 3)
    for act in (lambda: store.commit(term, Changes(workloads={"job": Workload(spec=SPEC)})), lambda: store.fence(term)):
        with pytest.raises(LeadershipLost, match=f"in term {term + 3}; this was term {term}"):
            act()
    assert other.load().workloads == []
    store.close()
    other.close()


WRITER = """
import sys
import tempfile
from resiliency.supervisor.records import Changes
from resiliency.supervisor.model import Incident, Workload, WorkloadSpec
from resiliency.supervisor.sqlite_store import SqliteStore
store = SqliteStore(sys.argv[1])
term = 7
store.fence(term)
for number in range(1, 1000):
    workload = Workload(spec=WorkloadSpec(name="job", replicas=2), generation=number)
    incident = Incident(number=number, workload="job", opened_at_s=0.0, opened_at=0.0)
    store.commit(term, Changes(workloads={"job": workload}, incidents={number: incident}))
    print(number, flush=True)
"""


@pytest.mark.parametrize("point", ["begin", "write", "committed"])
def test_a_kill_in_a_write_leaves_all_of_it_or_nothing(tmp_path: Path, point: str) -> None:
    env = {**os.environ, "RESILIENCY_FAULTS": f"supervisor.store.{point}:kill@4"}
    command = [sys.executable, "-c", WRITER, str(tmp_path / "s.db")]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert ended.returncode == -9, ended.stderr
    said = [int(line) for line in ended.stdout.split()]
    store = SqliteStore(str(tmp_path / "s.db"))
    found = store.load()
    assert said == [1, 2, 3]
    assert found.workloads[0].generation == len(found.incidents) == (4 if point == "committed" else 3)
    store.close()


def test_a_damaged_file_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    store, _ = leading(path)
    store.close()
    data = bytearray(path.read_bytes())
    data[100:] = os.urandom(len(data) - 100)
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="damaged.*move it away"):
        SqliteStore(str(path))


def test_a_row_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    store, term = leading(tmp_path / "s.db")
    store.commit(term, Changes(workloads={"job": Workload(spec=SPEC)}))
    with sqlite3.connect(tmp_path / "s.db") as other:
        other.execute("UPDATE workloads SET value = '{}'")
    other.close()
    with pytest.raises(ConfigError, match="job of workloads"):
        store.load()
    store.close()


def test_a_file_of_a_newer_version_or_of_something_else_is_refused(tmp_path: Path) -> None:
    store, _ = leading(tmp_path / "s.db")
    store.close()
    for name, statement in (
        ("s.db", "UPDATE meta SET value = '9' WHERE key = 'schema'"),
        ("x.db", "CREATE TABLE x (y)"),
    ):
        with sqlite3.connect(tmp_path / name) as other:
            other.execute(statement)
        other.close()
    with pytest.raises(ConfigError, match="newer version.*schema is 9"):
        SqliteStore(str(tmp_path / "s.db"))
    with pytest.raises(ConfigError, match="something else"):
        SqliteStore(str(tmp_path / "x.db"))


def test_the_history_is_bounded_and_open_incidents_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_MOST_EVENTS", 10), ("_MOST_INCIDENTS", 5), ("_SLACK", 2)):
        monkeypatch.setattr(f"resiliency.supervisor.sqlite_store.{name}", value)
    store, term = leading(tmp_path / "s.db")
    for number in range(1, 40):
        changes = Changes(incidents={number: incident(number, closed=number != 2)})
        store.commit(term, changes, {}, [HistoryEvent(at=1.0, kind="x", text=str(number))])
    kept = [one.number for one in store.load().incidents]
    assert 2 in kept and 39 in kept and len(kept) <= 7
    assert 10 <= len(store.events()) <= 12 and store.events()[-1].text == "39"
    store.close()


def test_text_that_is_half_a_letter_is_stored_without_it(tmp_path: Path) -> None:
    store, term = leading(tmp_path / "s.db")
    store.commit(term, Changes(), {}, [HistoryEvent(at=1.0, kind="x", text="a \ud800 b")])
    assert store.events()[0].text == "a ? b"
    store.close()


def test_a_file_that_somebody_writes_can_be_opened_and_is_not_called_damaged(tmp_path: Path) -> None:
    """A leader may be stopped in a transaction: another supervisor stands by all the same."""
    store, term = leading(tmp_path / "s.db")
    with store.writing():
        standby = SqliteStore(str(tmp_path / "s.db"))
        standby._db.execute("PRAGMA busy_timeout=1")
        assert standby.load().workloads == []
        with pytest.raises(StateUnavailable, match="locked; a supervisor that was stopped while it wrote holds it"):
            standby.fence(term + 1)
    store.close()
    standby.close()


OTHER_USER = """
import os, sys
os.setuid(65534)
from resiliency.errors import ConfigError
from resiliency.supervisor.sqlite_store import SqliteStore
try:
    SqliteStore(sys.argv[1])
except ConfigError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_file_that_may_not_be_written_is_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's belong to one user
        path = Path(folder, "s.db")
        store, _ = leading(path)
        store.close()
        os.chmod(folder, 0o777)
        os.chmod(path, 0o444)
        command = [sys.executable, "-c", OTHER_USER, str(path)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "s.db cannot be opened" in ended.stdout and "Permission denied" in ended.stdout, ended.stderr


def test_a_file_of_an_earlier_schema_is_taken_over(tmp_path: Path) -> None:
    """Its leader wrote only its term into it, and held a lock."""
    store, term = leading(tmp_path / "s.db", 1 << 40)
    store.commit(term, Changes(workloads={"job": Workload(spec=SPEC, generation=4)}))
    with store.writing() as db:
        db.execute("DROP TABLE lease")
        db.execute("UPDATE workloads SET value = replace(value, 'generation', 'epoch')")
        db.execute("UPDATE meta SET value = '1' WHERE key = 'schema'")
    store.close()
    store = SqliteStore(str(tmp_path / "s.db"))
    assert store.load().workloads == [Workload(spec=SPEC, generation=4)] and SCHEMA_VERSION == 3
    lease = SqliteLease(store, lease_s=1.0)
    assert lease.acquire() == term + 1
    store.fence(term + 1)
    store.close()
