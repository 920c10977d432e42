"""The proxy of faults itself."""

from __future__ import annotations

import http.client
import statistics
import time
from urllib.parse import urlsplit

from resiliency.testing.http_faults import FaultProxy


def test_an_answer_is_not_held_back_until_the_one_before_is_acknowledged() -> None:
    """Which takes 40 ms on a connection that is used again: more than most requests to a store on this machine."""
    with FaultProxy("http://127.0.0.1:1") as proxy:
        proxy.fail(".", 503, times=21)
        connection = http.client.HTTPConnection(urlsplit(proxy.url).netloc, timeout=10)
        took = []
        for _ in range(21):
            began = time.monotonic()
            connection.request("GET", "/")
            answer = connection.getresponse()
            assert (answer.status, answer.read()) == (503, b"injected")
            took.append(time.monotonic() - began)
        connection.close()
    assert statistics.median(took) < 0.03
