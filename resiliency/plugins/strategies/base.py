"""The interface through which the engine saves checkpoints of a Lightning strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

__all__ = ["StrategyAdapter", "TensorRules"]


@dataclass(frozen=True)
class TensorRules:
    """How the tensors of one state may be saved.

    Valid until the next optimizer step.

    Attributes:
        may_copy_late: nothing changes the tensor before the next optimizer step, so it may be copied while the next
            forward and backward run.
        is_replicated: the tensor is equal on all ranks, so that each rank may write a part of it. When every rank has a
            tensor that is not replicated, rank 0's is saved.
    """

    may_copy_late: Callable[[Tensor], bool]
    is_replicated: Callable[[Tensor], bool]


class StrategyAdapter(Protocol):
    """Adapter of one kind of strategy. It has no state; all methods are called on every rank, in the training thread.

    To support a new kind, write a class of this protocol and add it to
    :data:`resiliency.plugins.strategies.registry.ADAPTERS`.
    """

    def supports(self, strategy: Any) -> bool:
        """True when this adapter supports the strategy. Decides by class names, so that packages of other strategies
        are not imported."""

    def dump_state(self, trainer: Any, *, weights_only: bool) -> dict[str, Any]:
        """This rank's current checkpoint, with live tensors, not copies. Runs the ``on_save_checkpoint`` hooks.
        Collective: when the strategy's own saving is."""

    def tensor_rules(self, trainer: Any) -> TensorRules:
        """Which tensors of the state just dumped may be copied late, and which are replicated."""

    def expected_tensors(self, trainer: Any) -> dict[str, Tensor]:
        """The large tensors that this rank's full checkpoints will contain once the optimizers have state, as meta
        tensors by key. Shard files for them are prepared before training."""
