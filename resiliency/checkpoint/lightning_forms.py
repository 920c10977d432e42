"""The two forms of a Lightning checkpoint: as Lightning dumps it, and as it is stored when ranks hold parts of it.

The sharded form has the keys of Lightning's own distributed checkpoint folder: ``state_dict`` and ``optimizer_<index>``
hold the sharded tensors, by parameter name; ``meta.pt`` holds everything else, as the bytes that ``torch.save`` makes.
Nothing here needs Lightning.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Collection, Mapping
from typing import Any

import torch

from resiliency.checkpoint.stored_state import rank_state
from resiliency.errors import ConfigError
from resiliency.state.leaf_kinds import kind_of
from resiliency.state.tree import keyed_leaves

__all__ = ["META", "dumped_form", "optimizer_key", "parameter_names", "plain_name", "sharded_form", "with_names"]

#: Key of everything but model and optimizer state, and name of its file in Lightning's folder.
META = "meta.pt"

#: Parts of a parameter's name that a wrapper adds: of torch.compile, and of activation checkpointing.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


def plain_name(name: str) -> str:
    """A parameter's name without the parts that wrappers of its modules add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def with_names(state_dict: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The state of a model under the names that the model has, which may be wrapped or not where it was saved. A name
    that the model lacks stays."""
    own = {plain_name(name): name for name in names}
    return {own.get(plain_name(name), name): value for name, value in state_dict.items()}


def sharded_form(checkpoint: Mapping[str, Any], *, keeps_meta: bool) -> dict[str, Any]:
    """The sharded form of a dumped checkpoint. Only rank 0 ``keeps_meta``, because what ranks hold there may differ;
    the others make it too, so that all ranks refuse what rank 0 cannot store.

    Raises:
        ConfigError: something else than the model and the optimizers holds a part of a tensor.
        Exception: an object cannot be pickled; as ``torch.save``.
    """
    rest = dict(checkpoint)
    state: dict[str, Any] = {"state_dict": rest.pop("state_dict")}
    for index, optimizer in enumerate(rest.pop("optimizer_states", ())):
        state[optimizer_key(index)] = optimizer
    for key, leaf in keyed_leaves(rest).items():
        if not kind_of(leaf).replicated:
            raise ConfigError(
                f"the checkpoint holds {key!r}, a {type(leaf).__qualname__} of which each rank has a part; only the"
                " model and the optimizers may. Take it out in on_save_checkpoint"
            )
    data = io.BytesIO()
    torch.save(rest, data)
    return {**state, META: data.getvalue() if keeps_meta else b""}


def dumped_form(state: dict[str, Any], *, allow_pickle: bool) -> dict[str, Any]:
    """The checkpoint as Lightning dumps it, of a state in either form. Its optimizers number their parameters. Of the
    folder of Fabric, whose users choose the keys, all that they saved.

    Raises:
        pickle.UnpicklingError: it holds objects of classes that may not be loaded.
    """
    if META not in state:
        return state
    rest = state[META]  # of Lightning's own folder the tree, of this library's steps its bytes
    if isinstance(rest, bytes):
        rest = rank_state(rest, where=META, allow_pickle=allow_pickle)
    weights = "state_dict" if "state_dict" in state else "model"  # as FSDPStrategy calls it
    if weights not in state or (weights == "model" and "pytorch-lightning_version" not in rest):
        return {**rest, **{key: value for key, value in state.items() if key != META}}
    checkpoint = {**rest, "state_dict": state[weights]}
    if "lr_schedulers" in rest:  # not only the weights
        keys = itertools.takewhile(state.__contains__, map(optimizer_key, itertools.count()))
        checkpoint["optimizer_states"] = [_numbered(state[key]) for key in keys]
    return checkpoint


def optimizer_key(index: int) -> str:
    """The key of an optimizer in the sharded form."""
    return f"optimizer_{index}"


def _numbered(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an optimizer with the number of each parameter in place of its name, as torch's own."""
    numbers = {name: number for number, name in enumerate(parameter_names(optimizer))}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in optimizer["param_groups"]]
    return {
        **optimizer,
        # torch's distributed checkpoint leaves empty dicts out
        "state": {numbers[name]: value for name, value in optimizer.get("state", {}).items()},
        "param_groups": groups,
    }


def parameter_names(optimizer: Mapping[str, Any]) -> list[Any]:
    """The names or numbers of the parameters in an optimizer's state, in its order."""
    return [name for group in optimizer["param_groups"] for name in group["params"]]
