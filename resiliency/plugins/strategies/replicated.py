"""Adapter for strategies that keep the whole model on every rank: a single device, and distributed data parallel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import Parameter, is_lazy

from resiliency.checkpoint.lightning_forms import dumped_form, with_names
from resiliency.checkpoint.read_plan import ReadPlanner
from resiliency.plugins import _lightning
from resiliency.plugins.strategies.base import TensorRules

__all__ = ["ReplicatedAdapter", "local_part"]

#: Strategies for which ``dump_checkpoint`` returns the whole, unsharded state on every rank, with live tensors.
_SUPPORTED = frozenset({"SingleDeviceStrategy", "DDPStrategy"})
#: Strategies that shard; listed because some of them derive from a supported strategy.
_UNSUPPORTED = frozenset(
    {"FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy", "XLAStrategy", "MegatronStrategy"}
)


class ReplicatedAdapter:
    """Adapter of ``SingleDeviceStrategy``, ``DDPStrategy`` and strategies derived from them that do not shard."""

    is_sharded = False

    def supports(self, strategy: Any) -> bool:
        """False for a derived strategy that writes its checkpoints itself: it may encrypt them, say."""
        names = {cls.__name__ for cls in type(strategy).__mro__}
        return bool(names & _SUPPORTED) and not names & _UNSUPPORTED and not _lightning.has_own_writes(strategy)

    def dump_state(self, trainer: Any, *, weights_only: bool) -> dict[str, Any]:
        with trainer.profiler.profile("save_checkpoint"):
            dumped: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only)
        return dumped

    def stored_state(self, trainer: Any, checkpoint: dict[str, Any]) -> dict[str, Any]:
        return checkpoint

    def tensor_rules(self, trainer: Any) -> TensorRules:
        """Parameters and optimizer state are replicated. Other tensors are not, because buffers differ between DDP
        ranks until the next forward, and tensors of callbacks may differ.

        Trained parameters and their optimizer state may be copied late, because they change only in the optimizer step.
        Parameters that belong to no optimizer may not, because they may be moving averages, which change in any hook or
        in forward. Nothing is copied late when an optimizer runs inside backward.
        """
        module = trainer.lightning_module
        replicated = _addresses(filter(_has_data, module.parameters()))
        stepped: set[int] = set()
        in_backward = False
        for optimizer in trainer.optimizers:
            for group in getattr(optimizer, "param_groups", ()):
                for parameter in filter(_has_data, group["params"]):
                    in_backward |= _is_stepped_in_backward(parameter)
                    if parameter.requires_grad:
                        stepped |= _addresses([parameter])
            for state in getattr(optimizer, "state", {}).values():
                if isinstance(state, Mapping):
                    own = _addresses(value for value in state.values() if isinstance(value, Tensor))
                    stepped |= own
                    replicated |= own
        if in_backward:
            stepped.clear()
        return TensorRules(
            may_copy_late=lambda tensor: tensor.data_ptr() in stepped,
            is_replicated=lambda tensor: tensor.data_ptr() in replicated,
        )

    def expected_tensors(self, trainer: Any) -> dict[str, Tensor]:
        """Leaves out parameters of lazy modules, which have no shape yet, and tensors that are not plain."""
        tensors: dict[str, Tensor] = {}
        for name, value in trainer.lightning_module.state_dict().items():
            value = local_part(value)
            if _is_plain(value):
                tensors[f"state_dict/{name}"] = _without_values(value)
        for index, optimizer in enumerate(trainer.optimizers):
            parameters: Iterable[Tensor] = (p for group in optimizer.param_groups for p in group["params"])
            for position, parameter in enumerate(map(local_part, parameters)):
                if not _is_plain(parameter):
                    continue
                for name in _moments(optimizer):
                    key = f"optimizer_states/{index}/state/{position}/{name}"
                    tensors[key] = _without_values(parameter)
        return tensors

    def target_state(self, trainer: Any) -> ReadPlanner | None:
        return None

    def load_state(self, trainer: Any, state: dict[str, Any], *, allow_pickle: bool) -> dict[str, Any]:
        """Lightning puts everything into its place; of a sharded state it needs the form that it dumps itself."""
        checkpoint = dumped_form(state, allow_pickle=allow_pickle)
        if checkpoint is not state:
            names = trainer.lightning_module.state_dict().keys()
            checkpoint["state_dict"] = with_names(checkpoint["state_dict"], names)
        return checkpoint


def local_part(value: Any) -> Any:
    """The part of a DTensor that this rank holds, without a copy; any other value itself."""
    return value.to_local() if hasattr(value, "to_local") else value


def _has_data(tensor: Tensor) -> bool:
    """False for a parameter or buffer of a lazy module that has not run its first forward yet."""
    return not is_lazy(tensor)


def _is_plain(value: Any) -> bool:
    """True for a tensor that can be described on the meta device: no subclass, not sparse, nested or quantized."""
    return (
        type(value) in (Tensor, Parameter)
        and value.layout is torch.strided
        and not value.is_nested
        and not value.is_quantized
    )


def _without_values(tensor: Tensor) -> Tensor:
    """A tensor on the meta device with as many bytes as a save stores: of an expanded tensor, its small storage."""
    held = tensor.untyped_storage().nbytes()
    if held < tensor.nbytes:
        return torch.empty(held, dtype=torch.uint8, device="meta")
    return torch.empty_like(tensor, device="meta")


def _addresses(tensors: Iterable[Tensor]) -> set[int]:
    """The addresses of the tensors' data, of a DTensor those of its local part. Wrappers, sparse tensors and those with
    a freed storage have none and are left out."""
    found = set()
    for tensor in tensors:
        try:
            found.add(local_part(tensor.detach()).data_ptr())
        except RuntimeError:  # torch raises it for tensors without a storage
            continue
    found.discard(0)
    return found


def _is_stepped_in_backward(parameter: Any) -> bool:
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None)) or hasattr(
        parameter, "_in_backward_optimizers"
    )


def _moments(optimizer: Any) -> list[str]:
    """Names of the parameter-sized tensors that an optimizer keeps per parameter. Before its first step they are
    guessed from its settings; [] when that is impossible."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    for state in getattr(optimizer, "state", {}).values():
        if isinstance(state, Mapping) and state:
            return [name for name, value in state.items() if isinstance(value, Tensor) and value.dim() > 0]
    defaults = getattr(optimizer, "defaults", {})
    if "betas" in defaults:
        return ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if defaults.get("amsgrad") else [])]
    if defaults.get("momentum"):
        return ["momentum_buffer"]
    return []
