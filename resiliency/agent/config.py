"""Settings of a host agent: equal on all ranks of a host in one attempt, sent in Hello."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from resiliency.storage.manifest import META_DIR

__all__ = ["AgentConfig", "TierSpec", "agent_address"]


@dataclass(frozen=True, kw_only=True)
class TierSpec:
    """Settings of one tier.

    Attributes:
        address: folder or URL.
        name: name in listings and events.
        keep, keep_named: which steps are kept, see :mod:`resiliency.storage.retention`.
        storage_options: passed to fsspec.
    """

    address: str
    name: str
    keep: int | None = None
    keep_named: bool = True
    storage_options: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Settings of an agent.

    Attributes:
        run, node: as in :mod:`resiliency.storage.manifest`.
        attempt, token: identity of this start of the job; the token has 6 hex digits.
        world_size: ranks of the job.
        local_ranks: global ranks on this host.
        shared: True when the local tier shows the records of every rank (one host, or a shared folder).
        local: the tier whose files the trainers map.
        durable: fsync the local tier (False on a ramdisk, where fsync does nothing).
        remotes: tiers to upload to.
        events: path of the agent's event log, None for none.
        drain_s: seconds that the agent may take to finish sealed saves after the last rank has disconnected.
        only_files: when the job ends in order, leave only checkpoint files, see :mod:`resiliency.storage.single_files`.
    """

    run: str
    node: str
    attempt: int
    token: str
    world_size: int
    local_ranks: tuple[int, ...]
    shared: bool
    local: TierSpec
    durable: bool
    remotes: tuple[TierSpec, ...] = ()
    events: str | None = None
    drain_s: float = 60.0
    only_files: bool = False

    @property
    def run_folder(self) -> str:
        """The run's folder in the local tier."""
        return os.path.join(self.local.address, META_DIR, self.run)

    @property
    def address(self) -> str:
        """Name of the agent's socket."""
        return agent_address(self.local.address, self.run, self.node)


def agent_address(directory: str, run: str, node: str) -> str:
    """Name of the socket of the agent that serves a run of this user in a directory on a host.

    It is in Linux' abstract namespace, so that a killed agent leaves no file behind.
    """
    identity = f"{os.getuid()}:{os.path.realpath(directory)}:{run}:{node}"
    return "\0resiliency-" + hashlib.blake2b(os.fsencode(identity), digest_size=12).hexdigest()
