"""A part of the run: since, until, without some stretches; what is left sums exactly and is what happened then."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from resiliency.cli.goodput import app
from resiliency.goodput.incidents import incidents
from resiliency.goodput.ledger import Ledger, account
from resiliency.goodput.page import render_page
from resiliency.goodput.summary import summarize
from resiliency.goodput.taxonomy import Bucket
from resiliency.goodput.windows import Moment, Windows, parse_moment, parse_span
from resiliency.telemetry.collect import Collector

from .scripted import START, Job
from .test_ledger_property import check
from .test_ledger_truth import crash


def ledger_of(job: Job, **windows: object) -> Ledger:
    collector = Collector()
    for event in job.events:
        collector.add(event)
    return account(collector.runs[job.run], windows=Windows(**windows))  # type: ignore[arg-type]


def wall(ledger: Ledger) -> dict[str, float]:
    return {bucket.value: seconds / 1e6 for bucket, seconds in ledger.wall.items() if seconds}


def two_halves() -> Job:
    """30 s of start, 100 s without data waits, 150 s with a third of them."""
    job = Job()
    job.start()
    job.steps(50)
    job.steps(50, data=1.0)
    job.finish()
    return job


def test_each_half_is_what_happened_in_it() -> None:
    job = two_halves()
    first, second = ledger_of(job, until=Moment(130, is_offset=True)), ledger_of(job, since=Moment(130, is_offset=True))
    for ledger in (first, second):
        check(ledger)
    assert wall(first) == {"productive": 100.0, "first_start": 30.0}
    assert wall(second) == pytest.approx({"productive": 100.0, "data_wait": 50.0})
    assert (first.end, second.start) == (START + 130, START + 130)


def test_a_stretch_that_is_left_out_leaves_the_rest_whole() -> None:
    job = crash()
    whole = ledger_of(job)
    # The failure and the restart: 40 s start, 260 s of steps, then 3 + 20 + 10 + 15 s until the next.
    ledger = ledger_of(job, exclude=((Moment(300, is_offset=True), Moment(348, is_offset=True)),))
    check(ledger)
    assert ledger.wall_us == whole.wall_us - 48_000_000
    assert (ledger.start, ledger.end) == (whole.start, whole.end)
    for bucket in (Bucket.DETECTION, Bucket.RESTART, Bucket.RESTORE):
        assert ledger.wall[bucket] == 0 < whole.wall[bucket]
    assert wall(ledger)["lost_work"] == wall(whole)["lost_work"]
    assert summarize(ledger)["left_out_s"] == 48.0
    assert any("left out" in note for note in ledger.notes)


def test_steps_attempts_and_incidents_are_those_of_the_part() -> None:
    job = crash()
    summary = summarize(ledger_of(job, since=Moment(-100, is_offset=True)))
    assert [row["attempt"] for row in summary["attempts"]] == [2]
    assert summary["attempts"][0]["wall_s"] == 100.0
    assert summary["steps"]["run"] == summary["steps"]["kept"] == 50
    assert incidents(ledger_of(job, since=Moment(-100, is_offset=True))) == []
    before = summarize(ledger_of(job, until=Moment(240, is_offset=True)))
    assert (before["steps"]["run"], before["steps"]["thrown_away"]) == (100, 0)


def test_the_parts_of_a_run_sum_to_it() -> None:
    job = crash()
    whole = ledger_of(job)
    edges = [Moment(float(seconds), is_offset=True) for seconds in (0, 17, 133, 299, 333, 400)]
    sums = dict.fromkeys(Bucket, 0)
    for low, high in zip(edges, [*edges[1:], Moment(1e9, is_offset=True)], strict=True):
        part = ledger_of(job, since=low, until=high)
        check(part)
        for bucket, amount in part.gpu.items():
            sums[bucket] += amount
    for bucket, amount in sums.items():
        assert abs(amount - whole.gpu[bucket]) <= 4 * 4 * len(edges), f"{bucket}: rounded in each piece that is cut"


def test_moments_are_times_or_offsets() -> None:
    assert parse_moment("90") == parse_moment("+90s") == parse_moment("1m30") == Moment(90.0, is_offset=True)
    assert parse_moment("2d1h0.5m") == Moment(2 * 86400 + 3630.0, is_offset=True)
    assert parse_moment("-30m") == Moment(-1800.0, is_offset=True)
    noon = parse_moment("2025-10-09T12:00:00Z")
    assert noon == parse_moment("2025-10-09T12:00:00") == parse_moment("2025-10-09T14:00:00+02:00")
    assert not noon.is_offset
    first, last = parse_span("10m..")
    assert first == Moment(600.0, is_offset=True) and last.at(0.0, 99.0) == float("inf")
    for bad in ("", "soon", "h", "1x", "..", "1:30"):
        with pytest.raises(ValueError, match="neither an ISO time"):
            parse_moment(bad)
    with pytest.raises(ValueError, match=r"write A\.\.B"):
        parse_span("1h")


def test_the_page_shows_what_is_left_out() -> None:
    ledger = ledger_of(crash(), exclude=((Moment(300, is_offset=True), Moment(348, is_offset=True)),))
    assert "Left out: 48.0 s" in render_page([(summarize(ledger), ledger)])


def test_the_command_line_takes_times_and_offsets(tmp_path: Path) -> None:
    two_halves().write(tmp_path)

    def report(*options: str) -> dict[str, float]:
        result = CliRunner().invoke(app, ["report", str(tmp_path), "--json", *options])
        assert result.exit_code == 0, result.output
        (run,) = json.loads(result.output)["runs"]
        assert sum(row["wall_s"] for row in run["buckets"]) == pytest.approx(run["wall_s"])
        return {row["bucket"]: row["wall_s"] for row in run["buckets"] if row["wall_s"]}

    assert report("--until", "130s") == {"productive": 100.0, "first_start": 30.0}
    assert report("--since", "30", "--until", "-150") == {"productive": 100.0}
    assert report("--exclude", "..30s", "--exclude", "2m10s..") == {"productive": 100.0}
    assert report("--since", "2025-10-09T08:53:50Z", "--until", "2025-10-09T08:55:30") == {"productive": 100.0}
    for options, message in (
        (["--since", "soon"], "neither an ISO time"),
        (["--exclude", "1h"], "write A..B"),
        (["--since", "5h"], "leave nothing of the run"),
    ):
        wrong = CliRunner().invoke(app, ["report", str(tmp_path), *options])
        assert wrong.exit_code == 2 and message in wrong.output


def test_watch_shows_the_part_that_is_asked_for_and_waits_while_there_is_none(tmp_path: Path) -> None:
    """A running job may be shorter yet than the hour that is asked for."""
    (tmp_path / "log").mkdir()
    two_halves().write(tmp_path / "log")
    gauges = tmp_path / "gauges.prom"

    def watch(*options: str) -> str:
        words = ["watch", str(tmp_path / "log"), "--rounds", "1", "--prometheus", str(gauges), *options]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        return result.output

    def goodput() -> float:
        (line,) = re.findall(r"^resiliency_goodput_ratio\{.*\} (\S+)$", gauges.read_text(), re.MULTILINE)
        return float(line)

    watch()
    whole = goodput()
    watch("--since", "30s", "--exclude", "2m10s..")
    assert whole < goodput() == 1
    watch("--reference-step-time", "0.5")  # half of what a step takes
    assert goodput() < whole
    gauges.unlink()
    assert "waiting: --since and --exclude leave nothing of the run so far" in watch("--since", "5h")
    assert not gauges.exists()
    wrong = CliRunner().invoke(app, ["watch", str(tmp_path), "--rounds", "1", "--since", "soon"])
    assert wrong.exit_code == 2 and "neither an ISO time" in wrong.output


def test_a_stretch_that_ends_before_it_begins_is_refused() -> None:
    for bad in ("2m..1m", "-1m..-2m", "2025-10-09T13:00:00Z..2025-10-09T12:00:00Z"):
        with pytest.raises(ValueError, match="ends before it begins"):
            parse_span(bad)
    parse_span("2m..-1m")  # in order or not as the run's length says


def test_an_offset_has_one_sign_and_minus_zero_is_the_end() -> None:
    for bad in ("--5m", "+-60s", "-+1h"):
        with pytest.raises(ValueError, match="neither an ISO time"):
            parse_moment(bad)
    assert parse_moment("-0s").at(10.0, 99.0) == 99.0
    assert parse_moment("0s").at(10.0, 99.0) == 10.0


def test_watch_waits_for_a_run_that_has_not_begun(tmp_path: Path) -> None:
    two_halves().write(tmp_path)
    result = CliRunner().invoke(app, ["watch", str(tmp_path), "--rounds", "1", "--run", "later"])
    assert result.exit_code == 0, result.output
    assert "waiting for run 'later'; so far there are: job" in result.output


def test_endless_seconds_are_wrong_arguments(tmp_path: Path) -> None:
    two_halves().write(tmp_path)
    for words in (
        ["report", str(tmp_path), "--json", "--reference-step-time", "inf"],
        ["watch", str(tmp_path), "--rounds", "2", "--interval", "inf"],
    ):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 2 and "Invalid value" in result.output
