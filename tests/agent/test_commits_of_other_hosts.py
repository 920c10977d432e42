"""A step goes to a remote tier in parts, one from each host: the ranks of all hosts hear that it is durable there, although
only the agent that sends the last part commits it."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from resiliency.agent import commit_watch
from resiliency.agent._reporter import Reporter
from resiliency.agent.commit_watch import CommitWatch
from resiliency.agent.config import AgentConfig, TierSpec
from resiliency.agent.core import HostAgent
from resiliency.agent.messages import Complete, Durable, Failed, Notice
from resiliency.checkpoint.checkpointer import CheckpointerOptions
from resiliency.checkpoint.coordinator import Coordinator
from resiliency.checkpoint.options import LocalTierOptions, RemoteTierOptions
from resiliency.errors import TierError
from resiliency.events import EventWriter
from resiliency.storage.catalog import step_prefix
from resiliency.storage.manifest import MANIFEST, Manifest
from resiliency.storage.stage import Stage
from resiliency.storage.step_id import StepId
from resiliency.storage.tiers.base import Tier
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.checkpoints import make_checkpointer, make_state, run_ranks
from tests.agent.sealing import config_for, manifest_of, seal_of, write_shard
from tests.agent.test_names_of_a_killed_agent import step_at

SOON = timedelta(seconds=20)
SPEC = TierSpec(address="store", name="store", keep=None)

Start = Callable[[AgentConfig], tuple[HostAgent, list[Notice]]]


@pytest.mark.parametrize("agents", ["a process for each host", "a process for each host, one folder", "in each rank"])
def test_every_rank_hears_that_a_step_is_durable_on_a_store(
    tmp_path: Path, agents: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting = threading.Lock()  # RESILIENCY_NODE is read when a checkpointer is opened
    together = threading.Barrier(2)
    shared, own_hosts = agents.endswith("one folder"), agents != "in each rank"

    def work(rank: int, coordinator: Coordinator) -> None:
        folder = tmp_path / (f"local{rank}" if own_hosts and not shared else "local")
        with starting:
            if own_hosts:
                monkeypatch.setenv("RESILIENCY_NODE", f"host{rank}")
            checkpointer = make_checkpointer(
                LocalTierOptions(directory=str(folder), shared=shared),
                coordinator,
                remotes=[RemoteTierOptions(address=str(tmp_path / "store"), name="store")],
                options=CheckpointerOptions(
                    agent="process" if own_hosts else "embedded", drain_timeout=timedelta(seconds=10)
                ),
            )
        with checkpointer:
            for step in (1, 2, 3):
                ticket = checkpointer.save(step, make_state(step), names=["last.ckpt"])
                assert ticket is not None
                if step == 2:
                    assert checkpointer.flush(Stage.DURABLE, timeout=SOON)
                    assert ticket.has_reached(Stage.DURABLE, tier="store"), "before flush has returned"
                ticket.wait(Stage.DURABLE, tier="store", timeout=SOON)
                assert step_at(tmp_path / "store" / "last.ckpt") == step
                together.wait(20)

    run_ranks(2, work, timeout_s=90)


def test_an_agent_is_idle_while_another_host_has_not_sent_its_part(tmp_path: Path, start: Start) -> None:
    host_a = config_for(tmp_path / "a", node="a", world_size=2, local_ranks=(0,), shared=False)
    host_a = dataclasses.replace(host_a, remotes=(dataclasses.replace(SPEC, address=str(tmp_path / "store")),))
    agent, heard = start(host_a)
    seal = seal_of(host_a, 1, write_shard(host_a, 1, 0), tiers=("store",))
    agent.handle(0, seal)
    agent.handle(0, Complete(id=seal.id))
    assert agent.wait(Stage.DURABLE, timeout_s=20)
    assert list((tmp_path / "store").rglob("*.distcp")), "this host's part is sent"
    assert not [message for message in heard if getattr(message, "tier", "") == "store"]
    assert agent.idle, "it exits when its ranks have left"


# ---- the watch alone


class Store(LocalTier):
    """A store that fails as often as it is told to."""

    failures = 0

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads = threading.Semaphore(0)

    def read(self, key: str, *args: Any, **options: Any) -> bytes:
        self.reads.release()
        if self.failures:
            self.failures -= 1
            raise TierError("the store is down", retryable=True)
        return super().read(key, *args, **options)


@dataclasses.dataclass
class Watched:
    """A watch for one host's ranks, and what these hear."""

    watch: CommitWatch
    tier: Store
    manifests: dict[int, Manifest]
    heard: list[Notice] = dataclasses.field(default_factory=list)
    changed: threading.Condition = dataclasses.field(default_factory=threading.Condition)

    def commit(self, step: int) -> None:
        manifest = self.manifests[step]
        self.tier.put_bytes(step_prefix("run", manifest.id) + MANIFEST, manifest.to_json().encode())

    def add(self, *steps: int) -> None:
        for step in steps:
            self.watch.add(self.id(step))

    def id(self, step: int) -> StepId:
        return self.manifests[step].id

    def wait(self, notices: int) -> None:
        """Waits until the ranks have heard so many notices."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.heard) >= notices, 20)

    def hear(self, message: Notice) -> None:
        with self.changed:
            self.heard.append(message)
            self.changed.notify_all()


@pytest.fixture
def watched(tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(commit_watch, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(commit_watch, "_LONGEST_PAUSE_S", 0.02)
    config = config_for(tmp_path / "made")
    agent, _ = start(config)
    manifests = {}
    for step in (1, 2, 3):
        agent.handle(0, seal_of(config, step, write_shard(config, step, 0), names=("last.ckpt",)))
        assert agent.wait(Stage.COMMITTED, timeout_s=20)
        manifests[step] = Manifest.from_json(json.dumps(manifest_of(config, step)), where="the made step")
    tier = Store(tmp_path / "store")
    events = EventWriter(run="run", attempt=1, rank=-1, host="a", sinks=())
    reporter = Reporter((1,), lambda _, message: found.hear(message), events)
    watch = CommitWatch("run", SPEC, lambda: tier, reporter)
    found = Watched(watch, tier, manifests)
    yield found
    watch.close()


def test_a_commit_is_reported_once_it_has_its_names(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = ["last.ckpt"]
    looks = threading.Semaphore(0)

    def missing_names(tier: Tier, manifest: Manifest) -> list[str]:
        looks.release()
        return missing

    monkeypatch.setattr(commit_watch, "missing_names", missing_names)
    watched.add(1)
    watched.commit(1)
    for _ in range(3):
        assert looks.acquire(timeout=20)
    assert not watched.heard
    missing.clear()
    watched.wait(1)
    assert watched.heard == [Durable(id=watched.id(1), tier="store")]


def test_a_name_that_is_refused_holds_up_the_report_for_a_moment_only(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_watch, "missing_names", lambda tier, manifest: ["refused.ckpt"])
    monkeypatch.setattr(commit_watch, "_NAMES_S", 0.1)
    watched.commit(1)
    watched.add(1)
    watched.wait(1)
    assert watched.heard == [Durable(id=watched.id(1), tier="store")]


def test_of_several_steps_the_newest_decides_which_will_not_come(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_watch, "missing_names", lambda tier, manifest: [])
    watched.tier.failures = 1 << 30  # until all are there
    watched.add(1, 2, 3)
    watched.commit(1)
    watched.commit(3)
    watched.tier.failures = 0
    watched.wait(3)
    said = {message.id: message for message in watched.heard if isinstance(message, (Durable, Failed))}
    assert len(watched.heard) == len(said) == 3
    assert [type(said[watched.id(step)]) for step in (1, 2, 3)] == [Durable, Failed, Durable]
    lost = said[watched.id(2)]
    assert isinstance(lost, Failed) and lost.gave_way and not lost.retrying
    assert "step 3 is on store instead; another host did not send its part of step 2" in lost.reason


def test_steps_that_a_later_commit_of_this_host_has_overtaken_are_waited_for_no_longer(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This host sent the last part of the later one, so that it is not looked for. It has their names, too."""
    monkeypatch.setattr(commit_watch, "missing_names", lambda tier, manifest: ["last.ckpt"])
    monkeypatch.setattr(commit_watch, "_NAMES_S", 300.0)
    watched.add(1, 2)
    watched.commit(1)
    watched.watch.committed(watched.id(3))
    watched.wait(2)
    assert [type(message) for message in sorted(watched.heard, key=lambda message: message.id)] == [Durable, Failed]


def test_an_agent_tells_its_watch_of_its_own_commits(tmp_path: Path, start: Start) -> None:
    """The other host has left out the first step; of the second one its part is there first."""
    remotes = (dataclasses.replace(SPEC, address=str(tmp_path / "store")),)
    (a, heard), (b, _) = (
        start(config_for(tmp_path / node, node=node, world_size=2, local_ranks=(rank,), shared=False, remotes=remotes))
        for rank, node in enumerate("ab")
    )
    for agent, step in ((a, 1), (b, 2), (a, 2)):
        (rank,) = agent.config.local_ranks
        seal = seal_of(agent.config, step, write_shard(agent.config, step, rank), tiers=("store",))
        agent.handle(rank, seal)
        agent.handle(rank, Complete(id=seal.id))
        assert agent.wait(Stage.DURABLE, timeout_s=20)
    deadline = time.monotonic() + 20
    while len(there := [message for message in heard if getattr(message, "tier", "") == "store"]) < 2:
        assert time.monotonic() < deadline, there
        threading.Event().wait(0.01)
    assert {(message.id.step, type(message)) for message in there} == {(1, Failed), (2, Durable)}


def test_steps_are_waited_for_while_none_is_committed(watched: Watched) -> None:
    watched.add(1, 2)
    for _ in range(6):
        assert watched.tier.reads.acquire(timeout=20)
    assert not watched.heard


def test_a_store_that_is_down_is_asked_again(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_watch, "missing_names", lambda tier, manifest: [])
    watched.tier.failures = 5
    watched.commit(2)
    watched.add(2)
    watched.wait(1)
    assert watched.heard == [Durable(id=watched.id(2), tier="store")] and not watched.tier.failures


def test_a_watch_that_is_closed_ends(watched: Watched) -> None:
    watched.add(1)
    assert watched.tier.reads.acquire(timeout=20)
    watched.watch.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "resiliency-agent-watch-store"]
    assert not watched.heard
