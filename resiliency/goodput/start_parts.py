"""What a start or restart is made of, in the order in which it happens. Pure."""

from __future__ import annotations

from enum import Enum

__all__ = ["PART_LABELS", "StartPart"]


class StartPart(str, Enum):
    """Name of a part as it stands in JSON."""

    RANKS_END = "ranks_end"
    PROCESSES = "processes"
    IMPORTS = "imports"
    GROUP = "group"
    MODEL = "model"
    FIRST_BATCH = "first_batch"
    OTHER = "other"


#: For tables. A part ends where the next one begins; OTHER is what the log does not split.
PART_LABELS = {
    StartPart.RANKS_END: "other ranks end",  # noticed, until the launcher starts ranks; crash loops wait
    StartPart.PROCESSES: "processes up",  # until the script begins
    StartPart.IMPORTS: "imports and script",  # until it makes our callback
    StartPart.GROUP: "trainer and process group",  # until the checkpointer is opened
    StartPart.MODEL: "checkpointer and model",  # until a checkpoint is loaded, or the first batch
    StartPart.FIRST_BATCH: "first batch",  # after the load, until the first batch
    StartPart.OTHER: "not split",
}
