"""The stages of a save, as one enum for tickets, waits, outcomes, messages and events. Pure."""

from __future__ import annotations

from enum import Enum

__all__ = ["Stage"]


class Stage(str, Enum):
    """Stages of a save, in the order they are reached.

    On a remote tier a committed step is DURABLE at once. On a ramdisk a save is never more than COMMITTED, because a
    ramdisk does not survive a power loss.
    """

    #: All bytes of this rank's shard are in its file; the tensors may change.
    COPIED = "copied"
    #: This rank's record is written: the shard survives the death of the trainer.
    RECORDED = "recorded"
    #: The manifest is written: the step has all its shards and survives the death of every process.
    COMMITTED = "committed"
    #: The step survives a power loss of the host (fsynced, or stored by an object store).
    DURABLE = "durable"

    def __str__(self) -> str:
        return self.value

    def reached_by(self, other: Stage) -> bool:
        """True when a save that has reached ``other`` has also reached this stage."""
        order = list(Stage)
        return order.index(other) >= order.index(self)
