"""A metadata server of a cloud, on loopback."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from typing import Any

import pytest


class Metadata(http.server.ThreadingHTTPServer):
    """As Google's: an answer when the value differs from the etag that is known, or after a time."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.values = {"preempted": "FALSE", "maintenance-event": "NONE"}
        self.changed = threading.Condition()
        self.asked: list[str] = []
        self.fails = False
        #: By key: the HTTP status that is answered instead of its value.
        self.statuses: dict[str, int] = {}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/computeMetadata/v1"

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()


class _Answer(http.server.BaseHTTPRequestHandler):
    server: Metadata

    def do_GET(self) -> None:
        key = self.path.partition("?")[0].rpartition("/")[2]
        self.server.asked.append(self.path)
        if self.headers["Metadata-Flavor"] != "Google" or self.server.fails or key in self.server.statuses:
            self.send_error(self.server.statuses.get(key, 503))
            return
        known = self.path.rpartition("last_etag=")[2]
        with self.server.changed:
            if "wait_for_change" in self.path:
                self.server.changed.wait_for(lambda: self.server.values[key] != known, 30)
            value = self.server.values[key]
        self.send_response(200)
        self.send_header("ETag", value)
        self.end_headers()
        self.wfile.write(value.encode())

    def log_message(self, *arguments: Any) -> None: ...


@pytest.fixture(name="metadata")
def metadata_server() -> Iterator[Metadata]:
    server = Metadata()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()
