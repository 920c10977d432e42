"""What a place holds of each step, and how ranks tell each other."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resiliency.checkpoint.rank_messages import CopyProblem, InventoryReport, ProblemReport
from resiliency.errors import ConfigError
from resiliency.runtime.typed_json import decode, encode
from resiliency.storage.inventory import StepInventory, list_inventory
from resiliency.storage.manifest import ShardRecord
from resiliency.storage.sources import BadCopy, Cost, ShardSource
from resiliency.storage.step_id import StepId
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.checkpoints import RUN, Series, make_series, step_dirs

HERE = ShardSource(tier="local", host="n0", cost=Cost.LOCAL)
PEER = ShardSource(tier="peer", host="n1", cost=Cost.PEER)
STORE = ShardSource(tier="store", host=None, cost=Cost.REMOTE)
STEP = StepId(7, 1, "0a0b0c")


@pytest.fixture
def series(tmp_path: Path) -> Series:
    return make_series(tmp_path, steps=(10,), remote=False)


def listed(series: Series, source: ShardSource) -> list[StepInventory]:
    return list_inventory(LocalTier(series.local_dir), RUN, source)


@pytest.mark.parametrize("source", [HERE, PEER, STORE], ids=str)
def test_a_committed_step_is_listed_with_its_source(series: Series, source: ShardSource) -> None:
    (found,) = listed(series, source)
    assert found.source == source and found.step.step == 10
    assert (found.world_size, found.ranks, found.lost, found.exact) == (2, (0, 1), (), True)


@pytest.mark.parametrize("source", [HERE, PEER, STORE], ids=str)
def test_records_without_a_manifest_count_on_a_host_and_not_in_remote_storage(
    series: Series, source: ShardSource
) -> None:
    (folder,) = step_dirs(series.local_dir).values()
    (folder / "manifest.json").unlink()
    (folder / "shard-00000.json").unlink()
    (found,) = listed(series, source)
    assert (found.ranks, found.world_size) == (((), 0) if source is STORE else ((1,), 2)) and found.lost == ()


def test_shard_0_counts_only_with_the_records_of_all_ranks_that_wrote_it(series: Series) -> None:
    """Without the digests of a block nothing says that its rank has written it."""
    (folder,) = step_dirs(series.local_dir).values()
    (folder / "manifest.json").unlink()
    (found,) = listed(series, HERE)
    assert found.ranks == (0, 1) and found.replicated
    path = folder / "shard-00000.json"
    record = ShardRecord.from_dict(json.loads(path.read_text()), where="")
    others = replace(record, digests=("", *record.digests[1:]))  # the first block is another rank's
    path.write_text(json.dumps(others.to_dict()))
    (found,) = listed(series, HERE)
    assert found.ranks == (1,) and found.replicated


def test_a_shard_that_is_cut_is_reported_with_its_path(series: Series) -> None:
    (folder,) = step_dirs(series.local_dir).values()
    shard = folder / "shard-00001.shard"
    nbytes = shard.stat().st_size
    shard.write_bytes(shard.read_bytes()[:-1])
    for _ in range(2):
        (found,) = listed(series, HERE)
        assert found.ranks == (0,) and found.lost == (f"{shard} has {nbytes - 1:,} bytes instead of {nbytes:,}",)
        (folder / "manifest.json").unlink(
            missing_ok=True
        )  # the records tell as much: they are written after the shards


@pytest.mark.parametrize("source", [HERE, STORE], ids=str)
def test_a_manifest_that_cannot_be_read_is_reported(series: Series, source: ShardSource) -> None:
    (folder,) = step_dirs(series.local_dir).values()
    (folder / "manifest.json").write_bytes(b"{")
    (found,) = listed(series, source)
    assert "manifest.json" in found.lost[0]
    assert (found.ranks, found.world_size) == (((), 0) if source is STORE else ((0, 1), 2))


INVENTORY = InventoryReport(
    entries=(
        StepInventory(source=HERE, step=STEP, world_size=2, ranks=(0, 1), names=("a.ckpt", "ü.ckpt"), exact=False),
        StepInventory(source=STORE, step=replace(STEP, step=8), world_size=0, ranks=(), lost=("it is gone",)),
    ),
    problem="rank 0: the store is down",
)
PROBLEMS = ProblemReport(
    problems=(
        CopyProblem(copy=BadCopy(source=PEER, step=STEP, rank=1), reason="bytes differ", damaged=True),
        CopyProblem(copy=BadCopy(source=STORE, step=STEP, rank=0), reason="503", damaged=False),
    )
)


def test_what_one_rank_sends_another_reads() -> None:
    assert decode(InventoryReport, encode(INVENTORY), what="it") == INVENTORY
    assert decode(ProblemReport, encode(PROBLEMS), what="it") == PROBLEMS
    assert encode(INVENTORY).isascii(), "coordinators carry text"


@pytest.mark.parametrize("report", [INVENTORY, PROBLEMS], ids=["inventory", "problems"])
@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff", b'{"entries": 1}', b'{"problems": [1]}'])
def test_what_is_no_report_is_refused_with_the_rank(report: Any, data: bytes) -> None:
    with pytest.raises(ConfigError, match=r"of rank 3 cannot be read: .+; start all ranks with the same version"):
        decode(type(report), data, what="the report of rank 3")


def paths(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    found = [here] if here else []
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        found += paths(item, (*here, key))
    return found


@settings(deadline=None, database=None, max_examples=300, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from([INVENTORY, PROBLEMS]),
    st.data(),
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just([]) | st.just({}),
)
def test_a_field_of_another_kind_is_refused_or_read_never_a_keyerror(
    report: Any, data: st.DataObject, value: Any
) -> None:
    message = copy.deepcopy(json.loads(encode(report)))
    *way, last = data.draw(st.sampled_from(paths(message)))
    place = message
    for key in way:
        place = place[key]
    if data.draw(st.booleans()):
        del place[last]
    else:
        place[last] = value
    try:
        again = decode(type(report), json.dumps(message).encode(), what="the report of rank 3")
    except ConfigError as error:
        assert "of rank 3" in str(error)
    else:
        assert decode(type(report), encode(again), what="it") == again
