"""What the launcher makes of messages that no rank of ours sends."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from typing import Any

import pytest

from resiliency.launch.channel import send
from resiliency.launch.rank_links import RankLinks


@pytest.mark.parametrize(
    "message", [{}, {"kind": "inside"}, {"kind": "inside", "number": "one"}, {"kind": "heartbeat", "number": 0}]
)
def test_a_message_that_is_not_understood_ends_its_connection_and_nothing_else(
    message: Mapping[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    links = RankLinks(fork=lambda request, fds: None, log=lambda message: None)
    other, stranger = (socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2))
    with other, stranger, caplog.at_level(logging.WARNING):
        for end in (other, stranger):
            end.connect("\0" + links.address)
        send(stranger, message)
        links.serve()
        send(other, {"kind": "inside", "number": -1})
        links.serve()
        assert "is not understood" in caplog.text
        assert len(links.fds()) == 2  # the listener, and the one that is well
        links.close()
