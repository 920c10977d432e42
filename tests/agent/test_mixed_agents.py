"""One rank has lost agents too often and does its agent's work itself, while an agent process serves the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from resiliency import faultpoints
from resiliency.agent import client as client_module
from resiliency.agent.client import AgentClient
from resiliency.agent.config import embedded_address, held
from resiliency.agent.core import HostAgent
from resiliency.agent.messages import Recorded, Request
from resiliency.checkpoint.coordinator import Coordinator
from resiliency.checkpoint.options import CheckpointerOptions
from resiliency.events import EventWriter
from resiliency.storage.catalog import scan
from resiliency.storage.stage import Stage
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.checkpoints import RUN, differences, make_checkpointer, make_state, run_ranks
from tests.agent.sealing import config_for, manifest_of, sealed

SOON = timedelta(seconds=20)
OPTIONS = CheckpointerOptions(previous_save_timeout=timedelta(seconds=20), agree_timeout=timedelta(seconds=20))


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    faultpoints.arm("")  # in this process; an agent process reads the environment
    yield
    faultpoints.arm("")


@pytest.mark.parametrize("alone", [0, 1])
@pytest.mark.parametrize("last", [0, 1, None])
def test_both_learn_of_each_commit_and_every_step_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: int, last: int | None
) -> None:
    # An agent that adds the other shards to shard 0 takes its time: the step of whoever commits meanwhile is damaged.
    monkeypatch.setenv("RESILIENCY_FAULTS", "agent.join.record:delay=0.3@*")
    monkeypatch.setattr(client_module.Peer, "kill", lambda peer: False)  # else the rank gets another agent process

    def work(rank: int, coordinator: Coordinator) -> None:
        with make_checkpointer(tmp_path, coordinator, options=OPTIONS) as checkpointer:
            for step in (1, 2, 3):
                if step == 2 and rank == alone:
                    client = checkpointer.session.client
                    client.give_up_agent()
                    assert client._thread is not None
                    client._thread.join(30)
                    assert client.embedded
                coordinator.all_gather("step", b"", timeout=SOON)
                if step > 1 and rank == last:
                    coordinator.all_gather("the other has recorded its part", b"", timeout=SOON)
                ticket = checkpointer.save(step, make_state(step), per_rank={"rank": rank}, names=(f"{step}.ckpt",))
                assert ticket is not None
                if step > 1 and last is not None and rank != last:
                    ticket.wait(Stage.RECORDED, timeout=SOON)
                    coordinator.all_gather("the other has recorded its part", b"", timeout=SOON)
                ticket.wait(Stage.COMMITTED, timeout=SOON)
                assert ticket.failed is None

    run_ranks(2, work)
    for listing in scan(LocalTier(tmp_path), RUN):
        assert listing.committed and not listing.missing_files(), f"{listing.id} is damaged"
    with make_checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.load()
    assert restored is not None and restored.step == 3 and differences(restored.state, make_state(3)) == []


def _events(config: Any, rank: int = -1) -> EventWriter:
    return EventWriter(run=config.run, attempt=1, rank=rank, host="n", sinks=())


def test_an_agent_in_the_process_has_all_that_is_sent_again_when_a_flush_asks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the flush at the end of a job returns, and its last save is dropped in silence."""
    config = config_for(tmp_path)
    rank = AgentClient(config, 0, _events(config, 0))
    rank._unacknowledged[sealed(config).id] = sealed(config)
    handed, original = threading.Event(), HostAgent.handle

    def slowly(agent: HostAgent, rank: int, message: Request) -> None:
        handed.set()
        time.sleep(0.3)  # the other thread asks now
        original(agent, rank, message)

    monkeypatch.setattr(HostAgent, "handle", slowly)
    lost = threading.Thread(target=rank._embed)
    lost.start()
    assert handed.wait(20)
    try:
        assert rank.flush(Stage.COMMITTED, timeout_s=20)
        assert manifest_of(config, 1)
    finally:
        lost.join(20)
        rank.close()


def test_who_holds_an_address_is_seen_without_a_trace(tmp_path: Path) -> None:
    config = config_for(tmp_path, world_size=2, local_ranks=(0, 1))
    addresses = [embedded_address(config.address, rank) for rank in (0, 1)]
    assert not held([config.address, *addresses])
    rank = AgentClient(config, 1, _events(config, 1), embedded=True)
    rank.open()
    for _ in range(5):  # more than the queue of those who connect holds
        assert held([config.address, *addresses]) == {addresses[1]}
    assert not client_module._held_by_a_dead_process(addresses[1])
    assert [type(message) for message in rank.poll()] != [Recorded]
    rank.close()
    assert not held(addresses)
