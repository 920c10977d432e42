"""Fault tolerant training: near-free checkpoints, exact resume, goodput accounting.

The names below are loaded when first used (PEP 562): ``import resiliency`` alone imports neither torch nor Lightning.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from resiliency.callbacks.model_checkpoint import ModelCheckpoint
    from resiliency.checkpoint.checkpointer import Checkpointer, CheckpointerOptions, Restored, Ticket
    from resiliency.errors import (
        AgentError,
        ConfigError,
        CorruptShard,
        NoCheckpointFound,
        ResiliencyError,
        TierError,
        Timeout,
        TornSnapshot,
    )

__version__ = "0.1.0"

__all__ = [
    "AgentError",
    "Checkpointer",
    "CheckpointerOptions",
    "ConfigError",
    "CorruptShard",
    "ModelCheckpoint",
    "NoCheckpointFound",
    "ResiliencyError",
    "Restored",
    "Ticket",
    "TierError",
    "Timeout",
    "TornSnapshot",
    "__version__",
]

_HOME = {
    "AgentError": "resiliency.errors",
    "Checkpointer": "resiliency.checkpoint.checkpointer",
    "CheckpointerOptions": "resiliency.checkpoint.checkpointer",
    "ConfigError": "resiliency.errors",
    "CorruptShard": "resiliency.errors",
    "ModelCheckpoint": "resiliency.callbacks.model_checkpoint",
    "NoCheckpointFound": "resiliency.errors",
    "ResiliencyError": "resiliency.errors",
    "Restored": "resiliency.checkpoint.checkpointer",
    "Ticket": "resiliency.checkpoint.checkpointer",
    "TierError": "resiliency.errors",
    "Timeout": "resiliency.errors",
    "TornSnapshot": "resiliency.errors",
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
