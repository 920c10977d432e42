"""Encodes messages as bytes: one JSON line each, over a unix socket.

Only processes of the same user can connect (the server checks the socket's peer credentials), only JSON is parsed, and
every field is checked before it is used.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import get_args

from resiliency.agent.config import AgentConfig
from resiliency.agent.messages import Hello, Message
from resiliency.errors import AgentError
from resiliency.runtime.typed_json import from_jsonable, to_jsonable

__all__ = ["PROTOCOL_VERSION", "Framer", "config_from_json", "config_to_json", "pack"]

PROTOCOL_VERSION = 10
_MAX_LINE = 64 * 1024 * 1024
_KINDS = {kind.__name__: kind for kind in get_args(Message)}


def pack(message: Message) -> bytes:
    """Encodes a message as one line."""
    fields = {"type": type(message).__name__, **to_jsonable(message)}
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def unpack(line: bytes) -> Message:
    """Decodes the message of one line.

    Raises:
        AgentError: the line is not a message of this protocol; the error says why.
    """
    try:
        fields = json.loads(line)
        kind = _KINDS[fields.pop("type")]
        if kind is Hello and fields["version"] != PROTOCOL_VERSION:
            # The other fields may differ in that version; the server refuses the message because of its version.
            return Hello(version=int(fields["version"]), rank=int(fields["rank"]), config=None)
        found: Message = from_jsonable(kind, fields)
        return found
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        text = f"{type(error).__name__}: {error}"
        raise AgentError(f"not a message of the agent protocol ({text}): {line[:80]!r}") from error


class Framer:
    """Splits a byte stream into messages. Thread: one."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yields the messages completed by ``data``.

        Raises:
            AgentError: a line is not a message of this protocol, or too long.
        """
        self._rest += data
        if len(self._rest) > _MAX_LINE:
            raise AgentError(f"a message of more than {_MAX_LINE} bytes is not the agent protocol")
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            yield unpack(line)


def config_to_json(config: AgentConfig) -> str:
    """Encodes the settings for the command line of the agent process."""
    return json.dumps(to_jsonable(config))


def config_from_json(text: str) -> AgentConfig:
    """Inverse of :func:`config_to_json`.

    Raises:
        AgentError: the settings cannot be parsed.
    """
    try:
        return from_jsonable(AgentConfig, json.loads(text))
    except ValueError as error:
        raise AgentError(f"the agent's settings cannot be parsed: {error}") from error
