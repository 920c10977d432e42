"""Reads event logs into a :class:`~resiliency.telemetry.collect.Collector`, in bounded memory, at hundreds of thousands
of events a second.

Nearly every line of a long log is a step line of our own writer, so those are parsed by one regular expression over
a block of lines; everything else (other events, the older library's lines, other writers' key order) goes through
``json``. A line that was cut by a crash or is still being written is left for the next call, or counted at the end.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from resiliency.errors import ConfigError
from resiliency.telemetry.collect import Collector
from resiliency.telemetry.facts import RunFacts, Segment
from resiliency.telemetry.log_files import DAMAGED, MEASUREMENT, find, find_logs, is_array, open_log
from resiliency.telemetry.plain_text import is_plain_json, plain
from resiliency.telemetry.stepstats import StepStats

__all__ = ["LogReader", "find_logs", "read_logs"]

#: ``json.loads`` without detecting the encoding, which costs up to a tenth of the parse.
_loads = json.JSONDecoder().decode
#: The same for text without spaces around it, a fifth faster; also returns where the value ends.
_decode = json.JSONDecoder().raw_decode

BLOCK_BYTES = 1 << 20
#: Bytes of a block that are parsed at once; all that is found in them is in memory together.
_PART_BYTES = 1 << 16
_START_BYTES = 64
#: A line longer than this is not an event.
MAX_LINE_BYTES = 1 << 20

#: A well formed number below 1e9, so that a match needs no further check; lines with other numbers go through ``json``.
#: Here and below "(?:x|)" stands for "(?:x)?": it finds the same, in three quarters of the time.
_N = rb"(\d{1,9}(?:\.\d{1,20}|)(?:e-\d{1,3}|))"
_STEP = re.compile(
    rb'\{"timestamp":"([^"\\\n]+)","job_name":"([^"\\\n]+)","event_type":"step","v":1,"monotonic_s":'
    + _N
    + rb',("attempt":\d+,"rank":\d+,"host":"[^"\\\n]*"),"step":(\d{1,18}),"step_s":'
    + _N
    + rb',"data_wait_s":'
    + _N
    + rb',"stall_s":'
    + _N
    + rb',"save_in_flight":(?:(true)|false)(?:,"busy_s":'
    + _N
    + rb'|)(?:,"eval_s":'
    + _N
    + rb'|)(?:,"loop_s":'
    + _N
    + rb'|)(?:,"count":(\d{1,9}),"step_max_s":'
    + _N
    + rb"|)\}\n|([^\n]*)\n"
)
_WHO = re.compile(rb'"attempt":(\d+),"rank":(\d+),"host":"(.*)"')


class LogReader:
    """Reads logs and remembers how far, so that the next call reads only what was added. Thread: one."""

    def __init__(self, collector: Collector | None = None) -> None:
        self.collector = Collector() if collector is None else collector
        #: Lines that belong to no run: cut or damaged ones, and JSON that is no event.
        self.torn_lines = 0
        self.foreign_lines = 0
        self.lines = 0
        #: Files that look like logs and hold no event.
        self.left_out: tuple[Path, ...] = ()
        #: Files named like logs that cannot be read as one.
        self.unread: tuple[Path, ...] = ()
        #: By path: the damage of compressed files that are cut or damaged. What lies before the damage is read.
        self.cut: dict[str, str] = {}
        #: Lines of Google's ml-goodput-measurement, which has other events.
        self.measurement_lines = 0
        #: The files that hold them.
        self.measurements: dict[str, None] = {}
        self._offsets: dict[str, int] = {}
        #: The first bytes of each file. They hold a time, so they differ when another file has taken the name.
        self._begins: dict[str, bytes] = {}

    def read(self, files: Sequence[str | os.PathLike[str]], *, final: bool = True) -> int:
        """Reads what was added to ``files``.

        Args:
            files: logs; one that shrank or begins otherwise (rotated) is read from its start again.
            final: a last line without its newline is read as it is (True), or left for the next call because it may
                still be being written (False).

        Returns:
            Number of lines read. Blocks for as long as the disk takes.

        Raises:
            ConfigError: a file cannot be read.
        """
        before = self.lines
        for file in files:
            others = self.measurement_lines
            self._read_file(os.fspath(file), final)
            if self.measurement_lines > others:
                self.measurements[os.fspath(file)] = None
        return self.lines - before

    def _read_file(self, path: str, final: bool) -> None:
        offset = self._offsets.get(path, 0)
        try:
            size = os.path.getsize(path)
            if size < offset:
                offset = 0
            if size == offset:
                return
            with open_log(path) as file:
                start = self._read_part(file, path, _START_BYTES)
                if not start.startswith(self._begins.get(path, b"")):
                    offset = 0
                self._begins[path] = start
                if is_array(start) and self._array(file):
                    self._offsets[path] = size
                    return
                packed = path.endswith(".gz")
                file.seek(0 if packed else offset)
                rest = b""
                while block := self._read_part(file, path, BLOCK_BYTES):
                    offset += len(block)
                    block = rest + block
                    end = block.rfind(b"\n") + 1
                    if end == 0 and len(block) > MAX_LINE_BYTES:
                        self.lines += 1
                        self.torn_lines += 1
                        rest = b""
                        continue
                    self._block(block[:end] if end < len(block) else block)
                    rest = block[end:]
        except OSError as error:
            raise ConfigError(
                f"cannot read event log {path}: {error.strerror or error}; check the path and its permissions"
            ) from error
        if packed:
            offset, final = size, True
        if rest and final:
            self._block(rest + b"\n")
        elif rest:
            offset -= len(rest)
        self._offsets[path] = offset

    def _read_part(self, file: io.BufferedReader | io.BytesIO, path: str, size: int) -> bytes:
        """The next bytes of a log, at most ``size``; none at its end, or where it is damaged."""
        try:
            return file.read1(size)
        except (gzip.BadGzipFile, *DAMAGED) as error:
            if isinstance(error, gzip.BadGzipFile) and not file.tell():
                raise  # it is no gzip file at all
            self.cut[path] = str(error)
            return b""

    def _block(self, block: bytes) -> None:
        """Reads complete lines. One loop without calls, because one more call per line costs a tenth of the speed."""
        collector = self.collector
        add_step = collector.add_step
        last_who = last_name = None
        generation = collector.generation
        known: dict[tuple[bytes, bytes], tuple[RunFacts, Segment]] = {}
        run: RunFacts | None = None
        segment: Segment | None = None
        stats = StepStats()
        lines = 0
        steps = 0
        for (
            stamp,
            name,
            mono,
            who,
            step_b,
            step_s_b,
            data_b,
            stall_b,
            flight,
            busy_b,
            eval_b,
            loop_b,
            count_b,
            max_b,
            other,
        ) in chain.from_iterable(_matches(block)):
            lines += 1
            if not stamp:
                if other:
                    self._other(other)
                continue
            if who != last_who or name != last_name or generation != collector.generation:
                if run is not None:
                    run.events += steps
                    steps = 0
                if generation != collector.generation:
                    known.clear()
                    generation = collector.generation
                found = known.get((name, who))
                if found is None:
                    found = known[name, who] = self._resolve(name, who)
                    generation = collector.generation
                run, segment = found
                last_who, last_name = who, name
                stats = segment.steps
            step = int(step_b)
            step_s = float(step_s_b)
            if not count_b:
                count, max_s = 1, step_s
            else:
                count, max_s = int(count_b), float(max_b)
                if not 0 < count <= step + 1:  # rare: worth looking for the line
                    self._other(block.split(b"\n", lines)[lines - 1])
                    continue
            data_s = float(data_b)
            stall_s = float(stall_b)
            busy_s = float(busy_b) if busy_b else 0.0
            eval_s = float(eval_b) if eval_b else 0.0
            loop_s = float(loop_b) if loop_b else 0.0
            in_flight = flight == b"true"
            steps += 1
            if stats.high < step <= stats.most:  # nearly always
                stats.add(step, count, step_s, data_s, stall_s, eval_s, busy_s, in_flight, max_s, stamp, mono, loop_s)
            else:
                assert run is not None and segment is not None
                times = (step_s, data_s, stall_s, eval_s, busy_s)
                add_step(run, segment, (step, count, *times, in_flight, max_s, stamp, mono, loop_s))
        if run is not None:
            run.events += steps
        self.lines += lines

    def _resolve(self, name: bytes, who: bytes) -> tuple[RunFacts, Segment]:
        run = self.collector.run(plain(_word(name)))
        match = _WHO.fullmatch(who)
        assert match is not None
        host = plain(_word(match[3]))
        attempt, rank = min(int(match[1]), 2**62), min(int(match[2]), 2**62)
        return run, self.collector.segment_for_step(run, attempt, rank, host)

    def _other(self, line: bytes) -> None:
        """Any line that is not a step line of our writer."""
        text = line.strip()
        if not text:
            return
        try:
            string = _text(text)
            record, end = _decode(string)
            if end != len(string):
                raise ValueError("more than one object")
        except (ValueError, RecursionError):
            self.torn_lines += 1
            return
        self._record(record, is_plain=is_plain_json(string))

    def _array(self, file: io.BufferedReader | io.BytesIO) -> bool:
        """Reads one JSON array of events, an export of Cloud Logging with the newest first, as a whole into memory.
        Returns False, and adds nothing, when the file is no array."""
        file.seek(0)
        try:
            records = _loads(_text(file.read()))
        except (ValueError, RecursionError, *DAMAGED):
            return False
        self.lines += len(records)
        for record in sorted(records, key=_stamp):
            self._record(record)
        return True

    def _record(self, record: Any, *, is_plain: bool = False) -> None:
        if isinstance(record, dict) and "event_type" not in record:
            # Exports of Cloud Logging wrap the event.
            record = record.get("jsonPayload") or record.get("payload") or record
        if not isinstance(record, dict) or "event_type" not in record:
            self.foreign_lines += 1
            self.measurement_lines += isinstance(record, dict) and not MEASUREMENT.isdisjoint(record)
            return
        self.collector.add(record, drop_copies=True, is_plain=is_plain)


def _matches(block: bytes) -> Iterator[list[tuple[bytes, ...]]]:
    """The groups of ``_STEP`` for each line of a block, part by part; a group that a line does not have is b"". Cheaper
    than an object for each match."""
    start = 0
    while start < len(block):
        end = block.rfind(b"\n", start, start + _PART_BYTES) + 1 or block.find(b"\n", start) + 1 or len(block)
        yield _STEP.findall(block, start, end)
        start = end


def _text(line: bytes) -> str:
    """Decodes a line: UTF-8, with or without a byte-order mark, else Latin-1, as some shippers write it.

    Raises:
        ValueError: it is no UTF-8 and holds zero bytes, so that it is no text.
    """
    try:
        return (line[3:].lstrip(b" \t\r") if line.startswith(codecs.BOM_UTF8) else line).decode()
    except UnicodeDecodeError:
        if b"\0" in line:
            raise
        return line.decode("latin-1")


def _word(name: bytes) -> str:
    """As :func:`_text`, of what is in a line that is an event."""
    try:
        return name.decode()
    except UnicodeDecodeError:
        return name.decode("latin-1")


def _stamp(record: object) -> str:
    """Timestamp of an entry in an export, "" without one. Sorted as text, because all stamps of an export have one
    form."""
    if not isinstance(record, dict):
        return ""
    inner = record.get("jsonPayload")
    found = inner.get("timestamp") if isinstance(inner, dict) else None
    return str(found or record.get("timestamp") or "")


def read_logs(paths: Iterable[str | os.PathLike[str]]) -> LogReader:
    """Finds and reads all logs under ``paths``; see :func:`find` for what is found and what raises."""
    logs, reader = find(paths), LogReader()
    reader.left_out, reader.unread = logs.left_out, logs.unread
    reader.read(logs.files)
    return reader
