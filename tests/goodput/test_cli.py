"""``resiliency goodput``: what it prints, writes and refuses."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from resiliency.cli.goodput import app
from resiliency.goodput.table import print_report
from resiliency.goodput.taxonomy import Bucket

from .scripted import Job
from .test_ledger_truth import crash, scale_down

run = CliRunner().invoke


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder with the log of a crash where our writers put it."""
    folder = tmp_path_factory.mktemp("ckpt")
    events = folder / ".resiliency" / "job" / "events"
    events.mkdir(parents=True)
    crash().write(events)
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other")
    job = scale_down()
    job.write(folder)
    return folder


def the_run(output: str) -> Any:
    """The only run of what --json prints."""
    (one,) = json.loads(output)["runs"]
    return one


def test_report_prints_every_bucket_and_the_sum(logs: Path) -> None:
    result = run(app, ["report", "--log", str(logs)])
    assert result.exit_code == 0, result.output
    for text in (
        "goodput of job",
        "Productive",
        "Lost work redone",
        "Unknown",
        "Sum",
        "100.0 %",
    ):
        assert text in result.output
    assert "restarted at step 100 from local" in result.output


def test_report_as_json_sums_to_the_whole(logs: Path) -> None:
    result = run(app, ["report", "--log", str(logs), "--json"])
    summary = the_run(result.output)
    assert summary["run"] == "job"
    assert sum(row["wall_s"] for row in summary["buckets"]) == pytest.approx(summary["wall_s"], abs=1e-4)
    assert sum(row["gpu_s"] for row in summary["buckets"]) == pytest.approx(summary["wall_s"] * 4, abs=1e-4)
    assert summary["steps"] == {"run": 210, "kept": 180, "thrown_away": 30, "last": 180, "usual_s": 2.0}
    (incident,) = summary["incidents"]
    assert (incident["lost_steps"], incident["where"]) == (30, "rank 1")
    # 30 lost steps of 2 s, 3 s detection, 30 s restart, 15 s restore, on 4 ranks.
    assert incident["cost_gpu_s"] == pytest.approx((60 + 3 + 30 + 15) * 4, rel=0.01)


def test_several_paths_are_one_report_of_each_run(logs: Path, other: Path, tmp_path: Path) -> None:
    both = tmp_path / "both.log"
    two = Job(run="second", ranks=1)
    two.start()
    two.steps(5)
    both.write_text("".join(event.to_json() + "\n" for event in two.events))
    result = run(app, ["report", "--log", str(logs), str(both), "--json"])
    both_runs = json.loads(result.output)
    assert (both_runs["schema"], [summary["run"] for summary in both_runs["runs"]]) == (2, ["job", "second"])
    result = run(app, ["report", "--log", str(logs), "--log", str(both), "--run", "second", "--json"])
    assert the_run(result.output)["run"] == "second"
    result = run(app, ["report", str(both), "--capacity", "4", "--gpus-per-rank", "2", "--json"])
    assert the_run(result.output)["capacity"] == 8


def test_until_counts_the_time_after_the_last_event(logs: Path, tmp_path: Path) -> None:
    job = Job(ranks=1)
    job.start()
    job.steps(5)
    log = tmp_path / "open.jsonl"
    log.write_text("".join(event.to_json() + "\n" for event in job.events))
    plain = the_run(run(app, ["report", "--log", str(log), "--json"]).output)
    assert plain["wall_s"] == pytest.approx(40)
    later = the_run(run(app, ["report", "--log", str(log), "--until", "2025-10-09T09:53:20Z", "--json"]).output)
    assert later["wall_s"] == pytest.approx(3600)
    assert the_run(run(app, ["report", "--log", str(log), "--until", "now", "--json"]).output)["wall_s"] > 3600
    bad = run(app, ["report", "--log", str(log), "--until", "tomorrow"])
    assert bad.exit_code == 2
    assert "neither last, now nor an ISO time" in bad.output


def test_html_writes_the_page(logs: Path, tmp_path: Path) -> None:
    page = tmp_path / "out.html"
    result = run(app, ["report", "--log", str(logs), "--html", str(page)])
    assert result.exit_code == 0, result.output
    assert "page written to" in result.output
    assert page.read_text().startswith("<!doctype html>")


def test_the_page_makes_its_folder(logs: Path, tmp_path: Path) -> None:
    page = tmp_path / "new" / "folder" / "out.html"
    assert run(app, ["report", "--log", str(logs), "--html", str(page)]).exit_code == 0
    assert page.exists()


def test_a_page_below_a_file_is_refused(logs: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for page in (tmp_path / "file" / "x.html", tmp_path / "file" / "below" / "x.html"):
        result = run(app, ["report", "--log", str(logs), "--html", str(page)])
        assert result.exit_code == 2 and "Not a directory" in " ".join(result.output.split())


def test_a_missing_jinja_is_told_in_one_line(logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    result = run(app, ["report", "--log", str(logs), "--html", str(tmp_path / "page.html")])
    assert (result.exit_code, "install resiliency[goodput]" in result.output) == (2, True)
    assert not (tmp_path / "page.html").exists()


def test_compare_takes_what_report_takes(logs: Path) -> None:
    options = [
        "--capacity",
        "8",
        "--gpus-per-rank",
        "2",
        "--until",
        "2025-10-09T09:53:20Z",
        "--reference-step-time",
        "1",
    ]
    result = run(app, ["compare", str(logs), str(logs), "--json", *options])
    assert result.exit_code == 0, result.output
    for one in json.loads(result.output)["runs"]:
        assert (one["capacity"], one["wall_s"], one["step_times"]["best_s"]) == (16, 3600.0, 1.0)


def test_compare_prints_both_and_the_change(logs: Path, other: Path) -> None:
    result = run(app, ["compare", str(logs), str(other)])
    assert result.exit_code == 0, result.output
    assert "points" in result.output
    assert "Scaled-down capacity" in result.output
    both = json.loads(run(app, ["compare", str(logs), str(other), "--json"]).output)
    assert [one["run"] for one in both["runs"]] == ["job", "job"]


def test_watch_follows_a_growing_log(logs: Path, tmp_path: Path) -> None:
    result = run(app, ["watch", "--log", str(logs), "--rounds", "2", "--interval", "0.1"])
    assert result.exit_code == 0, result.output
    assert "goodput of job" in result.output
    empty = run(app, ["watch", "--log", str(tmp_path), "--rounds", "1"])
    assert empty.exit_code == 0
    assert "waiting for a log" in empty.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report"], "say which log to read"),
        (["report", "--log", "/no/such/place"], "no event log at /no/such/place"),
        (["report", "--log", "EMPTY"], "no *.jsonl or *.log below"),
        (
            ["report", "--log", "LOGS", "--html", "/proc/none/page.html"],
            "the page /proc/none/page.html cannot be written",
        ),
        (["watch", "--log", "/no/such/place", "--rounds", "1"], "there is no /no/such/place"),
        (["compare", "LOGS", "/no/such/place"], "no event log at /no/such/place"),
        (["report", "--log", "LOGS", "--run", "nobody"], "no run named 'nobody' in these logs; there are: job"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments: list[str], message: str, logs: Path, tmp_path: Path) -> None:
    known = {"EMPTY": str(tmp_path), "LOGS": str(logs)}
    result = run(app, [known.get(word, word) for word in arguments])
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_an_end_before_the_run_leaves_nothing(logs: Path) -> None:
    for command in (["report", str(logs)], ["compare", str(logs), str(logs)]):
        result = run(app, [*command, "--until", "2001-01-01"])
        assert result.exit_code == 2 and "leave nothing of the run" in result.output


@pytest.mark.parametrize("stretch", ["400..2001-01-01", "2099-01-01..10", "-5..10", "10..-2d"])
def test_a_stretch_that_turns_out_to_be_reversed_is_refused(logs: Path, stretch: str) -> None:
    result = run(app, ["report", str(logs), "--exclude", stretch])
    assert result.exit_code == 2 and "ends before it begins" in result.output
    assert run(app, ["watch", str(logs), "--exclude", stretch, "--rounds", "1"]).exit_code == 0


def test_watch_says_that_it_waits_for_the_first_event(tmp_path: Path) -> None:
    (tmp_path / "job.jsonl").touch()
    result = run(app, ["watch", str(tmp_path), "--rounds", "1"])
    assert result.exit_code == 0 and "waiting for the first event" in result.output


def test_an_interrupt_ends_a_watch_well_wherever_it_comes(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("resiliency.telemetry.reader.LogReader.read", interrupted)
    assert run(app, ["watch", str(logs)]).exit_code == 0


def test_a_locale_without_bars_gets_the_rest(logs: Path) -> None:
    result = CliRunner(charset="ascii").invoke(app, ["report", str(logs)])
    assert result.exit_code == 0, result.exception
    assert "Productive" in result.output and "100.0 %" in result.output


@pytest.mark.parametrize(("width", "words"), [(80, ["10-09 08:53", "thrown away"]), (64, ["First start", "100.0 %"])])
def test_a_narrow_terminal_cuts_no_figure(
    logs: Path, monkeypatch: pytest.MonkeyPatch, width: int, words: list[str]
) -> None:
    (summary,) = json.loads(run(app, ["report", str(logs), "--json"]).output)["runs"]
    console = Console(file=io.StringIO(), width=width)
    print_report([summary], console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\u2026" not in text and all(word in text for word in words)
    assert max(map(len, text.splitlines())) <= width


def test_what_a_log_puts_in_brackets_is_text_and_no_style(tmp_path: Path) -> None:
    job = Job(ranks=2, run="[/red] :smile:", hosts={0: "[blink]a", 1: "[/b]"})
    job.start()
    for _ in range(100):
        job.step += 1
        job.advance(2.0, Bucket.PRODUCTIVE)
        for rank in range(2):
            busy = 1.9 if rank else 1.0
            job.emit("step", rank, step=job.step, step_s=2.0, busy_s=busy, data_wait_s=0.0, stall_s=0.0)
    job.emit("checkpoint_failed", 0, step=20, tier="[/dev/shm]", reason="[/why] [errno 28]")
    job.emit("span_ended", 0, span="[/span]", span_s=1.0)
    job.fail(detection=5.0, kind="host_lost", lost_host="[/c]", reason="[gone]")
    job.start(load=20)
    job.finish()
    job.write(tmp_path)
    words = ("[/red] :smile:", "[/b]", "[/dev/shm]", "[/why]", "[errno", "[/span]", "[/c]", "[gone]")
    report = run(app, ["report", str(tmp_path)])
    assert report.exit_code == 0, report.output
    assert [word for word in words if word not in report.output] == []
    for command in (["compare", str(tmp_path), str(tmp_path)], ["watch", str(tmp_path), "--rounds", "1"]):
        result = run(app, command)
        assert result.exit_code == 0 and "[/red] :smile:" in result.output, result.output
    waits = run(app, ["watch", str(tmp_path), "--rounds", "1", "--run", "[/x]"])
    assert waits.exit_code == 0 and "waiting for run '[/x]'" in waits.output
    console = Console(file=io.StringIO(), width=200, emoji=False)
    (summary,) = json.loads(run(app, ["report", str(tmp_path), "--json"]).output)["runs"]
    print_report([summary], console)
