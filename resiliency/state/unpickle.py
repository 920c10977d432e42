"""Reads a pickled structure back."""

from __future__ import annotations

import io
import logging
import pickle
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.storage import TypedStorage, UntypedStorage

from resiliency.errors import ConfigError
from resiliency.state.harmless import harmless_classes
from resiliency.state.plain_pickle import NotPlainPickle, load_plain

__all__ = ["unpickle"]

logger = logging.getLogger(__name__)

# Torch does not annotate them.
_typed_storage: Any = TypedStorage
_torch_utils: Any = torch._utils


def unpickle(
    data: bytes, storage: Callable[[str, int], UntypedStorage], *, allow_pickle: bool = False, filled: bool = False
) -> tuple[Any, Counter[str]]:
    """The tree of a pickled structure; and, by storage key, how many of its tensors and storages use that storage.

    Args:
        storage: returns the storage of a key, with at least the given number of bytes.
        allow_pickle: False: load only what ``torch.load(weights_only=True)`` would, which honours
            ``torch.serialization.add_safe_globals``. True: load any class; only for files you trust, because it can run
            code.
        filled: the storages have their values. Sparse tensors are validated then when ``torch.load`` would do it.

    Raises:
        pickle.UnpicklingError: a class may not be loaded; torch's message says how to allow it.
        ConfigError: the data is not the pickle of a checkpoint.
    """
    uses: Counter[str] = Counter()

    def persistent_load(reference: Any) -> Any:
        if not isinstance(reference, tuple) or len(reference) != 5 or reference[0] not in ("storage", b"storage"):
            raise ConfigError(f"the structure refers to {reference!r}, which is no storage")
        _, kind, key, _, numel = reference
        key = str(key)
        uses[key] += 1
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind._dtype  # the property ``dtype`` would warn
        return _typed_storage(wrap_storage=storage(key, numel * dtype.itemsize), dtype=dtype, _internal=True)

    try:
        return load_plain(data, storage)
    except NotPlainPickle as error:
        logger.debug("the structure is left to torch's unpickler, which is slower: %s", error)
    unpickler: Any
    if allow_pickle:
        unpickler = pickle.Unpickler(io.BytesIO(data), encoding="utf-8")  # noqa: S301 - the caller vouches for the file
    else:
        from torch._weights_only_unpickler import Unpickler

        unpickler = Unpickler(io.BytesIO(data), encoding="utf-8")
    unpickler.persistent_load = persistent_load
    try:
        with harmless_classes():
            tree = unpickler.load()
        if filled:
            _torch_utils._validate_loaded_sparse_tensors()
        return tree, uses
    finally:
        # Those without values are not for the next torch.load to validate.
        _torch_utils._sparse_tensors_to_validate.clear()
