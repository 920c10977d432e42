"""The position of one data loader: captured at a save, restored after a restart.

======== ========================================== =========================================================
kind     loaders                                    batches already taken are skipped by
======== ========================================== =========================================================
map      ``DataLoader`` of a map-style dataset      drawing the same indices; the dataset is not touched
stream   ``DataLoader`` of an iterable dataset      reading the batches and dropping them
stateful anything with state_dict/load_state_dict   its own state, which is this rank's
plain    every other iterable                       reading the batches and dropping them
======== ========================================== =========================================================

How a pass is made to begin as an earlier one is in :mod:`resiliency.plugins.resume.loader_follow`. Private names of
torch's and torchdata's loaders used: ``_num_yielded``, ``_dataset_fetcher``. All of it runs on the thread that
trains; nothing here is collective.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from resiliency.plugins.resume import rng
from resiliency.plugins.resume.loader_follow import (
    KEY,
    PASS,
    Followed,
    Pass,
    Replay,
    digest_of,
    generators_of,
    is_stateful,
    restore_to,
    samplers_of,
    set_generators,
    workers_of,
)
from resiliency.plugins.resume.plain import NotPlain, from_plain, to_plain

__all__ = ["describe", "kind_of", "prepare_next_pass", "resume_pass"]

log = logging.getLogger(__name__)

_NOTHING = object()


# ---- capture


def describe(loader: Any, iterator: Any, *, taken: int, undone: int) -> dict[str, Any]:
    """One loader's position, as plain data that shares nothing with live objects.

    Args:
        iterator: the loader's live iterator, None when it has none.
        taken: batches taken, used only when the iterator does not count itself.
        undone: 1 when the last batch taken is to be trained on again, else 0.

    Returns:
        the entry for :func:`resume_pass` and :func:`prepare_next_pass`; ``caveat`` is set when it cannot be exact.
    """
    seen: Pass | None = getattr(iterator, PASS, None) or getattr(iterator, "_seen", None)
    taken = getattr(iterator, "_num_yielded", getattr(iterator, "taken", taken))
    entry: dict[str, Any] = {"kind": kind_of(loader), "taken": max(0, taken - undone), "caveat": None}
    entry["generators"] = [generator.get_state() for generator in generators_of(loader)]
    if seen is not None:
        entry |= {"before": seen.before, "opened": seen.opened, "begun": seen.begun}
    if entry["kind"] == "map" and seen is not None:
        entry["check"] = digest_of(seen.index_of_batch(entry["taken"]))
    if entry["kind"] == "stateful":
        if undone and taken:
            entry["caveat"] = "saved in the middle of a step: the loader's own state is one batch ahead, which is lost"
        try:
            entry["state"] = to_plain(loader.state_dict(), f"{type(loader).__name__}.state_dict()")
        except NotPlain as error:
            entry |= {"state": None, "caveat": f"the loader's state was not saved: {error}"}
    return entry


# ---- restore


def resume_pass(loader: Any, entry: dict[str, Any], *, reread: bool = False) -> Iterator[Any]:
    """Opens ``loader`` in the middle of a pass, at the position that ``entry`` describes.

    Leaves the generators of the process in any state: the caller sets them afterwards.

    Args:
        reread: read and drop the batches of a map-style loader too, so that its workers draw the same random numbers
            again.
    """
    kind, taken, before = entry["kind"], entry["taken"], entry.get("before")
    if before is not None:
        restore_to(loader, before)
    if kind == "stateful":
        return _resume_stateful(loader, entry)
    if kind == "map" and _restores_its_own_position(loader):
        iterator: Iterator[Any] = iter(loader)
        setattr(iterator, "_num_yielded" if hasattr(iterator, "_num_yielded") else "taken", taken)
        return iterator
    skip = taken if kind == "map" and not reread and KEY in getattr(loader, "__dict__", {}) else 0
    replay = Replay(opened=entry.get("opened"), begun=entry.get("begun"), skip=skip, check=entry.get("check"))
    iterator = _replayed(loader, replay)
    if kind == "plain" and entry.get("begun") is not None:
        rng.restore(entry["begun"]["rng"])
    if skip:
        seen = getattr(iterator, PASS, None) or getattr(iterator, "_seen", None)
        if seen is not None and seen.indices is not None and not seen.indices._begun:
            seen.indices.begin()  # now, so that a changed order is reported before the next batch
        setattr(iterator, "_num_yielded" if hasattr(iterator, "_num_yielded") else "taken", taken)
        return iterator
    for number in range(taken):
        try:
            next(iterator)
        except StopIteration:
            log.warning(
                "%s ended after %d of the %d batches that were taken before the restart; the data has changed",
                type(loader).__name__,
                number,
                taken,
            )
            break
    return iterator


def prepare_next_pass(loader: Any, entry: dict[str, Any]) -> None:
    """Puts ``loader`` into the state it had between two passes; the generators of the process are not changed."""
    with rng.preserved():
        if entry["kind"] == "stateful":
            _finish_stateful(loader, entry)
        set_generators(loader, entry)
    persistent = workers_of(loader) and getattr(loader, "persistent_workers", False)
    if (
        persistent
        and entry.get("before") is not None
        and KEY in getattr(loader, "__dict__", {})
        and entry["kind"] != "stateful"
    ):
        # Persistent workers are seeded once, in the first pass. Here new ones start, and their seed is drawn from the
        # generators of the process, which the next pass of an undisturbed run does not do.
        loader.__dict__[KEY].replay = Replay(reseeds=True)


def _restores_its_own_position(loader: Any) -> bool:
    """True for samplers that start at the samples already consumed (Megatron, NeMo): batches must not be skipped
    again."""
    consumed = (getattr(sampler, "consumed_samples", 0) for sampler in samplers_of(loader))
    return any(isinstance(count, int) and count > 0 for count in consumed)


def _replayed(loader: Any, replay: Replay) -> Iterator[Any]:
    followed: Followed | None = getattr(loader, "__dict__", {}).get(KEY)
    if followed is None:
        return iter(loader)
    followed.replay = replay
    try:
        return iter(loader)
    finally:
        followed.replay = None


def _resume_stateful(loader: Any, entry: dict[str, Any]) -> Iterator[Any]:
    iterator = _open_with_state(loader, entry)
    if _dataset_is_at_its_end(iterator) is False:
        iterator = _open_with_state(loader, entry)
    return iterator


def _finish_stateful(loader: Any, entry: dict[str, Any]) -> None:
    """Loads the state of a pass that is over and ends that pass, so that the next iter() is a new one."""
    dataset = getattr(loader, "dataset", None)
    if entry.get("state") is None:
        return
    if isinstance(loader, DataLoader) and isinstance(dataset, IterableDataset) and not hasattr(dataset, "state_dict"):
        return  # nothing is kept after the pass, and finding its end would mean reading all of it
    iterator = _open_with_state(loader, entry)
    at_its_end = _dataset_is_at_its_end(iterator)
    if at_its_end is None:
        at_its_end = (
            next(iterator, _NOTHING) is _NOTHING
        )  # one more item, since a generator function looks at its state only then
    if not at_its_end:
        # The pass was left before its end, or its end has reset the state: only the position matters, not that batch.
        _open_with_state(loader, entry)


def _open_with_state(loader: Any, entry: dict[str, Any]) -> Iterator[Any]:
    if entry.get("state") is not None:
        loader.load_state_dict(from_plain(entry["state"]))
    return _replayed(loader, Replay(opened=entry.get("opened"), begun=entry.get("begun")))


def _dataset_is_at_its_end(iterator: Any) -> bool | None:
    """Reads past the end of a dataset that had already ended before the save.

    torchdata remembers that end and does not ask the dataset again. A dataset written as a generator function then
    keeps the loaded position for the next pass, which would be empty.

    Returns:
        True when the dataset ended again, False when it gave a sample, None when it had not ended before (or that
        cannot be seen).
    """
    fetcher = getattr(iterator, "_dataset_fetcher", None)
    if fetcher is None or not getattr(fetcher, "ended", False):
        return None
    return next(fetcher.dataset_iter, _NOTHING) is _NOTHING


def kind_of(loader: Any) -> str:
    if is_stateful(loader):
        return "stateful"
    if not isinstance(loader, DataLoader):
        return "plain"
    return "stream" if isinstance(loader.dataset, IterableDataset) else "map"
