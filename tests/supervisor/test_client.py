"""An operator's request goes to the supervisor that leads, also where it does not say that it is ready."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from resiliency.errors import AgentError
from resiliency.supervisor.client import OperatorClient


@contextlib.contextmanager
def answering(**statuses: int) -> Iterator[str]:
    """Its address. Args: statuses: by the last word of the path."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status = statuses[self.path.rpartition("/")[2]]
            body = json.dumps({"led": True} if status == 200 else {"error": f"status {status}"}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def test_a_leader_whose_disk_is_full_is_found_behind_one_that_stands_by() -> None:
    with answering(readyz=503, status=503) as waiting, answering(readyz=503, status=200) as leader:
        assert OperatorClient(waiting, leader).get("/v1/status") == {"led": True}


def test_a_refusal_by_the_leader_is_final_and_of_none_that_leads_each_is_named() -> None:
    with answering(readyz=200, status=401) as leader, answering(readyz=503, status=503) as waiting:
        with pytest.raises(AgentError, match="status 401") as refused:
            OperatorClient(waiting, leader).get("/v1/status")
        assert waiting not in str(refused.value)
        with pytest.raises(AgentError, match=r"status 503\. .*no supervisor answers at http://127.0.0.1:1\b"):
            OperatorClient("http://127.0.0.1:1", waiting).get("/v1/status")
