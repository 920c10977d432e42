"""Deleting a step: in one order for everybody, safe when cut anywhere, and sparing what is not the caller's."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from resiliency import faultpoints
from resiliency.errors import TierError
from resiliency.storage.blocks import block_digest
from resiliency.storage.catalog import scan, step_prefix
from resiliency.storage.deletion import delete_step
from resiliency.storage.format_version import FORMAT_VERSION
from resiliency.storage.manifest import (
    COMMIT_MARK,
    MANIFEST,
    META_DIR,
    Manifest,
    ShardRecord,
    gather_records,
    record_file,
)
from resiliency.storage.names import delete_names, give_name, read_name
from resiliency.storage.shard_file import Identity, read_identity
from resiliency.storage.step_id import StepId
from resiliency.storage.tiers import open_tier
from resiliency.storage.tiers.base import Tier
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.tier_doubles import Fault, FaultyTier, RecordingTier

OLD, NEW = StepId(1, 1, "0a0b0c"), StepId(2, 1, "0a0b0c")
NAMES = ("a.ckpt", "b.ckpt")
FILES = ("manifest.json", *(f"shard-{rank:05d}.{end}" for rank in range(2) for end in ("json", "shard")))


def store(tier: Tier, step: StepId, names: tuple[str, ...] = NAMES, *, run: str = "r", replicated: bool = True) -> None:
    """A committed step of two shards, with its names."""
    records = []
    for rank in range(2):
        data = Identity(id=step, run=run, rank=rank, world_size=2, replicated=replicated).to_bytes()
        record = ShardRecord(
            id=step,
            run=run,
            rank=rank,
            world_size=2,
            node="n",
            nbytes=len(data),
            block_bytes=8 << 20,
            digests=(block_digest(data),),
            plan="p",
            names=names,
            replicated=replicated,
        )
        tier.put_bytes(step_prefix(run, step) + record.file, data)
        tier.put_bytes(step_prefix(run, step) + record_file(rank), json.dumps(record.to_dict()).encode())
        records.append(record)
    manifest = gather_records(records)
    assert isinstance(manifest, Manifest)
    tier.put_bytes(step_prefix(run, step) + MANIFEST, manifest.to_json().encode())
    for name in names:
        assert give_name(tier, manifest, name)


def named(tier: Tier) -> dict[str, StepId]:
    """The names there are, and the step of each."""
    keys = {info.key.partition("/")[0] for info in tier.list("") if not info.key.startswith(f"{META_DIR}/")}
    found = {}
    for name in sorted(keys):
        identity = read_name(tier, name)
        assert identity is not None, name
        found[name] = identity.id
    return found


@pytest.fixture(params=["folder", "object store"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Tier:
    if request.param == "folder":
        return LocalTier(tmp_path / "tier")
    return open_tier(f"memory://{uuid.uuid4().hex}/job")


def test_manifest_then_names_then_records_then_shards(tier: Tier) -> None:
    store(tier, OLD)
    seen = RecordingTier(tier)
    assert delete_step(seen, "r", OLD, files=reversed(FILES), names=NAMES) == [*NAMES]
    assert [call.key.rpartition("/")[2] for call in seen.calls("delete")] == [
        "manifest.json",
        "a.ckpt",
        "b.ckpt",
        "shard-00000.json",
        "shard-00001.json",
        "shard-00000.shard",
        "shard-00001.shard",
    ]
    assert [*tier.list("")] == []


def test_the_name_of_a_sharded_step_goes_with_all_its_files_its_manifest_first(tier: Tier) -> None:
    store(tier, OLD, ("a.ckpt",), replicated=False)
    seen = RecordingTier(tier)
    sizes = next(found.sizes for found in scan(tier, "r"))
    assert delete_step(seen, "r", OLD, files=sizes, names=NAMES) == ["a.ckpt"]
    assert [call.key for call in seen.calls("delete")][1:4] == [
        "a.ckpt/manifest.json",
        "a.ckpt/__0_0.distcp",
        "a.ckpt/__1_0.distcp",
    ]
    assert [*tier.list("")] == []


CUTS = [*((True, at) for at in range(1, 8)), *((False, at) for at in range(1, 12))]


@pytest.mark.parametrize(("replicated", "at"), CUTS)
def test_cut_anywhere_it_leaves_no_torn_step_and_is_finished_by_the_next_pass(
    tier: Tier, replicated: bool, at: int
) -> None:
    """The next pass knows only what it can list."""
    store(tier, OLD, replicated=replicated)
    store(tier, NEW, ("new.ckpt",), replicated=replicated)
    dying = FaultyTier(tier)
    dying.fail("delete", Fault.REFUSED, at=at)
    with pytest.raises(TierError):
        delete_step(dying, "r", OLD, files=next(found.sizes for found in scan(tier, "r")), names=NAMES)
    old = next(found for found in scan(tier, "r") if found.id == OLD)
    assert old.committed == (at == 1)
    if old.manifest is not None:
        assert old.faults() == {}, "a step that counts as whole lacks a shard"
    names = {name for record in old.records.values() for name in record.names}
    assert {name for name, step in named(tier).items() if step == OLD} <= names, "nobody will ever delete that name"
    delete_step(tier, "r", OLD, files=old.sizes, names=names)
    assert [found.id for found in scan(tier, "r")] == [NEW]
    assert named(tier) == {"new.ckpt": NEW}


@pytest.mark.parametrize("point", ["manifest", "record", "shard"])
def test_the_fault_points_are_passed_before_each_deletion(tier: Tier, point: str) -> None:
    store(tier, OLD)
    before = {"manifest": 5, "record": 4, "shard": 2}[point]
    faultpoints.arm(f"agent.prune.{point}:error")
    try:
        with pytest.raises(OSError, match="fault injected"):
            delete_step(tier, "r", OLD, files=FILES, names=NAMES)
    finally:
        faultpoints.arm("")
    assert len([*tier.list(step_prefix("r", OLD))]) == before


def test_a_name_that_points_to_another_step_or_run_stays(tier: Tier) -> None:
    store(tier, OLD, ("a.ckpt",), run="another")
    store(tier, OLD, ("b.ckpt",))
    store(tier, NEW, ("b.ckpt",))
    assert delete_step(tier, "r", OLD, files=FILES, names=NAMES) == []
    assert named(tier) == {"a.ckpt": OLD, "b.ckpt": NEW}


def test_a_stock_file_under_the_name_stays(tier: Tier) -> None:
    store(tier, OLD)
    tier.put_bytes("a.ckpt", b"PK\x03\x04 not ours")
    assert delete_step(tier, "r", OLD, files=FILES, names=NAMES) == ["b.ckpt"]
    assert tier.read("a.ckpt").startswith(b"PK")


def test_a_file_of_another_format_under_the_name_stays(tier: Tier) -> None:
    store(tier, OLD)
    head = Identity(id=OLD, run="r", rank=0, world_size=2, replicated=True).to_bytes()
    theirs = head.replace(b'"version":%d' % FORMAT_VERSION, b'"version":9')
    assert theirs != head
    tier.put_bytes("a.ckpt", theirs)
    assert delete_step(tier, "r", OLD, files=FILES, names=NAMES) == ["b.ckpt"]
    assert tier.read("a.ckpt") == theirs


def test_files_of_other_hosts_stay(tier: Tier) -> None:
    store(tier, OLD)
    delete_step(tier, "r", OLD, files=["shard-00000.json", "shard-00000.shard"], names=NAMES)
    left = sorted(info.key.rpartition("/")[2] for info in tier.list(step_prefix("r", OLD)))
    assert left == ["shard-00001.json", "shard-00001.shard"]


def test_shards_can_be_recycled_instead(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "tier")
    store(tier, OLD)
    folder = Path(tier.root, step_prefix("r", OLD))
    seen: list[tuple[str, list[str]]] = []

    def recycle(name: str) -> None:
        seen.append((name, sorted(path.name for path in folder.glob("*.json"))))
        (folder / name).rename(tmp_path / name)

    delete_step(tier, "r", OLD, files=FILES, names=NAMES, remove_shard=recycle)
    assert seen == [("shard-00000.shard", []), ("shard-00001.shard", [])], "a shard went before its record"
    assert not folder.exists(), "an empty folder is left behind"
    assert read_identity((tmp_path / "shard-00001.shard").read_bytes(), where="x") is not None


def test_temp_files_of_killed_writers_go_only_when_asked(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "tier")
    delete: Callable[[bool], object] = lambda leftovers: delete_step(  # noqa: E731
        tier, "r", OLD, files=FILES, names=NAMES, leftovers=leftovers
    )
    store(tier, OLD)
    partial = Path(tier.root, step_prefix("r", OLD), f".resiliency-{'0' * 32}.partial")
    partial.write_bytes(b"half")
    delete(False)
    assert partial.exists()
    delete(True)
    assert not partial.parent.exists()
    delete(True)  # again: nothing is there, which is no error


def test_names_of_the_run_are_deleted_whatever_step_they_point_to(tier: Tier) -> None:
    store(tier, OLD, ("a.ckpt",))
    store(tier, NEW, ("b.ckpt",))
    store(tier, OLD, ("c.ckpt",), run="another")
    assert delete_names(tier, "r", ["a.ckpt", "b.ckpt", "c.ckpt", "never.ckpt"]) == ["a.ckpt", "b.ckpt"]
    assert [*named(tier)] == ["c.ckpt"]


def test_the_mark_of_one_hosts_part_goes_as_a_manifest_does(tmp_path: Path) -> None:
    tier = RecordingTier(LocalTier(tmp_path))
    store(tier, OLD)
    tier.delete(step_prefix("r", OLD) + MANIFEST)
    tier.put_bytes(step_prefix("r", OLD) + COMMIT_MARK, b"{}")
    done = len(tier.calls("delete"))
    delete_step(tier, "r", OLD, files=[*FILES, COMMIT_MARK], names=NAMES)
    assert [call.key.rpartition("/")[2] for call in tier.calls("delete")][done:][:3] == [
        MANIFEST,
        COMMIT_MARK,
        NAMES[0],
    ]
    assert scan(tier, "r") == []
