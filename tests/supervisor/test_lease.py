"""Who leads, of those that have one state file."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from resiliency.supervisor.lease import Lease
from resiliency.supervisor.store import Store

from .fake_monitors import until


def test_one_that_stands_by_outlives_a_leader_that_was_stopped_while_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("resiliency.supervisor.store._BUSY_S", 0.05)
    store = Store(str(tmp_path / "s.db"))
    leader = sqlite3.connect(tmp_path / "s.db", isolation_level=None)
    leader.execute("BEGIN IMMEDIATE")

    async def work() -> None:
        lease = Lease(store, lease_s=0.5)
        turn = asyncio.create_task(lease.wait_for_turn())
        await until(lambda: "cannot be taken over" in caplog.text or turn.done())
        assert not turn.done()
        leader.execute("ROLLBACK")
        await asyncio.wait_for(turn, 10)
        assert lease.is_mine() and caplog.text.count("cannot be taken over") == 1
        lease.close()

    asyncio.run(work())
    leader.close()
    store.close()


def test_a_leader_that_gives_the_lock_away_before_it_is_gone_is_replaced_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel closes the files of a process that was killed, and a moment later it is no process any more."""
    store = Store(str(tmp_path / "s.db"))
    looks: list[bool] = []

    def runs(*_: object) -> bool:
        looks.append(True)
        return len(looks) == 1

    async def work() -> None:
        monkeypatch.setattr(Lease, "_runs", runs)
        lease = Lease(store, lease_s=3600)
        await asyncio.wait_for(lease.wait_for_turn(), 10)
        assert lease.is_mine() and len(looks) == 2
        lease.close()

    asyncio.run(work())
    store.close()


def test_a_leader_that_is_stopped_while_it_counts_does_not_take_leadership_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(str(tmp_path / "s.db"))

    async def work() -> None:
        first, second = Lease(store, lease_s=0.2), Lease(store, lease_s=0.2)
        second._me = first._me[0], first._me[1] + 1  # another process
        monkeypatch.setattr(second, "_runs", lambda page: False)
        await asyncio.wait_for(first.wait_for_turn(), 10)
        term = await asyncio.wait_for(second.wait_for_turn(), 10)
        assert second.is_mine() and not first.is_mine()
        with monkeypatch.context() as stopped:
            stopped.setattr(first, "is_mine", lambda: True)  # as it found before it was stopped
            first.renew()
        assert second.is_mine() and not first.is_mine()
        second.renew()
        assert second.is_mine() and second._read()[3] == term
        first.close()
        second.close()

    asyncio.run(work())
    store.close()
