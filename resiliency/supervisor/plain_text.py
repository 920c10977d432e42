"""Text that others have written, made fit to be stored, logged and shown. Pure."""

from __future__ import annotations

__all__ = ["plain_text"]

_MOST = 2000


def plain_text(text: str, most: int = _MOST) -> str:
    """One line without control characters, which would forge lines of a log or rule a terminal, and without halves of
    surrogate pairs, which JSON can carry and neither a database nor a file can. A traceback becomes one long line.

    Args:
        most: characters; what is longer is cut.
    """
    if text.isprintable() and len(text) <= most:
        return text
    return "".join(one if one.isprintable() else " " for one in text[:most]).rstrip()
