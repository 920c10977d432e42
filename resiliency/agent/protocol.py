"""Messages as bytes: one JSON line each, over a unix socket.

Only processes of the same user are heard (the socket's peer credentials are checked), only JSON is read, and every
field is checked before anything is done with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import get_args

from resiliency.agent.config import AgentConfig
from resiliency.agent.messages import Hello, Message
from resiliency.errors import AgentError
from resiliency.storage.typed_json import from_jsonable, to_jsonable

__all__ = ["PROTOCOL_VERSION", "Framer", "config_from_json", "config_to_json", "pack"]

PROTOCOL_VERSION = 3
_MAX_LINE = 64 * 1024 * 1024
_KINDS = {kind.__name__: kind for kind in get_args(Message)}


def pack(message: Message) -> bytes:
    """One message as a line."""
    fields = {"type": type(message).__name__, **to_jsonable(message)}
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def unpack(line: bytes) -> Message:
    """The message of a line.

    Raises:
        AgentError: not a message of this protocol; says what is wrong with it.
    """
    try:
        fields = json.loads(line)
        kind = _KINDS[fields.pop("type")]
        if kind is Hello and fields["version"] != PROTOCOL_VERSION:
            # What else it says may be of another shape; who gets it refuses it by its version.
            return Hello(version=int(fields["version"]), rank=int(fields["rank"]), config=None)
        found: Message = from_jsonable(kind, fields)
        return found
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        text = f"{type(error).__name__}: {error}"
        raise AgentError(f"not a message of the agent protocol ({text}): {line[:80]!r}") from error


class Framer:
    """Cuts a byte stream into messages. Thread: one."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yields the messages completed by ``data``.

        Raises:
            AgentError: something that is not this protocol.
        """
        self._rest += data
        if len(self._rest) > _MAX_LINE:
            raise AgentError(f"a message of more than {_MAX_LINE} bytes is not the agent protocol")
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            yield unpack(line)


def config_to_json(config: AgentConfig) -> str:
    """The settings as the agent process gets them on its command line."""
    return json.dumps(to_jsonable(config))


def config_from_json(text: str) -> AgentConfig:
    """The settings of :func:`config_to_json`.

    Raises:
        AgentError: they cannot be read.
    """
    try:
        return from_jsonable(AgentConfig, json.loads(text))
    except ValueError as error:
        raise AgentError(f"the agent's settings cannot be read: {error}") from error
