"""Lists the steps of a tier, reads manifests and records, verifies shards. No torch.

Used by the agent, the restore and the command line. Everything read is checked. A file that cannot be read is reported
in the listing instead of raised, so that one broken file does not hide other steps.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from resiliency.errors import CorruptShard, TierError, UnsupportedFormat
from resiliency.storage.blocks import block_digest
from resiliency.storage.format_version import earlier_format, refuse_format
from resiliency.storage.manifest import (
    COMMIT_MARK,
    MANIFEST,
    META_DIR,
    STEPS_DIR,
    Manifest,
    ShardRecord,
    UnfinishedStep,
    gather_records,
    part_of,
    record_file,
)
from resiliency.storage.step_id import StepId
from resiliency.storage.tiers.base import ObjectInfo, Tier, UnreadableFolders

__all__ = [
    "StepListing",
    "damage",
    "find_runs",
    "read_manifest",
    "read_record",
    "run_prefix",
    "scan",
    "step_folders",
    "step_prefix",
    "verify_shard",
]

logger = logging.getLogger(__name__)


def run_prefix(run: str) -> str:
    """Key prefix of a run's steps."""
    return f"{META_DIR}/{run}/{STEPS_DIR}/"


def step_prefix(run: str, step: StepId) -> str:
    """Key prefix of one step."""
    return f"{run_prefix(run)}{step.dirname}/"


@dataclass
class StepListing:
    """One step folder of a tier.

    Attributes:
        id: the step.
        records: rank -> record, from its own file or from the manifest.
        manifest: the manifest on the tier; in a folder, where a record is written once its shard is whole, or else one
            made from the records of all ranks; None while the step is not committed.
        committed: True when the manifest is on the tier.
        part: this host's part of a committed step, on a tier that each host has for itself; None without its mark.
        sizes: file name -> bytes, of all files in the folder.
        problems: name of each file that could not be read ("": the folder) -> why, with its path.
        readable: False when the folder cannot be listed; then nothing is known of the step, and it must not be deleted.
        single: key of the file that holds the whole step, when the step has no folder; see
            :mod:`resiliency.storage.single_files`; "" otherwise.
    """

    id: StepId
    records: dict[int, ShardRecord] = field(default_factory=dict)
    manifest: Manifest | None = None
    committed: bool = False
    part: UnfinishedStep | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    readable: bool = True
    single: str = ""

    def key(self, record: ShardRecord) -> str:
        """Key of a shard of the step."""
        return self.single or step_prefix(record.run, self.id) + record.file

    def is_whole(self, record: ShardRecord) -> bool:
        """True when the record's shard is there with its full size."""
        return self.sizes.get(record.file) == record.nbytes

    def faults(self) -> dict[str, str]:
        """Name of each shard file that has a record, but is missing from the folder or of another size -> which."""
        found = {}
        for record in self.records.values():
            if not self.is_whole(record):
                size = self.sizes.get(record.file)
                text = "is missing" if size is None else f"has {size:,} bytes instead of {record.nbytes:,}"
                found[record.file] = text
        return found


def damage(tier: Tier, run: str, listing: StepListing, *, committed: bool = False) -> list[str]:
    """What is wrong with the files of one copy of a committed step, each text with the path of its file.

    Empty for a whole copy, and for an unfinished step unless a file of it cannot be read: manifests and records appear
    whole, so that one that cannot be read is damaged. Without a manifest a shard that is too long is not: a killed
    agent was continuing it, and the next one cuts it back.

    Args:
        committed: the step is committed, although this copy alone does not show it.
    """
    found = list(listing.problems.values())
    if committed or listing.manifest is not None or listing.part is not None:
        prefix = tier.location(step_prefix(run, listing.id))
        may_be_longer = not listing.committed and listing.part is None
        longer = {r.file for r in listing.records.values() if may_be_longer and listing.sizes.get(r.file, 0) > r.nbytes}
        found += [f"{prefix}{file} {text}" for file, text in listing.faults().items() if file not in longer]
    return found


def find_runs(tier: Tier) -> list[str]:
    """Names of the runs with steps on the tier.

    Raises:
        TierError: the tier cannot be listed.
    """
    keys, unreadable = _list(tier, f"{META_DIR}/")
    named = [*(info.key for info in keys), *(f"{folder}/" for folder in unreadable)]
    return sorted({key.split("/")[1] for key in named if f"/{STEPS_DIR}/" in key})


def _list(tier: Tier, prefix: str) -> tuple[Sequence[ObjectInfo], Mapping[str, str]]:
    """The objects below a prefix, and the folders below it that cannot be read -> why.

    Raises:
        TierError: the tier cannot be listed.
    """
    try:
        return list(tier.list(prefix)), {}
    except UnreadableFolders as error:
        if any(not folder.startswith(prefix) for folder in error.folders):
            raise  # the folder of the prefix itself
        return error.found, error.folders


def step_folders(tier: Tier, run: str) -> dict[StepId, dict[str, int]]:
    """Step folders of a run, each with the sizes of its files in bytes by name; empty for a folder that cannot be read.

    Raises:
        UnsupportedFormat: the run holds steps that another version of the format wrote.
        TierError: the tier cannot be listed.
    """
    return {listing.id: listing.sizes for listing in _list_steps(tier, run)}


def _list_steps(tier: Tier, run: str) -> list[StepListing]:
    """The steps of a run with the sizes of their files, oldest first."""
    prefix = run_prefix(run)
    infos, unreadable = _list(tier, prefix)
    folders: dict[str, dict[str, int]] = {}
    problems: dict[str, dict[str, str]] = {}
    for info in infos:
        folder, _, name = info.key.removeprefix(prefix).partition("/")
        if name:
            folders.setdefault(folder, {})[name] = info.nbytes
    for key, why in unreadable.items():
        folder = key.removeprefix(prefix).partition("/")[0]
        folders.setdefault(folder, {})
        problems.setdefault(folder, {}).setdefault("", why)
    for folder, files in folders.items():
        version = earlier_format(folder, files)
        if version is not None:
            raise refuse_format(version, tier.location(prefix + folder))
    parsed = {folder: step for folder in folders if (step := StepId.parse(folder)) is not None}
    listings = [
        StepListing(step, sizes=folders[folder], problems=problems.get(folder, {}), readable=folder not in problems)
        for folder, step in parsed.items()
    ]
    return sorted(listings, key=lambda listing: listing.id)


def scan(tier: Tier, run: str) -> list[StepListing]:
    """Lists a run's steps on a tier, oldest first. Reads manifests and records, not shards.

    A step whose folder cannot be read is a listing with a problem and without records.

    Raises:
        UnsupportedFormat: the run holds steps that another version of the format wrote.
        TierError: the tier cannot be listed.
    """
    listings = _list_steps(tier, run)
    return [_read_step(tier, run, listing) if listing.readable else listing for listing in listings]


def _read_step(tier: Tier, run: str, listing: StepListing) -> StepListing:
    prefix = step_prefix(run, listing.id)
    if MANIFEST in listing.sizes:
        try:
            listing.manifest, listing.committed = read_manifest(tier, run, listing.id), True
            listing.records = {shard.rank: shard for shard in listing.manifest.shards}
            return listing
        except (CorruptShard, TierError) as error:
            listing.problems[MANIFEST] = str(error)
    for name in sorted(listing.sizes):
        if not (name.startswith("shard-") and name.endswith(".json")):
            continue
        where = tier.location(prefix + name)
        try:
            record = ShardRecord.from_json(tier.read(prefix + name), where=where)
            if record.id != listing.id or record.run != run:
                raise CorruptShard(f"{where}: record of {record.run} {record.id} is in the wrong folder", path=where)
            listing.records[record.rank] = record
        except UnsupportedFormat:
            raise  # its check sum is right, so it is not damaged; training must not start from scratch beside it
        except FileNotFoundError:
            listing.problems[name] = f"{where} is gone"
        except (CorruptShard, TierError) as error:
            listing.problems[name] = str(error)
    found = gather_records(listing.records.values())
    if found is not None:
        listing.records.update({shard.rank: shard for shard in found.shards})
    listing.manifest = found if isinstance(found, Manifest) and tier.is_local else None
    listing.part = part_of(found) if found is not None and COMMIT_MARK in listing.sizes else None
    return listing


def read_manifest(tier: Tier, run: str, step: StepId) -> Manifest:
    """A step's manifest.

    Raises:
        CorruptShard: it is missing, damaged, or another step's.
        TierError: the tier cannot be read.
    """
    key = step_prefix(run, step) + MANIFEST
    where = tier.location(key)
    try:
        manifest = Manifest.from_json(tier.read(key), where=where)
    except FileNotFoundError as error:
        raise CorruptShard(f"{where} is gone", path=where) from error
    if manifest.id != step or manifest.run != run:
        raise CorruptShard(f"{where}: manifest of {manifest.run} {manifest.id} is in the wrong folder", path=where)
    return manifest


def read_record(tier: Tier, run: str, step: StepId, rank: int) -> ShardRecord:
    """A shard's record with the digests of all blocks, from its own file or from the manifest.

    Raises:
        CorruptShard: neither can be read.
        TierError: the tier cannot be read.
    """
    prefix = step_prefix(run, step)
    where = tier.location(f"{prefix}{record_file(rank)}")
    why = "it is the record of another shard"
    try:
        record = ShardRecord.from_json(tier.read(prefix + record_file(rank)), where=where)
        if record.id == step and record.rank == rank and record.run == run:
            return record if record.complete else _read_shares(tier, record, where)
    except FileNotFoundError:
        why = "it is missing"
    except (TierError, CorruptShard) as error:
        if isinstance(error, TierError) and error.retryable and not tier.is_local:
            raise  # the store cannot be reached, and so the manifest cannot either
        why = str(error).removeprefix(f"{where}: ")
    try:
        manifest = Manifest.from_json(tier.read(prefix + MANIFEST), where=tier.location(prefix + MANIFEST))
    except FileNotFoundError:
        raise CorruptShard(f"{where}: {why}, and there is no manifest to take it from", path=where) from None
    logger.warning("%s: %s; using the manifest's copy", where, why)
    if manifest.id != step or rank >= len(manifest.shards):
        raise CorruptShard(f"{tier.location(prefix + MANIFEST)}: manifest of another step", path=where)
    return manifest.shards[rank]


def _read_shares(tier: Tier, record: ShardRecord, where: str) -> ShardRecord:
    """The record, completed with the digests that records of other ranks hold.

    Raises:
        CorruptShard: some digests are missing.
        TierError: the tier cannot be read.
    """
    prefix = step_prefix(record.run, record.id)
    others = _read_step(tier, record.run, StepListing(record.id, sizes=_sizes(tier, prefix))).records.values()
    merged = next((other for other in others if other.rank == record.rank), record).with_shares(others)
    if not merged.complete:
        raise CorruptShard(
            f"{where}: the digests of {merged.digests.count('')} blocks that other ranks wrote are missing", path=where
        )
    return merged


def _sizes(tier: Tier, prefix: str) -> dict[str, int]:
    return {info.key.removeprefix(prefix): info.nbytes for info in tier.list(prefix)}


def verify_shard(
    tier: Tier,
    run: str,
    record: ShardRecord,
    *,
    first_block: int = 0,
    last_block: int | None = None,
    key: str | None = None,
) -> list[tuple[int, int]]:
    """Reads a shard and returns the byte ranges that do not match its record (empty: all match).

    Args:
        first_block, last_block: only check blocks ``[first_block, last_block)``.
        key: the file to read; None: the shard in the step's folder.

    Raises:
        TierError: the tier cannot be read.
    """
    key = key or step_prefix(run, record.id) + record.file
    bad: list[tuple[int, int]] = []
    for index in range(first_block, len(record.digests) if last_block is None else last_block):
        start, end = record.blocks.bounds(index)
        try:
            data = tier.read_range(key, start, end)
        except FileNotFoundError:
            return [(0, record.nbytes)]
        if len(data) != end - start or block_digest(data) != record.digests[index]:
            if bad and bad[-1][1] == start:
                bad[-1] = (bad[-1][0], end)
            else:
                bad.append((start, end))
    return bad
