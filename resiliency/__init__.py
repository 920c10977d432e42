"""Fault tolerant training: near-free checkpoints, exact resume, goodput accounting.

The names below are loaded when first used (PEP 562): ``import resiliency`` alone imports neither torch nor Lightning.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from resiliency._version import __version__

if TYPE_CHECKING:
    from resiliency.callbacks.autocheckpoint import AutoCheckpointCallback
    from resiliency.callbacks.model_checkpoint import ModelCheckpoint
    from resiliency.checkpoint import (
        Checkpointer,
        CheckpointerOptions,
        Interval,
        LocalTierOptions,
        Outcome,
        RemoteTierOptions,
        Restored,
        Stage,
        StepId,
        Ticket,
    )
    from resiliency.errors import (
        AgentError,
        ConfigError,
        CorruptShard,
        DirectoryInUse,
        NoCheckpointFound,
        ResiliencyError,
        TierError,
        Timeout,
        TornSnapshot,
        UnsupportedFormat,
    )


__all__ = [
    "AgentError",
    "AutoCheckpointCallback",
    "Checkpointer",
    "CheckpointerOptions",
    "ConfigError",
    "CorruptShard",
    "DirectoryInUse",
    "Interval",
    "LocalTierOptions",
    "ModelCheckpoint",
    "NoCheckpointFound",
    "Outcome",
    "RemoteTierOptions",
    "ResiliencyError",
    "Restored",
    "Stage",
    "StepId",
    "Ticket",
    "TierError",
    "Timeout",
    "TornSnapshot",
    "UnsupportedFormat",
    "__version__",
]

_HOME = {
    "AgentError": "resiliency.errors",
    "AutoCheckpointCallback": "resiliency.callbacks.autocheckpoint",
    "Checkpointer": "resiliency.checkpoint",
    "CheckpointerOptions": "resiliency.checkpoint",
    "ConfigError": "resiliency.errors",
    "CorruptShard": "resiliency.errors",
    "DirectoryInUse": "resiliency.errors",
    "Interval": "resiliency.checkpoint",
    "LocalTierOptions": "resiliency.checkpoint",
    "ModelCheckpoint": "resiliency.callbacks.model_checkpoint",
    "NoCheckpointFound": "resiliency.errors",
    "Outcome": "resiliency.checkpoint",
    "RemoteTierOptions": "resiliency.checkpoint",
    "ResiliencyError": "resiliency.errors",
    "Restored": "resiliency.checkpoint",
    "Stage": "resiliency.checkpoint",
    "StepId": "resiliency.checkpoint",
    "Ticket": "resiliency.checkpoint",
    "TierError": "resiliency.errors",
    "Timeout": "resiliency.errors",
    "TornSnapshot": "resiliency.errors",
    "UnsupportedFormat": "resiliency.errors",
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
