"""What the engine must know of a Lightning strategy to save its checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

__all__ = ["StrategyAdapter", "TensorRules"]


@dataclass(frozen=True)
class TensorRules:
    """How the tensors of one state may be saved; asked with a tensor and its key, such as "state_dict/layer.weight".

    Valid until the next optimizer step.

    Attributes:
        may_copy_late: nothing changes the tensor before the next optimizer step, so it may be copied while the next
            forward and backward run.
        is_replicated: the tensor is equal on all ranks, so that each may write a part of it. Of other tensors that
            every rank has, rank 0 writes its own.
    """

    may_copy_late: Callable[[str, Tensor], bool]
    is_replicated: Callable[[str, Tensor], bool]


class StrategyAdapter(Protocol):
    """One kind of strategy. Stateless; called on every rank alike, in the training thread.

    A new kind is a class of this protocol and its entry in :data:`resiliency.plugins.strategies.registry.ADAPTERS`.
    """

    def supports(self, strategy: Any) -> bool:
        """True when this adapter serves the strategy. Decides by the names of its classes, so that no package of a
        strategy that is not used is imported."""

    def dump_state(self, trainer: Any, *, weights_only: bool) -> dict[str, Any]:
        """What a checkpoint of this moment holds on this rank, with live tensors in it. Runs the
        ``on_save_checkpoint`` hooks. Collective: as the strategy's own saving is."""

    def tensor_rules(self, trainer: Any) -> TensorRules:
        """Which tensors of the state dumped at this moment may be copied late and which are replicated."""

    def expected_tensors(self, trainer: Any) -> dict[str, Tensor]:
        """The large tensors a full checkpoint will hold on this rank once the optimizers have state, as meta tensors by
        key: shard files are made ready for them before training."""
