"""Records the random generators' states where each DataLoader iteration starts, and replays the iteration from them.

Starting an iteration consumes random numbers at three points: when the sampler is opened, when the workers are seeded,
and when the first index is drawn (where ``RandomSampler`` chooses its seed; with ``num_workers=0`` that is long after
``iter(loader)``). The recorder takes the generators' states before the iteration, when the sampler is opened and when
the first index is drawn. A replay sets the generators to these states, so that the sampler gives the same order again.

:func:`attach_recorder` replaces the loader's class by a subclass. That consumes no random numbers and changes no batch.
Private names of torch's loaders used: ``_index_sampler``, ``_num_yielded``. Everything here runs on the training thread
and is not collective.
"""

from __future__ import annotations

import copyreg
import logging
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from resiliency.plugins.resume import rng
from resiliency.plugins.resume.generator_search import is_stateful
from resiliency.plugins.resume.own_generators import set_states, states_of

__all__ = [
    "LoaderIteration",
    "LoaderRecorder",
    "Replay",
    "attach_recorder",
    "detach_recorder",
    "digest_of",
    "iteration_of",
    "recorder_of",
    "restore_to",
    "samplers_of",
    "snapshot_of",
    "workers_of",
]

log = logging.getLogger(__name__)

#: Attribute of a recorded loader: its LoaderRecorder.
_RECORDER = "_resiliency_recorder"
#: Attribute of torch's iterator over a recorded loader: its LoaderIteration.
_ITERATION = "_resiliency_iteration"


class LoaderIteration:
    """The record of one iteration: generator states and the last indices drawn.

    Attributes:
        before: generator states before ``iter(loader)``.
        opened: generator states when the sampler was opened; None before that.
        begun: generator states when the first index was drawn; None before that.
        indices: the index iterator; None before the sampler was opened.
        drawn: number of indices drawn (one per batch).
        recent: the last indices drawn, as many as workers can be ahead of the training loop.
    """

    def __init__(self, before: dict[str, Any], lookahead: int) -> None:
        self.before = before
        self.opened: dict[str, Any] | None = None
        self.begun: dict[str, Any] | None = None
        self.indices: _RecordedIndices | None = None
        self.drawn = 0
        self.recent: deque[Any] = deque(maxlen=lookahead + 1)

    def add(self, index: Any) -> None:
        self.drawn += 1
        self.recent.append(index)

    def index_of_batch(self, number: int) -> Any:
        """The indices of batch ``number`` (counted from 1); None when they are not kept any more."""
        back = self.drawn - number + 1
        return self.recent[-back] if 0 < back <= len(self.recent) and number > 0 else None


class Replay:
    """How the next iteration of a loader starts.

    Args:
        opened: generator states to set when the sampler is opened; None: leave them.
        begun: generator states to set when the first index is drawn; None: leave them.
        skip: number of indices to draw and drop.
        check: digest that the last skipped index must have; None: it is not checked.
        reseeds: for one iteration, set the generators back after the seed of the workers was drawn, because an
            uninterrupted run would not draw a seed here.
    """

    def __init__(
        self, *, opened: Any = None, begun: Any = None, skip: int = 0, check: int | None = None, reseeds: bool = False
    ) -> None:
        self.opened, self.begun, self.skip, self.check = opened, begun, skip, check
        self.reseeds = reseeds


class LoaderRecorder:
    """The recorder of one loader.

    Attributes:
        deferred: called at every ``iter(loader)``; if it returns True, the iteration starts when its first batch is
            requested.
        current: the iteration that was started last; None before the first one.
        replay: how the next iteration starts; None: as without a recorder.
        resumed: the iterator of a loader that was opened at its own saved position; None from its next iteration on.
    """

    def __init__(self, deferred: Callable[[], bool]) -> None:
        self.deferred = deferred
        self.current: LoaderIteration | None = None
        self.replay: Replay | None = None
        self.resumed: Any = None


class _DeferredIterator:
    """Starts its iteration when the first batch is requested. Before that it starts no workers and draws no random
    numbers."""

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
    """Wraps an iterator that is not torch's: counts its items, and records the generator states before the first one.

    ``taken``: number of items returned so far. ``iteration``: the record of the iteration.
    """

    def __init__(self, iterator: Iterator[Any], iteration: LoaderIteration) -> None:
        self._it, self.iteration, self.taken = iterator, iteration, 0

    def __iter__(self) -> _CountingIterator:
        return self

    def __next__(self) -> Any:
        if self.iteration.begun is None:
            self.iteration.begun = {"rng": rng.snapshot(), "generators": {}}
        value = next(self._it)
        self.taken += 1
        return value


class _RecordedIndexSampler:
    """Wraps the loader's private index sampler and records when it is opened. ``loader.sampler`` stays the user's
    object."""

    def __init__(self, sampler: Any, loader: Any) -> None:
        self._sampler, self._loader, self._opened = sampler, loader, 0

    def __iter__(self) -> _RecordedIndices:
        recorder: LoaderRecorder = self._loader.__dict__[_RECORDER]
        replay, iteration = recorder.replay, recorder.current
        self._opened += 1
        if replay is not None and replay.opened is not None and self._opened > 1:
            # With workers, torch opens the sampler before and after it seeds them, and uses the second iterator.
            restore_to(self._loader, replay.opened)
        if iteration is None:  # the index sampler is iterated without iter(loader)
            iteration = LoaderIteration(snapshot_of(self._loader), lookahead_of(self._loader))
        iteration.opened = snapshot_of(self._loader)
        iteration.indices = _RecordedIndices(iter(self._sampler), self._loader, iteration, replay)
        return iteration.indices

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_sampler" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._sampler, name)


class _RecordedIndices:
    """Iterator over the indices of one iteration. In a replay, the first ``next()`` sets the recorded generator states
    and skips the indices of the batches already taken."""

    def __init__(self, indices: Iterator[Any], loader: Any, iteration: LoaderIteration, replay: Replay | None) -> None:
        self._it, self._loader, self._iteration, self._replay = indices, loader, iteration, replay
        self._begun = False

    def __iter__(self) -> _RecordedIndices:
        return self

    def __next__(self) -> Any:
        if not self._begun:
            self.begin()
        index = next(self._it)
        self._iteration.add(index)
        return index

    def begin(self) -> None:
        """Records the generator states, or in a replay sets the recorded ones. ``next()`` calls it. Idempotent."""
        if self._begun:
            return
        self._begun = True
        replay, iteration = self._replay, self._iteration
        if replay is None or replay.begun is None:
            iteration.begun = snapshot_of(self._loader)
            return
        iteration.begun = replay.begun
        if not replay.skip:  # a stream: the dataset may draw random numbers right after this
            restore_to(self._loader, replay.begun)
            return
        with rng.preserved():
            restore_to(self._loader, replay.begun)
            for _ in range(replay.skip):
                index = next(self._it, None)
                if index is None:
                    log.warning(
                        "the sampler ended before batch %d, which was reached before the restart: the data changed",
                        replay.skip,
                    )
                    return
                iteration.add(index)
        if replay.check is not None and digest_of(iteration.index_of_batch(replay.skip)) != replay.check:
            log.warning(
                "batch %d of this epoch has other indices than before the restart: the order of %s cannot be replayed,"
                " the resumed run is not exact. Draw random numbers only when the sampler's iteration starts, or give"
                " it set_epoch or its own generator",
                replay.skip,
                type(self._loader.sampler).__name__,
            )


class _StatefulLoaderIndices:
    """Iterator over the indices of a sampler of a stateful loader. Such a loader restores its own position.

    At the first index it records the generator states, or in a replay sets the recorded ones.
    """

    def __init__(
        self, indices: Iterator[Any], loader: Any, iteration: LoaderIteration, begun: dict[str, Any] | None
    ) -> None:
        self._it, self._loader, self._iteration, self._replayed = indices, loader, iteration, begun
        self._begun = False

    def __iter__(self) -> _StatefulLoaderIndices:
        return self

    def __next__(self) -> Any:
        if self._begun:
            return next(self._it)
        self._begun = True
        self._iteration.begun = self._replayed or snapshot_of(self._loader)
        if self._replayed is None:
            return next(self._it)
        with rng.preserved():  # because the loader may skip the batches already taken only at the next request
            restore_to(self._loader, self._replayed, only_indices=True)
            return next(self._it)


# ---- attaching to a loader


def attach_recorder(loader: Any, deferred: Callable[[], bool]) -> bool:
    """Records every iteration over ``loader`` from now on. Idempotent.

    Args:
        loader: the object that will be iterated; it stays the same object and an instance of its class.
        deferred: called at every ``iter(loader)``; if it returns True, the iteration starts when its first batch is
            requested.

    Returns:
        False when the class of ``loader`` cannot be replaced (a list, a generator): its iterations are not recorded.
    """
    if (recorder := recorder_of(loader)) is not None:
        recorder.deferred = deferred
        return True
    base = type(loader)
    names: dict[str, Any] = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    names |= {"__iter__": _recording_iter(base), "__reduce_ex__": _reduce_to_base(base), "_resiliency_base": base}
    if isinstance(getattr(base, "_index_sampler", None), property) and not is_stateful(loader):
        names["_index_sampler"] = _recording_index_sampler(base)
    if not hasattr(base, "__iter__"):
        return False
    try:
        object.__setattr__(loader, "__class__", type(base.__name__, (base,), names))
        object.__setattr__(loader, _RECORDER, LoaderRecorder(deferred))
        if is_stateful(loader):
            for sampler in samplers_of(loader, inner=False):  # opening an outer sampler already draws from inner ones
                _record_sampler(sampler, loader)
    except TypeError:  # the class is built in, slotted or otherwise of a fixed layout
        log.debug(
            "iterations of %s cannot be recorded; after a restart the batches already seen are read again",
            base.__qualname__,
        )
        return False
    return True


def detach_recorder(loader: Any) -> None:
    """Undoes :func:`attach_recorder`: the loader and its samplers get their own classes back. Idempotent."""
    for recorded in (loader, *samplers_of(loader)):
        base = getattr(type(recorded), "_resiliency_base", None)
        if base is not None:
            object.__setattr__(recorded, "__class__", base)
            recorded.__dict__.pop(_RECORDER, None)


def recorder_of(loader: Any) -> LoaderRecorder | None:
    """The recorder attached to a loader; None when it has none."""
    recorder: LoaderRecorder | None = getattr(loader, "__dict__", {}).get(_RECORDER)
    return recorder


def iteration_of(iterator: Any) -> LoaderIteration | None:
    """The record of the iteration that this iterator belongs to; None when its loader has no recorder."""
    if isinstance(iterator, _CountingIterator):
        return iterator.iteration
    iteration: LoaderIteration | None = getattr(iterator, _ITERATION, None)
    return iteration


def _recording_iter(base: type) -> Callable[[Any], Iterator[Any]]:
    def __iter__(self: Any) -> Iterator[Any]:
        recorder: LoaderRecorder = self.__dict__[_RECORDER]

        def begin() -> Iterator[Any]:
            _end_resumed(self, recorder)
            iteration = recorder.current = LoaderIteration(snapshot_of(self), lookahead_of(self))
            if recorder.replay is not None and recorder.replay.reseeds:
                recorder.replay.opened = iteration.before
            try:
                iterator = base.__iter__(self)  # type: ignore[attr-defined]
            finally:
                if recorder.replay is not None and recorder.replay.reseeds:
                    recorder.replay = None
            if not hasattr(iterator, "_num_yielded"):
                return _CountingIterator(iterator, iteration)
            setattr(iterator, _ITERATION, iteration)
            return iterator  # type: ignore[no-any-return]

        return _DeferredIterator(begin) if recorder.deferred() else begin()

    return __iter__


def _end_resumed(loader: Any, recorder: LoaderRecorder) -> None:
    """Reads on from the last batch of a resumed iteration, so that the loader notices its end.

    Lightning reads as many batches as a loader has, and so never sees its end. A loader that forgets its restored
    position only there (litData #770) would begin the next epoch at that position, or at its end.
    """
    iterator, recorder.resumed = recorder.resumed, None
    if iterator is not None and iterator.taken == length_of(loader) and next(iterator, None) is not None:
        log.warning(
            "exact resume: %s has more batches than its length says; one was dropped at the end of the resumed epoch",
            type(loader).__name__,
        )


def _recording_index_sampler(base: Any) -> property:
    def _index_sampler(self: Any) -> Any:
        return _RecordedIndexSampler(base._index_sampler.fget(self), self)

    return property(_index_sampler)


def _record_sampler(sampler: Any, loader: Any) -> None:
    """Makes a sampler of a stateful loader record the generator states when it starts.

    A sampler whose iterator saves its own state is not recorded, because it needs no record.
    """
    base = type(sampler)

    def __iter__(self: Any) -> Iterator[Any]:
        recorder = recorder_of(loader)
        if recorder is None or recorder.current is None:
            return base.__iter__(self)  # type: ignore[no-any-return]
        replay, iteration = recorder.replay, recorder.current
        if replay is not None and replay.opened is not None:
            # Each time, because torchdata opens a sampler several times.
            restore_to(loader, replay.opened, only_indices=True)
        opened = snapshot_of(loader)
        indices = base.__iter__(self)
        if is_stateful(indices):
            return indices  # type: ignore[no-any-return]
        iteration.opened = opened
        return _StatefulLoaderIndices(indices, loader, iteration, replay.begun if replay is not None else None)

    names = {"__iter__": __iter__, "__reduce_ex__": _reduce_to_base(base), "_resiliency_base": base}
    names |= {"__module__": base.__module__, "__qualname__": base.__qualname__}
    if not hasattr(base, "_resiliency_base") and hasattr(base, "__iter__") and hasattr(sampler, "__dict__"):
        sampler.__class__ = type(base.__name__, (base,), names)


def _empty(kind: type) -> Any:
    return object.__new__(kind)


def _reduce_to_base(base: Any) -> Callable[[Any, Any], Any]:
    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        # Pickle the loader as its original class. It is pickled for spawned workers if collate_fn is its bound method.
        parts = list(base.__reduce_ex__(self, protocol))
        if parts[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
            parts[:2] = _empty, (base,)
        if len(parts) > 2 and isinstance(parts[2], dict):
            parts[2] = {key: value for key, value in parts[2].items() if key != _RECORDER}
        return tuple(parts)

    return __reduce_ex__


# ---- generators


def workers_of(loader: Any) -> int:
    """Number of worker processes of a loader; 0 also for a loader without such a setting."""
    return int(getattr(loader, "num_workers", 0) or 0)


def length_of(loader: Any) -> int | None:
    """The number of batches of a loader; None when it has no length."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def lookahead_of(loader: Any) -> int:
    """The largest number of batches by which the sampler may be ahead of the training loop."""
    return workers_of(loader) * int(getattr(loader, "prefetch_factor", None) or 2) + 1


def samplers_of(loader: Any, *, inner: bool = True) -> list[Any]:
    """The samplers of a loader, outermost first; with ``inner`` also those that Lightning wrapped for several ranks."""
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


def snapshot_of(loader: Any) -> dict[str, Any]:
    """Copies of the states of the process's generators and of those that the loader's objects own."""
    return {"rng": rng.snapshot(), "generators": states_of(loader)}


def restore_to(loader: Any, saved: dict[str, Any], *, only_indices: bool = False) -> None:
    """Sets the generators to the states that :func:`snapshot_of` returned.

    ``only_indices``: of the loader's own, only those that choose indices.
    """
    rng.restore(saved["rng"])
    set_states(loader, saved["generators"], only_indices=only_indices)


def digest_of(index: Any) -> int | None:
    """CRC-32 of the repr of indices; None when ``index`` is None or its repr contains memory addresses."""
    if index is None:
        return None
    text = repr(index)
    return None if " at 0x" in text else zlib.crc32(text.encode())
