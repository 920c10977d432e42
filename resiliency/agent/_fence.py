"""Nobody from an earlier attempt changes what a later one sees: the check that stands before every effect of an agent.

A process can be stopped between any two instructions and go on hours later, so a check alone is not enough. What an
agent changes in the local tier goes through a folder of its attempt (``staging`` of
:class:`~resiliency.storage.tiers.local.LocalTier`): what is new is made there and then moved into its place, what is
deleted is moved there first. Each agent has a folder of its own. The check makes it and then reads the attempt; the
agent of a later attempt writes its number and then removes the folder. So a move of which the check was passed before
either was made before the later attempt looked, or fails: a folder that is gone is never made again under its name,
which another thread may be about to use. What is not moved are the bytes that an agent adds to shard 0 of its own step,
and shard files of a step that is deleted, whose manifest went before.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import threading
from contextlib import suppress

from resiliency.agent.config import AgentConfig
from resiliency.errors import AgentError
from resiliency.storage.attempts import read_attempt
from resiliency.storage.claims import largest_claim
from resiliency.storage.manifest import META_DIR

__all__ = ["Fence"]

logger = logging.getLogger(__name__)

_STAGING = re.compile(r"(staging-a(\d{4,18})-[0-9a-f]{6})(-[0-9a-f]{8})?")
#: Another process may be making something in the folder while it is removed.
_TRIES = 16


class Fence:
    """The attempt of an agent. Thread: any."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._run = os.path.join(config.local.address, META_DIR, config.run)
        self._attempt = f"staging-a{config.attempt:04d}-{config.token}"
        self._lock = threading.Lock()
        self._name = ""

    @property
    def staging(self) -> str:
        """The folder of this agent, relative to the tier, as the last check has left it."""
        return os.path.join(META_DIR, self._config.run, self._name or self._attempt)

    def check(self) -> None:
        """Blocks: one small read, and a listing of the run's folder.

        Raises:
            AgentError: a later attempt has started.
        """
        self._make_folder()
        where, run = self._config.local.address, self._config.run
        newest = read_attempt(where, run)
        # An agent that was stopped while it started may have written its own number over a later one. It cannot have
        # taken that one's claim, which came first.
        with suppress(OSError):
            newest = max(newest, largest_claim(where, run))
        if newest > self._config.attempt:
            self.release()
            raise AgentError(f"attempt {newest} of this job has started; attempt {self._config.attempt} is over")

    def _make_folder(self) -> None:
        with self._lock:
            if self._name and os.path.isdir(os.path.join(self._run, self._name)):
                return
            self._name = f"{self._attempt}-{secrets.token_hex(4)}"
            with suppress(OSError):  # the run's folder is gone, and then nothing can be moved
                os.mkdir(os.path.join(self._run, self._name))

    def end_earlier(self) -> None:
        """Takes their folders from the agents of earlier attempts, once the number of this one is written.

        Raises:
            OSError: one cannot be removed.
        """
        for name in os.listdir(self._run):
            found = _STAGING.fullmatch(name)
            if found and found[1] != self._attempt and int(found[2]) <= self._config.attempt:
                _remove(os.path.join(self._run, name))

    def release(self) -> None:
        """Removes the folder of this agent, when it has nothing left to do."""
        with self._lock, suppress(OSError):
            if self._name:
                os.rmdir(os.path.join(self._run, self._name))


def _remove(folder: str) -> None:
    for attempt in range(_TRIES):
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            if not os.path.lexists(folder):
                return
        except OSError:
            if attempt == _TRIES - 1:
                raise
        else:
            return
