"""The interface through which the engine saves and restores checkpoints of a Lightning strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from resiliency.checkpoint.read_plan import ReadPlanner

__all__ = ["StrategyAdapter", "TensorRules"]


@dataclass(frozen=True)
class TensorRules:
    """How the tensors of one state may be saved.

    Valid until the next optimizer step.

    Attributes:
        may_copy_late: nothing changes the tensor (of a DTensor: its local tensor) before the next optimizer step, so it
            may be copied while the next forward and backward run.
        is_replicated: the tensor is equal on all ranks, so that each rank may write a part of it. When every rank has a
            tensor that is not replicated, rank 0's is saved. Not asked about DTensors, whose placements say which ranks
            hold the same part.
    """

    may_copy_late: Callable[[Tensor], bool]
    is_replicated: Callable[[Tensor], bool]


class StrategyAdapter(Protocol):
    """Adapter of one kind of strategy. It has no state; all methods are called on every rank, in the training thread.

    To support a new kind, write a class of this protocol and add it to
    :data:`resiliency.plugins.strategies.registry.ADAPTERS`.

    Attributes:
        is_sharded: a rank holds only parts of the tensors. So rank 0 alone cannot write the state, and Lightning loads
            checkpoints with ``strategy.load_checkpoint``, not with the CheckpointIO plugin.
    """

    is_sharded: bool

    def supports(self, strategy: Any) -> bool:
        """True when this adapter supports the strategy; its own methods for saving are then not called. Decides by
        class names, so that packages of other strategies are not imported."""

    def dump_state(self, trainer: Any, *, weights_only: bool) -> dict[str, Any]:
        """This rank's current checkpoint, as Lightning dumps it, with live tensors, not copies. Runs the
        ``on_save_checkpoint`` hooks. Collective: when the strategy's own saving is."""

    def stored_state(self, trainer: Any, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """The state that the engine stores for a dumped checkpoint."""

    def tensor_rules(self, trainer: Any) -> TensorRules:
        """Which tensors of the state just dumped may be copied late, and which are replicated."""

    def expected_tensors(self, trainer: Any) -> dict[str, Tensor]:
        """The large tensors that this rank's full checkpoints will contain once the optimizers have state, as meta
        tensors by key. Shard files for them are prepared before training."""

    def target_state(self, trainer: Any) -> ReadPlanner | None:
        """Plans which stored tensors a restore fills in place, such as live parameters. None: each rank gets the whole
        state in new CPU tensors. Called before every restore."""

    def load_state(self, trainer: Any, state: dict[str, Any], *, allow_pickle: bool) -> dict[str, Any]:
        """Puts into the model and the optimizers what Lightning does not put there itself.

        Args:
            state: as restored, with the tensors of :meth:`target_state`. Any adapter may have stored it.
            allow_pickle: also load objects of any class.

        Returns:
            The checkpoint with which Lightning goes on.
        """
