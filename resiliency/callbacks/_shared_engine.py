"""An engine shared by callbacks of one trainer, with a check that late-copied tensors did not change."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import Tensor

from resiliency.callbacks._places import CheckpointPlaces
from resiliency.checkpoint.checkpointer import Checkpointer

__all__ = ["SharedEngine"]

logger = logging.getLogger(__name__)


class SharedEngine:
    """An open engine and its places.

    Threads: training thread.
    """

    def __init__(self, engine: Checkpointer, places: CheckpointPlaces) -> None:
        self.engine = engine
        self.places = places
        self.warm = False
        self._discarded: list[str] = []
        # Tensors being copied late and their version when the copy began, and the names of that save.
        self._copied_late: list[tuple[Tensor, int]] = []
        self._copied_names: tuple[str, ...] = ()

    def watch_late_copies(self, tensors: Sequence[Tensor], names: Sequence[str]) -> None:
        """Records the versions of tensors that a save copies late, so that :meth:`fence` notices early changes."""
        self._copied_late = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]
        self._copied_names = tuple(names)

    def fence(self) -> tuple[float, bool]:
        """Waits until no pending copy reads live tensors. Blocks: up to the engine's ``fence_timeout``.

        Returns:
            seconds waited, and False when a tensor changed while it was copied: then the save may contain values from
            before and after the change, and its names are discarded.
        """
        waited = self.engine.fence() if self.engine.pending else 0.0
        copied, self._copied_late = self._copied_late, []
        if all(tensor._version == version for tensor, version in copied):
            return waited, True
        self._discarded += self._copied_names
        logger.warning(
            "parameters changed between the end of a batch and the optimizer step, while checkpoint %s was being"
            " copied: it is given up, and from now on checkpoints are copied at once. Change parameters in"
            " Callback.on_train_batch_end or pass lazy=False",
            ", ".join(self._copied_names),
        )
        return waited, False

    def take_discarded_names(self) -> list[str]:
        """Returns the names of discarded saves, each once; the next save must replace them."""
        names, self._discarded = self._discarded, []
        return names
