"""What --json prints is as ``report.schema.json`` says."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from resiliency.cli.goodput import app
from resiliency.goodput.start_parts import StartPart
from resiliency.goodput.summary import SCHEMA_VERSION, schema, summarize
from resiliency.goodput.taxonomy import Bucket

from .demo import demo
from .json_schema import problems
from .scripted import Job
from .test_ledger_truth import crash, scale_down
from .test_start_parts import _job

SCHEMA: dict[str, Any] = json.loads(schema())
run = CliRunner().invoke


def coarse() -> Job:
    job = Job(ranks=1)
    job.start()
    for _ in range(3):
        job.now += 100
        job.step += 10
        job.save()
    return job


@pytest.mark.parametrize("script", [crash, scale_down, demo, _job, coarse, Job], ids=lambda one: one.__name__)
def test_a_report_is_as_the_schema_says(script: Any) -> None:
    job = script()
    if not job.events:
        job.emit("made_up", 0)
    found = json.loads(json.dumps({"schema": SCHEMA_VERSION, "runs": [summarize(job.ledger())]}, allow_nan=False))
    assert list(problems(found, SCHEMA, SCHEMA)) == []


def test_the_command_line_prints_one_shape_and_the_schema(tmp_path: Path) -> None:
    crash().write(tmp_path)
    for command in (["report", str(tmp_path), "--json"], ["compare", str(tmp_path), str(tmp_path), "--json"]):
        result = run(app, command)
        assert list(problems(json.loads(result.output), SCHEMA, SCHEMA)) == []
    assert json.loads(run(app, ["schema"]).output) == SCHEMA


def test_the_schema_names_every_bucket_and_part() -> None:
    assert SCHEMA["$defs"]["bucket"]["enum"] == [bucket.value for bucket in Bucket]
    of_run = SCHEMA["properties"]["runs"]["items"]["properties"]
    parts = of_run["buckets"]["items"]["properties"]["parts"]["items"]["properties"]["part"]["enum"]
    assert parts == [part.value for part in StartPart]
    assert set(of_run) == set(summarize(crash().ledger()))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("schema", 3),
        ("runs.0.goodput", 1.5),
        ("runs.0.run", None),
        ("runs.0.events", 3.5),
        ("runs.0.coarse", 1),
        ("runs.0.buckets.0.bucket", "other"),
        ("runs.0.buckets.0.advice", {"text": "x"}),
        ("runs.0.attempts.0.gpu_s", {"nothing": 1.0}),
        ("runs.0.new", 1),
    ],
)
def test_the_validator_sees_what_is_wrong(path: str, value: object) -> None:
    found: Any = copy.deepcopy({"schema": SCHEMA_VERSION, "runs": [summarize(crash().ledger())]})
    inner, names = found, path.split(".")
    for name in names[:-1]:
        inner = inner[int(name)] if name.isdigit() else inner[name]
    inner[names[-1]] = value
    assert list(problems(found, SCHEMA, SCHEMA))
