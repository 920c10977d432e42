"""Resolves a path to a tier, run and step, and lists the steps of one or several tiers. No torch, so that it is quick.

All tiers of one command count as tiers of one job. A step that several of them hold is listed once, with several
copies. It is committed when every shard has a copy of full size on some tier, even if no single tier holds all shards.
"""

from __future__ import annotations

import logging
import os
import posixpath
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from resiliency.errors import ConfigError, CorruptShard, NoCheckpointFound
from resiliency.storage.catalog import StepListing, damage, find_runs, run_prefix, scan, step_prefix
from resiliency.storage.format_version import earlier_format, refuse_format
from resiliency.storage.manifest import (
    MANIFEST,
    META_DIR,
    STEPS_DIR,
    Manifest,
    StepRecords,
    gather_records,
    rank_of_shard,
    record_file,
)
from resiliency.storage.names import read_name
from resiliency.storage.retention import live_names
from resiliency.storage.shard_file import Identity
from resiliency.storage.single_files import find_single_files, read_single_file, single_file_at, single_files_of
from resiliency.storage.step_id import StepId
from resiliency.storage.tiers import open_tier
from resiliency.storage.tiers.base import Tier

__all__ = [
    "StoredCopy",
    "LabeledTier",
    "StepState",
    "StepView",
    "Target",
    "close_tier",
    "damaged_files",
    "find",
    "is_committed",
    "one_step",
    "refuse_damaged",
    "label_tiers",
    "listings",
    "runs_in",
    "runs_of",
    "survey",
]

logger = logging.getLogger(__name__)


class StepState(Enum):
    """The condition of a step.

    COMMITTED: it has a manifest or, in a folder, the records of all ranks, and it can be loaded. PART: it is committed,
        and shards of it are in the folders of other hosts. DAMAGED: it is committed but a file is missing, cut off or
        unreadable. UNFINISHED: it is not committed.
    """

    COMMITTED = "committed"
    PART = "part"
    DAMAGED = "damaged"
    UNFINISHED = "unfinished"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Target:
    """The tier, run and step that a path argument points to.

    Attributes:
        path: as it was given.
        tier: the tier it is on.
        run: the run it names; None: all runs there.
        step: the step it names; None: all steps of the run.
        name: key of the file (for a sharded step: the folder) that is a name of the step; None: the path is not a name,
            or the file is gone.
    """

    path: str
    tier: Tier
    run: str | None = None
    step: StepId | None = None
    name: str | None = None


@dataclass(frozen=True)
class LabeledTier:
    """A tier with a short label that is unique among the tiers of one command."""

    label: str
    tier: Tier


@dataclass(frozen=True)
class StoredCopy:
    """What one tier holds of a step; ``label``: see :class:`LabeledTier`."""

    label: str
    tier: Tier
    listing: StepListing


@dataclass
class StepView:
    """One step over all tiers of a command.

    Attributes:
        run, id: which step.
        copies: one for each tier that has files of the step.
        manifest: records of all shards, from a manifest or from the records of several tiers; None while a record is
            missing.
        needed: number of shards; None when no record could be read.
        present: ranks whose shard has a copy of full size.
        names: names that point to this step now.
        state: its condition.
        notes: texts about what is wrong, with the paths of files, or worth knowing.
    """

    run: str
    id: StepId
    copies: list[StoredCopy] = field(default_factory=list)
    manifest: Manifest | None = None
    needed: int | None = None
    present: frozenset[int] = frozenset()
    names: tuple[str, ...] = ()
    state: StepState = StepState.UNFINISHED
    notes: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Size in bytes of all shards when known; otherwise of the largest copy's shards."""
        if self.manifest is not None:
            return self.manifest.nbytes
        return max(
            sum(n for name, n in c.listing.sizes.items() if rank_of_shard(name) is not None) for c in self.copies
        )

    @property
    def created(self) -> float | None:
        """UTC seconds since the epoch when the save began; None when no record could be read."""
        times = [r.created for c in self.copies for r in c.listing.records.values() if r.created]
        return min(times, default=None)


def close_tier(tier: Tier) -> None:
    """Closes a tier's connections. Not every tier has a ``close``, because the ``Tier`` protocol does not require
    one."""
    close = getattr(tier, "close", None)
    if close is not None:
        close()


def find(path: str) -> Target:
    """Resolves a path: a directory, a name of a step (even if its file is gone), a step folder, or a URL.

    Blocks: for a few requests to the tier.

    Raises:
        NoCheckpointFound: nothing is there.
        CorruptShard: the path is a file of ours that is damaged.
        ConfigError: the path is something else, such as a stock checkpoint, or not a valid address.
        TierError: the tier cannot be read.
    """
    opened: list[Tier] = []

    def opening(address: str) -> Tier:
        opened.append(open_tier(address))
        return opened[-1]

    target: Target | None = None
    try:
        target = _find(path, opening)
        return target
    finally:
        for tier in opened:
            if target is None or tier is not target.tier:
                close_tier(tier)


def _find(path: str, opening: Callable[[str], Tier]) -> Target:
    tier = opening(path)
    address = tier.root
    marker = f"/{META_DIR}/"
    root, found, rest = (address + "/").partition(marker)
    if found:
        return _inside(path, opening(root or "/"), rest.rstrip("/"))
    identity = _identity(address, opening)
    if identity is None:
        if os.path.isdir(address) if tier.is_local else runs_in(tier):
            return Target(path, tier)
        if tier.is_local and os.path.exists(address):
            refuse_damaged(address)
            raise ConfigError(
                f"{path} is not one of our checkpoints; if it is a stock one, torch.load reads it directly"
            )
    for folder, name in _above(address):
        above = opening(folder)
        if identity is not None and _is_step_of(above, identity, name):
            return Target(path, above, identity.run, identity.id, name)
        if identity is None:
            named = _named_step(above, name)
            if named is not None:
                return Target(path, above, *named)
    if identity is not None:
        refuse_damaged(address)
        raise NoCheckpointFound(
            f"{path} is a copy of {identity.id} of run {identity.run!r}, and no folder above it has that run;"
            " torch.load reads it directly"
        )
    folder = posixpath.dirname(address)
    raise NoCheckpointFound(f"{path}: there is no such checkpoint; `resiliency ckpt ls {folder}` shows what is there")


def refuse_damaged(path: str) -> None:
    """Does nothing unless a path is a file on this machine.

    Raises:
        CorruptShard: the file is a whole step of this library, and damaged.
        OSError: it cannot be read.
    """
    if os.path.isfile(path):
        read_single_file(path)


def damaged_files(targets: Iterable[Target]) -> dict[str, str]:
    """Files in the folders of targets that are damaged steps, and no other names of a file in a step's folder -> why.

    Raises:
        OSError: a folder cannot be listed.
    """
    found: dict[str, str] = {}
    for target in targets:
        if target.tier.is_local and target.run is None:
            find_single_files(target.tier.root, below=False, damaged=found)
    return {path: why for path, why in found.items() if os.stat(path).st_nlink == 1}


def _inside(path: str, tier: Tier, rest: str) -> Target:
    """Resolves a path below ``.resiliency``: a run, a step folder, or a file in one."""
    parts = rest.split("/")
    run = parts[0] or None
    if len(parts) < 3:
        return Target(path, tier, run)
    step = StepId.parse(parts[2]) if parts[1] == STEPS_DIR else None
    if parts[1] == STEPS_DIR:
        folder = f"{META_DIR}/{run}/{STEPS_DIR}/{parts[2]}/"
        version = earlier_format(parts[2], [info.key.removeprefix(folder) for info in tier.list(folder)])
        if version is not None:
            raise refuse_format(version, path)
    if step is None:
        example = f"{META_DIR}/{run}/{STEPS_DIR}/0000000100-a0001-1a2b3c-00"
        raise ConfigError(f"{path} is not a step folder; step folders are named like {example}")
    return Target(path, tier, run, step)


def _above(address: str) -> Iterator[tuple[str, str]]:
    """Yields (folder, rest of the address) for every folder above: a name may contain slashes, so each may be the
    tier's root."""
    folder, _, name = address.rpartition("/")
    while folder and not folder.endswith(("/", ":")):
        yield folder, name
        folder, _, last = folder.rpartition("/")
        name = f"{last}/{name}"


def _is_step_of(tier: Tier, identity: Identity, name: str) -> bool:
    """True when the tier holds the run, or the step, that a file says it belongs to."""
    if next(iter(tier.list(run_prefix(identity.run))), None) is not None:
        return True
    try:
        step = single_file_at(tier, identity.run, name)
    except (CorruptShard, OSError) as error:
        logger.debug("%s is not counted as a checkpoint: %s", tier.location(name), error)
        return False
    return step is not None and step.id == identity.id


def _identity(address: str, opening: Callable[[str], Tier]) -> Identity | None:
    """What the file or folder at an address says it is; None when it is not ours."""
    for folder, name in _above(address):
        return read_name(opening(folder), name)
    return None


def _named_step(tier: Tier, name: str) -> tuple[str, StepId] | None:
    """(run, step) that manifests give this name to, though there is no file of that name; None: no manifest does."""
    manifests = [found.manifest for run in find_runs(tier) for found in scan(tier, run)]
    if tier.is_local:
        manifests += [file.manifest for file in find_single_files(tier.root, below=False)]
    for run in sorted({manifest.run for manifest in manifests if manifest is not None}):
        names = live_names([manifest for manifest in manifests if manifest is not None and manifest.run == run])
        if name in names:
            return run, names[name]
    return None


def label_tiers(targets: Iterable[Target]) -> list[LabeledTier]:
    """Gives each target's tier a label: "local", "gs", "memory"; numbered when several would get the same one."""
    tiers = list({target.tier.root: target.tier for target in targets}.values())
    kinds = ["local" if tier.is_local else tier.root.split("://")[0] for tier in tiers]
    labels = [
        kind if kinds.count(kind) == 1 else f"{kind}-{kinds[: at + 1].count(kind)}" for at, kind in enumerate(kinds)
    ]
    return [LabeledTier(label, tier) for label, tier in zip(labels, tiers, strict=True)]


def runs_of(targets: Sequence[Target]) -> list[str]:
    """Names of the runs that the targets name, sorted; if they name none, of all runs on their tiers.

    Raises:
        TierError: a tier cannot be listed.
    """
    named = {target.run for target in targets if target.run is not None}
    return sorted(named or {run for target in targets for run in runs_in(target.tier)})


def runs_in(tier: Tier) -> list[str]:
    """Names of the runs with steps on a tier, in folders or as single files.

    Raises:
        TierError: the tier cannot be listed.
    """
    runs = set(find_runs(tier))
    if tier.is_local:
        runs |= {file.manifest.run for file in find_single_files(tier.root)}
    return sorted(runs)


def listings(tier: Tier, run: str) -> list[StepListing]:
    """A run's steps on a tier, oldest first: in folders, or as single files.

    Raises:
        UnsupportedFormat: the run holds steps that another version of the format wrote.
        TierError: the tier cannot be listed.
    """
    files = [file.listing for file in single_files_of(tier, run)]
    return sorted({listing.id: listing for listing in [*files, *scan(tier, run)]}.values(), key=lambda step: step.id)


def is_committed(listing: StepListing) -> bool:
    """True when this tier alone holds a committed step: all records readable, every shard of full size."""
    return listing.manifest is not None and not listing.faults() and not listing.problems


def survey(tiers: Sequence[LabeledTier], run: str) -> list[StepView]:
    """A run's steps over all tiers, oldest first. Reads manifests and records, not shards.

    Raises:
        TierError: a tier cannot be listed.
    """
    views: dict[StepId, StepView] = {}
    for labeled in tiers:
        for listing in listings(labeled.tier, run):
            views.setdefault(listing.id, StepView(run, listing.id)).copies.append(
                StoredCopy(labeled.label, labeled.tier, listing)
            )
    for view in views.values():
        _set_state(view)
    names = live_names([known for known in map(_known, views.values()) if known is not None])
    for view in views.values():
        view.names = tuple(name for name, step in names.items() if step == view.id)
    return sorted(views.values(), key=lambda view: view.id)


def _known(view: StepView) -> StepRecords | None:
    """The records of a step that is committed: of all its shards, or of one host's part."""
    return view.manifest or next((copy.listing.part for copy in view.copies if copy.listing.part is not None), None)


def _present(copies: Iterable[StoredCopy]) -> frozenset[int]:
    """Ranks whose shard has a copy of full size."""
    return frozenset(
        rank for copy in copies for rank, record in copy.listing.records.items() if copy.listing.is_whole(record)
    )


def _counts(copy: StoredCopy) -> bool:
    """False for an unfinished upload: as in a restore, records in an object store do not count without the manifest."""
    return copy.tier.is_local or copy.listing.committed


def _set_state(view: StepView) -> None:
    counted = [copy for copy in view.copies if _counts(copy)]
    records = {rank: record for copy in counted for rank, record in copy.listing.records.items()}
    manifests = [copy.listing.manifest for copy in counted if copy.listing.manifest is not None]
    together = gather_records(records.values())
    view.manifest = manifests[0] if manifests else together if isinstance(together, Manifest) else None
    view.needed = next((record.world_size for copy in view.copies for record in copy.listing.records.values()), None)
    view.present = _present(view.copies)
    has_part = any(copy.listing.part is not None for copy in view.copies)
    for copy in view.copies:
        view.notes += damage(copy.tier, view.run, copy.listing, committed=view.manifest is not None and _counts(copy))
    if view.manifest is not None and _present(counted) == set(range(view.manifest.world_size)):
        view.state = StepState.COMMITTED
        if not has_part and not any(MANIFEST in copy.listing.sizes for copy in view.copies):
            first = _location(view.copies[0], view, MANIFEST)
            view.notes.append(f"{first} is missing; the records of all shards are there and stand in for it")
    elif view.notes:
        view.state = StepState.DAMAGED
    elif has_part:
        view.state = StepState.PART
    else:
        view.notes.append(_why_unfinished(view))


def _why_unfinished(view: StepView) -> str:
    """Names the first file that an unfinished step lacks."""
    copy = view.copies[0]
    if not copy.tier.is_local:
        return f"{_location(copy, view, MANIFEST)} is missing"
    known = copy.listing.records
    absent = [record_file(rank) for rank in range(view.needed or 1) if rank not in known or not known[rank].complete]
    if absent:
        return f"{_location(copy, view, absent[0])} is missing, or does not tell of all bytes of its shard"
    file, text = next(iter(copy.listing.faults().items()), (MANIFEST, "is missing"))
    return f"{_location(copy, view, file)} {text}"


def _location(copy: StoredCopy, view: StepView, file: str) -> str:
    return copy.tier.location(step_prefix(view.run, view.id) + file)


def one_step(target: Target, *, run: str | None = None) -> tuple[str, StepId]:
    """(run, step) that a target names, or the newest committed step (of ``run``, if given).

    Raises:
        NoCheckpointFound: there is no such run, or no committed step.
        ConfigError: there are several runs to choose from.
    """
    if target.run is not None and target.step is not None:
        return target.run, target.step
    runs = runs_of([target])
    if run is not None and run not in runs:
        raise NoCheckpointFound(f"{target.path}: there is no run {run!r}; there are: {', '.join(runs) or 'none'}")
    if run is not None:
        runs = [run]
    if len(runs) > 1:
        raise ConfigError(f"{target.path} holds several runs ({', '.join(runs)}); choose one with --run")
    why = ""
    for run in runs:
        taken, passed = _newest(target, run)
        if taken is not None and passed is not None:
            # A job that saves and deletes meanwhile may delete a listed file before it is read; that is no damage.
            before = passed.id
            taken, passed = _newest(target, run)
            passed = passed if passed is not None and passed.id == before else None
        if taken is not None:
            if passed is not None:
                logger.warning(
                    "%s of run %r is %s: %s; %s is taken instead", passed.id, run, passed.state, passed.notes[0], taken
                )
            return run, taken
        if passed is not None:
            why = f": {passed.id} is {passed.state} ({passed.notes[0]})"
    raise NoCheckpointFound(
        f"{target.path}: no committed checkpoint{why}; `resiliency ckpt ls {target.tier.root}` shows what is there"
    )


def _newest(target: Target, run: str) -> tuple[StepId | None, StepView | None]:
    """The newest committed step, and the newest damaged or unfinished step if it is newer; None for each that does not
    exist."""
    views = survey(label_tiers([target]), run)
    taken = max((view.id for view in views if view.state is StepState.COMMITTED), default=None)
    bad = [view for view in views if view.state in (StepState.DAMAGED, StepState.UNFINISHED)]
    newer = [view for view in bad if taken is None or view.id > taken]
    return taken, newer[-1] if newer else None
