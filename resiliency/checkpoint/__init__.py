"""The checkpoint engine. Needs torch only, and of it nothing for :mod:`~resiliency.storage.manifest` and the tiers.

The names below are loaded when first used (PEP 562), so that the host agent can import the manifest without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resiliency.checkpoint.checkpointer import Checkpointer, CheckpointerOptions, Restored, Ticket

__all__ = ["Checkpointer", "CheckpointerOptions", "Restored", "Ticket"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module("resiliency.checkpoint.checkpointer"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
