"""How far a save has come. One enum for tickets, waits, outcomes, messages and events. Pure."""

from __future__ import annotations

from enum import Enum

__all__ = ["Stage"]


class Stage(str, Enum):
    """Stages of a save, in the order they are reached.

    A remote tier knows two of them: a step that is stored there whole is DURABLE there. A ramdisk is never more than
    COMMITTED, because nothing on it survives a power loss.
    """

    #: Every byte of this rank's shard is in its file; the tensors may change.
    COPIED = "copied"
    #: This rank's record is written: the shard survives the death of the trainer.
    RECORDED = "recorded"
    #: The manifest is written: the step is whole and survives the death of every process.
    COMMITTED = "committed"
    #: The step survives a power loss of the host (fsynced, or stored by an object store).
    DURABLE = "durable"

    def __str__(self) -> str:
        return self.value

    def reached_by(self, other: Stage) -> bool:
        """True when a save that has come to ``other`` has come to this stage too."""
        order = list(Stage)
        return order.index(other) >= order.index(self)
