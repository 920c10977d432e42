"""Reads the JSON objects of a checkpoint: manifests, and records in files of their own or inside a shard. No torch.

Any of these files may be damaged. A parser's own words say neither which file nor that it is damaged, so that every
text about one begins with its path.
"""

from __future__ import annotations

import json
from typing import Any

from resiliency.errors import CorruptShard

__all__ = ["json_object", "reason"]


def json_object(text: str | bytes, *, what: str, where: str) -> dict[str, Any]:
    """Parses the text of a file that holds one JSON object.

    Args:
        what: what the file should be, for the message ("a manifest").
        where: its path, for the message.

    Raises:
        CorruptShard: it is empty, no JSON, or JSON of another kind.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        why = f"no JSON, {error}" if text.strip() else "it is empty"
        raise CorruptShard(f"{where}: not {what} ({why})", path=where) from error
    if not isinstance(data, dict):
        raise CorruptShard(f"{where}: not {what} (it is JSON, but no object)", path=where)
    return data


def reason(error: Exception) -> str:
    """Why the fields of a parsed object are not those of a manifest or record, for a message in brackets."""
    return f"it has no {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
