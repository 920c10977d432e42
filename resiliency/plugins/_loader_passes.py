"""Passes over one data loader: what must be written down to go through a pass again, and how it is done.

A *pass* begins with ``iter(loader)``. Three moments draw random numbers: opening the sampler, seeding the workers, and
the first index drawn (where ``RandomSampler`` chooses its seed, with ``num_workers=0`` long after ``iter``). The
generators are noted at each, so that the same order comes again; then as many batches are passed over as were taken:

======== ========================================== =========================================================
kind     loaders                                    passed over by
======== ========================================== =========================================================
map      ``DataLoader`` of a map-style dataset      drawing the same indices; the dataset is not touched
stream   ``DataLoader`` of an iterable dataset      reading the batches and dropping them
stateful anything with state_dict/load_state_dict   its own state, which is this rank's
plain    every other iterable                       reading the batches and dropping them
======== ========================================== =========================================================

Noting needs ``iter(loader)`` to be seen: :func:`follow` gives the loader object a subclass of its own class. It draws
no random number and changes no batch. This file alone knows private names of torch's loaders (``_index_sampler``,
``_num_yielded``). All of it runs on the thread that trains; nothing here is collective.
"""

from __future__ import annotations

import copyreg
import logging
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from resiliency.plugins import _rng
from resiliency.plugins._plain import NotPlain, from_plain, to_plain

__all__ = ["describe", "follow", "kind_of", "prepare_next_pass", "resume_pass", "set_generators", "unfollow"]

log = logging.getLogger(__name__)

_KEY = "_resiliency_followed"
_PASS = "_resiliency_pass"
_NOTHING = object()


class Pass:
    """One pass, as far as it was seen: the generators at its three moments and the last indices drawn."""

    def __init__(self, before: dict[str, Any], lookahead: int) -> None:
        self.before = before
        self.opened: dict[str, Any] | None = None
        self.begun: dict[str, Any] | None = None
        self.indices: _Indices | None = None
        self.drawn = 0
        self.recent: deque[Any] = deque(maxlen=lookahead + 1)

    def note(self, index: Any) -> None:
        self.drawn += 1
        self.recent.append(index)

    def index_of_batch(self, number: int) -> Any:
        """The indices of batch ``number`` (1 is the first), None when no longer known."""
        back = self.drawn - number + 1
        return self.recent[-back] if 0 < back <= len(self.recent) and number > 0 else None


class Replay:
    """How the next pass of a loader is to begin."""

    def __init__(
        self, *, opened: Any = None, begun: Any = None, skip: int = 0, check: int | None = None, reseeds: bool = False
    ) -> None:
        self.opened, self.begun, self.skip, self.check = opened, begun, skip, check
        self.reseeds = reseeds  # the workers' seed is drawn although it would not be without the restart


class Followed:
    """What is kept with a followed loader."""

    def __init__(self, holding: Callable[[], bool]) -> None:
        self.holding = holding  # True: iter() is put off until the first batch is asked for
        self.current: Pass | None = None
        self.replay: Replay | None = None


class _Deferred:
    """An iterator that begins its pass when the first batch is asked for: no workers, no random numbers before."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin
        self._it: Iterator[Any] | None = None

    def __iter__(self) -> _Deferred:
        return self

    def __next__(self) -> Any:
        if self._it is None:
            self._it = self._begin()
        return next(self._it)


class _Counted:
    """Counts what an iterator gave, and notes the generators when the first is asked for."""

    def __init__(self, iterator: Iterator[Any], seen: Pass) -> None:
        self._it, self._seen, self.taken = iterator, seen, 0

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> Any:
        if self.taken == 0 and self._seen.begun is None:
            self._seen.begun = {"rng": _rng.snapshot(), "generators": []}
        value = next(self._it)
        self.taken += 1
        return value


class _IndexSampler:
    """Stands before the loader's index sampler; users never see it, ``loader.sampler`` stays their own."""

    def __init__(self, sampler: Any, loader: Any) -> None:
        self._sampler, self._loader, self._opened = sampler, loader, 0

    def __iter__(self) -> _Indices:
        followed: Followed = self._loader.__dict__[_KEY]
        replay, seen = followed.replay, followed.current
        self._opened += 1
        if replay is not None and replay.opened is not None and self._opened > 1:
            # with workers torch opens the sampler twice, before and after seeding them; the second is used
            _restore(self._loader, replay.opened)
        if seen is None:  # iterated outside of iter(loader)
            seen = Pass(_snapshot(self._loader), _lookahead(self._loader))
        seen.opened = _snapshot(self._loader)
        seen.indices = _Indices(iter(self._sampler), self._loader, seen, replay)
        return seen.indices

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_sampler" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._sampler, name)


class _Indices:
    """The indices of one pass; on a replay the first call begins with the old generators and skips what was taken."""

    def __init__(self, indices: Iterator[Any], loader: Any, seen: Pass, replay: Replay | None) -> None:
        self._it, self._loader, self._seen, self._replay = indices, loader, seen, replay
        self._begun = False

    def __iter__(self) -> _Indices:
        return self

    def __next__(self) -> Any:
        if not self._begun:
            self.begin()
        index = next(self._it)
        self._seen.note(index)
        return index

    def begin(self) -> None:
        self._begun = True
        replay, seen = self._replay, self._seen
        if replay is None or replay.begun is None:
            seen.begun = _snapshot(self._loader)
            return
        seen.begun = replay.begun
        if not replay.skip:  # a stream: what the dataset draws at its own beginning comes right after
            _restore(self._loader, replay.begun)
            return
        with _rng.preserved():
            _restore(self._loader, replay.begun)
            for _ in range(replay.skip):
                index = next(self._it, None)
                if index is None:
                    log.warning("the sampler ended before the %d batches taken before the restart; the data changed", replay.skip)
                    return
                seen.note(index)
        if replay.check is not None and _digest(seen.index_of_batch(replay.skip)) != replay.check:
            log.warning(
                "batch %d of this epoch has other indices than before the restart: the order of %s cannot be replayed, the"
                " resumed run is not exact. Let the sampler draw only when its iteration begins, or give it set_epoch or its"
                " own generator", replay.skip, type(self._loader.sampler).__name__,
            )  # fmt: skip


class _Noted:
    """The indices of a sampler whose loader keeps its own place: notes where they begin, and begins there again."""

    def __init__(self, indices: Iterator[Any], loader: Any, seen: Pass, begun: dict[str, Any] | None) -> None:
        self._it, self._loader, self._seen, self._replayed = indices, loader, seen, begun
        self._begun = False

    def __iter__(self) -> _Noted:
        return self

    def __next__(self) -> Any:
        if self._begun:
            return next(self._it)
        self._begun = True
        self._seen.begun = self._replayed or _snapshot(self._loader)
        if self._replayed is None:
            return next(self._it)
        with _rng.preserved():  # the loader may skip what was taken only when the next batch is asked for
            _restore(self._loader, self._replayed)
            return next(self._it)


# ---- following


def follow(loader: Any, holding: Callable[[], bool]) -> bool:
    """Makes the passes over ``loader`` visible. Idempotent.

    Args:
        loader: the object that will be iterated; it stays the same object, an instance of its class.
        holding: asked at every ``iter(loader)``; while True the pass begins only with the first batch.

    Returns:
        False when its class cannot be replaced (a list, a generator): it is iterated as it is.
    """
    if _KEY in getattr(loader, "__dict__", {}):
        loader.__dict__[_KEY].holding = holding
        return True
    base = type(loader)
    names: dict[str, Any] = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    names |= {"__iter__": _followed_iter(base), "__reduce_ex__": _followed_reduce(base), "_resiliency_base": base}
    if isinstance(getattr(base, "_index_sampler", None), property) and not _is_stateful(loader):
        names["_index_sampler"] = _followed_index_sampler(base)
    if not hasattr(base, "__iter__"):
        return False
    try:
        object.__setattr__(loader, "__class__", type(base.__name__, (base,), names))
        object.__setattr__(loader, _KEY, Followed(holding))
        if _is_stateful(loader):
            for sampler in _samplers(loader, inner=False):  # inner ones are drawn from while an outer one is opened
                _follow_sampler(sampler, loader)
    except TypeError:  # built in, slotted or otherwise of a fixed layout
        log.debug("%s cannot be followed; batches already seen are read again after a restart", base.__qualname__)
        return False
    return True


def unfollow(loader: Any) -> None:
    """Gives the loader its own class back."""
    for followed in (loader, *_samplers(loader)):
        base = getattr(type(followed), "_resiliency_base", None)
        if base is not None:
            object.__setattr__(followed, "__class__", base)
            followed.__dict__.pop(_KEY, None)


def _is_stateful(loader: Any) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def _followed_iter(base: type) -> Callable[[Any], Iterator[Any]]:
    def __iter__(self: Any) -> Iterator[Any]:
        followed: Followed = self.__dict__[_KEY]

        def begin() -> Iterator[Any]:
            seen = followed.current = Pass(_snapshot(self), _lookahead(self))
            if followed.replay is not None and followed.replay.reseeds:
                followed.replay.opened = seen.before
            try:
                iterator = base.__iter__(self)  # type: ignore[attr-defined]
            finally:
                if followed.replay is not None and followed.replay.reseeds:
                    followed.replay = None
            if not hasattr(iterator, "_num_yielded"):
                return _Counted(iterator, seen)
            setattr(iterator, _PASS, seen)
            return iterator  # type: ignore[no-any-return]

        return _Deferred(begin) if followed.holding() else begin()

    return __iter__


def _followed_index_sampler(base: Any) -> property:
    def _index_sampler(self: Any) -> Any:
        return _IndexSampler(base._index_sampler.fget(self), self)

    return property(_index_sampler)


def _follow_sampler(sampler: Any, loader: Any) -> None:
    """Notes the generators where a sampler of a stateful loader begins; a sampler that keeps its own state is left alone."""
    base = type(sampler)

    def __iter__(self: Any) -> Iterator[Any]:
        followed: Followed | None = loader.__dict__.get(_KEY)
        if followed is None or followed.current is None:
            return base.__iter__(self)  # type: ignore[no-any-return]
        replay, seen = followed.replay, followed.current
        if replay is not None and replay.opened is not None:
            _restore(loader, replay.opened)  # torchdata opens a sampler several times; each must give the same
        opened = _snapshot(loader)
        indices = base.__iter__(self)
        if _is_stateful(indices):
            return indices  # type: ignore[no-any-return]
        seen.opened = opened
        return _Noted(indices, loader, seen, replay.begun if replay is not None else None)

    names = {"__iter__": __iter__, "__reduce_ex__": _followed_reduce(base), "_resiliency_base": base}
    names |= {"__module__": base.__module__, "__qualname__": base.__qualname__}
    if not hasattr(base, "_resiliency_base") and hasattr(base, "__iter__") and hasattr(sampler, "__dict__"):
        sampler.__class__ = type(base.__name__, (base,), names)


def _empty(kind: type) -> Any:
    return object.__new__(kind)


def _followed_reduce(base: Any) -> Callable[[Any, Any], Any]:
    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        # a bound method of the loader as collate_fn takes it along to spawned workers: there it is the user's class again
        parts = list(base.__reduce_ex__(self, protocol))
        if parts[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
            parts[:2] = _empty, (base,)
        if len(parts) > 2 and isinstance(parts[2], dict):
            parts[2] = {key: value for key, value in parts[2].items() if key != _KEY}
        return tuple(parts)

    return __reduce_ex__


# ---- writing down


def describe(loader: Any, iterator: Any, *, taken: int, undone: int) -> dict[str, Any]:
    """One loader's place, as plain data that shares nothing with live objects.

    Args:
        iterator: the loader's live iterator, None when it has none.
        taken: batches taken, used only when the iterator does not count itself.
        undone: 1 when the last batch taken is to be trained on again, else 0.

    Returns:
        the entry for :func:`resume_pass` and :func:`prepare_next_pass`; ``caveat`` is set when it cannot be exact.
    """
    seen: Pass | None = getattr(iterator, _PASS, None) or getattr(iterator, "_seen", None)
    taken = getattr(iterator, "_num_yielded", getattr(iterator, "taken", taken))
    entry: dict[str, Any] = {"kind": kind_of(loader), "taken": max(0, taken - undone), "caveat": None}
    entry["generators"] = [generator.get_state() for generator in _generators(loader)]
    if seen is not None:
        entry |= {"before": seen.before, "opened": seen.opened, "begun": seen.begun}
    if entry["kind"] == "map" and seen is not None:
        entry["check"] = _digest(seen.index_of_batch(entry["taken"]))
    if entry["kind"] == "stateful":
        if undone and taken:
            entry["caveat"] = "saved in the middle of a step: the loader's own state is one batch ahead, which is lost"
        try:
            entry["state"] = to_plain(loader.state_dict(), f"{type(loader).__name__}.state_dict()")
        except NotPlain as error:
            entry |= {"state": None, "caveat": f"the loader's state was not saved: {error}"}
    return entry


# ---- going through it again


def resume_pass(loader: Any, entry: dict[str, Any], *, reread: bool = False) -> Iterator[Any]:
    """Opens ``loader`` at the place in the middle of a pass that ``entry`` describes.

    Leaves the process generators anywhere: the caller sets them afterwards.

    Args:
        reread: read and drop the batches of a map-style loader too, so that its workers draw what they drew.
    """
    kind, taken, before = entry["kind"], entry["taken"], entry.get("before")
    if before is not None:
        _restore(loader, before)
    if kind == "stateful":
        return _resume_stateful(loader, entry)
    skip = taken if kind == "map" and not reread and _KEY in getattr(loader, "__dict__", {}) else 0
    replay = Replay(opened=entry.get("opened"), begun=entry.get("begun"), skip=skip, check=entry.get("check"))
    iterator = _replayed(loader, replay)
    if kind == "plain" and entry.get("begun") is not None:
        _rng.restore(entry["begun"]["rng"])
    if skip:
        seen = getattr(iterator, _PASS, None) or getattr(iterator, "_seen", None)
        if seen is not None and seen.indices is not None and not seen.indices._begun:
            seen.indices.begin()  # at once, so that a changed order is told now and not with the next batch
        setattr(iterator, "_num_yielded" if hasattr(iterator, "_num_yielded") else "taken", taken)
        return iterator
    for number in range(taken):
        try:
            next(iterator)
        except StopIteration:
            log.warning("%s ended after %d of the %d batches taken before the restart; the data changed",
                        type(loader).__name__, number, taken)  # fmt: skip
            break
    return iterator


def prepare_next_pass(loader: Any, entry: dict[str, Any]) -> None:
    """Brings ``loader`` to where it stood between two passes; the process generators are left as they are."""
    with _rng.preserved():
        if entry["kind"] == "stateful":
            _finish_stateful(loader, entry)
        set_generators(loader, entry)
    persistent = _workers(loader) and getattr(loader, "persistent_workers", False)
    if persistent and entry.get("before") is not None and _KEY in getattr(loader, "__dict__", {}) and entry["kind"] != "stateful":
        # workers that outlive a pass are seeded once, in the first; here they start anew and their seed is drawn from
        # the process generators, which the next pass of an undisturbed run does not do
        loader.__dict__[_KEY].replay = Replay(reseeds=True)


def _replayed(loader: Any, replay: Replay) -> Iterator[Any]:
    followed: Followed | None = getattr(loader, "__dict__", {}).get(_KEY)
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
        return  # nothing outlives the pass, and finding its end would mean to read it all
    iterator = _open_with_state(loader, entry)
    at_its_end = _dataset_is_at_its_end(iterator)
    if at_its_end is None:
        at_its_end = next(iterator, _NOTHING) is _NOTHING  # asked, since a generator function looks at its state only then
    if not at_its_end:
        # the pass was left before its end, or its end has set the state back: only the place counts, not that batch
        _open_with_state(loader, entry)


def _open_with_state(loader: Any, entry: dict[str, Any]) -> Iterator[Any]:
    if entry.get("state") is not None:
        loader.load_state_dict(from_plain(entry["state"]))
    return _replayed(loader, Replay(opened=entry.get("opened"), begun=entry.get("begun")))


def _dataset_is_at_its_end(iterator: Any) -> bool | None:
    """Lets a dataset whose end was already met before the save meet it again.

    torchdata remembers that end and never asks the dataset again; one written as a generator function then keeps the
    loaded place for the next pass, which would be empty.

    Returns:
        None when the end was not met (or cannot be seen), False when the dataset gave a sample after all.
    """
    fetcher = getattr(iterator, "_dataset_fetcher", None)
    if fetcher is None or not getattr(fetcher, "ended", False):
        return None
    return next(fetcher.dataset_iter, _NOTHING) is _NOTHING


# ---- generators


def kind_of(loader: Any) -> str:
    if _is_stateful(loader):
        return "stateful"
    if not isinstance(loader, DataLoader):
        return "plain"
    return "stream" if isinstance(loader.dataset, IterableDataset) else "map"


def _workers(loader: Any) -> int:
    return int(getattr(loader, "num_workers", 0) or 0)


def _lookahead(loader: Any) -> int:
    return _workers(loader) * int(getattr(loader, "prefetch_factor", None) or 2) + 1


def _samplers(loader: Any, *, inner: bool = True) -> list[Any]:
    """The samplers of a loader, outermost first; with ``inner`` also those Lightning has wrapped for several ranks."""
    found: dict[int, Any] = {}
    todo = [getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)]
    while todo:
        sampler = todo.pop(0)
        if sampler is None or isinstance(sampler, list | tuple) or id(sampler) in found:
            continue
        found[id(sampler)] = sampler
        todo.append(getattr(sampler, "sampler", None))
        if inner:
            todo.append(getattr(getattr(sampler, "dataset", None), "_sampler", None))
    return list(found.values())


def _generators(loader: Any) -> list[torch.Generator]:
    """The generators the user gave to the loader and its samplers, each once, always in the same order."""
    owned = (getattr(owner, "generator", None) for owner in (loader, *_samplers(loader)))
    return list({id(generator): generator for generator in owned if isinstance(generator, torch.Generator)}.values())


def set_generators(loader: Any, saved: dict[str, Any]) -> None:
    """Sets the generators the user gave to the loader to those of ``saved``."""
    for generator, state in zip(_generators(loader), saved["generators"], strict=False):
        generator.set_state(state)


def _snapshot(loader: Any) -> dict[str, Any]:
    return {"rng": _rng.snapshot(), "generators": [generator.get_state() for generator in _generators(loader)]}


def _restore(loader: Any, saved: dict[str, Any]) -> None:
    _rng.restore(saved["rng"])
    set_generators(loader, saved)


def _digest(index: Any) -> int | None:
    """A number that differs when the indices differ; None when they have no stable text."""
    if index is None:
        return None
    text = repr(index)
    return None if " at 0x" in text else zlib.crc32(text.encode())
