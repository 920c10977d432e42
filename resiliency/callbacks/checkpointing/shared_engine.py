"""A checkpoint engine shared by callbacks of one trainer; notices at the fence that a late copy was spoilt."""

from __future__ import annotations

import logging

from resiliency.callbacks.checkpointing.places import CheckpointPlaces
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
        self._torn = 0

    def fence(self) -> tuple[float, bool]:
        """Waits until no pending copy reads live tensors. Blocks: up to the engine's ``fence_timeout``.

        Returns:
            The seconds waited, and False when the engine has given up a save because tensors changed while they were
            copied. Neither files nor names of that save are left.
        """
        waited = self.engine.fence() if self.engine.pending else 0.0
        before, self._torn = self._torn, self.engine.torn
        if self._torn == before:
            return waited, True
        logger.warning(
            "parameters changed between the end of a batch and the optimizer step, while a checkpoint in %s was being"
            " copied: it is given up, and from now on checkpoints are copied at once. Change parameters in"
            " Callback.on_train_batch_end or pass lazy=False",
            self.places.dirpath,
        )
        return waited, False
