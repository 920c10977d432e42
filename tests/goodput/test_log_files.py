"""Logs as they come from disks, shippers and exports."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from resiliency.cli.goodput import app
from resiliency.errors import ConfigError
from resiliency.events import EventKind
from resiliency.goodput.ledger import Ledger, account
from resiliency.goodput.summary import summarize
from resiliency.telemetry import collect, log_files
from resiliency.telemetry.log_files import find, find_logs
from resiliency.telemetry.reader import LogReader, read_logs

from .scripted import Job, assert_matches
from .test_ledger_truth import crash


def lines_of(job: Job) -> list[str]:
    return [event.to_json() for event in job.events]


def ledger_of(*paths: Path) -> Ledger:
    (run,) = read_logs(paths).collector.runs.values()
    return account(run)


def test_logs_that_were_rotated_and_compressed_are_read_oldest_first(tmp_path: Path) -> None:
    job = crash()
    lines = lines_of(job)
    third = len(lines) // 3
    (tmp_path / "job.jsonl").write_text("\n".join(lines[2 * third :]) + "\n")
    (tmp_path / "job.jsonl.1").write_text("\n".join(lines[third : 2 * third]) + "\n")
    (tmp_path / "job.jsonl.2.gz").write_bytes(gzip.compress(("\n".join(lines[:third]) + "\n").encode()))
    (tmp_path / "job.jsonl.swp").write_text("no log")
    assert [path.name for path in find_logs([tmp_path])] == ["job.jsonl.2.gz", "job.jsonl.1", "job.jsonl"]
    names = [f"job.jsonl.{number}" for number in range(1, 12)] + ["job.jsonl"]
    assert sorted(names, key=log_files._oldest_first) == [*reversed(names[:-1]), "job.jsonl"]
    ledger = ledger_of(tmp_path)
    assert_matches(ledger, job)
    assert ledger.gpu == job.ledger().gpu
    assert not ledger.facts.quality, "nothing was late"
    reader = read_logs([tmp_path])
    assert reader.read(find_logs([tmp_path])) == 0, "a second look reads nothing again"


@pytest.mark.parametrize("how", ["cut", "damaged"])
def test_a_compressed_log_counts_up_to_where_it_is_cut_or_damaged(tmp_path: Path, how: str) -> None:
    """A host that dies while it compresses a log leaves a part. What lies beside it counts whole."""
    raw = ("\n".join(lines_of(crash())) + "\n").encode()
    raw *= 2 + (1 << 20) // len(raw)  # more than is unpacked at once
    (tmp_path / "job.jsonl").write_bytes(b"".join(raw.splitlines(keepends=True)[:10]))
    packed = bytearray(gzip.compress(raw, compresslevel=0))
    whole = 800 << 10
    if how == "cut":
        del packed[whole:]
    else:
        packed[whole:] = b"\xff" * (len(packed) - whole)
    (tmp_path / "job.jsonl.1.gz").write_bytes(packed)
    reader = read_logs([tmp_path])
    least = raw[: whole - (100 << 10)].count(b"\n")
    assert least < reader.lines - 10 <= raw[:whole].count(b"\n") + 1 and reader.torn_lines <= 1
    (name,) = reader.cut
    assert name.endswith("job.jsonl.1.gz")
    result = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "it was counted up to there" in " ".join(result.output.split())
    assert reader.read(find_logs([tmp_path])) == 0, "a second look reads nothing again"


def test_a_compressed_export_is_read(tmp_path: Path) -> None:
    job = crash()
    entries = [{"jsonPayload": json.loads(line)} for line in lines_of(job)]
    (tmp_path / "export.json.gz").write_bytes(gzip.compress(json.dumps(entries).encode()))
    (tmp_path / "other.json.gz").write_bytes(gzip.compress(b'{"loss": 1}'))
    assert_matches(ledger_of(tmp_path), job)


def test_what_is_no_compressed_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "job.jsonl.1.gz").write_bytes(b"these are no gzip bytes")
    with pytest.raises(ConfigError, match=r"cannot read event log .*job.jsonl.1.gz: Not a gzipped file"):
        read_logs([tmp_path])


@pytest.mark.parametrize("form", ["lines", "array", "array, newest first"])
def test_exports_of_cloud_logging_are_read(tmp_path: Path, form: str) -> None:
    job = crash()
    entries = [{"insertId": "x", "jsonPayload": json.loads(line), "severity": "INFO"} for line in lines_of(job)]
    if form == "lines":
        (tmp_path / "export.log").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    else:
        if form != "array":
            entries.reverse()
        (tmp_path / "export.json").write_text(json.dumps(entries, indent=2))
    ledger = ledger_of(tmp_path)
    assert_matches(ledger, job)
    assert not ledger.facts.quality


def test_what_a_sink_of_cloud_logging_writes_into_a_bucket_is_read(tmp_path: Path) -> None:
    """A file for each hour, in a folder for each day."""
    job = crash()
    entries = [json.dumps({"insertId": "x", "jsonPayload": json.loads(line)}) + "\n" for line in lines_of(job)]
    day = tmp_path / "job-goodput" / "2026" / "11" / "28"
    day.mkdir(parents=True)
    half = len(entries) // 2
    for hour, part in (("08", entries[:half]), ("09", entries[half:])):
        (day / f"{hour}:00:00_{hour}:59:59_S0.json").write_text("".join(part))
    assert_matches(ledger_of(tmp_path), job)


def test_an_export_that_is_not_read_is_named_wherever_it_lies(tmp_path: Path) -> None:
    """Of another library, or without an event; a JSON file that is no export of a log is not."""
    crash().write(tmp_path)
    measured = {"job_name": "j", "step_count": 3, "step_start_time": 1_760_000_000.0}
    deep = tmp_path / "exports" / "old"
    deep.mkdir(parents=True)
    (tmp_path / "measured.json").write_text(json.dumps([{"jsonPayload": measured}, {"jsonPayload": measured}]))
    (deep / "measured-too.json").write_text(json.dumps({"jsonPayload": measured}) + "\n")
    (deep / "other.json").write_text(json.dumps([{"textPayload": "hello", "insertId": "x"}]))
    (deep / "config.json").write_text(json.dumps({"step_start_time": 1, "lr": 0.1}))
    report = CliRunner().invoke(app, ["report", str(tmp_path)])
    told = " ".join(report.output.split())
    assert report.exit_code == 0, report.output
    assert "of ml-goodput-measurement, whose own library reads them: measured.json, measured-too.json." in told
    assert "Left out, because it holds no event: other.json." in told and "config.json" not in told
    for path in tmp_path.rglob("*.jsonl"):
        path.unlink()
    report = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert report.exit_code == 2 and "these are logs of ml-goodput-measurement" in report.output
    (deep / "measured-too.json").unlink()
    with pytest.raises(ConfigError, match=r"other\.json, config\.json hold no event"):
        find([deep])


@pytest.mark.parametrize("form", ["spaced", "as we write it", "an entry"])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "latin-1", "utf-16"])
def test_other_encodings_lose_no_event(tmp_path: Path, encoding: str, form: str) -> None:
    """Step lines as we write them are not parsed as JSON."""
    job = crash()
    job.run = "jöb"
    between = (", ", ": ") if form == "spaced" else (",", ":")
    events = [{**json.loads(line), "job_name": "jöb"} for line in lines_of(job)]
    entries = [{"jsonPayload": event} for event in events] if form == "an entry" else events
    text = "".join(json.dumps(entry, ensure_ascii=False, separators=between) + "\n" for entry in entries)
    (tmp_path / "job.jsonl").write_bytes(text.encode(encoding))
    reader = read_logs([tmp_path])
    assert reader.torn_lines == 0
    (run,) = reader.collector.runs.values()
    assert run.name == "jöb"
    assert_matches(account(run), job)


def test_a_log_whose_first_line_is_a_list_is_read_by_lines(tmp_path: Path) -> None:
    job = crash()
    (tmp_path / "job.jsonl").write_text("[1, 2]\n" + "".join(line + "\n" for line in lines_of(job)))
    assert_matches(ledger_of(tmp_path), job)


def test_output_beside_the_logs_is_left_out_and_named(tmp_path: Path) -> None:
    crash().write(tmp_path)
    spoken = '[12:00] INFO wrote {"event_type": "checkpoint_saved"}\n'
    (tmp_path / "output.log").write_text(spoken + "epoch 1, loss 2.0\n" * 1000)
    logs = find([tmp_path])
    assert [path.name for path in logs.left_out] == ["output.log"]
    reader = read_logs([tmp_path])
    assert (reader.torn_lines, reader.left_out) == (0, logs.left_out)
    report = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert "Left out, because it holds no event: output.log" in " ".join(report.output.split())
    only = tmp_path / "only"
    only.mkdir()
    (only / "output.log").write_text("loss\n")
    with pytest.raises(ConfigError, match=r"output\.log hold no event"):
        find([only])


def test_the_log_of_another_library_is_named(tmp_path: Path) -> None:
    record = {"job_name": "j", "step_count": 3, "step_start_time": 1_760_000_000.0}
    (tmp_path / "measured.jsonl").write_text(json.dumps(record) + "\n")
    report = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert report.exit_code != 0
    assert "ml-goodput-measurement" in report.output
    crash().write(tmp_path)
    report = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert report.exit_code == 0, report.output
    assert "of ml-goodput-measurement, whose own library reads them: measured.jsonl." in " ".join(report.output.split())


def test_a_week_that_was_delivered_twice_counts_once() -> None:
    def events() -> list[dict[str, Any]]:
        return [
            {
                "timestamp": 1_760_000_000.0 + number,
                "job_name": "job",
                "event_type": EventKind.CHECKPOINT_STARTED,
                "attempt": 0,
                "rank": 0,
                "stall_s": 0.5,
                "step": number,
            }
            for number in range(20_000)
        ]

    reader = LogReader()
    block = "".join(json.dumps(event) + "\n" for event in events()).encode()
    reader._block(block)
    reader._block(block)
    run = reader.collector.runs["job"]
    assert run.segments[0].stall_s == 10_000.0
    assert run.quality["duplicates"] == 20_000


def test_only_the_last_events_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a log is, what is known of the events in it stays small."""
    monkeypatch.setattr(collect, "MOST_SEEN", 1000)
    lines = [event.to_json() for event in crash().events if event.kind == EventKind.JOB_STARTED]
    block = "".join(lines[0].replace('"attempt":0', f'"attempt":{number}') + "\n" for number in range(5000)).encode()
    reader = LogReader()
    reader._block(block)
    run = reader.collector.runs["job"]
    assert not run.quality
    reader._block(b"".join(block.splitlines(keepends=True)[-1000:]))
    assert run.quality == {"duplicates": 1000}
    reader._block(block.splitlines(keepends=True)[0])
    assert run.kinds[EventKind.JOB_STARTED] == 5001, "forgotten"


@pytest.mark.parametrize("floats", [False, True], ids=["whole", "40.0"])
@pytest.mark.parametrize("shape", ["lines", "array", "compact array"])
def test_entries_of_cloud_logging_give_the_account_of_plain_lines(tmp_path: Path, shape: str, floats: bool) -> None:
    job = crash()
    plain, wrapped = tmp_path / "plain.jsonl", tmp_path / "wrapped.json"
    plain.write_text("\n".join(lines_of(job)) + "\n")
    events = [dict(sorted(json.loads(line).items())) for line in lines_of(job)]
    if floats:
        events = [{key: float(one) if type(one) is int else one for key, one in event.items()} for event in events]
    entries = [{"insertId": "1", "jsonPayload": event, "logName": "projects/p/logs/job"} for event in events]
    if shape == "lines":
        wrapped.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    else:
        wrapped.write_text(json.dumps(entries[::-1], indent=2 if shape == "array" else None))
    assert summarize(ledger_of(wrapped)) == summarize(ledger_of(plain))


@pytest.mark.parametrize(
    "ending", ["-20260131", "-20260131.gz", "-2026013112", ".2026-01-31", ".2026-01-31_12-30-00", ".2026-01-31.gz"]
)
def test_logs_that_bear_the_day_they_were_rotated_on_are_read_first(tmp_path: Path, ending: str) -> None:
    job = crash()
    lines = lines_of(job)
    pack = gzip.compress if ending.endswith(".gz") else bytes
    older = ending.replace("31", "30", 1) if "-20" in ending[:3] else ending.replace("-31", "-30")
    third = len(lines) // 3
    for name, part in ((older, lines[:third]), (ending, lines[third : 2 * third]), ("", lines[2 * third :])):
        data = ("\n".join(part) + "\n").encode()
        (tmp_path / f"job.jsonl{name}").write_bytes(pack(data) if name else data)
    assert [path.name for path in find_logs([tmp_path])] == [f"job.jsonl{name}" for name in (older, ending, "")]
    assert_matches(ledger_of(tmp_path), job)


def test_what_is_named_like_a_log_and_cannot_be_read_is_named(tmp_path: Path) -> None:
    crash().write(tmp_path)
    names = ["job.jsonl.1.bz2", "job.jsonl.old", "job.jsonl.swp", "job.jsonl.xz", "job.ndjson"]
    for name in names:
        (tmp_path / name).write_bytes(b"what")
    (tmp_path / "gone.jsonl").symlink_to(tmp_path / "nowhere")
    (tmp_path / "else.txt").write_text("no log")
    assert sorted(path.name for path in find([tmp_path]).unread) == ["gone.jsonl", *names]
    report = CliRunner().invoke(app, ["report", str(tmp_path)])
    assert report.exit_code == 0, report.output
    assert "Not read, because they are neither logs nor rotated or gzipped logs: " in " ".join(report.output.split())


def test_another_file_of_the_same_name_is_read_from_its_start(tmp_path: Path) -> None:
    """A log that was rotated away and has outgrown the old one since."""
    job = crash()
    lines = lines_of(job)
    reader, log, half = LogReader(), tmp_path / "job.jsonl", len(lines) // 3
    log.write_text("\n".join(lines[:half]) + "\n")
    reader.read(find_logs([tmp_path]), final=False)
    log.rename(tmp_path / "job.jsonl.1")
    log.write_text("\n".join(lines[half:]) + "\n")
    assert log.stat().st_size > (tmp_path / "job.jsonl.1").stat().st_size
    reader.read(find_logs([tmp_path]), final=False)
    assert_matches(account(reader.collector.runs["job"]), job)
    assert not reader.torn_lines


def test_what_a_terminal_would_obey_and_what_no_file_can_hold_is_replaced(tmp_path: Path) -> None:
    job = crash()
    odd = "a\x1b]0;title\x07\x9b31m\u202eb\ud800c"
    job.run = odd
    lines = [
        json.dumps({**json.loads(line), "job_name": odd, "host": odd, "reason": odd, "logs": [odd], odd: odd})
        for line in lines_of(job)
    ]
    (tmp_path / "job.jsonl").write_text("\n".join(lines) + "\n")
    page, gauges = tmp_path / "page.html", tmp_path / "x.prom"
    words = ["report", str(tmp_path), "--html", str(page), "--prometheus", str(gauges)]
    report = CliRunner().invoke(app, words)
    assert report.exit_code == 0, report.output
    for text in (report.output, page.read_text(), gauges.read_text()):
        assert "a\ufffd" in text and "c" in text and not set(text) & set(odd) - set("a]0;title31mbc")
