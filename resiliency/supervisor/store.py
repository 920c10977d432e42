"""The supervisor's state in a SQLite file. Every change is stored before anything is done about it.

Each set of changes is one transaction, which checks the leader's term: a leader that was replaced meanwhile writes
nothing, and learns of it. The journal is a write-ahead log, forced to disk with each transaction.

If the file is removed while it is open, it is written again under its name: SQLite would go on with the removed file,
and everything would be lost with the process.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from resiliency import faultpoints
from resiliency.errors import ConfigError, ResiliencyError
from resiliency.storage.typed_json import from_jsonable, to_jsonable
from resiliency.supervisor.controller import Changes
from resiliency.supervisor.model import Host, Incident, Plan, Workload

__all__ = ["SCHEMA_VERSION", "HistoryEvent", "LeadershipLost", "Store", "Stored"]

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
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
"""

T = TypeVar("T")


class LeadershipLost(ResiliencyError):
    """Another supervisor leads. This one must not send anything to anybody any more."""


@dataclass(frozen=True, kw_only=True)
class HistoryEvent:
    """A line of the supervisor's history.

    Attributes:
        number: 0 before it is stored.
        at: UTC seconds.
        text: for people.
    """

    at: float
    kind: str
    text: str
    workload: str = ""
    host: str = ""
    incident: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    number: int = 0


@dataclass(kw_only=True)
class Stored:
    """Everything that a new leader starts from."""

    workloads: list[Workload] = field(default_factory=list)
    incidents: list[Incident] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)
    hosts: list[Host] = field(default_factory=list)


class Store:
    """The state file. Thread: any; calls wait for each other. Blocks: for the disk.

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
            self._connect()
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"the state file {path} cannot be opened: {error}; pass another with `state`") from error
        try:
            self._prepare()
        except sqlite3.OperationalError as error:  # locked, full or read-only, not damaged
            self._db.close()
            raise ConfigError(
                f"the state file {path} cannot be used now: {error}. If it is locked, a supervisor that was stopped"
                " while it wrote holds it: let it go on, or kill it"
            ) from error
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise ConfigError(self._damaged(str(error))) from error
        except BaseException:
            self._db.close()
            raise

    def _connect(self) -> None:
        self._db = sqlite3.connect(self.path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
        self._file = _identity(self.path)

    def _force_to_disk(self) -> None:
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")

    def _prepare(self) -> None:
        self._force_to_disk()
        (found,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise ConfigError(self._damaged(found))
        if self._is_prepared():
            return  # without a write: a leader that was stopped in a write must not keep others from standing by
        self._db.execute("BEGIN IMMEDIATE")
        try:
            tables = {name for (name,) in self._db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if not tables:
                for statement in _TABLES.split(";"):
                    self._db.execute(statement)
                # Monitors obey no lower term than they have seen. In case this file replaces a lost one, its terms
                # start at the clock's seconds, above those of the lost file.
                values = [("schema", SCHEMA_VERSION), ("term", int(time.time())), ("owner", "")]
                self._db.executemany("INSERT INTO meta VALUES (?, ?)", [(key, str(value)) for key, value in values])
            elif "meta" not in tables:
                raise ConfigError(f"{self.path} is a database of something else; pass another file with `state`")
            schema = int(self._meta("schema"))
            if schema > SCHEMA_VERSION:
                raise ConfigError(
                    f"the state file {self.path} was written by a newer version (its schema is {schema}, this version"
                    f" knows {SCHEMA_VERSION}); start that version, or pass another file with `state`: then hosts"
                    " join anew, and workloads begin a new epoch"
                )
            self._know_the_file()
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _is_prepared(self) -> bool:
        tables = self._db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'meta'").fetchone()
        if not tables[0]:
            return False
        found = dict(self._db.execute("SELECT key, value FROM meta"))
        return found.get("schema") == str(SCHEMA_VERSION) and found.get("file") == self._file

    def _know_the_file(self) -> None:
        """Notes the file's identity. A copy may be older than terms that monitors have heard, so its term is raised to
        the clock's seconds."""
        row = self._db.execute("SELECT value FROM meta WHERE key = 'file'").fetchone()
        if row is not None and row[0] == self._file:
            return
        term = int(self._meta("term")) if row is None else max(int(self._meta("term")), int(time.time()))
        values = [("file", self._file), ("term", str(term))]
        self._db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values)

    def _see_that_it_is_there(self, *, may_be_another: bool) -> None:
        """Checks that the file is still in its place; writes it again if it was removed.

        Args:
            may_be_another: opens another file that has taken its place, instead of raising.

        Raises:
            sqlite3.Error: it cannot be written again, or another file has taken its place.
        """
        try:
            found = _identity(self.path)
        except FileNotFoundError:
            self._write_anew()
            return
        if found == self._file:
            return
        if not may_be_another:
            raise sqlite3.OperationalError(
                "another file was put in its place while the supervisor runs; start the supervisor anew to use that one"
            )
        self._db.close()
        self._connect()
        self._prepare()

    def _write_anew(self) -> None:
        """Writes the removed file again. Its content exists as long as it is open."""
        logger.error("the state file %s was removed while it is in use; it is written anew", self.path)
        partial = f"{self.path}.new"
        os.makedirs(os.path.dirname(os.path.abspath(self.path)), exist_ok=True)
        with suppress(FileNotFoundError):
            os.unlink(partial)
        os.close(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        self._db.execute("VACUUM INTO ?", (partial,))
        self._db.close()
        for journal in ("-wal", "-shm"):  # journals of the removed file, which would be taken for those of the new one
            with suppress(FileNotFoundError):
                os.unlink(self.path + journal)
        os.rename(partial, self.path)
        self._connect()
        self._force_to_disk()
        self._db.execute("UPDATE meta SET value = ? WHERE key = 'file'", (self._file,))

    def _damaged(self, why: str) -> str:
        return (
            f"the state file {self.path} is damaged ({why}). Put back a copy of it, or move it away together with"
            f" {self.path}-wal and {self.path}-shm and start again: hosts then join anew, and workloads begin a new"
            " epoch from their last checkpoint"
        )

    def _meta(self, key: str) -> str:
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        if row is None:
            raise ConfigError(self._damaged(f"it has no {key}"))
        return str(row[0])

    def close(self) -> None:
        with self._lock:
            self._db.close()

    # -- leadership ---------------------------------------------------------------------------------------------------

    def term(self) -> int:
        """The present leader's term."""
        with self._lock:
            self._see_that_it_is_there(may_be_another=True)
            return int(self._meta("term"))

    def take_over(self, seen_term: int, owner: str) -> int | None:
        """Begins the next term, and returns it. None when another supervisor has begun one since ``seen_term`` was
        read."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                if int(self._meta("term")) != seen_term:
                    return None
                self._db.executemany(
                    "UPDATE meta SET value = ? WHERE key = ?", [(str(seen_term + 1), "term"), (owner, "owner")]
                )
                self._db.execute("COMMIT")
                return seen_term + 1
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    def has_given_places(self) -> bool:
        """Whether hosts may have ranks because of this file."""
        with self._lock:
            return self._has_plans()

    def _has_plans(self) -> bool:
        return bool(self._db.execute("SELECT EXISTS (SELECT 1 FROM plans)").fetchone()[0])

    def rise_above(self, term: int, heard: int) -> bool:
        """Ends ``term``, and makes the next one greater than ``heard``, which hosts have obeyed. Returns False when
        another supervisor has begun a term meanwhile, or places were given."""
        with self._lock:
            self._see_that_it_is_there(may_be_another=False)
            self._db.execute("BEGIN IMMEDIATE")
            try:
                if int(self._meta("term")) != term or heard < term or self._has_plans():
                    return False
                self._db.execute("UPDATE meta SET value = ? WHERE key = 'term'", (str(heard),))
                self._db.execute("COMMIT")
                return True
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    # -- stored values ------------------------------------------------------------------------------------------------

    def load(self) -> Stored:
        """Reads everything.

        Raises:
            ConfigError: a row cannot be read.
        """
        with self._lock:
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
                raise ConfigError(self._damaged(f"{key} of {table}: {error}")) from error
        return found

    def commit(
        self,
        term: int,
        changes: Changes,
        hosts: Mapping[str, Host | None] | None = None,
        events: Sequence[HistoryEvent] = (),
    ) -> None:
        """Stores everything or nothing. It is on disk when this returns.

        Args:
            hosts: by name; None for a host that is forgotten.

        Raises:
            LeadershipLost: ``term`` is over.
            sqlite3.Error: the file cannot be written.
        """
        rows: list[tuple[str, list[tuple[Any, ...]]]] = [
            ("workloads", [(one.name, _text(one)) for one in changes.workloads.values()]),
            ("incidents", [(one.number, one.is_open, _text(one)) for one in changes.incidents.values()]),
            ("plans", [(one.number, one.incident, _text(one)) for one in changes.plans.values()]),
            ("hosts", [(name, _text(host)) for name, host in (hosts or {}).items() if host is not None]),
        ]
        gone = [(name,) for name, host in (hosts or {}).items() if host is None]
        with self._lock:
            faultpoints.hit("supervisor.store.begin")
            self._see_that_it_is_there(may_be_another=False)
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._check_term(term)
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
                faultpoints.hit("supervisor.store.write")
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
            faultpoints.hit("supervisor.store.committed")

    def _check_term(self, term: int) -> None:
        present = int(self._meta("term"))
        if present != term:
            raise LeadershipLost(
                f"another supervisor leads since term {present} ({self._meta('owner')}); this was {term}"
            )

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
        """The newest events that match, oldest first."""
        with self._lock:
            found = self._db.execute(
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


def _identity(path: str) -> str:
    """Device and inode number of a file, which identify it while it exists.

    Raises:
        FileNotFoundError: there is no such file.
    """
    status = os.stat(path)
    return f"{status.st_dev}:{status.st_ino}"


def _text(value: Any) -> str:
    return json.dumps(to_jsonable(value), separators=(",", ":"))


def _row(event: HistoryEvent) -> tuple[Any, ...]:
    fields = json.dumps(dict(event.fields), default=str)
    texts = (event.kind, event.workload, event.host, event.text)
    kind, workload, host, text = (one.encode(errors="replace").decode() for one in texts)
    return event.at, kind, workload, host, event.incident, text, fields
