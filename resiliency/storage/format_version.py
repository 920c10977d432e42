"""The version of the format on disk, what earlier versions did otherwise, and the refusal of others. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

from resiliency.errors import UnsupportedFormat

__all__ = [
    "FORMAT_VERSION",
    "READ_VERSIONS",
    "earlier_format",
    "has_stock_folders",
    "is_read",
    "refuse_format",
    "shard_ending",
]

#: Version of what is written. A step is in one version for ever, which its records and shard files state.
FORMAT_VERSION = 5
#: How names of shard files end, by the versions that are read; a reader refuses any other with an error. Format 3 ended
#: them as users end their names, so that a search for "*.ckpt" in the folder of a running fit found each file twice.
_SHARD_ENDINGS = {3: ".ckpt", 4: ".shard", FORMAT_VERSION: ".shard"}
#: From this version on the shards of a sharded step are named as torch names those of its distributed checkpoints.
_STOCK_FOLDERS_FROM = 5
READ_VERSIONS = tuple(_SHARD_ENDINGS)
#: Names of step folders in format 1, and of shards in format 2; they are recognised only to be refused.
_STEP_DIR_OF_FORMAT_1 = re.compile(r"^\d{10,}-a\d{4,}-[0-9a-f]{8}$")
_SHARD_OF_FORMAT_2 = re.compile(r"^shard-\d{5,}\.safetensors$")


def is_read(version: object) -> bool:
    """True for a version whose checkpoints this version of the library reads."""
    return isinstance(version, int) and not isinstance(version, bool) and version in READ_VERSIONS


def shard_ending(version: int) -> str:
    """How the names of shard files end in a version that is read."""
    return _SHARD_ENDINGS[version]


def has_stock_folders(version: int) -> bool:
    """True when the folder of a sharded step is also a stock distributed checkpoint."""
    return version >= _STOCK_FOLDERS_FROM


def refuse_format(version: object, where: str) -> UnsupportedFormat:
    """Makes the error for data of another version of the format; it says what can read them."""
    if isinstance(version, int) and version > FORMAT_VERSION:
        advice = "upgrade resiliency to read it"
    else:
        advice = (
            "export it with the version of resiliency that wrote it (resiliency ckpt export), or start in another"
            " directory or run; nothing there was changed"
        )
    *others, last = map(str, READ_VERSIONS)
    known = f"{', '.join(others)} and {last}"
    return UnsupportedFormat(
        f"{where} has checkpoint format {version}, this version reads {known}: {advice}", path=where
    )


def earlier_format(dirname: str, files: Iterable[str]) -> int | None:
    """The earlier version of the format that wrote a step folder with these files; None when none did."""
    if _STEP_DIR_OF_FORMAT_1.match(dirname):
        return 1
    return 2 if any(map(_SHARD_OF_FORMAT_2.match, files)) else None
