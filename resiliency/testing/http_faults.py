"""An HTTP proxy on a loopback port that answers some requests with a fault, for tests of retries."""

from __future__ import annotations

import enum
import http.client
import re
import socket
import struct
import threading
from dataclasses import dataclass, field
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import urlsplit

__all__ = ["FaultProxy", "HttpFault"]

# Headers of one connection, not of the response (RFC 9110, 7.6.1), and the length, which is written anew.
_HOP_BY_HOP = frozenset({"connection", "content-length", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"})


class HttpFault(enum.Enum):
    """What can happen to a request besides an error status."""

    RESET = "reset"  # the connection is cut before the server sees the request
    LOST_ANSWER = "lost answer"  # the server carries out the request, and the connection is cut before its response
    HANG = "hang"  # no answer until the proxy stops


@dataclass
class _RequestFault:
    pattern: re.Pattern[str]
    fault: HttpFault | int
    body: str
    left: int
    skip: int


@dataclass
class _State:
    host: str
    port: int
    origin: str
    deadline_s: float
    trips: list[_RequestFault] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    stopped: threading.Event = field(default_factory=threading.Event)

    def pick(self, request: str) -> _RequestFault | None:
        with self.lock:
            self.seen.append(request)
            for trip in self.trips:
                if trip.left and trip.pattern.search(request):
                    if trip.skip:
                        trip.skip -= 1
                        continue
                    trip.left -= 1
                    return trip
            return None


class FaultProxy:
    """Passes requests on to ``upstream``; a context manager.

    Thread: any.

    Args:
        upstream: "http://127.0.0.1:PORT".
        deadline: for each request passed on, and for ``HANG``.

    Attributes:
        url: address of the proxy.
    """

    def __init__(self, upstream: str, *, deadline: timedelta = timedelta(seconds=20)) -> None:
        parts = urlsplit(upstream)
        assert parts.hostname is not None and parts.port is not None, upstream
        self._state = state = _State(parts.hostname, parts.port, upstream, deadline.total_seconds())
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"state": state}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="fault-proxy", daemon=True
        )

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._state.stopped.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(self._state.deadline_s)

    def fail(
        self, pattern: str, fault: HttpFault | int, *, times: int = 1, skip: int = 0, body: str = "injected"
    ) -> None:
        """Arms a fault.

        Args:
            pattern: searched in "METHOD /path?query".
            fault: what happens, or the status of the answer.
            times: requests it happens to.
            skip: matching requests to let pass first.
            body: text of the answer.
        """
        with self._state.lock:
            self._state.trips.append(_RequestFault(re.compile(pattern), fault, body, times, skip))

    def reset(self) -> None:
        """Disarms all faults, frees hanging requests and clears the list of requests seen."""
        with self._state.lock:
            self._state.trips.clear()
            self._state.seen.clear()
            self._state.stopped.set()
            self._state.stopped = threading.Event()

    def seen(self, pattern: str = "") -> list[str]:
        """Requests so far that match, faulty ones too."""
        with self._state.lock:
            return [request for request in self._state.seen if re.search(pattern, request)]


class _Handler(BaseHTTPRequestHandler):
    state: _State
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and content are two writes

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        trip = self.state.pick(f"{self.command} {self.path}")
        fault = None if trip is None else trip.fault
        if fault is HttpFault.RESET:
            self._cut()
        elif fault is HttpFault.HANG:
            self.state.stopped.wait(self.state.deadline_s)
            self._cut()
        elif isinstance(fault, int) and trip is not None:
            self._answer(fault, [("Content-Type", "text/plain")], trip.body.encode())
        else:
            status, headers, content = self._pass_on(body)
            if fault is HttpFault.LOST_ANSWER:
                self._cut()
            else:
                self._answer(status, headers, content)

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = _serve

    def _pass_on(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        upstream = http.client.HTTPConnection(self.state.host, self.state.port, timeout=self.state.deadline_s)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
            upstream.request(self.command, self.path, body=body, headers=headers)
            answer = upstream.getresponse()
            content = answer.read()
            # Replace the server's address in that of an upload session, so that its parts pass through the proxy too.
            here = f"http://{self.headers['Host']}"
            kept = [
                (name, value.replace(self.state.origin, here))
                for name, value in answer.getheaders()
                if name.lower() not in _HOP_BY_HOP
            ]
            return answer.status, kept, content
        finally:
            upstream.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _cut(self) -> None:
        self.close_connection = True
        # A linger time of zero turns the close into a reset.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    def log_message(self, format: str, *args: object) -> None:
        """Prints nothing; :meth:`FaultProxy.seen` has the requests."""
