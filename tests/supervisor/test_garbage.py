"""The supervisor's process looks for garbage by the clock, and for no longer than it runs."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from resiliency.supervisor import garbage


class Knot:
    def __init__(self) -> None:
        self.itself = self


def test_new_garbage_is_soon_gone_and_old_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "_NEW_EVERY_S", 0.001)
    monkeypatch.setattr(garbage, "_ALL_EVERY_S", 0.005)

    async def gone(knot: weakref.ref[Knot]) -> None:
        while knot() is not None:
            await asyncio.sleep(0.001)

    async def main() -> None:
        old = Knot()
        gc.collect()  # and is of the oldest now
        async with garbage.collected_by_the_clock():
            assert not gc.isenabled()
            await asyncio.wait_for(gone(weakref.ref(Knot())), 20)
            known = weakref.ref(old)
            del old
            await asyncio.wait_for(gone(known), 20)
        assert gc.isenabled()

    asyncio.run(main())
