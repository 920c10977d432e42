"""The checkpoint engine: the classes that users of plain torch use.

The names below are loaded when first used (PEP 562), so that importing this package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resiliency.checkpoint.checkpointer import Checkpointer
    from resiliency.checkpoint.coordinator import Coordinator, StoreCoordinator
    from resiliency.checkpoint.options import CheckpointerOptions, LocalTierOptions, RemoteTierOptions
    from resiliency.checkpoint.read_plan import Read
    from resiliency.checkpoint.restore import Restored
    from resiliency.checkpoint.ticket import Outcome, Ticket
    from resiliency.checkpoint.write_plan import WriteChunk, WritePlan
    from resiliency.events import EventSink
    from resiliency.storage.interval import Interval
    from resiliency.storage.stage import Stage
    from resiliency.storage.step_id import StepId

__all__ = [
    "Checkpointer",
    "CheckpointerOptions",
    "Coordinator",
    "EventSink",
    "Interval",
    "LocalTierOptions",
    "Outcome",
    "Read",
    "RemoteTierOptions",
    "Restored",
    "Stage",
    "StepId",
    "StoreCoordinator",
    "Ticket",
    "WriteChunk",
    "WritePlan",
]

_HOME = {
    "Checkpointer": "resiliency.checkpoint.checkpointer",
    "CheckpointerOptions": "resiliency.checkpoint.options",
    "Coordinator": "resiliency.checkpoint.coordinator",
    "EventSink": "resiliency.events",
    "Interval": "resiliency.storage.interval",
    "LocalTierOptions": "resiliency.checkpoint.options",
    "Outcome": "resiliency.checkpoint.ticket",
    "Read": "resiliency.checkpoint.read_plan",
    "RemoteTierOptions": "resiliency.checkpoint.options",
    "Restored": "resiliency.checkpoint.restore",
    "Stage": "resiliency.storage.stage",
    "StepId": "resiliency.storage.step_id",
    "StoreCoordinator": "resiliency.checkpoint.coordinator",
    "Ticket": "resiliency.checkpoint.ticket",
    "WriteChunk": "resiliency.checkpoint.write_plan",
    "WritePlan": "resiliency.checkpoint.write_plan",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
