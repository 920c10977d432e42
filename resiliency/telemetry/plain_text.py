"""Makes text from elsewhere safe to show in a terminal or a report, and to store. Pure."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["is_plain_json", "plain", "plain_line"]

#: Control characters (a terminal obeys them), characters that turn the direction of the text around them, and
#: surrogates (halves of characters, which cannot be encoded).
_ODD = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(value: Any) -> Any:
    """Returns ``value`` with control characters and the like replaced by U+FFFD in each of its strings, also those
    within lists and dicts (keys, too), because a log may hold anything."""
    if isinstance(value, str):
        return value if value.isprintable() else _ODD.sub("\ufffd", value)
    if isinstance(value, dict):
        return {plain(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value


def is_plain_json(text: str) -> bool:
    """True when :func:`plain` would change nothing in the value that was parsed from this JSON text; False when that
    cannot be told without a look at each string. Apart from DEL, valid JSON has control characters only as escapes."""
    return text.isascii() and "\\" not in text and "\x7f" not in text


def plain_line(text: str, most: int = 2000) -> str:
    """Returns the text as one line of at most ``most`` characters, a space for each that is not printable: control
    characters would forge log lines, and halves of surrogate pairs cannot be stored."""
    if text.isprintable() and len(text) <= most:
        return text
    return "".join(one if one.isprintable() else " " for one in text[:most]).rstrip()
