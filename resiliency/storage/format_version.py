"""The version of the format on disk, and the refusal of other versions. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from resiliency.errors import UnsupportedFormat

__all__ = ["FORMAT_VERSION", "earlier_format", "refuse_format"]

#: Version of everything written below ``.resiliency``. A reader refuses any other version with an error.
FORMAT_VERSION = 3
#: Names of step folders in format 1, and of shards in format 2; they are recognised only to be refused.
_STEP_DIR_OF_FORMAT_1 = re.compile(r"^\d{10,}-a\d{4,}-[0-9a-f]{8}$")
_SHARD_OF_FORMAT_2 = re.compile(r"^shard-\d{5,}\.safetensors$")


def refuse_format(version: object, where: str) -> UnsupportedFormat:
    """Makes the error for data of another version of the format; it says what can read them."""
    if isinstance(version, int) and version > FORMAT_VERSION:
        advice = "upgrade resiliency to read it"
    else:
        advice = (
            "export it with the version of resiliency that wrote it (resiliency ckpt export), or start in another"
            " directory or run; nothing there was changed"
        )
    return UnsupportedFormat(
        f"{where} has checkpoint format {version}, this version reads {FORMAT_VERSION}: {advice}", path=where
    )


def earlier_format(dirname: str, files: Iterable[str]) -> int | None:
    """The earlier version of the format that wrote a step folder with these files; None when none did."""
    if _STEP_DIR_OF_FORMAT_1.match(dirname):
        return 1
    return 2 if any(map(_SHARD_OF_FORMAT_2.match, files)) else None
