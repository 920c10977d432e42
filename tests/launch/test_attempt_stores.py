"""The store of an attempt stays open for as long as a rank may take to leave it."""

from __future__ import annotations

import socket
import time

import pytest

from resiliency.launch.attempt_stores import AttemptStores


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("localhost", port)) == 0


def test_a_store_is_closed_when_it_was_replaced_long_ago_however_old_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stores = AttemptStores(keep_s=10.0)
    ports = [stores.make().port]  # of an attempt that lasts an hour
    for now[0] in (3600.0, 3601.0, 3609.0):  # three that fail soon
        ports.append(stores.make().port)
    assert [is_open(port) for port in ports] == [True, True, True, True]
    now[0] = 3612.0
    ports.append(stores.make().port)
    assert [is_open(port) for port in ports] == [False, False, True, True, True]
