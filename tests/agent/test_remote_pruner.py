"""What is deleted from a remote tier after an upload, by whom, and what a failure there leaves."""

from __future__ import annotations

import logging
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from resiliency.agent._fence import Fence
from resiliency.agent._reporter import Reporter
from resiliency.agent.config import AgentConfig, TierSpec
from resiliency.agent.remote_pruner import RemotePruner
from resiliency.checkpoint.options import LocalTierOptions
from resiliency.events import EventWriter
from resiliency.storage.catalog import scan, step_prefix
from resiliency.storage.retention import DeleteRequest
from resiliency.storage.stage import Stage
from resiliency.storage.step_id import StepId
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.checkpoints import RUN, make_checkpointer, make_series, make_state
from resiliency.testing.tier_doubles import Fault, FaultyTier


@pytest.fixture
def tier(tmp_path: Path) -> FaultyTier:
    """Steps 10, 20 and 30, each named."""
    return FaultyTier(LocalTier(make_series(tmp_path, remote=False).local_dir, name="store"))


def pruner(
    tier: FaultyTier, *, rank: int = 0, keep: int | None = 1, keep_named: bool = False, attempt: int = 9
) -> RemotePruner:
    spec = TierSpec(address=tier.root, name="store", keep=keep, keep_named=keep_named)
    config = AgentConfig(
        run=RUN,
        node="n",
        attempt=attempt,
        token="0a0b0c",
        world_size=2,
        local_ranks=(rank,),
        shared=False,
        local=TierSpec(address="/nowhere", name="local"),
        durable=True,
        remotes=(spec,),
    )
    events = EventWriter(run=RUN, attempt=9, rank=-1, host="h", sinks=())
    return RemotePruner(config, spec, Reporter((rank,), lambda *_: None, events), Fence(config))


NEWEST = StepId(30, 9, "0a0b0c")


def steps(tier: FaultyTier) -> list[int]:
    return [listing.id.step for listing in scan(tier, RUN)]


def test_only_the_agent_of_rank_0_prunes(tier: FaultyTier) -> None:
    pruner(tier, rank=1).prune(tier, NEWEST)
    assert steps(tier) == [10, 20, 30]
    pruner(tier).prune(tier, NEWEST)
    assert steps(tier) == [30]


def test_what_an_agent_left_half_deleted_goes_with_its_names(tier: FaultyTier) -> None:
    """It died after the manifest: the names are known from the records alone."""
    (first, *_) = scan(tier, RUN)
    names = {name for record in first.records.values() for name in record.names}
    assert names and all(Path(tier.root, name).exists() for name in names)
    tier.delete(step_prefix(RUN, first.id) + "manifest.json")
    pruner(tier).prune(tier, NEWEST)
    assert steps(tier) == [30]
    assert not any(Path(tier.root, name).exists() for name in names), "a name is left that points to nothing"


def test_a_tier_that_fails_is_pruned_at_the_next_call(tier: FaultyTier, caplog: pytest.LogCaptureFixture) -> None:
    tier.fail("delete", Fault.BUSY, at=2)
    one = pruner(tier)
    with caplog.at_level(logging.WARNING):
        one.prune(tier, NEWEST)
    assert "could not be deleted" in caplog.text
    assert 30 in steps(tier) and len(steps(tier)) > 1
    one.prune(tier, NEWEST)
    assert steps(tier) == [30]


def test_a_requested_deletion_waits_for_its_step(tier: FaultyTier) -> None:
    one = pruner(tier, keep_named=True)
    names = {name for record in scan(tier, RUN)[0].records.values() for name in record.names}
    (old, _, newest) = scan(tier, RUN)
    later = replace(newest.id, step=31)
    one.request({name: DeleteRequest(upto=old.id, after=later) for name in names})
    one.prune(tier, NEWEST)
    assert steps(tier) == [10, 20, 30], "deleted before the step that had to be safe first"
    one.request({name: DeleteRequest(upto=old.id, after=newest.id) for name in names})
    one.prune(tier, NEWEST)
    assert steps(tier) == [20, 30]


def test_what_a_later_attempt_has_saved_stays_whatever_was_asked_for(tmp_path: Path) -> None:
    """A host that was thought dead goes on, in a folder of its own where nobody tells it."""
    for steps_of_attempt in ((10,), (20, 30)):
        with make_checkpointer(LocalTierOptions(directory=str(tmp_path), keep=None)) as checkpointer:
            checkpointer.load()
            for number in steps_of_attempt:
                ticket = checkpointer.save(number, make_state(number), names=[f"{number}.ckpt", "last.ckpt"])
                assert ticket is not None
                ticket.wait(Stage.DURABLE, timeout=timedelta(seconds=20))
    tier = FaultyTier(LocalTier(tmp_path, name="store"))
    ours, *later = sorted(listing.id for listing in scan(tier, RUN))
    assert (ours.attempt, [(id.attempt, id.line == ours.line) for id in later]) == (1, [(2, True), (2, True)])
    one = pruner(tier, keep=1, attempt=1)
    one.request({name: DeleteRequest(upto=later[-1], after=ours) for name in ("20.ckpt", "30.ckpt", "last.ckpt")})
    tier.delete(step_prefix(RUN, later[0]) + "manifest.json")  # it is being sent
    one.prune(tier, ours)
    assert {listing.id for listing in scan(tier, RUN)} >= set(later)
    assert all(Path(tmp_path, name).exists() for name in ("20.ckpt", "30.ckpt", "last.ckpt"))
