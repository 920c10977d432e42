"""Finds the adapter of a strategy."""

from __future__ import annotations

from typing import Any

from resiliency.plugins.strategies.base import StrategyAdapter
from resiliency.plugins.strategies.replicated import ReplicatedAdapter
from resiliency.plugins.strategies.sharded import ShardedAdapter

__all__ = ["ADAPTERS", "adapter_for"]

#: The first one that supports a strategy is used.
ADAPTERS: tuple[StrategyAdapter, ...] = (ReplicatedAdapter(), ShardedAdapter())


def adapter_for(strategy: Any) -> StrategyAdapter | None:
    """The adapter of a Lightning strategy; None when the engine does not support the strategy."""
    return next((adapter for adapter in ADAPTERS if adapter.supports(strategy)), None)
