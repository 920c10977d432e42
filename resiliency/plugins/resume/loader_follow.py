"""Making the passes over a data loader visible, and beginning one as an earlier one began.

A *pass* begins with ``iter(loader)``. Three moments draw random numbers: opening the sampler, seeding the workers, and
the first index drawn (where ``RandomSampler`` chooses its seed, with ``num_workers=0`` long after ``iter``). The
generators are noted at each, so that the same order can come again.

:func:`follow` gives the loader object a subclass of its own class. It draws no random number and changes no batch.
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
            self._seen.begun = {"rng": rng.snapshot(), "generators": []}
        value = next(self._it)
        self.taken += 1
        return value


class _IndexSampler:
    """Stands before the loader's index sampler; users never see it, ``loader.sampler`` stays their own."""

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
            seen.begun = snapshot_of(self._loader)
            return
        seen.begun = replay.begun
        if not replay.skip:  # a stream: what the dataset draws at its own beginning comes right after
            restore_to(self._loader, replay.begun)
            return
        with rng.preserved():
            restore_to(self._loader, replay.begun)
            for _ in range(replay.skip):
                index = next(self._it, None)
                if index is None:
                    log.warning(
                        "the sampler ended before the %d batches taken before the restart; the data changed",
                        replay.skip,
                    )
                    return
                seen.note(index)
        if replay.check is not None and digest_of(seen.index_of_batch(replay.skip)) != replay.check:
            log.warning(
                "batch %d of this epoch has other indices than before the restart: the order of %s cannot be replayed,"
                " the"
                " resumed run is not exact. Let the sampler draw only when its iteration begins, or give it set_epoch"
                " or its"
                " own generator",
                replay.skip,
                type(self._loader.sampler).__name__,
            )


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
        self._seen.begun = self._replayed or snapshot_of(self._loader)
        if self._replayed is None:
            return next(self._it)
        with rng.preserved():  # the loader may skip what was taken only when the next batch is asked for
            restore_to(self._loader, self._replayed)
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
    if KEY in getattr(loader, "__dict__", {}):
        loader.__dict__[KEY].holding = holding
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
        object.__setattr__(loader, KEY, Followed(holding))
        if is_stateful(loader):
            for sampler in samplers_of(loader, inner=False):  # inner ones are drawn from while an outer one is opened
                _follow_sampler(sampler, loader)
    except TypeError:  # built in, slotted or otherwise of a fixed layout
        log.debug("%s cannot be followed; batches already seen are read again after a restart", base.__qualname__)
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
                return _Counted(iterator, seen)
            setattr(iterator, PASS, seen)
            return iterator  # type: ignore[no-any-return]

        return _Deferred(begin) if followed.holding() else begin()

    return __iter__


def _followed_index_sampler(base: Any) -> property:
    def _index_sampler(self: Any) -> Any:
        return _IndexSampler(base._index_sampler.fget(self), self)

    return property(_index_sampler)


def _follow_sampler(sampler: Any, loader: Any) -> None:
    """Notes the generators where a sampler of a stateful loader begins; a sampler that keeps its own state is left
    alone."""
    base = type(sampler)

    def __iter__(self: Any) -> Iterator[Any]:
        followed: Followed | None = loader.__dict__.get(KEY)
        if followed is None or followed.current is None:
            return base.__iter__(self)  # type: ignore[no-any-return]
        replay, seen = followed.replay, followed.current
        if replay is not None and replay.opened is not None:
            restore_to(loader, replay.opened)  # torchdata opens a sampler several times; each must give the same
        opened = snapshot_of(loader)
        indices = base.__iter__(self)
        if is_stateful(indices):
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
