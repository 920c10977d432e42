"""Adapter for Lightning's ``ModelParallelStrategy``: FSDP2, tensor parallelism and both, whose parameters are DTensors.

The live DTensors are saved and filled, each rank its own part. Lightning itself copies all of them to the host before
it saves.
"""

from __future__ import annotations

import importlib
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from resiliency.checkpoint.lightning_forms import (
    dumped_form,
    optimizer_key,
    parameter_names,
    plain_name,
    sharded_form,
)
from resiliency.checkpoint.read_plan import ReadPlan, ReadPlanner, plan_new, plan_reads
from resiliency.errors import ConfigError
from resiliency.plugins.strategies.base import TensorRules
from resiliency.plugins.strategies.replicated import ReplicatedAdapter
from resiliency.state.tree import keyed_leaves
from resiliency.storage.shard_file import Chunk

__all__ = ["ShardedAdapter"]

_OF_OPTIMIZER = re.compile(r"optimizer_\d+/")


class ShardedAdapter(ReplicatedAdapter):
    """Adapter of ``ModelParallelStrategy`` with ``save_distributed_checkpoint=True``, and of derived strategies."""

    is_sharded = True

    def supports(self, strategy: Any) -> bool:
        names = {cls.__name__ for cls in type(strategy).__mro__}
        return "ModelParallelStrategy" in names and bool(strategy._save_distributed_checkpoint)

    def dump_state(self, trainer: Any, *, weights_only: bool) -> dict[str, Any]:
        with _live(trainer.strategy):
            return super().dump_state(trainer, weights_only=weights_only)

    def stored_state(self, trainer: Any, checkpoint: dict[str, Any]) -> dict[str, Any]:
        return sharded_form(checkpoint, keeps_meta=trainer.is_global_zero)

    def tensor_rules(self, trainer: Any) -> TensorRules:
        """Of plain tensors, such as buffers, rank 0's are saved, as with DDP."""
        return replace(super().tensor_rules(trainer), is_replicated=lambda tensor: False)

    def target_state(self, trainer: Any) -> ReadPlanner:
        """Fills the live parameters and optimizer states, which an optimizer makes now if it has none yet. Everything
        else that a replicated checkpoint holds is made anew."""
        optimizers = [_optimizer_state(trainer.strategy, optimizer) for optimizer in trainer.optimizers]
        names = [parameter_names(state) for state in optimizers]
        tree = {"state_dict": _model_state(trainer.strategy)}
        tree |= {optimizer_key(index): state for index, state in enumerate(optimizers)}
        live = keyed_leaves(tree)
        frozen = {plain_name(name) for name, p in trainer.strategy.model.named_parameters() if not p.requires_grad}

        def plan(stored: Sequence[Chunk]) -> ReadPlan:
            keys = {chunk.key: _key_here(chunk.key, names) for chunk in stored}
            wanted = {key: live[here] for key, here in keys.items() if here in live}
            for key, here in keys.items():
                if key not in wanted and _OF_OPTIMIZER.match(here) and optimizers:
                    _refuse_unless_frozen(key, here, frozen)
            rest = plan_new(lambda key: not (key.startswith("state_dict/") or _OF_OPTIMIZER.match(keys[key])))(stored)
            return ReadPlan(
                reads=[*plan_reads(wanted, stored), *rest.reads], tensors={**wanted, **rest.tensors}, partial=True
            )

        return plan

    def load_state(self, trainer: Any, state: dict[str, Any], *, allow_pickle: bool) -> dict[str, Any]:
        """The tensors are the live ones already; this restores numbers, such as the learning rate."""
        for index, optimizer in enumerate(trainer.optimizers):
            key = optimizer_key(index)
            if key in state:
                state[key] = _in_order_of(_optimizer_state(trainer.strategy, optimizer), state[key])
        checkpoint = dict(dumped_form(state, allow_pickle=allow_pickle))
        weights = {plain_name(name): value for name, value in checkpoint.pop("state_dict").items()}
        options = _torch().StateDictOptions(strict=trainer.lightning_module.strict_loading)
        _torch().set_model_state_dict(trainer.strategy.model, weights, options=options)
        saved = checkpoint.pop("optimizer_states", [])
        for optimizer, own in itertools.zip_longest(trainer.optimizers, saved[: len(trainer.optimizers)]):
            if own is None:
                optimizer.state.clear()  # target_state() has made it
                continue
            trained = [parameter.requires_grad for group in optimizer.param_groups for parameter in group["params"]]
            # Of a parameter that is frozen now, nothing was filled.
            kept = {
                number: value for number, value in own["state"].items() if number < len(trained) and trained[number]
            }
            optimizer.load_state_dict({**own, "state": kept})
        return checkpoint


def _key_here(key: str, names: Sequence[Sequence[str]]) -> str:
    """The key under which this job has what is stored under ``key``: without the names of wrappers, and with the
    parameter's name where a replicated checkpoint has its number.

    Args:
        names: of the parameters of each optimizer.
    """
    kind, *parts = key.split("/")
    if kind == "optimizer_states":
        index, *parts = parts
        kind = optimizer_key(int(index))
        if parts[0] == "state" and int(index) < len(names):
            parts[1] = str(dict(enumerate(names[int(index)])).get(int(parts[1]), parts[1]))
    return "/".join([kind, *map(plain_name, parts)])


def _refuse_unless_frozen(key: str, here: str, frozen: Collection[str]) -> None:
    """Refuses the state of a trained parameter that the optimizer of this job does not have: it would be lost.

    Raises:
        ConfigError: it is such a state.
    """
    if not any(f"/state/{name}/" in here for name in frozen):
        raise ConfigError(
            f"the checkpoint holds the optimizer state {key!r}, which the optimizer of this job has not made for its"
            " parameters; use the same optimizer with the same parameters"
        )


def _in_order_of(own: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The saved state of an optimizer with the parameters of each group in the order in which the job's optimizer has
    them, because torch matches them by their place."""
    place = {name: number for number, name in enumerate(parameter_names(own))}
    groups = [
        {**group, "params": sorted(group["params"], key=lambda name: place.get(name, len(place)))}
        for group in saved["param_groups"]
    ]
    return {**saved, "param_groups": groups}


@contextmanager
def _live(strategy: Any) -> Iterator[None]:
    """Within the block, the strategy dumps its live DTensors."""
    strategy.lightning_module_state_dict = lambda: _model_state(strategy)
    strategy.optimizer_state = lambda optimizer: _optimizer_state(strategy, optimizer)
    try:
        yield
    finally:
        del strategy.lightning_module_state_dict, strategy.optimizer_state


def _model_state(strategy: Any) -> dict[str, Any]:
    return dict(_torch().get_model_state_dict(strategy.model))


def _optimizer_state(strategy: Any, optimizer: Any) -> dict[str, Any]:
    optimizer = getattr(optimizer, "_optimizer", optimizer)
    return dict(_torch().get_optimizer_state_dict(strategy.model, optimizer))


def _torch() -> Any:
    return importlib.import_module("torch.distributed.checkpoint.state_dict")  # takes a third of a second
