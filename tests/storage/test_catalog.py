"""What a tier holds, read from files that may be anything: damage is told and hides nothing else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from resiliency.errors import CorruptShard, UnsupportedFormat
from resiliency.storage import manifest as manifest_module
from resiliency.storage.catalog import read_record, scan, step_folders, verify_shard
from resiliency.storage.format_version import FORMAT_VERSION
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.checkpoints import RUN, flip_bits, make_series, step_dir


@pytest.fixture
def tier(tmp_path: Path) -> LocalTier:
    return LocalTier(make_series(tmp_path, steps=(10,), remote=False).local_dir)


@pytest.fixture
def folder(tier: LocalTier) -> Path:
    """Of step 10: replicated, two ranks of one host, both of which wrote shard 0."""
    found = step_dir(tier.root, RUN, 10)
    share = json.loads((found / "shard-00001.json").read_text())["share"]
    if share is None:  # the state is smaller than a block: let rank 1 have written the first one
        first, second = (found / f"shard-{rank:05d}.json" for rank in range(2))
        record = json.loads(first.read_text())
        digests = [*record["digests"]]
        other = {**json.loads(second.read_text()), "share": {"first": 0, "digests": digests[:1]}}
        seal(first, {**record, "digests": ["", *digests[1:]]})
        seal(second, other)
    return found


def seal(path: Path, fields: dict[str, object]) -> None:
    """Writes a record whose check sum is right."""
    fields = {key: value for key, value in fields.items() if key != "check"}
    path.write_text(json.dumps({**fields, "check": manifest_module._check(fields)}))


def test_a_shard_that_two_ranks_wrote_has_all_its_digests_with_and_without_a_manifest(
    tier: LocalTier, folder: Path
) -> None:
    (step,) = step_folders(tier, RUN)
    assert "" in json.loads((folder / "shard-00000.json").read_text())["digests"]
    record = read_record(tier, RUN, step, 0)
    assert record.complete and verify_shard(tier, RUN, record) == []
    (folder / "manifest.json").unlink()
    (listing,) = scan(tier, RUN)
    assert read_record(tier, RUN, step, 0).digests == record.digests == listing.records[0].digests
    assert listing.manifest is not None and not listing.committed


def test_digests_that_only_a_lost_record_had_are_taken_from_the_manifest_or_told_to_be_missing(
    tier: LocalTier, folder: Path
) -> None:
    (step,) = step_folders(tier, RUN)
    record = read_record(tier, RUN, step, 0)
    (folder / "shard-00001.json").unlink()
    assert read_record(tier, RUN, step, 0).digests == record.digests
    (folder / "manifest.json").unlink()
    missing = record.digests.count("") or 1
    what = f"shard-00000.json: the digests of {missing} blocks that other ranks wrote are missing, and there is no manifest"
    with pytest.raises(CorruptShard, match=what):
        read_record(tier, RUN, step, 0)
    (listing,) = scan(tier, RUN)
    assert listing.manifest is None and not listing.records[0].complete
    (folder / "shard-00000.json").unlink()
    with pytest.raises(CorruptShard, match="shard-00000.json: it is missing, and there is no manifest"):
        read_record(tier, RUN, step, 0)


def test_damage_is_located_in_its_block_whatever_section_it_is_in(tier: LocalTier, folder: Path) -> None:
    (step,) = step_folders(tier, RUN)
    record = read_record(tier, RUN, step, 0)
    assert len(record.sections) > 1
    for start, end in map(record.blocks.bounds, range(record.blocks.count)):
        path = folder / "shard-00000.shard"
        good = path.read_bytes()
        flip_bits(path, [(end - 1, end)])
        assert verify_shard(tier, RUN, record) == [(start, end)]
        path.unlink()  # the name is a link to the same bytes
        path.write_bytes(good)


def test_a_record_of_another_version_is_refused_and_not_taken_for_damage(tier: LocalTier, folder: Path) -> None:
    """Or training would begin anew beside checkpoints that a newer version wrote."""
    for name in ("shard-00000.json", "shard-00001.json"):
        seal(folder / name, {**json.loads((folder / name).read_text()), "version": FORMAT_VERSION + 1})
    data = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**data, "version": FORMAT_VERSION + 1}))
    with pytest.raises(UnsupportedFormat, match="upgrade resiliency"):
        scan(tier, RUN)


def test_a_flipped_version_in_a_manifest_hides_nothing(tier: LocalTier, folder: Path) -> None:
    data = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**data, "version": FORMAT_VERSION + 2}))
    (listing,) = scan(tier, RUN)
    assert len(listing.problems) == 1 and listing.manifest is not None and not listing.committed


def test_a_record_or_manifest_in_the_folder_of_another_step_is_not_believed(tier: LocalTier, folder: Path) -> None:
    (step,) = step_folders(tier, RUN)
    other = replace(step, step=11)
    folder.rename(folder.with_name(other.dirname))
    (listing,) = scan(tier, RUN)
    assert listing.id == other and listing.records == {} and listing.manifest is None
    assert len(listing.problems) == 3 and all("is in the wrong folder" in why for why in listing.problems.values())
