"""What trainer and host agent say to each other: JSON lines over a unix socket, and the settings both need.

Trainer to agent (``t``): ``hello seal complete delete rescan flush bye``. Agent to trainer: ``welcome refused
recorded committed durable failed free gone flushed``. Every message about a save carries ``step`` and ``serial``. Only
processes of the same user are heard (the socket's peer credentials are checked), and only JSON is read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from resiliency.errors import AgentError, ConfigError
from resiliency.storage.manifest import StepId

__all__ = ["MAX_SERIAL", "AgentConfig", "Framer", "TierSpec", "pack", "step_token"]

PROTOCOL_VERSION = 2
#: Largest serial: a step can be saved that many times and once more in one attempt.
MAX_SERIAL = 255
_MAX_LINE = 64 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class TierSpec:
    """A tier as told to the agent.

    Attributes:
        address: folder or URL.
        name: word for listings and events.
        keep, keep_named: what stays, see :mod:`resiliency.storage.retention`.
        storage_options: passed to fsspec.
    """

    address: str
    name: str
    keep: int | None = None
    keep_named: bool = True
    storage_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.keep is not None and self.keep < 1:
            raise ConfigError(
                f"tier {self.name!r}: keep={self.keep} would delete the checkpoint to resume from; pass 1 or more, or"
                " None"
            )


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """Everything an agent needs to know; equal for all ranks of a host in one attempt.

    Attributes:
        run, node: as in :mod:`resiliency.storage.manifest`.
        attempt, token: identity of this start of the job; the token has 6 hex digits.
        world_size: ranks of the job.
        local_ranks: global ranks on this host.
        shared: True when every rank's records can be seen in the local tier (one host, or a shared folder).
        local: the tier whose files the trainers map.
        durable: fsync the local tier (False on a ramdisk, where it means nothing).
        remotes: tiers to upload to.
        events: path of the agent's event log, None for none.
        drain_s: after the last trainer is gone: how long to finish what was sealed before ending.
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

    def step_id(self, message: Mapping[str, Any]) -> StepId:
        """Identity of the save a message speaks of; ``serial`` tells saves of the same step apart."""
        return StepId(message["step"], self.attempt, step_token(self.token, message["serial"]))

    def address(self) -> str:
        """Name of the socket (Linux abstract namespace: no file to leave behind)."""
        identity = f"{os.getuid()}:{os.path.realpath(self.local.address)}:{self.run}:{self.node}"
        return "\0resiliency-" + hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()

    def to_json(self) -> str:
        return json.dumps(
            {
                **{
                    k: getattr(self, k)
                    for k in ("run", "node", "attempt", "token", "world_size", "shared", "durable", "events", "drain_s")
                },
                "local_ranks": list(self.local_ranks),
                "local": _spec_dict(self.local),
                "remotes": [_spec_dict(spec) for spec in self.remotes],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> AgentConfig:
        data = json.loads(text)
        data["local_ranks"] = tuple(data["local_ranks"])
        data["local"] = TierSpec(**data["local"])
        data["remotes"] = tuple(TierSpec(**spec) for spec in data["remotes"])
        return cls(**data)


def step_token(token: str, serial: int) -> str:
    """Token of the ``serial``-th save of one step in an attempt whose token (6 hex digits) this is."""
    assert 0 <= serial <= MAX_SERIAL
    return f"{token}{serial:02x}"


def _spec_dict(spec: TierSpec) -> dict[str, Any]:
    options = None if spec.storage_options is None else dict(spec.storage_options)
    return {
        "address": spec.address,
        "name": spec.name,
        "keep": spec.keep,
        "keep_named": spec.keep_named,
        "storage_options": options,
    }


def pack(message: Mapping[str, Any]) -> bytes:
    """One message as a line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class Framer:
    """Cuts a byte stream into messages. Thread: one."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yields the messages completed by ``data``.

        Raises:
            AgentError: something that is not this protocol.
        """
        self._rest += data
        if len(self._rest) > _MAX_LINE:
            raise AgentError(f"a message of more than {_MAX_LINE} bytes is not the agent protocol")
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            try:
                message = json.loads(line)
                message["t"]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise AgentError(f"not the agent protocol: {line[:80]!r}") from error
            yield message
