"""Every touch of Lightning's private parts that saving and resuming need, in one place.

Works on the trainer object alone, so that both namespaces and all versions from 2.2 are served. (What exact resume
needs of the loops is in :mod:`resiliency.plugins._rank_state`.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["dump_checkpoint", "expected_tensors", "intercept_resume", "is_supported", "lazy_pointers", "validation_follows"]

logger = logging.getLogger(__name__)

#: Strategies whose ``dump_checkpoint`` gives every rank the whole, unsharded state as live aliases.
_SUPPORTED = frozenset({"SingleDeviceStrategy", "DDPStrategy"})
_UNSUPPORTED = frozenset({"FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy", "XLAStrategy", "MegatronStrategy"})


def is_supported(strategy: Any) -> bool:
    """True when the engine can save what this strategy's checkpoints hold."""
    names = {cls.__name__ for cls in type(strategy).__mro__}
    return bool(names & _SUPPORTED) and not names & _UNSUPPORTED


def dump_checkpoint(trainer: Any, weights_only: bool) -> dict[str, Any]:
    """What Lightning would save, with live tensors in it. Runs the ``on_save_checkpoint`` hooks. On every rank."""
    dumped: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only)
    return dumped


def intercept_resume(trainer: Any, decide: Callable[[Any], Any]) -> None:
    """Lets ``decide(path)`` choose what the next fit resumes from: it gets what the user asked for (or None).

    ``ckpt_path`` is resolved before any callback hook runs, on every rank from its own file system; this is the first
    moment at which ranks can agree.
    """
    connector = trainer._checkpoint_connector
    original = connector.resume_start

    def resume_start(checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        del connector.resume_start  # only for this fit
        original(decide(checkpoint_path), *args, **kwargs)

    connector.resume_start = resume_start


def validation_follows(trainer: Any) -> bool:
    """True when a validation runs right after this batch; callbacks may swap weights for it before we could fence."""
    epoch_loop = trainer.fit_loop.epoch_loop
    check = getattr(epoch_loop, "_should_check_val_fx", None)
    if check is None or not getattr(trainer, "enable_validation", False):
        return False
    try:
        return bool(check(trainer.fit_loop._data_fetcher))
    except TypeError:
        return bool(check())  # before 2.3 it took no argument


def lazy_pointers(trainer: Any) -> set[int]:
    """Addresses of tensors that change only in the optimizer step: parameters and optimizer state.

    Empty when that cannot be relied on (an optimizer that runs inside backward).
    """
    module = trainer.lightning_module
    pointers: set[int] = set()
    for parameter in module.parameters():
        if getattr(parameter, "_post_accumulate_grad_hooks", None) or hasattr(parameter, "_in_backward_optimizers"):
            return set()
        pointers.add(parameter.data_ptr())
    for optimizer in trainer.optimizers:
        for state in getattr(optimizer, "state", {}).values():
            if isinstance(state, Mapping):
                pointers.update(value.data_ptr() for value in state.values() if isinstance(value, Tensor))
    return pointers


def expected_tensors(trainer: Any) -> dict[str, Tensor]:
    """The large tensors a full checkpoint will hold once the optimizers have state, as meta tensors, by state key."""
    tensors: dict[str, Tensor] = {}
    for name, value in trainer.lightning_module.state_dict().items():
        if isinstance(value, Tensor):
            tensors[f"state_dict/{name}"] = torch.empty_like(value, device="meta")
    for index, optimizer in enumerate(trainer.optimizers):
        parameters: Iterable[Tensor] = (p for group in optimizer.param_groups for p in group["params"])
        for position, parameter in enumerate(parameters):
            for name in _moments(optimizer):
                tensors[f"optimizer_states/{index}/state/{position}/{name}"] = torch.empty_like(parameter, device="meta")
    return tensors


def _moments(optimizer: Any) -> list[str]:
    """Names of the parameter-sized tensors an optimizer keeps per parameter, guessed before its first step."""
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
