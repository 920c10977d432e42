"""Keeps an agent of an earlier attempt from changing what a later attempt sees: the check before each of its effects.

A process can be stopped between any two instructions and go on hours later, so a check alone is not enough. Whatever an
agent changes in the local tier goes through a folder of its own (``staging`` of
:class:`~resiliency.storage.tiers.local.LocalTier`): new files are made there and then moved into place, and files to
delete are first moved there. The check makes that folder and then reads the attempt number; the agent of a later
attempt writes its number and then removes the folder. So a move whose check passed either happened before the later
attempt looked, or fails, because a removed folder is never made again under the same name: another thread might be
about to use it. Two kinds of change are not moves: bytes that an agent appends to shard 0 of a step that is not
committed, during which it holds a lock on the file, and shard files of a step whose manifest has already been deleted.
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
#: Tries to remove a folder; another process may be making a file in it meanwhile.
_TRIES = 16


class Fence:
    """The fence of one agent. Thread: any."""

    def __init__(self, config: AgentConfig) -> None:
        self._config = config
        self._run = config.run_folder
        self._attempt = f"staging-a{config.attempt:04d}-{config.token}"
        self._lock = threading.Lock()
        self._name = ""

    @property
    def staging(self) -> str:
        """This agent's staging folder, relative to the tier, as the last check has made it."""
        return os.path.join(META_DIR, self._config.run, self._name or self._attempt)

    def check(self) -> None:
        """Call before each effect. Blocks: for one small read, and a listing of the run's folder.

        Raises:
            AgentError: a later attempt has started.
        """
        self._make_folder()
        newest = self._newest()
        if newest > self._config.attempt:
            self.release()
            raise AgentError(f"attempt {newest} of this job has started; attempt {self._config.attempt} is over")

    def cause(self, error: Exception) -> Exception:
        """What made an effect fail: that this attempt is over, if it is, otherwise ``error``.

        When a later attempt starts between a check and the move after it, the move finds that its staging folder is
        gone, and says only that.
        """
        if isinstance(error, AgentError):
            return error
        try:
            self.check()
        except AgentError as over:
            return over
        return error

    def _newest(self) -> int:
        newest = read_attempt(self._run)
        # An agent that was stopped while it started may have written its own number over a later one. It cannot have
        # removed the later agent's claim, which was made before.
        with suppress(OSError):
            newest = max(newest, largest_claim(self._run))
        return newest

    def _make_folder(self) -> None:
        with self._lock:
            if self._name and os.path.isdir(os.path.join(self._run, self._name)):
                return
            self._name = f"{self._attempt}-{secrets.token_hex(4)}"
            with suppress(OSError):  # the run's folder is gone, and then every move fails
                os.mkdir(os.path.join(self._run, self._name))

    def end_earlier(self) -> None:
        """Removes the staging folders of earlier attempts' agents; call it after writing this attempt's number.

        Raises:
            OSError: a folder cannot be removed.
        """
        for name in os.listdir(self._run):
            found = _STAGING.fullmatch(name)
            if found and found[1] != self._attempt and int(found[2]) <= self._config.attempt:
                _remove(os.path.join(self._run, name))

    def release(self) -> None:
        """Removes this agent's staging folder if it is empty; call it when the agent has nothing left to do."""
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
