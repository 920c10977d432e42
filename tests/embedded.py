"""Looks into an agent that runs in a thread of this process."""

from __future__ import annotations

from resiliency.agent.core import HostAgent
from resiliency.checkpoint.checkpointer import Checkpointer

__all__ = ["host_agent"]


def host_agent(checkpointer: Checkpointer) -> HostAgent:
    """The agent of a checkpointer with ``agent="embedded"``."""
    embedded = checkpointer.session.client._embedded
    assert embedded is not None and embedded._running is not None
    agent = embedded._running.server._agent
    assert agent is not None
    return agent
