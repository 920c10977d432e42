"""Limits log lines that unauthenticated clients cause, so that whoever can reach the port cannot fill the disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, MutableMapping
from typing import Any

from aiohttp.http_exceptions import HttpProcessingError

from resiliency.telemetry.plain_text import plain_line

__all__ = ["SaidRarely", "ServerLog"]

#: Within this many seconds one line for each sender, and this many for all senders. Lines left out are counted.
_EVERY_S, _MOST = 60.0, 20
_MOST_TEXT = 300


class SaidRarely:
    """Writes warnings at a limited rate. Thread: the event loop's."""

    def __init__(self, logger: logging.Logger, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger, self._clock = logger, clock
        #: Of the present interval.
        self._senders: set[str] = set()
        self._left_out, self._since_s = 0, clock()

    def warning(self, sender: str, text: str) -> None:
        """Writes one line, unless the sender has had a line within the minute, or too many other senders have."""
        now_s = self._clock()
        if now_s - self._since_s >= _EVERY_S:
            if self._left_out:
                lines = "%d more warnings like those within %.0f s were not written"
                self._logger.warning(lines, self._left_out, now_s - self._since_s)
            self._senders, self._left_out, self._since_s = set(), 0, now_s
        if sender in self._senders or len(self._senders) >= _MOST:
            self._left_out += 1
            return
        self._senders.add(sender)
        self._logger.warning("%s", plain_line(text, _MOST_TEXT))


class ServerLog(logging.LoggerAdapter):  # type: ignore[type-arg]  # takes no argument before Python 3.11
    """The log of aiohttp's server. A request that is no HTTP is logged as one line with its sender, at a limited rate,
    in place of a traceback. Errors of the supervisor itself keep their tracebacks."""

    def __init__(self, logger: logging.Logger, rarely: SaidRarely) -> None:
        super().__init__(logger, {})
        self._rarely = rarely

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        error = kwargs.get("exc_info")
        if level >= logging.WARNING and isinstance(error, HttpProcessingError):
            sender = str(args[0]) if args else "somebody"
            what = error.message.splitlines()[0] if error.message else type(error).__name__
            self._rarely.warning(sender, f"{sender} has sent what is no HTTP request ({what}); it is cut off")
            return
        super().log(level, msg, *args, **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return msg, kwargs
