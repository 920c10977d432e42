"""Finds and opens the files that hold events: our logs, rotated or compressed ones, and exports of Cloud Logging."""

from __future__ import annotations

import gzip
import io
import os
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from resiliency.errors import ConfigError

__all__ = ["DAMAGED", "LogFiles", "find", "find_logs", "is_array", "open_log"]

#: Names of logs: ``rank-00000.jsonl``, ``goodput.log.2``, ``agent.jsonl.gz``, ``launcher.jsonl.1.gz``, and names with
#: the day (and time) of their rotation: ``rank-00000.jsonl-20260131.gz``, ``rank-00000.jsonl.2026-01-31_12``.
_NAME = re.compile(r"\.(?:jsonl|log)(?:\.(\d{1,6})|([-.]\d{4}-?\d\d-?\d\d(?:[-_T.:\d]*\d)?))?(?:\.gz)?$")
#: Names that resemble those of logs: a copy, a kind of compression that is not read here.
_ALIKE = re.compile(r"\.(?:jsonl|ndjson)[^/]*$|\.log\.[^/]*(?:bz2|xz|zst|lz4|zip|old|bak)$", re.IGNORECASE)
#: Exports of Cloud Logging.
_EXPORT = (".json", ".json.gz")
#: Bytes at the start of a file that are searched for a line that is an event, or for an array of events; output of a
#: process may mention events.
_SNIFF_BYTES = 1 << 16
_EVENT = re.compile(rb'^(?:\xef\xbb\xbf)?[ \t]*\{[^\n]*"event_type"', re.MULTILINE)
_ARRAY = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[\s*\{")
#: Fields of which each entry of ml-goodput-measurement's log has one. It is read all the same, because the reader names
#: it.
MEASUREMENT = frozenset({"job_start_time", "job_end_time", "step_start_time", "tpu_init_start_time"})
_MEASURED = re.compile(rb'"(?:%s)"' % "|".join(sorted(MEASUREMENT)).encode())
#: What every entry of Cloud Logging has one of.
_ENTRY = re.compile(rb'"(?:json|text|proto)Payload"\s*:')
#: Raised by a read of a compressed log that is cut, because its host died while it compressed it, or damaged.
DAMAGED = (EOFError, zlib.error)
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, kw_only=True)
class LogFiles:
    """``files``: to be read in this order. ``left_out``: named like logs, but without an event at their start."""

    files: tuple[Path, ...]
    left_out: tuple[Path, ...] = ()
    #: Named like a log, but a copy, rotated or compressed in an unknown way, or a link to nothing.
    unread: tuple[Path, ...] = ()


def find_logs(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The ``files`` that :func:`find` returns; raises as it does."""
    return list(find(list(paths)).files)


def find(paths: Iterable[str | os.PathLike[str]]) -> LogFiles:
    """Finds the logs under ``paths``. A file is taken as given. A folder is searched for ``*.jsonl``, ``*.log``, their
    rotated (``.1``, ``.2``, ``-20260131``) and compressed (``.gz``) files, and for exports of Cloud Logging
    (``*.json``, ``*.json.gz``), such as a sink writes into a folder for each day.

    A file found twice counts once. Hidden folders are searched too, because our logs are below ``.resiliency``, but not
    for exports, because step folders have many ``*.json``.

    Raises:
        ConfigError: a path does not exist, or there is no log at all.
    """
    found: dict[str, Path] = {}
    left: dict[str, Path] = {}
    unread: dict[str, Path] = {}
    silent: dict[str, Path] = {}  # *.json that are no exports of a log
    listed = list(paths)
    for given in listed:
        path = Path(given)
        if path.is_dir():
            for folder, folders, names in os.walk(path):
                folders.sort()
                hidden = any(part.startswith(".") for part in Path(folder).relative_to(path).parts)
                for name in sorted(names, key=_oldest_first):
                    export = name.endswith(_EXPORT) and not hidden
                    file = Path(folder, name)
                    if not _NAME.search(name) and not export:
                        if _ALIKE.search(name) and file.is_file():
                            unread.setdefault(os.path.realpath(file), file)
                        continue
                    if not file.exists():  # a link to nothing, or gone since the folder was listed
                        unread.setdefault(os.path.realpath(file), file)
                    elif name.endswith(".jsonl") or _holds_events(start := _start(file), export=export):
                        found.setdefault(os.path.realpath(file), file)
                    else:
                        named = not export or _ENTRY.search(start or b"") is not None
                        (left if named else silent).setdefault(os.path.realpath(file), file)
        elif path.exists():
            found.setdefault(os.path.realpath(path), path)
        else:
            raise ConfigError(f"no event log at {path}; give the checkpoint folder, its events folder or a log file")
    if not found:
        where = ", ".join(str(path) for path in listed)
        silent = {**left, **silent}
        others = f" ({_names(silent.values())} hold no event)" if silent else ""
        others += f" ({_names(unread.values())} cannot be read as one)" if unread else ""
        raise ConfigError(
            f"no *.jsonl or *.log below {where}{others}; does this job use ModelCheckpoint or GoodputCallback?"
        )
    return LogFiles(
        files=tuple(found.values()),
        left_out=tuple(file for key, file in left.items() if key not in found),
        unread=tuple(unread.values()),
    )


def _names(files: Iterable[Path]) -> str:
    names = [file.name for file in files]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} others" if len(names) > 3 else "")


def _oldest_first(name: str) -> tuple[str, int, str]:
    """Sort key. Rotated logs come before the log that bears their name now: the highest number first, the earliest day
    first."""
    match = _NAME.search(name)
    if match is None:
        return name, 0, ""
    return name[: match.start()], -int(match[1] or 0), (match[2] or "").replace("-", "") or "~"


def _start(file: Path) -> bytes | None:
    """The bytes of a file that are searched; None when it cannot be read."""
    try:
        with open_log(file) as opened:
            return opened.read(_SNIFF_BYTES)
    except (OSError, *DAMAGED):
        return None


def _holds_events(start: bytes | None, *, export: bool) -> bool:
    """Whether a file that begins so holds events, of ours or (an export) of ml-goodput-measurement. True also when it
    cannot be read (reading it will say why) or is empty (its first event may still come)."""
    if not start:
        return True
    if export and _ENTRY.search(start) and _MEASURED.search(start):
        return True
    return b'"event_type"' in start if _ARRAY.match(start) else _EVENT.search(start) is not None


def open_log(path: str | os.PathLike[str]) -> io.BufferedReader | io.BytesIO:
    """Opens a log. Its bytes come unpacked, and as UTF-8 when an editor has saved it as UTF-16. A compressed log that
    is cut or damaged raises one of ``DAMAGED`` at its damage.

    Raises:
        OSError: it cannot be opened. That a ``.gz`` is no gzip file is raised by the first read.
    """
    if os.fspath(path).endswith(".gz"):
        return cast(io.BufferedReader, gzip.open(path, "rb"))  # has all methods of one
    file = open(path, "rb")
    start = file.read(64)
    if start[:2] in _UTF16 and b"\0" in start:
        file.seek(0)
        with file:
            return io.BytesIO(file.read().decode("utf-16", "replace").encode())
    file.seek(0)
    return file


def is_array(start: bytes) -> bool:
    """True when a file that begins with these bytes is one JSON array: an export of Cloud Logging."""
    return start.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"["
