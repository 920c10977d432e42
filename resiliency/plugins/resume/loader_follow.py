"""Records where each iteration over a data loader starts and replays it from there.

A *pass* is one iteration over a loader; it begins with ``iter(loader)``. Random numbers are drawn at three points of
it: when the sampler is opened, when the workers are seeded, and with the first index (where ``RandomSampler``
chooses its seed; with ``num_workers=0`` that is long after ``iter``). The state of the generators is recorded at
each of them, so that a later pass can draw the same order.

:func:`follow` gives the loader object a subclass of its own class. It draws no random numbers and changes no batch.
Private names of torch's loaders used: ``_index_sampler``, ``_num_yielded``. All of it runs on the thread that trains;
nothing here is collective.
"""

from __future__ import annotations

import copyreg
import logging
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from resiliency.plugins.resume import rng

__all__ = [
    "KEY",
    "PASS",
    "Followed",
    "Pass",
    "Replay",
    "digest_of",
    "follow",
    "generators_of",
    "is_stateful",
    "restore_to",
    "samplers_of",
    "set_generators",
    "snapshot_of",
    "unfollow",
    "workers_of",
]

log = logging.getLogger(__name__)

#: Attribute of a followed loader: its Followed.
KEY = "_resiliency_followed"
#: Attribute of an iterator of a followed loader: its Pass.
PASS = "_resiliency_pass"


class Pass:
    """What is recorded of one pass: the state of the generators at its three points, and the last indices drawn.

    Attributes:
        before: generators before ``iter(loader)``.
        opened: generators when the sampler was opened, None before that.
        begun: generators before the first index (or item) was drawn, None before that.
        indices: the iterator over indices, None when the loader has no index sampler.
        drawn: number of indices drawn.
        recent: the last of them.
    """

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
        """The indices of batch ``number`` (1 is the first), None when it is no longer kept."""
        back = self.drawn - number + 1
        return self.recent[-back] if 0 < back <= len(self.recent) and number > 0 else None


class Replay:
    """How the next pass of a loader is to begin.

    Attributes:
        opened, begun: generators to set at these points, as in :class:`Pass`.
        skip: batches whose indices are drawn and dropped.
        check: digest of the last skipped batch's indices, to notice another order; None: not checked.
        reseeds: the workers' seed is drawn in this pass because of the restart; the pass of an undisturbed run would
            not draw it.
    """

    def __init__(
        self, *, opened: Any = None, begun: Any = None, skip: int = 0, check: int | None = None, reseeds: bool = False
    ) -> None:
        self.opened, self.begun, self.skip, self.check = opened, begun, skip, check
        self.reseeds = reseeds


class Followed:
    """State kept on a followed loader."""

    def __init__(self, defer_open: Callable[[], bool]) -> None:
        self.defer_open = defer_open  # True: iter() does nothing until the first batch is asked for
        self.current: Pass | None = None
        self.replay: Replay | None = None


class _DeferredIterator:
    """An iterator that begins its pass when the first batch is asked for; before, no workers start and no random
    numbers are drawn."""

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin
        self._it: Iterator[Any] | None = None

    def __iter__(self) -> _DeferredIterator:
        return self

    def __next__(self) -> Any:
        if self._it is None:
            self._it = self._begin()
        return next(self._it)


class _CountingIterator:
    """Counts the items of an iterator, and records the generators before the first."""

    def __init__(self, iterator: Iterator[Any], seen: Pass) -> None:
        self._it, self._seen, self.taken = iterator, seen, 0

    def __iter__(self) -> _CountingIterator:
        return self

    def __next__(self) -> Any:
        if self.taken == 0 and self._seen.begun is None:
            self._seen.begun = {"rng": rng.snapshot(), "generators": []}
        value = next(self._it)
        self.taken += 1
        return value


class _IndexSampler:
    """Wraps the loader's index sampler. Users do not see it: ``loader.sampler`` stays their own object."""

    def __init__(self, sampler: Any, loader: Any) -> None:
        self._sampler, self._loader, self._opened = sampler, loader, 0

    def __iter__(self) -> _Indices:
        followed: Followed = self._loader.__dict__[KEY]
        replay, seen = followed.replay, followed.current
        self._opened += 1
        if replay is not None and replay.opened is not None and self._opened > 1:
            # with workers torch opens the sampler twice, before and after seeding them; the second is used
            restore_to(self._loader, replay.opened)
        if seen is None:  # iterated outside of iter(loader)
            seen = Pass(snapshot_of(self._loader), lookahead_of(self._loader))
        seen.opened = snapshot_of(self._loader)
        seen.indices = _Indices(iter(self._sampler), self._loader, seen, replay)
        return seen.indices

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_sampler" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._sampler, name)


class _Indices:
    """The indices of one pass. On a replay the first call sets the recorded generators and skips the batches already
    taken."""

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
            seen.begun = snapshot_of(self._loader)
            return
        seen.begun = replay.begun
        if not replay.skip:  # a stream: the dataset draws its own first random numbers right after this
            restore_to(self._loader, replay.begun)
            return
        with rng.preserved():
            restore_to(self._loader, replay.begun)
            for _ in range(replay.skip):
                index = next(self._it, None)
                if index is None:
                    log.warning(
                        "the sampler ended within the %d batches taken before the restart; the data has changed",
                        replay.skip,
                    )
                    return
                seen.note(index)
        if replay.check is not None and digest_of(seen.index_of_batch(replay.skip)) != replay.check:
            log.warning(
                "batch %d of this epoch has other indices than before the restart: the order of %s cannot be replayed,"
                " the resumed run is not exact. Let the sampler draw only when its iteration begins, or give it"
                " set_epoch or its own generator",
                replay.skip,
                type(self._loader.sampler).__name__,
            )


class _ReplayableIndices:
    """The indices of a sampler whose loader restores its own position: records the generators at their start, and sets
    them there on a replay."""

    def __init__(self, indices: Iterator[Any], loader: Any, seen: Pass, begun: dict[str, Any] | None) -> None:
        self._it, self._loader, self._seen, self._replayed = indices, loader, seen, begun
        self._begun = False

    def __iter__(self) -> _ReplayableIndices:
        return self

    def __next__(self) -> Any:
        if self._begun:
            return next(self._it)
        self._begun = True
        self._seen.begun = self._replayed or snapshot_of(self._loader)
        if self._replayed is None:
            return next(self._it)
        with rng.preserved():  # the loader may wait with skipping until the next batch is asked for
            restore_to(self._loader, self._replayed)
            return next(self._it)


# ---- following


def follow(loader: Any, defer_open: Callable[[], bool]) -> bool:
    """Records the passes over ``loader`` from now on. Idempotent.

    Args:
        loader: the object that will be iterated; it stays the same object, an instance of its class.
        defer_open: asked at every ``iter(loader)``; when True the pass begins only with the first batch.

    Returns:
        False when its class cannot be replaced (a list, a generator): it is iterated as it is.
    """
    if KEY in getattr(loader, "__dict__", {}):
        loader.__dict__[KEY].defer_open = defer_open
        return True
    base = type(loader)
    names: dict[str, Any] = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    names |= {"__iter__": _followed_iter(base), "__reduce_ex__": _followed_reduce(base), "_resiliency_base": base}
    if isinstance(getattr(base, "_index_sampler", None), property) and not is_stateful(loader):
        names["_index_sampler"] = _followed_index_sampler(base)
    if not hasattr(base, "__iter__"):
        return False
    try:
        object.__setattr__(loader, "__class__", type(base.__name__, (base,), names))
        object.__setattr__(loader, KEY, Followed(defer_open))
        if is_stateful(loader):
            for sampler in samplers_of(loader, inner=False):  # the inner ones are read while an outer one is opened
                _follow_sampler(sampler, loader)
    except TypeError:  # a built-in class, one with slots, or another whose layout is fixed
        log.debug("%s cannot be followed; batches already taken are read again after a restart", base.__qualname__)
        return False
    return True


def unfollow(loader: Any) -> None:
    """Gives the loader its own class back."""
    for followed in (loader, *samplers_of(loader)):
        base = getattr(type(followed), "_resiliency_base", None)
        if base is not None:
            object.__setattr__(followed, "__class__", base)
            followed.__dict__.pop(KEY, None)


def is_stateful(loader: Any) -> bool:
    return callable(getattr(loader, "state_dict", None)) and callable(getattr(loader, "load_state_dict", None))


def _followed_iter(base: type) -> Callable[[Any], Iterator[Any]]:
    def __iter__(self: Any) -> Iterator[Any]:
        followed: Followed = self.__dict__[KEY]

        def begin() -> Iterator[Any]:
            seen = followed.current = Pass(snapshot_of(self), lookahead_of(self))
            if followed.replay is not None and followed.replay.reseeds:
                followed.replay.opened = seen.before
            try:
                iterator = base.__iter__(self)  # type: ignore[attr-defined]
            finally:
                if followed.replay is not None and followed.replay.reseeds:
                    followed.replay = None
            if not hasattr(iterator, "_num_yielded"):
                return _CountingIterator(iterator, seen)
            setattr(iterator, PASS, seen)
            return iterator  # type: ignore[no-any-return]

        return _DeferredIterator(begin) if followed.defer_open() else begin()

    return __iter__


def _followed_index_sampler(base: Any) -> property:
    def _index_sampler(self: Any) -> Any:
        return _IndexSampler(base._index_sampler.fget(self), self)

    return property(_index_sampler)


def _follow_sampler(sampler: Any, loader: Any) -> None:
    """Records the generators at the start of a sampler of a stateful loader; a sampler that keeps its own state is not
    touched."""
    base = type(sampler)

    def __iter__(self: Any) -> Iterator[Any]:
        followed: Followed | None = loader.__dict__.get(KEY)
        if followed is None or followed.current is None:
            return base.__iter__(self)  # type: ignore[no-any-return]
        replay, seen = followed.replay, followed.current
        if replay is not None and replay.opened is not None:
            # torchdata opens a sampler several times; each time must give the same order.
            restore_to(loader, replay.opened)
        opened = snapshot_of(loader)
        indices = base.__iter__(self)
        if is_stateful(indices):
            return indices  # type: ignore[no-any-return]
        seen.opened = opened
        return _ReplayableIndices(indices, loader, seen, replay.begun if replay is not None else None)

    names = {"__iter__": __iter__, "__reduce_ex__": _followed_reduce(base), "_resiliency_base": base}
    names |= {"__module__": base.__module__, "__qualname__": base.__qualname__}
    if not hasattr(base, "_resiliency_base") and hasattr(base, "__iter__") and hasattr(sampler, "__dict__"):
        sampler.__class__ = type(base.__name__, (base,), names)


def _empty(kind: type) -> Any:
    return object.__new__(kind)


def _followed_reduce(base: Any) -> Callable[[Any, Any], Any]:
    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        # a bound method of the loader as collate_fn takes it along to spawned workers: there it is the user's class
        # again
        parts = list(base.__reduce_ex__(self, protocol))
        if parts[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
            parts[:2] = _empty, (base,)
        if len(parts) > 2 and isinstance(parts[2], dict):
            parts[2] = {key: value for key, value in parts[2].items() if key != KEY}
        return tuple(parts)

    return __reduce_ex__


# ---- generators


def workers_of(loader: Any) -> int:
    return int(getattr(loader, "num_workers", 0) or 0)


def lookahead_of(loader: Any) -> int:
    return workers_of(loader) * int(getattr(loader, "prefetch_factor", None) or 2) + 1


def samplers_of(loader: Any, *, inner: bool = True) -> list[Any]:
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


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators the user gave to the loader and its samplers, each once, always in the same order."""
    owned = (getattr(owner, "generator", None) for owner in (loader, *samplers_of(loader)))
    return list({id(generator): generator for generator in owned if isinstance(generator, torch.Generator)}.values())


def set_generators(loader: Any, saved: dict[str, Any]) -> None:
    """Sets the generators the user gave to the loader to those of ``saved``."""
    for generator, state in zip(generators_of(loader), saved["generators"], strict=False):
        generator.set_state(state)


def snapshot_of(loader: Any) -> dict[str, Any]:
    return {"rng": rng.snapshot(), "generators": [generator.get_state() for generator in generators_of(loader)]}


def restore_to(loader: Any, saved: dict[str, Any]) -> None:
    rng.restore(saved["rng"])
    set_generators(loader, saved)


def digest_of(index: Any) -> int | None:
    """A number that differs when the indices differ; None when they have no stable text."""
    if index is None:
        return None
    text = repr(index)
    return None if " at 0x" in text else zlib.crc32(text.encode())
