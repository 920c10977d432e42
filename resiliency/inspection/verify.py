"""Checks every byte of steps, and of the files that are their names, against the digests recorded at the save. No
torch."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from resiliency.errors import CorruptShard, TierError, UnsupportedFormat
from resiliency.inspection.survey import StepView, StoredCopy
from resiliency.storage.catalog import step_prefix, verify_shard
from resiliency.storage.manifest import MANIFEST, ShardRecord, record_file, shard_file
from resiliency.storage.names import read_name
from resiliency.storage.step_id import StepId
from resiliency.storage.stock_folder import files_in_shard
from resiliency.storage.tiers.base import Tier

__all__ = ["Finding", "bytes_to_check", "check_step"]

#: Blocks that one task reads, and number of tasks that read at a time: enough for a disk or a bucket, with little
#: memory for a small host.
_TASK_BLOCKS = 8
_READERS = 4

_Task = tuple[ShardRecord, str, int, int]  # blocks [first, last) of a shard, in the file of a key
_Result = tuple[list[tuple[int, int]], str]  # (byte ranges that differ, why the file could not be read or "")


@dataclass(frozen=True)
class Finding:
    """A fault (``bad``) or a remark about one copy of a step.

    Attributes:
        run, id, tier: the copy; ``tier`` is the tier's label.
        bad: True when the fault keeps this copy from being restored, or torch's own readers from loading it rightly.
        path: of the file or object.
        ranges: byte ranges that differ, half open; empty when the fault is not in the bytes.
        text: what is wrong, without the path.
    """

    run: str
    id: StepId
    tier: str
    bad: bool
    path: str
    ranges: tuple[tuple[int, int], ...]
    text: str


def bytes_to_check(view: StepView) -> int:
    """Number of bytes that :func:`check_step` will read."""
    return sum(record.nbytes for copy in view.copies for record, _ in _readable(view, copy))


def _readable(view: StepView, copy: StoredCopy) -> list[tuple[ShardRecord, str]]:
    """(record, file key) of each shard whose bytes can be compared with digests, because it has full size; and of each
    file that is a name of the step, unless it is the same file under another name."""
    listing = copy.listing
    records = sorted(listing.records.values(), key=lambda record: record.rank)
    whole = [record for record in records if record.complete and listing.is_whole(record)]
    if listing.single:
        whole = [record for record in whole if record.rank == 0]  # the others are entries of its file
    found = [(record, listing.key(record)) for record in whole]
    for name in view.names:
        sizes = {info.key: info.nbytes for info in copy.tier.list(name)}
        for record in whole:
            key = f"{name}/{record.file}" if not record.replicated else name
            if record.replicated and record.rank != 0:
                continue
            if sizes.get(key) == record.nbytes and not _is_same(copy.tier, key, listing.key(record)):
                found.append((record, key))
    return found


def _is_same(tier: Tier, key: str, other: str) -> bool:
    return tier.is_local and os.path.samefile(tier.location(key), tier.location(other))


def check_step(view: StepView, *, advance: Callable[[int], None] = lambda _: None) -> list[Finding]:
    """Reads and checks all shards of all copies of a step.

    Thread: any; reads on threads of its own, which have ended at return. Blocks: while everything is read.

    Args:
        advance: called with the number of bytes checked since the last call; from any thread, one call at a time.
    """
    findings: list[Finding] = []
    for copy in view.copies:
        findings += _metadata(view, copy)
        findings += _names(view, copy)
        of_bytes = _bytes(view, copy, advance)
        findings += of_bytes
        findings += _beside(view, copy, {finding.path for finding in of_bytes})
    return findings


def _metadata(view: StepView, copy: StoredCopy) -> list[Finding]:
    listing, tier = copy.listing, copy.tier
    folder_key = step_prefix(view.run, view.id)
    folder = tier.location(folder_key)

    def finding(bad: bool, file: str, text: str) -> Finding:
        return Finding(view.run, view.id, copy.label, bad, folder + file, (), text)

    if listing.single:
        return []  # a damaged record of a single file would have kept it from being listed
    found = []
    for file, why in listing.problems.items():
        found.append(finding(True, file, f"cannot be used: {why.removeprefix(f'{folder}{file}: ')}"))
    if MANIFEST not in listing.sizes:
        if not tier.is_local:
            # A restore ignores a remote step without a manifest, because its upload may still be going on.
            found.append(finding(True, MANIFEST, "is missing; without it the step is not restored from here"))
        elif listing.manifest is not None and listing.part is None:
            found.append(finding(False, MANIFEST, "is missing; the shards' records stand in for it"))
    for record in listing.records.values():
        if record_file(record.rank) not in listing.sizes:
            found.append(finding(False, record_file(record.rank), "is missing; the manifest's copy stands in for it"))
        elif listing.committed and (why := _why_not_a_record(tier, folder_key + record_file(record.rank))):
            found.append(finding(False, record_file(record.rank), f"{why}; the manifest's copy stands in for it"))
        if not record.complete:
            missing = f"the digests of {record.digests.count('')} blocks that other ranks wrote are missing"
            found.append(finding(True, record.file, f"cannot be checked: {missing}"))
    found += [finding(True, file, text) for file, text in listing.faults().items()]
    if listing.manifest is None and not listing.problems:
        for rank in sorted(set(range(view.needed or 1)) - set(listing.records)):
            part = listing.part
            if part and shard_file(rank, part.version, replicated=part.replicated) not in listing.sizes:
                continue  # it is in the folder of another host
            found.append(finding(True, record_file(rank), "is missing, so its shard cannot be checked"))
    return found


def _why_not_a_record(tier: Tier, key: str) -> str:
    """Why the file of a record cannot be used; "" when it can."""
    where = tier.location(key)
    try:
        ShardRecord.from_json(tier.read(key), where=where)
    except FileNotFoundError:
        return "is gone"
    except (CorruptShard, TierError) as error:
        return f"cannot be used: {str(error).removeprefix(f'{where}: ')}"
    return ""


def _names(view: StepView, copy: StoredCopy) -> list[Finding]:
    """Findings about names that are missing, or whose file belongs to something else."""
    found = []
    if copy.listing.manifest is None and copy.listing.part is None:
        return []  # a step gets its names last, so it has none yet
    for name in view.names:
        path = copy.tier.location(name)

        def finding(bad: bool, text: str, path: str = path) -> Finding:
            return Finding(view.run, view.id, copy.label, bad, path, (), text)

        try:
            identity = read_name(copy.tier, name)
        except (TierError, UnsupportedFormat) as error:
            found.append(finding(True, f"could not be read: {error}"))
            continue
        if identity is None:
            found.append(finding(False, "is missing, or not a file of this library; the step is not affected"))
        elif identity.run != view.run:
            found.append(finding(False, f"is {identity.id} of run {identity.run!r}"))
        elif identity.id != view.id:
            found.append(finding(True, f"says that it is {identity.id}"))
        elif identity.replicated and not _has_size(copy, name):
            found.append(finding(True, "has another size than its step"))
    return found


def _beside(view: StepView, copy: StoredCopy, damaged: Collection[str]) -> list[Finding]:
    """Findings about the files beside the shards of a sharded step, which torch's own readers go by. Shard 0 holds the
    same, and this library reads those.

    Args:
        damaged: paths of shards that cannot be compared with.
    """
    listing, tier = copy.listing, copy.tier
    record = listing.records.get(0)
    if record is None or record.replicated or not listing.committed or not listing.is_whole(record):
        return []
    key = listing.key(record)
    if tier.location(key) in damaged:
        return []
    try:
        held = files_in_shard(partial(tier.read_range, key), record.nbytes, where=tier.location(key))
    except FileNotFoundError:
        return []  # deleted meanwhile
    found = []
    for folder in (step_prefix(view.run, view.id), *(f"{name}/" for name in view.names)):
        there = {info.key.removeprefix(folder) for info in tier.list(folder)}
        for file, data in held.items() if record.file in there else ():
            path = tier.location(folder + file)
            if file not in there:
                text = "is missing, so that torch's own readers do not find the step; this library reads the one in"
                found.append(Finding(view.run, view.id, copy.label, False, path, (), f"{text} {record.file}"))
            elif tier.read(folder + file) != data:
                text = f"differs from the one in {record.file}, which this library reads: torch's own readers load"
                found.append(Finding(view.run, view.id, copy.label, True, path, (), f"{text} something else or fail"))
    return found


def _has_size(copy: StoredCopy, name: str) -> bool:
    record = copy.listing.records.get(0)
    sizes = [info.nbytes for info in copy.tier.list(name) if info.key == name]
    return record is None or sizes == [record.nbytes]


def _bytes(view: StepView, copy: StoredCopy, advance: Callable[[int], None]) -> list[Finding]:
    lock = threading.Lock()
    tasks: list[_Task] = []
    for record, key in _readable(view, copy):
        blocks = record.blocks.count
        tasks += [(record, key, first, min(first + _TASK_BLOCKS, blocks)) for first in range(0, blocks, _TASK_BLOCKS)]

    def check(task: _Task) -> _Result:
        record, key, first, last = task
        try:
            return verify_shard(copy.tier, view.run, record, first_block=first, last_block=last, key=key), ""
        except TierError as error:
            return [], str(error)
        finally:
            with lock:
                advance(record.blocks.bounds(last - 1)[1] - record.blocks.bounds(first)[0])

    with ThreadPoolExecutor(_READERS, thread_name_prefix="verify") as pool:
        results = list(pool.map(check, tasks))
    return _fold(view, copy, tasks, results)


def _fold(view: StepView, copy: StoredCopy, tasks: Sequence[_Task], results: Sequence[_Result]) -> list[Finding]:
    """One finding per bad shard, with adjacent ranges joined."""
    tier: Tier = copy.tier
    ranges: dict[str, list[tuple[int, int]]] = {}
    failures: dict[str, str] = {}
    for (_, key, _, _), (bad, failure) in zip(tasks, results, strict=True):
        known = ranges.setdefault(key, [])
        for start, end in bad:
            if known and start <= known[-1][1]:
                known[-1] = (known[-1][0], max(end, known[-1][1]))
            else:
                known.append((start, end))
        if failure:
            failures.setdefault(key, failure)
    found = []
    for key in ranges:
        path = tier.location(key)
        if key in failures:
            found.append(Finding(view.run, view.id, copy.label, True, path, (), f"could not be read: {failures[key]}"))
        if ranges[key]:
            text = "differs from its digests in " + ", ".join(
                f"bytes {start:,} to {end:,}" for start, end in ranges[key]
            )
            found.append(Finding(view.run, view.id, copy.label, True, path, tuple(ranges[key]), text))
    return found
