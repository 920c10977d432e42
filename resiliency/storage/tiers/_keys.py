"""Checks the keys that tiers accept, and makes the names reserved for files that are being written. Pure."""

from __future__ import annotations

import re
import uuid

from resiliency.errors import TierError

__all__ = ["check_key", "check_prefix", "check_range", "is_partial", "partial_name"]

# Independent of the key's name, so that the temp file of a key with the longest allowed name has a valid name.
_PARTIAL = re.compile(r"^\.resiliency-[0-9a-f]{32}\.partial$")


def partial_name() -> str:
    """Returns a new file name for an object that is being written. No listing shows it, and no key may have it."""
    return f".resiliency-{uuid.uuid4().hex}.partial"


def is_partial(basename: str) -> bool:
    """True for names made by :func:`partial_name`."""
    return _PARTIAL.match(basename) is not None


def check_key(key: str, *, tier: str) -> None:
    """Refuses keys that lead out of the root, that listings would not show, or that some tier cannot store.

    Raises:
        TierError: not retryable; the message names the rule.
    """
    parts = key.split("/")
    rule = None
    if not key or "" in parts:
        rule = "it is empty, begins or ends with '/', or has '//' in it"
    elif "." in parts or ".." in parts:
        rule = "'.' and '..' are not allowed as parts of a key"
    elif is_partial(parts[-1]):
        rule = "the name is reserved for files in flight"
    else:
        rule = _bad_text(key)
    if rule is not None:
        raise TierError(f"{tier}: key {key!r} refused: {rule}; pass a path relative to the root", retryable=False)


def check_prefix(prefix: str, *, tier: str) -> None:
    """As :func:`check_key`, for listings: empty (everything), a folder ("a/") or the beginning of a key ("a/b")."""
    parts = prefix.split("/")
    if "" in parts[:-1] or "." in parts[:-1] or ".." in parts or _bad_text(prefix) is not None:
        raise TierError(
            f"{tier}: prefix {prefix!r} refused; pass a path relative to the root (a folder ends in one '/')",
            retryable=False,
        )


def check_range(key: str, start: int, end: int, *, tier: str) -> None:
    """Refuses invalid ranges (Python's negative indices are not supported).

    Raises:
        TierError: not retryable.
    """
    if not 0 <= start <= end:
        raise TierError(
            f"{tier}: byte range [{start}, {end}) of {key!r} refused; pass 0 <= start <= end", retryable=False
        )


def _bad_text(key: str) -> str | None:
    if any(character in key for character in "\0\r\n"):
        return "NUL and line breaks are not allowed"
    try:
        key.encode()
    except UnicodeEncodeError:
        return "it is not valid Unicode"
    return None
