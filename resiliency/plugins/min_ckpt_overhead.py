"""The older import path of ``MinCkptOverheadCheckpointIO``; see :mod:`resiliency.compat.checkpoint_io`."""

from __future__ import annotations

from resiliency.compat.checkpoint_io import adapter

__all__ = ["MinCkptOverheadCheckpointIO", "build"]  # noqa: F822 - built on first use

_adapter = adapter(__name__, "MinCkptOverheadCheckpointIO")
build, __getattr__ = _adapter.build, _adapter.attribute
