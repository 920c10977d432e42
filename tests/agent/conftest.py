"""The tests of the agent look at its process: its start, parent, status and list of words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from resiliency.agent.config import AgentConfig
from resiliency.agent.core import HostAgent
from resiliency.agent.messages import Notice
from resiliency.events import EventWriter


@pytest.fixture(autouse=True)
def agents_of_this_room_are_started(started_agents: None) -> None:
    """And not forked as those of other tests are; see :mod:`tests.agent_forks`."""


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[HostAgent, list[Notice]]]]:
    """Starts agents in this process, each with the notices that it has for its ranks, and closes them. ``told``: further
    arguments of the agent."""
    running: list[HostAgent] = []

    def start(config: AgentConfig, **told: Any) -> tuple[HostAgent, list[Notice]]:
        heard: list[Notice] = []
        events = EventWriter(run=config.run, attempt=config.attempt, rank=-1, host=config.node, sinks=())
        agent = HostAgent(config, lambda _, message: heard.append(message), events, **told)
        running.append(agent)
        agent.start()
        return agent, heard

    yield start
    for agent in running:
        agent.close()
