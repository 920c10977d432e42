"""Converts the timestamps of log lines to UTC seconds. Pure."""

from __future__ import annotations

from datetime import datetime, timezone

__all__ = ["parse_stamp"]


def parse_stamp(stamp: bytes | str | float | int | None) -> float | None:
    """UTC seconds of an ISO timestamp (UTC if it has no zone) or a number; None for anything else, and for a time that
    is not between 1970 and 2286."""
    if isinstance(stamp, (str, bytes)):
        text = stamp if isinstance(stamp, str) else stamp.decode("ascii", "replace")
        try:
            moment = datetime.fromisoformat(text)  # parses nearly all stamps, on every supported Python
        except ValueError:
            other = _iso(text.strip())
            if other is None:
                return None
            moment = other
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=timezone.utc)
        try:
            seconds = moment.timestamp()
        except (OverflowError, ValueError):
            return None
    elif isinstance(stamp, (int, float)) and not isinstance(stamp, bool):
        try:
            seconds = float(stamp)
        except OverflowError:
            return None
    else:
        return None
    return seconds if 0.0 < seconds < 1e10 else None


def _iso(text: str) -> datetime | None:
    if text.endswith(("Z", "z")):
        text = text[:-1] + "+00:00"
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        pass  # Python 3.10 takes only 3 or 6 fractional digits; other numbers of digits are cut or padded below.
    head, dot, rest = text.partition(".")
    if not dot:
        return None
    digits = len(rest) - len(rest.lstrip("0123456789"))
    try:
        return datetime.fromisoformat(f"{head}.{rest[:digits][:6]:0<6}{rest[digits:]}")
    except ValueError:
        return None
