"""The parts of a start or restart, in the order in which they happen. Pure."""

from __future__ import annotations

from collections.abc import Container
from enum import Enum

__all__ = ["StartPart", "part_label"]


class StartPart(str, Enum):
    """Name of a part as it stands in JSON."""

    RANKS_END = "ranks_end"
    PROCESSES = "processes"
    IMPORTS = "imports"
    SCRIPT = "script"
    GROUP = "group"
    RENDEZVOUS = "rendezvous"
    AGENT = "agent"
    MODEL = "model"
    FIRST_BATCH = "first_batch"
    OTHER = "other"


#: Labels for tables. A part ends where the next one begins; OTHER is time that the log does not split.
_LABELS = {
    StartPart.RANKS_END: "other ranks end",  # from the notice until the launcher starts ranks; crash loops wait here
    StartPart.PROCESSES: "processes up",  # until the script begins
    StartPart.IMPORTS: "imports",
    StartPart.SCRIPT: "script",  # until it creates our callback, without the imports
    StartPart.GROUP: "trainer",  # until the checkpointer is opened, without the process group
    StartPart.RENDEZVOUS: "process group",  # init_process_group, which waits for all ranks
    StartPart.AGENT: "checkpointer and agent",  # until the checkpointer is open
    StartPart.MODEL: "model set-up",  # until a checkpoint is loaded, or the first batch
    StartPart.FIRST_BATCH: "first batch",  # after the load, until the first batch
    StartPart.OTHER: "not split",
}
#: Labels of parts that contain another part as well, when the log does not separate the two.
_WITH_ANOTHER = {
    StartPart.IMPORTS: (StartPart.SCRIPT, "imports and script"),
    StartPart.GROUP: (StartPart.RENDEZVOUS, "trainer and process group"),
}


def part_label(part: StartPart, parts: Container[StartPart]) -> str:
    """The label of a part in a table.

    Args:
        parts: all parts that the table shows.
    """
    another = _WITH_ANOTHER.get(part)
    return another[1] if another is not None and another[0] not in parts else _LABELS[part]
