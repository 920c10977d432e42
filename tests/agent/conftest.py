"""The tests of the agent look at its process: its start, parent, status and list of words."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def agents_of_this_room_are_started(started_agents: None) -> None:
    """And not forked as those of other tests are; see :mod:`tests.agent_forks`."""
