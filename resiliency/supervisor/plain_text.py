"""Makes text from elsewhere fit to be stored, logged and shown. Pure: no input, no output."""

from __future__ import annotations

__all__ = ["plain_text"]

_MOST = 2000


def plain_text(text: str, most: int = _MOST) -> str:
    """Returns the text as one line. Control characters become spaces, because they would forge log lines or control a
    terminal; so do halves of surrogate pairs, which JSON can carry and neither a database nor a file can store. A
    traceback becomes one long line.

    Args:
        most: characters that are kept.
    """
    if text.isprintable() and len(text) <= most:
        return text
    return "".join(one if one.isprintable() else " " for one in text[:most]).rstrip()
