"""One uploader by itself, and two on different hosts that send halves of one step."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from resiliency.agent import uploader as uploader_module
from resiliency.agent._fence import Fence
from resiliency.agent._reporter import Reporter
from resiliency.agent.config import AgentConfig, TierSpec
from resiliency.agent.uploader import Uploader
from resiliency.errors import TierError
from resiliency.events import EventWriter, JsonlSink
from resiliency.storage.blocks import block_digest
from resiliency.storage.catalog import scan, step_prefix
from resiliency.storage.manifest import ShardRecord, shard_file
from resiliency.storage.retention import DeleteRequest
from resiliency.storage.step_id import StepId
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.tier_doubles import Fault, FaultyTier
from tests.patience import PATIENCE

STEP = StepId(7, 1, "0a0b0c")


class Host:
    """One host with its own local folder, uploading to a shared remote one."""

    def __init__(self, root: Path, rank: int, world_size: int = 2, keep: int = 1) -> None:
        self.local, self.rank = root / f"host{rank}", rank
        self.reports: list[tuple[str, str]] = []
        self.heard: list[tuple[int, str, str]] = []
        self.log = root / f"agent-{rank}.jsonl"
        events = EventWriter(run="r", attempt=1, rank=-1, host="h", sinks=(JsonlSink(self.log),))
        spec = TierSpec(address=str(root / "remote"), name="store", keep=keep)
        config = AgentConfig(
            run="r",
            node=f"n{rank}",
            attempt=1,
            token="0a0b0c",
            world_size=world_size,
            local_ranks=(rank,),
            shared=False,
            local=TierSpec(address=str(self.local), name="local"),
            durable=True,
            remotes=(spec,),
        )
        self.world_size = world_size
        self.uploader = Uploader(
            config,
            spec,
            lambda step, file: str(self.local / step_prefix("r", step) / file),
            lambda _, step, outcome, why: self.hear(step, outcome, why),
            Reporter((rank,), lambda *_: None, events),
            Fence(config),
        )

    def hear(self, step: StepId, outcome: str, why: str) -> None:
        self.reports.append((outcome, why))
        self.heard.append((step.step, outcome, why))

    def outcomes(self) -> list[tuple[int, str]]:
        """Step and outcome of each report so far."""
        return [(step, outcome) for step, outcome, _ in list(self.heard)]

    def record(self, step: StepId = STEP, plan: str = "p") -> ShardRecord:
        data = f"{step} of {self.rank}".encode() * 50
        path = self.local / step_prefix("r", step) / shard_file(self.rank, replicated=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return ShardRecord(
            id=step,
            run="r",
            rank=self.rank,
            world_size=self.world_size,
            node="n",
            nbytes=len(data),
            block_bytes=8 << 20,
            digests=(block_digest(data),),
            plan=plan,
            names=("a.ckpt",),
        )

    def events(self) -> list[tuple[Any, ...]]:
        """Kind, step, tier, stage and will_retry of each event."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [(e["event_type"], e["step"], e["tier"], e.get("stage"), e.get("will_retry")) for e in lines]

    def send(self, *records: ShardRecord, **further: Any) -> str:
        """Sends and waits; returns the outcome."""
        before = len(self.reports)
        for record in records:
            self.uploader.submit(record.id, [record], **further)
        assert self.uploader.wait_idle(time.monotonic() + 20)
        return self.reports[before:][-1][0]


def until(condition: Callable[[], bool], seconds: float = 15.0) -> bool:
    """Waits for what another thread does."""
    deadline, pause = time.monotonic() + PATIENCE * seconds, threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(0.01)
    return True


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultyTier:
    tier = FaultyTier(LocalTier(tmp_path / "remote", name="store"))
    monkeypatch.setattr(uploader_module, "open_tier", lambda *_, **__: tier)
    monkeypatch.setattr(uploader_module, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(uploader_module, "_LONGEST_PAUSE_S", 0.02)
    return tier


@pytest.fixture
def hosts(tmp_path: Path, remote: FaultyTier) -> Any:
    made = [Host(tmp_path, rank) for rank in range(2)]
    yield made
    for host in made:
        host.uploader.close()


@pytest.mark.parametrize("first", [0, 1])
def test_the_last_host_writes_the_manifest(hosts: list[Host], remote: FaultyTier, first: int) -> None:
    assert hosts[first].send(hosts[first].record()) == "partial"
    (listing,) = scan(remote, "r")
    assert not listing.committed
    assert hosts[1 - first].send(hosts[1 - first].record()) == "durable"
    (listing,) = scan(remote, "r")
    assert listing.committed and listing.manifest is not None and listing.faults() == {}
    assert json.loads(remote.read("a.ckpt/manifest.json"))["step"] == 7


def test_events_name_the_stage_as_those_of_the_local_tier_do(hosts: list[Host], remote: FaultyTier) -> None:
    remote.fail("put_file", Fault.BUSY)
    assert hosts[0].send(hosts[0].record()) == "partial"
    assert hosts[0].events() == [("checkpoint_failed", 7, "store", "durable", True)]
    assert hosts[1].send(hosts[1].record()) == "durable"
    assert hosts[1].events() == [("checkpoint_durable", 7, "store", "durable", None)]
    other = StepId(8, 1, "0a0b0c")
    hosts[0].send(hosts[0].record(other, plan="p"))
    assert hosts[1].send(hosts[1].record(other, plan="q")) == "failed"
    assert hosts[1].events()[1:] == [("checkpoint_failed", 8, "store", "durable", False)]


def test_two_hosts_that_finish_at_once_commit_the_step(hosts: list[Host], remote: FaultyTier) -> None:
    for step in range(1, 15):
        records = [host.record(StepId(step, 1, "0a0b0c")) for host in hosts]
        barrier = threading.Barrier(2)
        outcomes: list[str] = []

        def work(
            host: Host, record: ShardRecord, barrier: threading.Barrier = barrier, outcomes: list[str] = outcomes
        ) -> None:
            barrier.wait(10)
            outcomes.append(host.send(record))

        threads = [threading.Thread(target=work, args=pair) for pair in zip(hosts, records, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert "durable" in outcomes, f"nobody wrote the manifest of step {step}: {outcomes}"
    assert scan(remote, "r")[-1].committed


def test_halves_that_do_not_belong_together_are_never_a_step(hosts: list[Host], remote: FaultyTier) -> None:
    hosts[0].send(hosts[0].record(plan="p"))
    assert hosts[1].send(hosts[1].record(plan="q")) == "failed"
    assert not scan(remote, "r")[0].committed


def test_a_broken_record_of_the_other_host_is_no_manifest(hosts: list[Host], remote: FaultyTier) -> None:
    hosts[0].send(hosts[0].record())
    remote.put_bytes(step_prefix("r", STEP) + "shard-00000.json", b'{"half')
    assert hosts[1].send(hosts[1].record()) == "partial"
    assert hosts[0].send(hosts[0].record()) == "durable"


def test_what_is_there_already_is_not_sent_again(hosts: list[Host], remote: FaultyTier) -> None:
    for host in hosts:
        host.send(host.record())
    remote.fail("put_file", Fault.REFUSED)
    assert hosts[0].send(hosts[0].record(), only_if_missing=True) in ("partial", "durable")
    assert remote.tripped(Fault.REFUSED) == 0


def test_damage_since_the_digest_is_not_sent_on(hosts: list[Host], remote: FaultyTier) -> None:
    record = hosts[0].record()
    path = hosts[0].local / step_prefix("r", STEP) / record.file
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert hosts[0].send(record) == "failed"
    assert "changed after it was digested" in hosts[0].reports[-1][1]
    assert list(remote.list("")) == []


@pytest.mark.parametrize("damage", ["shorter", "longer", "missing"])
def test_a_file_of_another_length_is_not_sent_on(hosts: list[Host], remote: FaultyTier, damage: str) -> None:
    record = hosts[0].record()
    path = hosts[0].local / step_prefix("r", STEP) / record.file
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] if damage == "shorter" else path.read_bytes() + b"x")
    threading.Timer(1.0, hosts[0].uploader.close).start()  # a failure that is tried again for ever is ended here
    hosts[0].uploader.submit(STEP, [record])
    assert hosts[0].uploader.wait_idle(time.monotonic() + 20)
    assert hosts[0].reports[-1][0] == "failed"
    assert not [info for info in remote.list("") if info.key.endswith(".json")]


def test_closing_ends_the_waiting_at_once(
    hosts: list[Host], remote: FaultyTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploader_module, "_FIRST_PAUSE_S", 60.0)
    told = threading.Event()
    remote.fail("put_file", Fault.BUSY, times=10**9)
    monkeypatch.setattr(hosts[0].uploader, "_report", lambda *what: (hosts[0].reports.append(what[2:]), told.set()))
    hosts[0].uploader.submit(STEP, [hosts[0].record()])
    assert told.wait(10)
    began = time.monotonic()
    hosts[0].uploader.close()
    assert time.monotonic() - began < 3
    assert hosts[0].reports[-1][0] == "interrupted" and "next start" in hosts[0].reports[-1][1]


def test_while_the_tier_is_down_only_the_newest_step_waits_for_it(
    hosts: list[Host], remote: FaultyTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step that waits is kept on the local tier, which may be memory."""
    host = hosts[0]
    works, real = threading.Event(), remote.put_file

    def put_file(key: str, path: str, **further: Any) -> None:
        if not works.is_set():
            raise TierError("the bucket is down", retryable=True)
        real(key, path, **further)

    monkeypatch.setattr(remote, "put_file", put_file)
    first = host.record(StepId(1, 1, "0a0b0c"))
    host.uploader.submit(first.id, [first])
    assert until(lambda: (1, "retrying") in host.outcomes())
    for step in range(2, 30):
        record = host.record(StepId(step, 1, "0a0b0c"))
        host.uploader.submit(record.id, [record])
    assert until(lambda: len(host.outcomes()) == 29), "steps wait although newer ones do"
    assert sorted(host.outcomes()[1:]) == [(step, "gave way") for step in range(1, 29)]
    assert all("is newer" in reason for _, outcome, reason in host.heard if outcome == "gave way")
    failed = [event for event in host.events() if event[0] == "checkpoint_failed" and event[4] is False]
    assert sorted(event[1] for event in failed) == list(range(1, 29)), "what gave way is not in the event log"
    works.set()
    assert host.uploader.wait_idle(time.monotonic() + 20)
    assert host.outcomes()[-1] == (29, "partial")
    assert [listing.id.step for listing in scan(remote, "r") if listing.records] == [29]


def hold_up(remote: FaultyTier, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Makes transfers hang. The first event is set when one does, the second lets them go on."""
    held, free, real = threading.Event(), threading.Event(), remote.put_file

    def put_file(key: str, path: str, **further: Any) -> None:
        held.set()
        assert free.wait(20)
        real(key, path, **further)

    monkeypatch.setattr(remote, "put_file", put_file)
    return held, free


def test_beside_the_step_that_is_being_sent_one_waits_the_newest(
    hosts: list[Host], remote: FaultyTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transfer that hangs raises nothing: what is behind it must not pile up on the local tier."""
    host, (held, free) = hosts[0], hold_up(remote, monkeypatch)
    records = [host.record(StepId(step, 1, "0a0b0c")) for step in range(1, 10)]
    host.uploader.submit(records[0].id, [records[0]])
    assert held.wait(10)
    for record in records[1:]:
        host.uploader.submit(record.id, [record])
    # What has no last outcome is pinned.
    assert host.outcomes() == [(step, "gave way") for step in range(2, 9)]
    assert all("busy" in reason and "is newer" in reason for _, _, reason in host.heard)
    free.set()
    assert host.uploader.wait_idle(time.monotonic() + 20)
    assert host.outcomes()[7:] == [(1, "partial"), (9, "partial")]


def test_a_step_that_is_heard_of_late_does_not_displace_a_newer_one(
    hosts: list[Host], remote: FaultyTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, (held, free) = hosts[0], hold_up(remote, monkeypatch)
    for step in (1, 5, 3, 5):
        record = host.record(StepId(step, 1, "0a0b0c"))
        host.uploader.submit(record.id, [record])
        assert held.wait(10)
    assert host.outcomes() == [(3, "gave way"), (5, "partial")]  # the second request for 5 is none
    free.set()
    assert host.uploader.wait_idle(time.monotonic() + 20)
    assert host.outcomes()[2:] == [(1, "partial"), (5, "partial")]


def test_a_step_that_comes_while_closing_is_not_waited_for(
    hosts: list[Host], remote: FaultyTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploader_module, "_FIRST_PAUSE_S", 60.0)
    remote.fail("put_file", Fault.BUSY, times=10**9)
    host = hosts[0]
    for step in (1, 2):
        record = host.record(StepId(step, 1, "0a0b0c"))
        host.uploader.submit(record.id, [record])
        assert until(lambda step=step: any(known == step or known == 1 for known, _ in host.outcomes()))
    assert until(lambda: (1, "gave way") in host.outcomes()), "the older step waits for the end of the pause"
    began = time.monotonic()
    host.uploader.close()
    assert time.monotonic() - began < 3
    assert host.outcomes()[-1] == (2, "interrupted") and "next start" in host.heard[-1][2]


def test_a_name_that_is_given_up_after_the_last_upload_does_not_stay(tmp_path: Path) -> None:
    """Else a job leaves one more checkpoint than it keeps, if its last upload was quicker than the request."""
    host, newer = Host(tmp_path, 0, world_size=1, keep=2), replace(STEP, step=8)
    try:
        host.send(host.record())
        host.send(replace(host.record(newer), names=("b.ckpt",)))
        host.uploader.delete({"a.ckpt": DeleteRequest(upto=STEP, after=replace(STEP, step=9))})
        assert host.uploader.wait_idle(time.monotonic() + 20)
        tier = LocalTier(tmp_path / "remote")
        assert {found.id for found in scan(tier, "r")} == {STEP, newer}, "deleted before its successor was there"
        host.uploader.delete({"a.ckpt": DeleteRequest(upto=STEP, after=newer)})
        assert until(lambda: {found.id for found in scan(tier, "r")} == {newer})
    finally:
        host.uploader.close()
