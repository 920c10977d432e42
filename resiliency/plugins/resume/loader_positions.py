"""Captures the position of one data loader at a save and restores it after a restart.

======== ========================================== =========================================================
kind     loaders                                    batches already taken are skipped by
======== ========================================== =========================================================
map      ``DataLoader`` of a map-style dataset      drawing the same indices; the dataset is not read
stream   ``DataLoader`` of an iterable dataset      reading the batches and dropping them
stateful anything with state_dict/load_state_dict   loading its own state, saved for this rank
plain    every other iterable                       reading the batches and dropping them
======== ========================================== =========================================================

:mod:`resiliency.plugins.resume.loader_recorder` records and replays the random numbers of an iteration. Private names
of torch's and torchdata's loaders used: ``_num_yielded``, ``_dataset_fetcher``. Everything here runs on the training
thread and is not collective.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from resiliency.plugins.resume import rng
from resiliency.plugins.resume.generator_search import is_stateful
from resiliency.plugins.resume.loader_recorder import (
    Replay,
    digest_of,
    iteration_of,
    recorder_of,
    restore_to,
    samplers_of,
    workers_of,
)
from resiliency.plugins.resume.own_generators import own_generators, set_states, states_within
from resiliency.plugins.resume.plain import NotPlain, from_plain, to_plain

__all__ = [
    "capture_position",
    "kind_of",
    "misplaced_generators",
    "place_generators",
    "prepare_next_iteration",
    "resume_iteration",
    "worker_caveat",
]

log = logging.getLogger(__name__)

_NOTHING = object()
#: Kinds whose own generators reach their states by reading the batches again.
_READ_AGAIN = ("stream", "plain")


# ---- save


def capture_position(loader: Any, iterator: Any, *, taken: int, undone: int) -> dict[str, Any]:
    """The position of one loader, as plain data that shares no memory with live objects.

    Args:
        iterator: the loader's current iterator, None when it has none.
        taken: number of batches taken, used only when the iterator does not count them itself.
        undone: 1 when the last batch taken must be trained on again, else 0.

    Returns:
        The entry for :func:`resume_iteration` and :func:`prepare_next_iteration`. Its ``caveat`` says why the resume
        will not be exact; None when it will be exact.
    """
    iteration = iteration_of(iterator)
    taken = getattr(iterator, "_num_yielded", getattr(iterator, "taken", taken))
    own = own_generators(loader)
    entry: dict[str, Any] = {"kind": kind_of(loader), "taken": max(0, taken - undone), "caveat": None}
    entry |= {"generators": {path: one.state() for path, one in own.items()}, "undone": undone}
    if entry["kind"] in _READ_AGAIN:
        entry["local"] = states_within(iterator, own)
    if iteration is not None:
        entry |= {"before": iteration.before, "opened": iteration.opened, "begun": iteration.begun}
    if entry["kind"] == "map" and iteration is not None:
        entry["check"] = digest_of(iteration.index_of_batch(entry["taken"]))
    if entry["kind"] == "stateful":
        if undone and taken:
            entry["caveat"] = "saved in the middle of a step: the loader's own state is one batch ahead, which is lost"
        try:
            entry["state"] = to_plain(loader.state_dict(), f"{type(loader).__name__}.state_dict()")
        except NotPlain as error:
            entry |= {"state": None, "caveat": f"the loader's state was not saved: {error}"}
    return entry


# ---- restore


def resume_iteration(loader: Any, entry: dict[str, Any], *, reread: bool = False) -> Iterator[Any]:
    """Opens ``loader`` in the middle of an iteration, at the position that ``entry`` describes. Returns the iterator.

    Changes the random generators of the process; the caller sets them afterwards.

    Args:
        reread: read and drop the batches of a map-style loader too, so that its workers consume the same random
            numbers as before.
    """
    kind, taken = entry["kind"], entry["taken"]
    if kind == "stateful":
        return _resume_stateful(loader, entry)
    _restore_before(loader, entry)
    if kind == "map" and _skips_consumed_samples(loader):
        iterator: Iterator[Any] = iter(loader)
        setattr(iterator, "_num_yielded" if hasattr(iterator, "_num_yielded") else "taken", taken)
        return iterator
    skip = taken if kind == "map" and not reread and recorder_of(loader) is not None else 0
    replay = Replay(opened=entry.get("opened"), begun=entry.get("begun"), skip=skip, check=entry.get("check"))
    iterator = _replayed(loader, replay)
    if kind == "plain" and entry.get("begun") is not None:
        rng.restore(entry["begun"]["rng"])
    if skip:
        iteration = iteration_of(iterator)
        if iteration is not None and iteration.indices is not None:
            iteration.indices.begin()  # now, so that the warning about a changed order comes before training
        setattr(iterator, "_num_yielded" if hasattr(iterator, "_num_yielded") else "taken", taken)
        return iterator
    for number in range(taken):
        try:
            next(iterator)
        except StopIteration:
            log.warning(
                "%s ended after %d of the %d batches taken before the restart: the data changed",
                type(loader).__name__,
                number,
                taken,
            )
            break
    return iterator


def prepare_next_iteration(loader: Any, entry: dict[str, Any]) -> list[str]:
    """Restores ``loader`` between two iterations. Changes neither the generators of the process nor the loader's own,
    which have their saved states already.

    Returns:
        Paths of generators that were saved and do not exist now.
    """
    now = own_generators(loader)
    if entry["kind"] == "stateful":
        states = {path: one.state() for path, one in now.items() if not one.self_restored}
        with rng.preserved():
            _finish_stateful(loader, entry)
        set_states(loader, states)
    persistent = workers_of(loader) and getattr(loader, "persistent_workers", False)
    recorder = recorder_of(loader)
    if persistent and entry.get("before") is not None and recorder is not None and entry["kind"] != "stateful":
        # Persistent workers are seeded only in the first iteration. After a restart they start again and draw a seed
        # from the generators of the process, which an uninterrupted run would not do in this iteration.
        recorder.replay = Replay(reseeds=True)
    return [path for path in _saved_states(entry) if path not in now]


def misplaced_generators(loader: Any, iterator: Any, entry: dict[str, Any]) -> list[str]:
    """Paths of generators of the loader that are not where they were at the save, after :func:`resume_iteration`.

    Something else draws from them, they were made anew, or they were seeded by the clock: batches that were read again
    were others than before. Also names those that do not exist any more.
    """
    own, saved = own_generators(loader), _saved_states(entry)
    missing = [path for path in saved if path not in own]
    if entry["kind"] not in _READ_AGAIN or entry.get("undone"):
        return missing
    local, local_now = entry.get("local", {}), states_within(iterator, own)
    moved = [path for path, state in saved.items() if path in own and own[path].state() != state]
    return missing + moved + [path for path, state in local.items() if local_now.get(path) != state]


def place_generators(loader: Any, entry: dict[str, Any], now: dict[str, Any]) -> None:
    """Sets the loader's own generators after :func:`resume_iteration` to the states ``now``, from before it.

    Those that have reached their states by themselves keep them: those that choose indices, because a sampler may be
    ahead of the training loop; those of a stateful loader; and all when the last batch is trained on again.
    """
    if entry["kind"] == "stateful" or (entry["kind"] in _READ_AGAIN and entry.get("undone")):
        return
    own = own_generators(loader)
    here = {path: state for path, state in {**_saved_states(entry), **now}.items() if path in own}
    again = entry["kind"] in _READ_AGAIN
    set_states(loader, {path: state for path, state in here.items() if again or not own[path].chooses_indices})


def worker_caveat(loader: Any, *, reread: bool, ended: bool) -> str | None:
    """Says why generators that draw in the loader's worker processes will not be exact; None when they will be.

    Workers that are started for each iteration get copies of the generators, which draw what they drew before.

    Args:
        ended: the save is at the end of the iteration.
    """
    if not workers_of(loader):
        return None
    kind, name = kind_of(loader), type(loader).__name__
    paths = [path for path, own in own_generators(loader).items() if not own.chooses_indices and not own.self_restored]
    listed = ", ".join(paths)
    if paths and getattr(loader, "persistent_workers", False):
        return (
            f"{listed} of {name} draw in persistent worker processes: a resume after the first epoch starts them anew."
            " Seed them by the epoch, or set persistent_workers=False"
        )
    map_style = kind in ("map", "stateful") and not isinstance(loader.dataset, IterableDataset)
    if paths and map_style and not ended and not (reread and kind == "map"):
        return (
            f"{listed} of {name} draw in worker processes: a resume within an epoch starts them anew."
            ' ModelCheckpoint(exact_resume="reread") reads the batches of a DataLoader again, so that they continue'
        )
    return None


def _saved_states(entry: dict[str, Any]) -> dict[str, Any]:
    """States of the loader's own generators by path; empty in an entry of version 2, which has no paths."""
    saved = entry["generators"]
    return saved if isinstance(saved, dict) else {}


def _restore_before(loader: Any, entry: dict[str, Any]) -> None:
    if entry.get("before") is not None:
        restore_to(loader, entry["before"])


def _skips_consumed_samples(loader: Any) -> bool:
    """True when a sampler, like Megatron's and NeMo's, itself skips the samples that were already consumed."""
    consumed = (getattr(sampler, "consumed_samples", 0) for sampler in samplers_of(loader))
    return any(isinstance(count, int) and count > 0 for count in consumed)


def _replayed(loader: Any, replay: Replay) -> Iterator[Any]:
    recorder = recorder_of(loader)
    if recorder is None:
        return iter(loader)
    recorder.replay = replay
    try:
        return iter(loader)
    finally:
        recorder.replay = None


def _resume_stateful(loader: Any, entry: dict[str, Any]) -> Iterator[Any]:
    kept = _not_replayed(loader)
    iterator = _open_with_state(loader, entry, kept)
    if _dataset_is_at_its_end(iterator) is False:
        iterator = _open_with_state(loader, entry, kept)
    recorder = recorder_of(loader)
    if recorder is not None and hasattr(iterator, "taken"):
        iterator.taken, recorder.resumed = entry["taken"], iterator
    return iterator


def _finish_stateful(loader: Any, entry: dict[str, Any]) -> None:
    """Loads the state of a finished iteration and ends that iteration, so that the next iter() starts a new one."""
    dataset = getattr(loader, "dataset", None)
    if entry.get("state") is None:
        return
    if isinstance(loader, DataLoader) and isinstance(dataset, IterableDataset) and not hasattr(dataset, "state_dict"):
        return  # the dataset keeps no state between iterations, and reaching the end would read all of it
    kept = _not_replayed(loader)
    iterator = _open_with_state(loader, entry, kept)
    at_its_end = _dataset_is_at_its_end(iterator)
    if at_its_end is None:
        at_its_end = next(iterator, _NOTHING) is _NOTHING  # a generator function reads its state only at next()
    if not at_its_end:
        # The iteration was left before its end, or its end has reset the state. The loader is opened at the saved
        # position again, so that the batch just read is not lost.
        _open_with_state(loader, entry, kept)


def _open_with_state(loader: Any, entry: dict[str, Any], kept: dict[str, Any]) -> Iterator[Any]:
    """Opens a stateful loader at its saved position. ``kept``: what :func:`_not_replayed` has returned."""
    _restore_before(loader, entry)  # what the loader restores by itself, or draws when it is opened, comes after
    set_states(loader, kept)
    if entry.get("state") is not None:
        loader.load_state_dict(from_plain(entry["state"]))
    return _replayed(loader, Replay(opened=entry.get("opened"), begun=entry.get("begun")))


def _not_replayed(loader: Any) -> dict[str, Any]:
    """States of the generators that a stateful loader neither restores nor draws from on the way to its position."""
    own = own_generators(loader)
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        return {}  # read again from the beginning, unless the dataset restores itself
    return {path: one.state() for path, one in own.items() if not (one.chooses_indices or one.self_restored)}


def _dataset_is_at_its_end(iterator: Any) -> bool | None:
    """If the dataset had ended before the save, reads from it once more, so that it resets itself at its end.

    torchdata restores that the dataset has ended, and does not call it again. A dataset written as a generator function
    would then keep the loaded position for the next iteration, which would be empty.

    Returns:
        True when the dataset is at its end, False when it returned a sample; None when it had not ended before the
        save, or the loader does not show whether it had.
    """
    fetcher = getattr(iterator, "_dataset_fetcher", None)
    if fetcher is None or not getattr(fetcher, "ended", False):
        return None
    return next(fetcher.dataset_iter, _NOTHING) is _NOTHING


def kind_of(loader: Any) -> str:
    """The kind of a loader: a word of the table in the module docstring."""
    if is_stateful(loader):
        return "stateful"
    if not isinstance(loader, DataLoader):
        return "plain"
    return "stream" if isinstance(loader.dataset, IterableDataset) else "map"
