"""Finds the random generators that the objects of a data loader own, and saves and restores their states.

Each is found once, under the shortest path that leads to it (``dataset.rng``), on the side of the data if possible, and
restored under that path. :mod:`resiliency.plugins.resume.generator_search` says what is found, and the bounds.
Everything here runs on the training thread and is not collective. Reading a state does not advance the generator.
"""

from __future__ import annotations

import logging
import random
import types
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from resiliency.plugins.resume.generator_search import (
    asks_its_nodes,
    attributes_of,
    is_stateful,
    of_the_process,
    search,
)
from resiliency.plugins.resume.plain import from_plain, to_plain

__all__ = ["OwnGenerator", "own_generators", "set_states", "states_of", "states_within"]

log = logging.getLogger(__name__)

#: Attributes of a DataLoader that choose the indices; all others take part in reading the samples.
_INDEX_SIDE = ("batch_sampler", "sampler", "generator")


@dataclass(frozen=True)
class OwnGenerator:
    """A generator found below a loader.

    Attributes:
        generator: the object whose state is kept; the bit generator of a numpy ``Generator``.
        chooses_indices: it was found only below a sampler (or a source node of torchdata) or as the loader's
            ``generator``.
        self_restored: an object whose own ``load_state_dict`` the loader calls is responsible for it.
    """

    generator: Any
    chooses_indices: bool
    self_restored: bool

    def state(self) -> Any:
        """The state as plain data: comparable with ``==``, 2.5 KB for Mersenne Twisters, 5 KB for torch's."""
        own = self.generator
        if isinstance(own, random.Random):
            version, words, gauss = random.Random.getstate(own)
            return version, array("I", words).tobytes(), gauss
        if isinstance(own, torch.Generator):
            return own.get_state().numpy().tobytes()
        return to_plain(own.state if hasattr(own, "state") else own.get_state(legacy=False))

    def set_state(self, state: Any) -> None:
        own = self.generator
        if isinstance(own, random.Random):
            version, words, gauss = state
            random.Random.setstate(own, (version, tuple(array("I", words)), gauss))
        elif isinstance(own, torch.Generator):
            own.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
        elif hasattr(own, "state"):
            own.state = from_plain(state)
        else:
            own.set_state(from_plain(state))


def own_generators(loader: Any) -> dict[str, OwnGenerator]:
    """The generators that the loader's objects own, by path.

    Blocks: 50 microseconds, and 2 per object below the loader; at most some milliseconds, see the bounds of the search.
    """
    own = attributes_of(loader)
    roots = {name: own[name] for name in own if not name.startswith("_resiliency") and name != "_iterator"}
    torchs = isinstance(loader, DataLoader)
    asks = torchs or asks_its_nodes(loader)  # these call the state_dict of what they hold
    opaque, seen = not asks and is_stateful(loader), {id(loader)} | of_the_process()
    index_side = {name: roots.pop(name) for name in _INDEX_SIDE if name in roots} if torchs else {}
    found = {
        one.path: OwnGenerator(one.generator, one.below_source, one.self_restored)
        for one in search(roots, seen, asking=asks, opaque=opaque)
    }
    for one in search(index_side, seen, asking=asks):  # what only it has
        found[one.path] = OwnGenerator(one.generator, True, one.self_restored)
    return found


def states_of(loader: Any) -> dict[str, Any]:
    """Copies of the states of the loader's own generators, by path."""
    return {path: own.state() for path, own in own_generators(loader).items()}


def states_within(iterator: Any, own: Mapping[str, OwnGenerator]) -> dict[str, Any]:
    """States of generators that only the suspended generator functions of an iterator hold, in local variables.

    They cannot be restored, but show whether samples that are read again come in the same order.

    Args:
        own: what :func:`own_generators` found for the iterator's loader; these are left out.
    """
    inner = getattr(getattr(iterator, "_dataset_fetcher", None), "dataset_iter", getattr(iterator, "_it", None))
    if not isinstance(inner, types.GeneratorType):
        return {}
    seen = {id(one.generator) for one in own.values()} | of_the_process()
    found = search({"iteration": inner}, seen)
    return {one.path: OwnGenerator(one.generator, False, one.self_restored).state() for one in found}


def set_states(loader: Any, saved: Any, *, only_indices: bool = False) -> None:
    """Sets the loader's own generators to the states that :func:`states_of` returned. Ignores paths that lead to no
    generator of that kind now.

    Args:
        saved: such states; or a list of torch's, as version 2 of the rank's state has them.
        only_indices: leave those that take part in reading the samples.
    """
    own = own_generators(loader)
    if isinstance(saved, Mapping):
        for path, state in saved.items():
            if path in own and (own[path].chooses_indices or not only_indices):
                _set(path, own[path], state)
        return
    given = [one.generator for path, one in own.items() if path == "generator" or one.chooses_indices]
    for generator, state in zip((one for one in given if isinstance(one, torch.Generator)), saved, strict=False):
        generator.set_state(state)


def _set(path: str, own: OwnGenerator, state: Any) -> None:
    try:
        own.set_state(state)
    except (ValueError, TypeError, RuntimeError, KeyError) as error:
        log.warning("exact resume: %s is of another kind than at the save, and starts anew: %s", path, error)
