"""The state file: all of a set of changes or nothing, for the one that leads."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from resiliency.errors import ConfigError
from resiliency.supervisor.controller import Changes
from resiliency.supervisor.model import Host, HostState, Incident, Observation, ObservationKind, Workload, WorkloadSpec
from resiliency.supervisor.store import HistoryEvent, LeadershipLost, Store

SPEC = WorkloadSpec(name="job", replicas=2)
HOST = Host(name="a", incarnation="1", state=HostState.READY, heard_s=1.0)


def leading(path: Path) -> tuple[Store, int]:
    store = Store(str(path))
    term = store.take_over(store.term(), "test")
    assert term is not None
    return store, term


def incident(number: int, *, closed: bool = False) -> Incident:
    seen = Observation(kind=ObservationKind.WORKER_LOST, host="a", workload="job", epoch=1, rank=3)
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
    workload = Workload(spec=SPEC, epoch=3, places=("a", "b"), host_faults={"a": 2}, incident=1)
    changes = Changes(workloads={"job": workload}, incidents={1: incident(1)})
    store.commit(term, changes, {"a": HOST}, [HistoryEvent(at=1.0, kind="x", text="it was", fields={"rank": 3})])
    store.commit(term, Changes(), {"gone": None})
    store.close()
    again = Store(str(tmp_path / "s.db"))
    found = again.load()
    assert (found.workloads, found.incidents, found.hosts) == ([workload], [incident(1)], [HOST])
    assert [(one.number, one.text, one.fields) for one in again.events()] == [(1, "it was", {"rank": 3})]
    assert again.term() == term
    again.close()


def test_terms_grow_by_one_and_only_one_gets_each(tmp_path: Path) -> None:
    one, other = Store(str(tmp_path / "s.db")), Store(str(tmp_path / "s.db"))
    term = one.term()
    assert other.take_over(term, "other") == term + 1 and one.take_over(term, "one") is None
    assert one.take_over(term + 1, "one") == term + 2
    one.close()
    other.close()


def test_one_that_was_replaced_writes_nothing(tmp_path: Path) -> None:
    store, term = leading(tmp_path / "s.db")
    other = Store(str(tmp_path / "s.db"))
    other.take_over(term, "other")
    with pytest.raises(LeadershipLost, match="other"):
        store.commit(term, Changes(workloads={"job": Workload(spec=SPEC)}))
    assert other.load().workloads == []
    store.close()
    other.close()


WRITER = """
import sys
from resiliency.supervisor.controller import Changes
from resiliency.supervisor.model import Incident, Workload, WorkloadSpec
from resiliency.supervisor.store import Store
store = Store(sys.argv[1])
term = store.take_over(store.term(), "writer")
for number in range(1, 1000):
    workload = Workload(spec=WorkloadSpec(name="job", replicas=2), epoch=number)
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
    store = Store(str(tmp_path / "s.db"))
    found = store.load()
    assert said == [1, 2, 3]
    assert found.workloads[0].epoch == len(found.incidents) == (4 if point == "committed" else 3)
    store.close()


def test_a_damaged_file_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    store, _ = leading(path)
    store.close()
    data = bytearray(path.read_bytes())
    data[100:] = os.urandom(len(data) - 100)
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="damaged.*move it away"):
        Store(str(path))


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
        Store(str(tmp_path / "s.db"))
    with pytest.raises(ConfigError, match="something else"):
        Store(str(tmp_path / "x.db"))


def test_the_history_is_bounded_and_open_incidents_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_MOST_EVENTS", 10), ("_MOST_INCIDENTS", 5), ("_SLACK", 2)):
        monkeypatch.setattr(f"resiliency.supervisor.store.{name}", value)
    store, term = leading(tmp_path / "s.db")
    for number in range(1, 40):
        changes = Changes(incidents={number: incident(number, closed=number != 2)})
        store.commit(term, changes, {}, [HistoryEvent(at=1.0, kind="x", text=str(number))])
    kept = [one.number for one in store.load().incidents]
    assert 2 in kept and 39 in kept and len(kept) <= 7
    assert 10 <= len(store.events()) <= 12 and store.events()[-1].text == "39"
    store.close()


def test_a_file_that_is_removed_while_it_is_used_is_written_anew(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    store, term = leading(folder / "s.db")
    standby = Store(str(folder / "s.db"))
    store.commit(term, Changes(workloads={"job": Workload(spec=SPEC, epoch=3)}), {"a": HOST})
    for name in os.listdir(folder):
        os.unlink(folder / name)
    store.commit(term, Changes(incidents={1: incident(1)}))
    again = Store(str(folder / "s.db"))
    found = again.load()
    assert (found.workloads[0].epoch, found.incidents, found.hosts) == (3, [incident(1)], [HOST])
    assert os.stat(folder / "s.db").st_mode & 0o777 == 0o600
    assert standby.take_over(standby.term(), "standby") == term + 1, "it goes on with what is there"
    assert standby.load().incidents == [incident(1)]
    for one in (store, standby, again):
        one.close()


def test_a_file_that_was_put_in_its_place_is_not_written_to(tmp_path: Path) -> None:
    store, term = leading(tmp_path / "s.db")
    other, _ = leading(tmp_path / "other.db")
    other.close()
    os.replace(tmp_path / "other.db", tmp_path / "s.db")
    with pytest.raises(sqlite3.OperationalError, match="another file was put in its place"):
        store.commit(term, Changes(workloads={"job": Workload(spec=SPEC)}))
    store.close()


def test_terms_of_an_old_copy_begin_above_those_that_monitors_have_heard(tmp_path: Path) -> None:
    store, term = leading(tmp_path / "s.db")
    store._db.execute("UPDATE meta SET value = '1000' WHERE key = 'term'")
    store.close()
    (tmp_path / "copy.db").write_bytes((tmp_path / "s.db").read_bytes())
    same, copy = Store(str(tmp_path / "s.db")), Store(str(tmp_path / "copy.db"))
    assert same.term() == 1000 and copy.term() >= term - 1
    same.close()
    copy.close()


def test_text_that_is_half_a_letter_is_stored_without_it(tmp_path: Path) -> None:
    store, term = leading(tmp_path / "s.db")
    store.commit(term, Changes(), {}, [HistoryEvent(at=1.0, kind="x", text="a \ud800 b")])
    assert store.events()[0].text == "a ? b"
    store.close()


def test_a_file_that_somebody_writes_can_be_opened_and_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader may be stopped in a transaction: another supervisor stands by all the same."""
    monkeypatch.setattr("resiliency.supervisor.store._BUSY_S", 0.05)
    store, _ = leading(tmp_path / "s.db")
    store._db.execute("BEGIN IMMEDIATE")
    standby = Store(str(tmp_path / "s.db"))
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        standby.take_over(standby.term(), "standby")
    store._db.execute("DELETE FROM meta WHERE key = 'file'")
    store._db.execute("COMMIT")
    store._db.execute("BEGIN IMMEDIATE")
    with pytest.raises(ConfigError, match="cannot be used now.*locked"):
        Store(str(tmp_path / "s.db"))
    store._db.execute("ROLLBACK")
    store.close()
    standby.close()
