"""Nobody from an earlier attempt changes what a later one sees: the check that stands before every effect of an agent.

A process can be stopped between any two instructions and go on hours later. So the check is made again right before
each change of something shared: record, manifest, name, deletion, upload. What remains is the time between the check
and the change; what can happen in it is a change of the attempt's own step, one name, or the deletion of one step that
was due.
"""

from __future__ import annotations

from contextlib import suppress

from resiliency.agent.config import AgentConfig
from resiliency.errors import AgentError
from resiliency.storage.attempts import read_attempt
from resiliency.storage.claims import largest_claim

__all__ = ["Fence"]


class Fence:
    """The attempt of an agent. Thread: any."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config

    def check(self) -> None:
        """Blocks: one small read, and a listing of the run's folder.

        Raises:
            AgentError: a later attempt has started.
        """
        where, run = self._config.local.address, self._config.run
        newest = read_attempt(where, run)
        # An agent that was stopped while it started may have written its own number over a later one. It cannot have
        # taken that one's claim, which came first.
        with suppress(OSError):
            newest = max(newest, largest_claim(where, run))
        if newest > self._config.attempt:
            raise AgentError(f"attempt {newest} of this job has started; attempt {self._config.attempt} is over")
