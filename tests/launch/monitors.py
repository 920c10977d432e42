"""The monitor's end of the channel to a launcher, and a supervisor that does what a test tells it. No decisions here."""

from __future__ import annotations

import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from resiliency.runtime.channel import receive, send
from tests.patience import PATIENCE

__all__ = ["FakeMonitor", "FakeSupervisor"]


class FakeMonitor:
    """Listens on a name of its own. Everything that the launcher says is kept, with the time at which it came.

    Threads: the test's, and one that reads, which calls ``heard``.
    """

    def __init__(self, heard: Callable[[FakeMonitor, dict[str, Any]], None] | None = None) -> None:
        self.name = f"resiliency-test-{os.getpid()}-{secrets.token_hex(4)}"
        self.said: list[tuple[float, dict[str, Any]]] = []
        self._heard = heard
        self._changed = threading.Condition()
        self._taken = 0
        self._last: list[dict[str, Any]] = []
        self._connection: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self.open()

    # -- the socket -----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        self._wake, self._end = socket.socketpair()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind("\0" + self.name)
        self._listener.listen(4)
        self._thread = threading.Thread(target=self._read, args=(self._listener,))
        self._thread.start()

    def close(self) -> None:
        """As a monitor that was killed. Idempotent."""
        if self._thread is None:
            return
        self._end.send(b"x")
        self._thread.join(10)
        self._thread = None
        self._wake.recv(1)
        self._wake.close()
        self._end.close()
        self._listener.close()
        with self._changed:
            if self._connection is not None:
                self._connection.close()
                self._connection = None

    def _read(self, listener: socket.socket) -> None:
        while True:
            fds = [self._wake, listener, *filter(None, [self._connection])]
            ready = select.select(fds, [], [])[0]
            if self._wake in ready:
                return
            if listener in ready:
                with self._changed:
                    if self._connection is not None:
                        self._connection.close()
                    self._connection = listener.accept()[0]
                    for message in self._last:
                        send(self._connection, message)
                    self._changed.notify_all()
            elif self._connection is not None:
                with suppress(ConnectionResetError):
                    received = receive(self._connection)
                    if received is not None:
                        self._take(received[0])
                        continue
                with self._changed:
                    self._connection.close()
                    self._connection = None

    def _take(self, message: dict[str, Any]) -> None:
        with self._changed:
            self.said.append((time.monotonic(), message))
            self._changed.notify_all()
        if self._heard is not None:
            self._heard(self, message)

    # -- what a test does -----------------------------------------------------------------------------------------------

    def tell(self, *messages: dict[str, Any]) -> None:
        """Says it now, or to whoever connects next; only the last call is said again to a launcher that comes back."""
        with self._changed:
            self._last = list(messages)
            if self._connection is not None:
                for message in messages:
                    with suppress(OSError):
                        send(self._connection, message)

    def send_raw(self, data: bytes, fds: Sequence[int] = ()) -> None:
        with self._changed:
            assert self._connection is not None
            socket.send_fds(self._connection, [data], list(fds))

    def wait(self, kind: str, *, timeout_s: float = 60.0, **fields: Any) -> tuple[float, dict[str, Any]]:
        """The next message of this kind with these fields, after the one that was waited for last."""
        deadline = time.monotonic() + PATIENCE * timeout_s
        with self._changed:
            while True:
                for at, (when, message) in enumerate(self.said[self._taken :], start=self._taken):
                    if message["kind"] == kind and all(message.get(name) == one for name, one in fields.items()):
                        self._taken = at + 1
                        return when, message
                left_s = deadline - time.monotonic()
                assert left_s > 0, f"no {kind} {fields}; it said {[one for _, one in self.said][-12:]}"
                self._changed.wait(left_s)

    def said_of(self, kind: str) -> list[dict[str, Any]]:
        with self._changed:
            return [message for _, message in self.said if message["kind"] == kind]


class FakeSupervisor:
    """Gives places to hosts, and passes on where the store of the generation is."""

    def __init__(self) -> None:
        self.monitors: list[FakeMonitor] = []
        self._lock = threading.Lock()
        self._places: dict[FakeMonitor, dict[str, Any]] = {}
        self.generation = 0
        #: Called with what a launcher says, on the thread that reads it.
        self.on_message: Callable[[FakeMonitor, dict[str, Any]], None] | None = None

    def monitor(self) -> FakeMonitor:
        self.monitors.append(FakeMonitor(self._heard))
        return self.monitors[-1]

    def _heard(self, monitor: FakeMonitor, message: dict[str, Any]) -> None:
        if message["kind"] == "master":
            with self._lock:
                given = [place for place in self._places.values() if place["generation"] == message["generation"]]
                for place in given:
                    place["master"] = message["address"]
                for one, place in self._places.items():
                    if place in given:
                        one.tell(place)
        if self.on_message is not None:
            self.on_message(monitor, message)

    def place(self, *hosts: FakeMonitor, generation: int | None = None, **more: Any) -> int:
        """Gives the next generation to these hosts, in the order of their node ranks."""
        with self._lock:
            self.generation = self.generation + 1 if generation is None else generation
            self._places = {
                host: {
                    "kind": "place",
                    "generation": self.generation,
                    "node_rank": node_rank,
                    "nodes": len(hosts),
                    "master": "",
                    "workload": "job",
                    "replicas": len(hosts),
                    "replicas_before": 0,
                    "replace": [],
                    **more,
                }
                for node_rank, host in enumerate(hosts)
            }
            for host, place in self._places.items():
                host.tell(place)
            return self.generation

    def withdraw(self, *hosts: FakeMonitor) -> None:
        with self._lock:
            for host in hosts:
                self._places.pop(host, None)
                host.tell({"kind": "no_place"})

    def complete(self) -> None:
        for host in self.monitors:
            host.tell({"kind": "completed"})

    def close(self) -> None:
        for monitor in self.monitors:
            monitor.close()
