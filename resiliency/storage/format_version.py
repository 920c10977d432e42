"""The version of the format on disk, and how others are refused. Pure."""

from __future__ import annotations

import re

from resiliency.errors import UnsupportedFormat

__all__ = ["FORMAT_VERSION", "is_folder_of_format_1", "refuse_format"]

#: Version of everything written below ``.resiliency``. A reader refuses any other and says so.
FORMAT_VERSION = 3
#: What format 1 called its step folders; they are recognised only to be refused.
_STEP_DIR_OF_FORMAT_1 = re.compile(r"^\d{10,}-a\d{4,}-[0-9a-f]{8}$")


def refuse_format(version: object, where: str) -> UnsupportedFormat:
    """The error for what another version of the format wrote; says what reads it."""
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


def is_folder_of_format_1(dirname: str) -> bool:
    """True for a step folder that format 1 named."""
    return _STEP_DIR_OF_FORMAT_1.match(dirname) is not None
