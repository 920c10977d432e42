"""The account as gauges, for Prometheus and TensorBoard; the dashboard shows what there is."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from resiliency.cli.goodput import app
from resiliency.events import Event, EventKind
from resiliency.goodput.gauges import GAUGES, dashboard, gauges, prometheus_text
from resiliency.goodput.summary import summarize
from resiliency.goodput.taxonomy import Bucket
from resiliency.telemetry.sinks import PrometheusTextSink

from .test_ledger_truth import crash

run = CliRunner().invoke


def test_every_bucket_is_a_gauge_and_they_sum() -> None:
    parser = importlib.import_module("prometheus_client.parser")  # in the dev extra: absent is a failure
    summary = {**summarize(crash().ledger()), "run": 'a"b\n'}
    families = list(parser.text_string_to_metric_families(prometheus_text([summary, {**summary, "run": "other"}])))
    assert {family.name for family in families} == set(GAUGES)
    assert {family.type for family in families} == {"gauge"}
    samples = {
        (sample.name, sample.labels.get("bucket")): sample.value
        for family in families
        for sample in family.samples
        if sample.labels["run"] == 'a"b\n'
    }
    for name, whole in (
        ("bucket_ratio", 1.0),
        ("bucket_seconds", summary["wall_s"]),
        ("bucket_gpu_seconds", summary["gpu_s"]),
    ):
        values = [samples[f"resiliency_goodput_{name}", bucket.value] for bucket in Bucket]
        assert sum(values) == pytest.approx(whole)
    assert samples["resiliency_goodput_ratio", None] == pytest.approx(summary["goodput"])
    assert samples["resiliency_goodput_wall_seconds", None] == summary["wall_s"]


def test_the_command_line_writes_both(tmp_path: Path) -> None:
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    logs = tmp_path / "logs"
    logs.mkdir()
    crash().write(logs)
    text, scalars = tmp_path / "goodput.prom", tmp_path / "tb"
    for command in (["report"], ["watch", "--rounds", "1"]):
        result = run(app, [*command, str(logs), "--prometheus", str(text), "--tensorboard", str(scalars)])
        assert result.exit_code == 0, result.output
        assert "Goodput over time" in result.output
        assert 'resiliency_goodput_bucket_ratio{run="job",bucket="lost_work"}' in text.read_text()
    read = accumulator.EventAccumulator(str(scalars / "job"))
    read.Reload()
    (summary,) = json.loads(run(app, ["report", str(logs), "--json"]).output)["runs"]
    for row in summary["buckets"]:
        point = read.Scalars(f"goodput/bucket_ratio/{row['bucket']}")[0]
        assert (point.value, point.step) == (pytest.approx(row["share"]), 180)
        assert point.wall_time == pytest.approx(summary["end"])
    assert not list(tmp_path.glob("*.tmp"))
    failed = run(app, ["report", str(logs), "--prometheus", str(tmp_path / "none" / "x.prom")])
    said = " ".join(failed.output.split())
    assert failed.exit_code == 2 and f"the gauges cannot be written to {tmp_path / 'none' / 'x.prom'}: " in said


def shown() -> set[str]:
    found = json.loads(dashboard())
    texts = [target["expr"] for panel in found["panels"] for target in panel["targets"]]
    texts += [one["query"]["query"] for one in found["templating"]["list"] if one["type"] == "query"]
    return {name for text in texts for name in re.findall(r"resiliency_\w+", text)}


def test_the_dashboard_names_only_gauges_that_there_are_and_shows_all(tmp_path: Path) -> None:
    sink = PrometheusTextSink(tmp_path / "x.prom")
    sink.emit(Event(kind=EventKind.STEP, time=1.0, monotonic_s=1.0, run="r", attempt=0, rank=0, host="h", step=1))
    of_ranks = set(re.findall(r"^(resiliency_\w+)\{", sink.text(), re.MULTILINE))
    assert shown() <= set(GAUGES) | of_ranks, shown() - set(GAUGES) - of_ranks
    assert set(GAUGES) <= shown(), set(GAUGES) - shown()


def test_labels_in_the_dashboard_are_labels_of_the_gauges() -> None:
    labels: dict[str, set[str]] = {}
    for sample in gauges(summarize(crash().ledger())):
        labels.setdefault(sample.name, {"run"}).update(sample.labels)
    for panel in json.loads(dashboard())["panels"]:
        for target in panel["targets"]:
            (name,) = set(re.findall(r"resiliency_\w+", target["expr"]))
            used = set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")))
            used |= set(re.findall(r'(\w+)=~?"|(\w+)!="', target["expr"])[0][:1]) - {""}
            if name in labels:
                assert used <= labels[name], (target, labels[name])


def test_the_dashboard_is_printed_and_its_panels_do_not_overlap() -> None:
    result = run(app, ["dashboard"])
    assert result.exit_code == 0
    panels = json.loads(result.output)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 10
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
