"""The account of a run as gauges for Prometheus and TensorBoard, and the Grafana dashboard that shows them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from resiliency.telemetry.sinks import ScalarFile, escape_label
from resiliency.telemetry.text_file import replace_text

__all__ = ["GAUGES", "Sample", "dashboard", "gauges", "prometheus_text", "write_prometheus", "write_tensorboard"]

#: Name of each gauge -> its help text.
GAUGES: dict[str, str] = {
    "resiliency_goodput_ratio": "Share of all GPU time that was productive, over the whole account.",
    "resiliency_goodput_recent_ratio": "The same, over the last sixteenth of the account.",
    "resiliency_goodput_bucket_seconds": "Wall seconds by bucket; they sum to the wall time.",
    "resiliency_goodput_bucket_gpu_seconds": "GPU seconds by bucket.",
    "resiliency_goodput_bucket_ratio": "Share of all GPU time by bucket; they sum to 1.",
    "resiliency_goodput_wall_seconds": "Wall time that is accounted for.",
    "resiliency_goodput_capacity": "GPUs (ranks, hosts) of the job when none is missing.",
    "resiliency_goodput_attempts": "Attempts so far.",
    "resiliency_goodput_incidents": "Incidents so far, by whether they ended an attempt.",
    "resiliency_goodput_steps": "Steps that were kept and thrown away so far.",
    "resiliency_goodput_last_step": "Last optimizer step.",
    "resiliency_goodput_step_seconds": "Computing time of a step: usual, best (stable), deviation.",
    "resiliency_goodput_end_timestamp_seconds": "End of the account, UTC seconds.",
}


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One value of a gauge; ``labels`` are those besides ``run``."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


def gauges(summary: Mapping[str, Any]) -> Iterator[Sample]:
    """All gauges of one run.

    Args:
        summary: result of :func:`~resiliency.goodput.summary.summarize`.
    """

    def sample(name: str, value: float, **labels: str) -> Sample:
        return Sample(name=f"resiliency_goodput_{name}", value=float(value), labels=labels)

    yield sample("ratio", summary["goodput"])
    points = summary["over_time"]
    yield sample("recent_ratio", points[-1]["goodput"] if points else summary["goodput"])
    for row in summary["buckets"]:
        yield sample("bucket_seconds", row["wall_s"], bucket=row["bucket"])
        yield sample("bucket_gpu_seconds", row["gpu_s"], bucket=row["bucket"])
        yield sample("bucket_ratio", row["share"], bucket=row["bucket"])
    yield sample("wall_seconds", summary["wall_s"])
    yield sample("capacity", summary["capacity"], unit=summary["unit"])
    yield sample("attempts", len(summary["attempts"]))
    for ended in (True, False):
        count = sum(row["ended_attempt"] is ended for row in summary["incidents"])
        yield sample("incidents", count, ended_attempt=str(ended).lower())
    yield sample("steps", summary["steps"]["kept"], fate="kept")
    yield sample("steps", summary["steps"]["thrown_away"], fate="thrown_away")
    if summary["steps"]["last"] is not None:
        yield sample("last_step", summary["steps"]["last"])
    for kind in ("usual", "best", "deviation"):
        if summary["step_times"][f"{kind}_s"] is not None:
            yield sample("step_seconds", summary["step_times"][f"{kind}_s"], kind=kind)
    yield sample("end_timestamp_seconds", summary["end"])


def prometheus_text(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Exposition text of all runs; every gauge has the label ``run``."""
    by_name: dict[str, list[str]] = {name: [] for name in GAUGES}
    for summary in summaries:
        for one in gauges(summary):
            labels = {"run": summary["run"], **one.labels}
            written = ",".join(f'{name}="{escape_label(value)}"' for name, value in labels.items())
            by_name[one.name].append(f"{one.name}{{{written}}} {one.value:.10g}")
    lines: list[str] = []
    for name, samples in by_name.items():
        if samples:
            lines += [f"# HELP {name} {GAUGES[name]}", f"# TYPE {name} gauge", *samples]
    return "\n".join(lines) + "\n"


def write_prometheus(path: str | os.PathLike[str], summaries: Sequence[Mapping[str, Any]]) -> None:
    """Replaces a ``*.prom`` file for node_exporter's textfile collector atomically, so that it never reads a part.

    Raises:
        OSError: the file cannot be written.
    """
    replace_text(path, prometheus_text(summaries))


def write_tensorboard(file: ScalarFile, summary: Mapping[str, Any]) -> None:
    """Adds all gauges of a run as scalars ``goodput/...`` at its last step, with the end of the account as their wall
    time."""
    step = summary["steps"]["last"] or 0
    for one in gauges(summary):
        tag = one.name.removeprefix("resiliency_goodput_")
        names = "/".join(["goodput", tag, *_tags(one.labels.values())])
        file.add_scalar(names, one.value, step, walltime=summary["end"])


def _tags(values: Iterable[str]) -> Iterator[str]:
    return (value.replace("/", "_") for value in values)


def dashboard() -> str:
    """The Grafana dashboard, as JSON to import."""
    return (resources.files("resiliency.goodput") / "grafana.json").read_text(encoding="utf-8")
