"""The supervisor's state in a SQLite file: its journal is a write-ahead log, forced to disk with each transaction."""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from resiliency.errors import ConfigError, ResiliencyError
from resiliency.faultpoints import hit
from resiliency.runtime.typed_json import from_jsonable, to_jsonable
from resiliency.supervisor.model import Host, Incident, Plan, Workload
from resiliency.supervisor.records import Changes
from resiliency.supervisor.store import HistoryEvent, LeadershipLost, StateUnavailable, Stored

__all__ = ["SCHEMA_VERSION", "SqliteStore", "StateFileGone", "open_or_begin_anew"]

logger = logging.getLogger(__name__)

#: 2: the table ``lease``. 3: the field ``generation``, which was named ``epoch``.
SCHEMA_VERSION = 3
#: How many events, and how many closed incidents, are kept.
_MOST_EVENTS, _MOST_INCIDENTS = 20_000, 2_000
#: Rows beyond these numbers that may accumulate before they are deleted together.
_SLACK = 500
#: Seconds to wait while another process writes.
_BUSY_S = 10.0

_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE workloads (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE hosts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE incidents (number INTEGER PRIMARY KEY, open INTEGER NOT NULL, value TEXT NOT NULL);
CREATE TABLE plans (number INTEGER PRIMARY KEY, incident INTEGER NOT NULL, value TEXT NOT NULL);
CREATE INDEX plans_of_incidents ON plans (incident);
CREATE TABLE events (number INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, kind TEXT NOT NULL,
  workload TEXT NOT NULL, host TEXT NOT NULL, incident INTEGER, text TEXT NOT NULL, fields TEXT NOT NULL);
INSERT INTO meta VALUES ('term', '0');
"""
#: One row; see :class:`~resiliency.supervisor.lease.SqliteLease`.
_LEASE = """
CREATE TABLE lease (one INTEGER PRIMARY KEY CHECK (one = 1), term INTEGER NOT NULL, holder TEXT NOT NULL,
  lease_s REAL NOT NULL, renewals INTEGER NOT NULL);
INSERT INTO lease SELECT 1, CAST(value AS INTEGER), '', 0, 0 FROM meta WHERE key = 'term';
"""
_GENERATIONS = "".join(
    f"UPDATE {table} SET value = replace(value, '\"epoch\":', '\"generation\":');"
    for table in ("workloads", "incidents", "plans")
)

T = TypeVar("T")


class StateFileGone(ResiliencyError):
    """The state file was removed or replaced while it was in use: what would be written to it is lost."""


class StateDamaged(ConfigError):
    """The state file cannot be read, or its values cannot."""


def open_or_begin_anew(path: str) -> SqliteStore:
    """The state file; a damaged one is put aside as ``PATH.damaged``, and an empty one takes its place. For a file that
    holds no lease, and whose contents a supervisor can do without.

    Raises:
        ConfigError: as :class:`SqliteStore`, unless the file is damaged.
    """
    try:
        store = SqliteStore(path)
        try:
            store.load()
        except BaseException:
            store.close()
            raise
        return store
    except (StateDamaged, StateFileGone) as error:
        for end in ("", "-wal", "-shm"):
            with suppress(FileNotFoundError):
                os.replace(path + end, f"{path}.damaged{end}")
        problem = str(error).partition(". ")[0]
        logger.error(
            "%s. It is now %s.damaged, and this supervisor begins with nothing; hosts tell it which ranks run",
            problem,
            path,
        )
        return SqliteStore(path)


class SqliteStore:
    """The state file, see :class:`~resiliency.supervisor.store.StateStore`.

    Args:
        path: of the file; it and its folder are created when missing.

    Raises:
        ConfigError: the file cannot be opened, is damaged, or was written by a newer version.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
            # Only this user: the file names hosts, and whoever can write it controls them.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._file = os.stat(path)
            self._db = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"the state file {path} cannot be opened: {error}; pass another with `state`") from error
        try:
            self._prepare()
        except sqlite3.OperationalError as error:  # locked, full or read-only, not damaged
            self._db.close()
            raise ConfigError(f"the state file {path} cannot be used now: {error}{_who_holds(error)}") from error
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise StateDamaged(self.damaged(str(error))) from error
        except BaseException:
            self._db.close()
            raise

    def _prepare(self) -> None:
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        (found,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise StateDamaged(self.damaged(found))
        if self._schema() == SCHEMA_VERSION and self._meta("term"):
            return  # without a write: a leader that was stopped in a write must not keep others from standing by
        with self._exclusively():
            schema = self._schema()
            if schema > SCHEMA_VERSION:
                raise ConfigError(
                    f"the state file {self.path} was written by a newer version (its schema is {schema}, this version"
                    f" knows {SCHEMA_VERSION}); start that version, or pass another file with `state`: then hosts"
                    " join anew, and workloads begin a new generation"
                )
            statements = {0: _TABLES + _LEASE, 1: _LEASE + _GENERATIONS, 2: _GENERATIONS, SCHEMA_VERSION: ""}[schema]
            for statement in statements.split(";"):
                self._db.execute(statement)
            self._db.execute("INSERT OR REPLACE INTO meta VALUES ('schema', ?)", (str(SCHEMA_VERSION),))

    def _schema(self) -> int:
        """The version that wrote the file; 0: it is empty."""
        tables = {name for (name,) in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if tables and "meta" not in tables:
            raise ConfigError(f"{self.path} is a database of something else; pass another file with `state`")
        return int(self._meta("schema")) if tables else 0

    def damaged(self, why: str) -> str:
        return (
            f"the state file {self.path} is damaged ({why}). Put back a copy of it, or move it away together with"
            f" {self.path}-wal and {self.path}-shm and start again: hosts then join anew, and workloads begin a new"
            " generation from their last checkpoint"
        )

    def _meta(self, key: str) -> str:
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        if row is None:
            raise StateDamaged(self.damaged(f"it has no {key}"))
        return str(row[0])

    def close(self) -> None:
        with self._lock:
            self._db.close()

    # -- access -------------------------------------------------------------------------------------------------------

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """The file, for this thread alone.

        Raises:
            StateUnavailable: it cannot be read or written now.
            StateFileGone: it is not in its place any more, or it is damaged.
        """
        with self._lock:
            try:
                self._see_that_it_is_there()
                yield self._db
            except (sqlite3.Error, OSError) as error:
                if type(error) is sqlite3.DatabaseError:  # its subclasses are about locks, full disks, wrong words
                    raise StateFileGone(self.damaged(str(error))) from error
                raise StateUnavailable(
                    f"the state file {self.path} cannot be used now: {error}{_who_holds(error)}"
                ) from error

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """The file in a transaction that no other process writes beside; nothing of it is stored when the block
        raises. Raises what :meth:`reading` does."""
        with self.reading() as db, self._exclusively():
            yield db

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def _see_that_it_is_there(self) -> None:
        # SQLite would go on with a removed file, and all of it would be lost with the process.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.path), self._file):
                return
        raise StateFileGone(
            f"the state file {self.path} was removed, or another put in its place, while this supervisor used it."
            " Start the supervisor again: with a copy of the file it goes on from there; without any, hosts join anew"
            " and workloads begin a new generation from their last checkpoint"
        )

    # -- stored values ------------------------------------------------------------------------------------------------

    def fence(self, term: int) -> None:
        with self.writing() as db:
            if int(self._meta("term")) > term:
                raise LeadershipLost(self._replaced(term))
            db.execute("UPDATE meta SET value = ? WHERE key = 'term'", (str(term),))

    def _replaced(self, term: int) -> str:
        return f"another supervisor leads, in term {self._meta('term')}; this was term {term}"

    def load(self) -> Stored:
        with self.reading():
            return Stored(
                workloads=self._rows("workloads", Workload),
                incidents=self._rows("incidents", Incident),
                plans=self._rows("plans", Plan),
                hosts=self._rows("hosts", Host),
            )

    def _rows(self, table: str, kind: type[T]) -> list[T]:
        found = []
        for key, text in self._db.execute(f"SELECT {'name' if kind in _NAMED else 'number'}, value FROM {table}"):
            try:
                found.append(from_jsonable(kind, json.loads(text)))
            except (ValueError, RecursionError) as error:
                raise StateDamaged(self.damaged(f"{key} of {table}: {error}")) from error
        return found

    def commit(
        self,
        term: int,
        changes: Changes,
        hosts: Mapping[str, Host | None] | None = None,
        events: Sequence[HistoryEvent] = (),
    ) -> None:
        rows: list[tuple[str, list[tuple[Any, ...]]]] = [
            ("workloads", [(one.name, _text(one)) for one in changes.workloads.values()]),
            ("incidents", [(one.number, one.is_open, _text(one)) for one in changes.incidents.values()]),
            ("plans", [(one.number, one.incident, _text(one)) for one in changes.plans.values()]),
            ("hosts", [(name, _text(host)) for name, host in (hosts or {}).items() if host is not None]),
        ]
        gone = [(name,) for name, host in (hosts or {}).items() if host is None]
        with self.reading():
            hit("supervisor.store.begin")
            with self._exclusively():
                if int(self._meta("term")) != term:
                    raise LeadershipLost(self._replaced(term))
                for table, values in rows:
                    if values:
                        marks = ", ".join("?" * len(values[0]))
                        self._db.executemany(f"INSERT OR REPLACE INTO {table} VALUES ({marks})", values)
                self._db.executemany("DELETE FROM hosts WHERE name = ?", gone)
                self._db.executemany(
                    "INSERT INTO events (at, kind, workload, host, incident, text, fields)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?)",
                    map(_row, events),
                )
                self._forget_oldest()
                hit("supervisor.store.write")
            hit("supervisor.store.committed")

    def _forget_oldest(self) -> None:
        first, last = self._db.execute("SELECT min(number), max(number) FROM events").fetchone()
        if last is not None and last - first >= _MOST_EVENTS + _SLACK:
            self._db.execute("DELETE FROM events WHERE number <= ?", (last - _MOST_EVENTS,))
        (count,) = self._db.execute("SELECT count(*) FROM incidents").fetchone()
        if count >= _MOST_INCIDENTS + _SLACK:
            old = "SELECT number FROM incidents WHERE NOT open ORDER BY number LIMIT ?"
            self._db.execute(f"DELETE FROM plans WHERE incident IN ({old})", (count - _MOST_INCIDENTS,))
            self._db.execute(f"DELETE FROM incidents WHERE number IN ({old})", (count - _MOST_INCIDENTS,))

    def events(
        self, *, after: int = 0, limit: int = 200, workload: str = "", host: str = "", incident: int | None = None
    ) -> list[HistoryEvent]:
        with self.reading() as db:
            found = db.execute(
                "SELECT number, at, kind, workload, host, incident, text, fields FROM events WHERE number > ?"
                " AND (? = '' OR workload = ?) AND (? = '' OR host = ?) AND (? IS NULL OR incident = ?)"
                " ORDER BY number DESC LIMIT ?",
                (after, workload, workload, host, host, incident, incident, limit),
            ).fetchall()
        return [
            HistoryEvent(number=n, at=at, kind=kind, workload=w, host=h, incident=i, text=text, fields=json.loads(rest))
            for n, at, kind, w, h, i, text, rest in reversed(found)
        ]


_NAMED = (Workload, Host)


def _text(value: Any) -> str:
    return json.dumps(to_jsonable(value), separators=(",", ":"))


def _row(event: HistoryEvent) -> tuple[Any, ...]:
    fields = json.dumps(dict(event.fields), default=str)
    texts = (event.kind, event.workload, event.host, event.text)
    kind, workload, host, text = (one.encode(errors="replace").decode() for one in texts)
    return event.at, kind, workload, host, event.incident, text, fields


def _who_holds(error: Exception) -> str:
    """What to do about a file that is locked; "" where it is not."""
    locked = "locked" in str(error)
    return "; a supervisor that was stopped while it wrote holds it: let it go on, or kill it" if locked else ""
