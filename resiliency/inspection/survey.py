"""What a path refers to and which steps are there, over one or several places. No torch, so that a listing is quick.

A *place* is a tier named on the command line. A step that several places hold is one step here, with several copies. It
is complete when each of its shards has a copy of full length in at least one of the places.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from resiliency.errors import ConfigError, NoCheckpointFound
from resiliency.storage.catalog import StepListing, find_runs, read_name, run_prefix, scan, step_prefix
from resiliency.storage.manifest import (
    MANIFEST,
    META_DIR,
    STEPS_DIR,
    Manifest,
    NameFile,
    StepId,
    gather_records,
    is_folder_of_format_1,
    refuse_format,
)
from resiliency.storage.retention import live_names
from resiliency.storage.tiers import open_tier
from resiliency.storage.tiers.base import Tier

__all__ = [
    "StoredCopy",
    "Place",
    "StepView",
    "Target",
    "close_tier",
    "find",
    "is_whole",
    "one_step",
    "places_of",
    "runs_of",
    "survey",
    "unreadable",
]

State = Literal["complete", "damaged", "unfinished"]


@dataclass(frozen=True)
class Target:
    """What a path argument refers to.

    Attributes:
        path: as it was given.
        tier: where it is.
        run: the run it names; None: all runs there.
        step: the step it names; None: all steps of the run.
    """

    path: str
    tier: Tier
    run: str | None = None
    step: StepId | None = None


@dataclass(frozen=True)
class Place:
    """A tier with a short label that is unique among the places of one command."""

    label: str
    tier: Tier


@dataclass(frozen=True)
class StoredCopy:
    """What one place holds of a step."""

    place: Place
    listing: StepListing


@dataclass
class StepView:
    """One step over all places.

    Attributes:
        run, id: which step.
        copies: what each place that has something of it holds.
        manifest: records of all shards, from a manifest or from all records together; None while one is unknown.
        needed: number of shards; None when there is no record.
        present: ranks whose shard has a copy of full length.
        names: names that point to this step now.
        state: "complete"; "damaged": its manifest exists but a part of it is missing or unreadable; "unfinished".
        notes: what is wrong or worth knowing, in words.
    """

    run: str
    id: StepId
    copies: list[StoredCopy] = field(default_factory=list)
    manifest: Manifest | None = None
    needed: int | None = None
    present: frozenset[int] = frozenset()
    names: tuple[str, ...] = ()
    state: State = "unfinished"
    notes: list[str] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of all shards when that is known, otherwise of those that exist."""
        if self.manifest is not None:
            return self.manifest.nbytes
        return max(sum(n for name, n in c.listing.sizes.items() if name.endswith(".safetensors")) for c in self.copies)

    @property
    def created(self) -> float | None:
        """UTC seconds when the save began, None when there is no record."""
        times = [r.created for c in self.copies for r in c.listing.records.values() if r.created]
        return min(times, default=None)


def close_tier(tier: Tier) -> None:
    """Closes a tier's connections, if it has any (closing is not part of the ``Tier`` protocol)."""
    close = getattr(tier, "close", None)
    if close is not None:
        close()


def find(path: str) -> Target:
    """What a path refers to: a directory, a name file (whether or not the file still exists), a step folder, or a URL.

    Blocks: a few requests to the place.

    Raises:
        NoCheckpointFound: nothing is there.
        ConfigError: it is something else, such as a stock checkpoint; or no address.
        TierError: the place cannot be read.
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
    if os.path.isdir(address) if tier.is_local else find_runs(tier):
        return Target(path, tier)
    pointer = _pointer(address, opening)
    if pointer is None and tier.is_local and os.path.exists(address):
        raise ConfigError(f"{path} is not one of our checkpoints; if it is a stock one, torch.load reads it as it is")
    for folder, name in _above(address):
        above = opening(folder)
        if pointer is not None and next(iter(above.list(run_prefix(pointer.run))), None) is not None:
            return Target(path, above, pointer.run, pointer.id)
        if pointer is None:
            meant = _meant(above, name)
            if meant is not None:
                return Target(path, above, *meant)
    if pointer is not None:
        raise NoCheckpointFound(
            f"{path} points to {pointer.id} of run {pointer.run!r}, but the run is in no folder above it"
        )
    folder = posixpath.dirname(address)
    raise NoCheckpointFound(f"{path}: there is no such checkpoint; `resiliency ckpt ls {folder}` shows what is there")


def _inside(path: str, tier: Tier, rest: str) -> Target:
    """A path below ``.resiliency``: a run, or a step folder or a file in one."""
    parts = rest.split("/")
    run = parts[0] or None
    if len(parts) < 3:
        return Target(path, tier, run)
    step = StepId.parse(parts[2]) if parts[1] == STEPS_DIR else None
    if parts[1] == STEPS_DIR and is_folder_of_format_1(parts[2]):
        raise refuse_format(1, path)
    if step is None:
        example = f"{META_DIR}/{run}/{STEPS_DIR}/0000000100-a0001-1a2b3c-00"
        raise ConfigError(f"{path} is no step folder; those are called like {example}")
    return Target(path, tier, run, step)


def _above(address: str) -> Iterator[tuple[str, str]]:
    """(folder, rest of the address) for every folder above; a name may contain slashes, so each of them may be the
    root."""
    folder, _, name = address.rpartition("/")
    while folder and not folder.endswith(("/", ":")):
        yield folder, name
        folder, _, last = folder.rpartition("/")
        name = f"{last}/{name}"


def _pointer(address: str, opening: Callable[[str], Tier]) -> NameFile | None:
    for folder, name in _above(address):
        return read_name(opening(folder), name)
    return None


def _meant(tier: Tier, name: str) -> tuple[str, StepId] | None:
    """The run and step a name points to, from the manifests: name files are written after the commit and may be
    missing."""
    for run in find_runs(tier):
        names = live_names([found.manifest for found in scan(tier, run) if found.manifest is not None])
        if name in names:
            return run, names[name]
    return None


def places_of(targets: Iterable[Target]) -> list[Place]:
    """Gives each target's tier a label: "local", "gs", "memory"; numbered when several have the same label."""
    tiers = list({target.tier.root: target.tier for target in targets}.values())
    kinds = ["local" if tier.is_local else tier.root.split("://")[0] for tier in tiers]
    labels = [
        kind if kinds.count(kind) == 1 else f"{kind}-{kinds[: at + 1].count(kind)}" for at, kind in enumerate(kinds)
    ]
    return [Place(label, tier) for label, tier in zip(labels, tiers, strict=True)]


def runs_of(targets: Sequence[Target]) -> list[str]:
    """Runs the targets name; when they name none, all runs in their tiers.

    Raises:
        TierError: a place cannot be listed.
    """
    named = {target.run for target in targets if target.run is not None}
    return sorted(named or {run for target in targets for run in find_runs(target.tier)})


def is_whole(listing: StepListing) -> bool:
    """True when this one copy has everything: all records, and every shard in full length."""
    return listing.manifest is not None and not listing.missing_files() and not listing.problems


def survey(places: Sequence[Place], run: str) -> list[StepView]:
    """A run's steps over all places, oldest first. Reads manifests and records, not shards.

    Raises:
        TierError: a place cannot be listed.
    """
    views: dict[StepId, StepView] = {}
    for place in places:
        for listing in scan(place.tier, run):
            views.setdefault(listing.id, StepView(run, listing.id)).copies.append(StoredCopy(place, listing))
    for view in views.values():
        _judge(view, several=len(places) > 1)
    names = live_names([view.manifest for view in views.values() if view.manifest is not None])
    for view in views.values():
        view.names = tuple(name for name, step in names.items() if step == view.id)
    return sorted(views.values(), key=lambda view: view.id)


def _judge(view: StepView, *, several: bool) -> None:
    records = {rank: record for copy in view.copies for rank, record in copy.listing.records.items()}
    manifests = [copy.listing.manifest for copy in view.copies if copy.listing.manifest is not None]
    together = gather_records(records.values())
    view.manifest = manifests[0] if manifests else together if isinstance(together, Manifest) else None
    view.needed = next((record.world_size for record in records.values()), None)
    view.present = frozenset(
        rank
        for copy in view.copies
        for rank, record in copy.listing.records.items()
        if copy.listing.sizes.get(record.file) == record.nbytes
    )
    promised = any(MANIFEST in copy.listing.sizes for copy in view.copies)
    for copy in view.copies:
        label = f"{copy.place.label}: " if several else ""
        view.notes += [label + text for text in _lacks(copy, view.run)]
    if view.manifest is not None and view.present == set(range(view.manifest.world_size)):
        view.state = "complete"
        if not promised:
            view.notes.append("no manifest file; its records are all there, which is as good")
    elif promised or any(copy.listing.problems for copy in view.copies):
        view.state = "damaged"
    elif view.needed is None:
        view.notes.append("no record yet")


def unreadable(copy: StoredCopy, run: str) -> list[str]:
    """Which files of one copy could not be read, and why."""
    prefix = step_prefix(run, copy.listing.id)
    return [text.replace(f"{copy.place.tier.root}/{prefix}", "").replace(prefix, "") for text in copy.listing.problems]


def _lacks(copy: StoredCopy, run: str) -> list[str]:
    """What is wrong with one copy, in words. An unfinished copy is not wrong."""
    found = unreadable(copy, run)
    if copy.listing.manifest is not None:
        for record in copy.listing.manifest.shards:
            size = copy.listing.sizes.get(record.file)
            if size is None:
                found.append(f"{record.file} is missing")
            elif size != record.nbytes:
                found.append(f"{record.file} has {size:,} bytes instead of {record.nbytes:,}")
    return found


def one_step(target: Target, *, run: str | None = None) -> tuple[str, StepId]:
    """The run and step a target refers to: the step it names, otherwise the newest complete one (of ``run``).

    Raises:
        NoCheckpointFound: nothing complete is there.
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
    for run in runs:
        complete = [view.id for view in survey(places_of([target]), run) if view.state == "complete"]
        if complete:
            return run, complete[-1]
    raise NoCheckpointFound(
        f"{target.path}: no complete checkpoint; `resiliency ckpt ls {target.tier.root}` shows what is there"
    )
