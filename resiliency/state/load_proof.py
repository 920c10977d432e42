"""Checks, at the save, that a saved state can be loaded: a start that resumes would find out too late."""

from __future__ import annotations

import mmap
import pickle
import re
from typing import Any

import torch
from torch.storage import UntypedStorage

from resiliency.state.plain_pickle import PLAIN_NAMES
from resiliency.state.unpickle import unpickle

__all__ = ["LoadProof"]

_untyped_storage: Any = UntypedStorage  # torch does not annotate it

#: A class or function named in a pickle. A string in the state may look the same; it only adds a name.
_NAMED = re.compile(rb"c([\w.]{1,200})\n([\w.]{1,200})\n")
#: Bytes of the largest structure that is loaded. Torch's unpickler, written in Python, takes a second for 5 MB, and the
#: training thread would have to share the interpreter with it.
_LARGEST = 1 << 20
#: Linux flag: reserve no swap space for memory that is never written.
_MAP_NORESERVE = 0x4000


class LoadProof:
    """Loads a pickled structure whenever it names something new. Thread: one at a time."""

    def __init__(self) -> None:
        self._proven = {(module.encode(), name.encode()) for module, name in PLAIN_NAMES}
        self._zeros = mmap.mmap(-1, 1)

    def refusal(self, structure: bytes) -> str:
        """Why a load would refuse this structure, as ``torch.load(weights_only=True)`` would, which honours
        ``torch.serialization.add_safe_globals``; "" when it would not, when the structure names nothing new, or when it
        is larger than 1 MiB: tensors count by their descriptions, large Python objects by their pickle.

        Blocks: for as long as a load of the structure takes. No bytes of tensors are read; zeros stand in for them and
            take no memory.
        """
        named = set(_NAMED.findall(structure))
        if named <= self._proven or len(structure) > _LARGEST:
            return ""
        self._proven |= named
        try:
            unpickle(structure, self._storage)
        except pickle.UnpicklingError as error:
            return str(error)
        except Exception:  # Boundary: a user's class may fail on the zeros; that proves nothing.
            return ""
        return ""

    def _storage(self, _: str, nbytes: int) -> UntypedStorage:
        if not nbytes:
            nothing: UntypedStorage = _untyped_storage(0)
            return nothing
        if nbytes > len(self._zeros):
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            self._zeros = mmap.mmap(-1, nbytes, flags=flags)
        zeros: UntypedStorage = torch.frombuffer(self._zeros, dtype=torch.uint8, count=nbytes).untyped_storage()
        return zeros
