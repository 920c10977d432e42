"""What the launcher makes of messages that no rank of ours sends."""

from __future__ import annotations

import logging
import mmap
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

import pytest

from resiliency.launch.rank_links import RankLinks
from resiliency.runtime.channel import send
from resiliency.runtime.heartbeat_page import PAGE_BYTES, PageWriter


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


def test_a_rank_that_has_left_in_time_is_given_time_to_begin_however_late_the_next_attempt_starts() -> None:
    links = RankLinks(fork=lambda request, fds: None, log=lambda message: None)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as rank:
        rank.connect("\0" + links.address)
        send(rank, {"kind": "inside", "number": -1})
        links.serve()
        link = links.link_of(os.getpgid(0))
        assert link is not None
        began = time.monotonic()
        assert links.tell_to_leave(link, within_s=30)
        assert link.deadline is not None and link.deadline >= began + 30
        at_once = link.deadline
        assert links.start(link, 0, {}, [1, 2]) and link.deadline == at_once  # no longer than promised
        link.deadline = began - 60  # the next attempt waited for hosts, or for the end of a crash loop's pause
        assert links.start(link, 1, {}, [1, 2])
        assert link.deadline > began + 1
        link.within_s = 0.0
        link.deadline = began - 60
        assert links.start(link, 2, {}, [1, 2]) and link.deadline <= time.monotonic()
        links.close()


def test_what_a_rank_has_started_does_not_beat_for_it_though_it_came_first() -> None:
    links = RankLinks(fork=lambda request, fds: None, log=lambda message: None)
    ends = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    group, pages = os.getpgid(0), [os.memfd_create("page") for _ in ends]
    try:
        for end, page, beats in zip(ends, pages, (7, 9), strict=True):
            os.ftruncate(page, PAGE_BYTES)
            PageWriter(mmap.mmap(page, PAGE_BYTES)).write(beats=beats, last_ns=1, longest_ns=0, place=1)
            end.connect("\0" + links.address)
            send(end, {"kind": "heartbeat", "number": 0}, [page])
        links.serve()
        worker, rank = links._links
        worker.pid, rank.pid = group + 1, group
        found = links.heartbeat_of(group)
        assert found is not None and found[0] == group and found[1].beats == 9
        rank.pid = group + 2  # a shell that has started what beats
        found = links.heartbeat_of(group)
        assert found is not None and found[0] == group + 1 and found[1].beats == 7
    finally:
        links.close()
        for end in ends:
            end.close()
        for page in pages:
            os.close(page)
