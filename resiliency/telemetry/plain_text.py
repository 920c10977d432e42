"""Text from elsewhere, fit to be shown. Pure."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["is_plain_json", "plain"]

#: Control characters (a terminal obeys them), halves of characters (no file can hold them), and what turns the
#: direction of the text around it.
_ODD = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(value: Any) -> Any:
    """``value`` with every string in it, in lists and objects too, fit to be shown: a log may hold anything."""
    if isinstance(value, str):
        return value if value.isprintable() else _ODD.sub("\ufffd", value)
    if isinstance(value, dict):
        return {plain(key): plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value


def is_plain_json(text: str) -> bool:
    """Whether :func:`plain` would change nothing in what this JSON text, which was parsed, holds; False where that is
    not known without a look at each string: JSON has other control characters as escapes only."""
    return text.isascii() and "\\" not in text and "\x7f" not in text
