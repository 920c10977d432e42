"""The older library's goodput calculator: the same command line, class and figures, without pandas or a cloud account.

``python -m resiliency.goodput_measure.calculator --job-name J --log-file F --reference-step-time S``. With
``--log-file`` (a file or a folder, ours or the older library's) nothing else is needed; without it events come from
Google Cloud Logging.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

from resiliency.errors import ConfigError, ResiliencyError
from resiliency.events import EventKind
from resiliency.paths import absolute_path
from resiliency.telemetry.collect import Collector
from resiliency.telemetry.facts import RunFacts, parse_stamp
from resiliency.telemetry.reader import LogReader, find_logs

__all__ = ["EVENT_TYPE_ORDER", "GoodputCalculator", "get_parser", "main"]

logger = logging.getLogger(__name__)

#: Order of events with equal stamps.
EVENT_TYPE_ORDER = {
    EventKind.USER_SCHEDULED: 0,
    EventKind.JOB_STARTED: 1,
    EventKind.CHECKPOINT_LOADED: 2,
    EventKind.CHECKPOINT_SAVED: 3,
    EventKind.USER_TERMINATED: 4,
    EventKind.JOB_TERMINATED: 5,
}
#: The older formula uses these only; our step events, which may be millions, are skipped.
_KINDS = frozenset(EVENT_TYPE_ORDER)


class _Kept(Collector):
    """A collector that also keeps, once each, the events that the older figures need."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[dict[str, Any]] = []

    def _take(self, run: RunFacts, record: Mapping[str, Any], kind: str, time: float, attempt: int | None) -> None:
        if kind in _KINDS:
            self.events.append(record if isinstance(record, dict) else dict(record))
        super()._take(run, record, kind, time, attempt)


class GoodputCalculator:
    """Drop-in for the older class of this name. Use it from one thread.

    Args:
        job_name: the ``job_name`` in the events.
        local_log_path: file or folder of events; None: ask Google Cloud Logging.
        verbose: print progress.
        gcloud_logging_lookback_days: how many days of Cloud Logging to read.
    """

    def __init__(
        self,
        job_name: str,
        local_log_path: str | None = None,
        verbose: bool = False,
        gcloud_logging_lookback_days: float = 7.0,
    ) -> None:
        self.job_name = job_name
        self.log_name = f"{job_name}-goodput"
        self.local_log_path = local_log_path
        self.verbose = verbose
        self.gcloud_logging_lookback_days = gcloud_logging_lookback_days

    def _out(self, line: str) -> None:
        sys.stdout.write(line + "\n")

    def _say(self, line: str) -> None:
        if self.verbose:
            self._out(line)

    def load_events(self) -> list[dict[str, Any]]:
        """Events in order of time.

        Raises:
            FileNotFoundError: ``local_log_path`` does not exist.
            ConfigError: there is no ``local_log_path``, and Cloud Logging cannot be used.
        """
        events = self._from_files() if self.local_log_path else self._from_cloud()
        events.sort(key=_order)
        self._say(f"Loaded {len(events)} events")
        return events

    def _from_files(self) -> list[dict[str, Any]]:
        assert self.local_log_path is not None
        try:
            files = find_logs([self.local_log_path])
        except ConfigError as error:
            raise FileNotFoundError(f"Log file not found: {self.local_log_path} ({error})") from error
        kept = _Kept()
        reader = LogReader(kept)
        reader.read(files)
        if reader.torn_lines:
            self._say(f"Lines that could not be parsed: {reader.torn_lines}")
        return kept.events

    def _from_cloud(self) -> list[dict[str, Any]]:
        try:
            from google import auth
            from google.cloud import logging as cloud
        except ImportError as error:
            raise ConfigError(
                "no --log-file given and google-cloud-logging is not installed; give --log-file"
            ) from error
        try:
            _, project = auth.default()
            client = cloud.Client(project=project)
            since = datetime.now(timezone.utc) - timedelta(days=self.gcloud_logging_lookback_days)
            log = f"projects/{client.project}/logs/{self.log_name}"
            query = f'severity>=INFO AND logName="{log}" AND timestamp>"{since.strftime("%Y-%m-%dT%H:%M:%SZ")}"'
            self._say(f"Fetching logs with filter: {query}")
            entries = client.list_entries(filter_=query, page_size=500)
            return [dict(entry.payload) for entry in entries if isinstance(getattr(entry, "payload", None), Mapping)]
        except Exception as error:  # Boundary: the cloud client raises its own unrelated errors.
            raise ConfigError(f"Google Cloud Logging cannot be read ({error}); give --log-file") from error

    @staticmethod
    def preprocess_events(events: list[dict[str, Any]], job_name: str | None = None) -> list[dict[str, Any]]:
        """The events of one job in order of time.

        When the first event is not ``user_scheduled``, a copy of it stands in for that. Of consecutive starts, or
        ends, only the last is kept.
        """
        if not events:
            return []
        name = job_name or events[0].get("job_name")
        chosen = [event for event in events if name is None or event.get("job_name") == name]
        if not chosen:
            logger.warning("No events found for job name: %s", name)
            return []
        chosen.sort(key=_order)
        if chosen[0]["event_type"] != EventKind.USER_SCHEDULED:
            chosen.insert(0, {**chosen[0], "event_type": EventKind.USER_SCHEDULED, "is_proxy": True})
        kept: list[dict[str, Any]] = []
        for event in chosen:
            merges = event["event_type"] in (EventKind.JOB_STARTED, EventKind.JOB_TERMINATED)
            if merges and kept and kept[-1]["event_type"] == event["event_type"]:
                kept.pop()
            kept.append(event)
        return kept

    def calculate_goodput(
        self, events: list[dict[str, Any]], reference_step_time: float | None = None
    ) -> dict[str, Any]:
        """The older figures. ``useful_runtime_seconds`` and ``job_intervals`` stay empty, as they did there: the report
        (``resiliency goodput report``) says where the rest of the time went.

        Args:
            events: from :meth:`preprocess_events`.
            reference_step_time: seconds a step should take; None: ``goodput_percentage`` stays 0.
        """
        if not events:
            return {"error": "No events found", "goodput_percentage": 0, "total_runtime": 0, "useful_runtime": 0}
        if not any("is_proxy" in event for event in events):
            events = self.preprocess_events(events, events[0].get("job_name"))
        times = [parse_stamp(event.get("timestamp")) for event in events]
        known = [time for time in times if time is not None]
        loads = [_step(e) for e in events if e["event_type"] == EventKind.CHECKPOINT_LOADED]
        saves = [_step(e) for e in events if e["event_type"] == EventKind.CHECKPOINT_SAVED]
        metrics: dict[str, Any] = {
            "total_events": len(events),
            "job_started_count": sum(e["event_type"] == EventKind.JOB_STARTED for e in events),
            "checkpoints_loaded": sum(step > 0 for step in loads),
            "checkpoints_saved": len(saves),
            "total_runtime_seconds": max(known) - min(known) if known else 0,
            "useful_runtime_seconds": 0,
            "effective_computation_time": 0,
            "goodput_percentage": 0,
            "job_intervals": [],
            "checkpoint_intervals": _intervals(events),
        }
        if loads and saves and max(saves) > min(loads) and reference_step_time is not None:
            kept = max(saves) - min(loads)
            metrics.update(step_diff=kept, min_loaded_step=min(loads), max_saved_step=max(saves))
            metrics["effective_computation_time"] = kept * reference_step_time
            if metrics["total_runtime_seconds"] > 0:
                share = metrics["effective_computation_time"] / metrics["total_runtime_seconds"]
                metrics["goodput_percentage"] = share * 100
        return metrics

    def display_metrics(self, metrics: dict[str, Any]) -> None:
        """Prints the figures."""
        self._out(f"\n=== Goodput Analysis for Job: {self.job_name} ===\n")
        if "error" in metrics:
            self._out(f"Error: {metrics['error']}")
            return
        rows: list[tuple[str, object]] = [
            ("Total Events", metrics["total_events"]),
            ("Job Started Count", metrics["job_started_count"]),
            ("Checkpoints Loaded", metrics["checkpoints_loaded"]),
            ("Checkpoints Saved", metrics["checkpoints_saved"]),
        ]
        if metrics["total_runtime_seconds"] > 0:
            rows.append(("Total Runtime (hours)", round(metrics["total_runtime_seconds"] / 3600, 2)))
        if "step_diff" in metrics:
            rows += [
                ("Min Loaded Step", metrics["min_loaded_step"]),
                ("Max Saved Step", metrics["max_saved_step"]),
                ("Step Difference", metrics["step_diff"]),
            ]
        if metrics["effective_computation_time"] > 0:
            rows.append(("Effective Computation Time (hours)", round(metrics["effective_computation_time"] / 3600, 2)))
        rows.append(("Goodput Percentage", f"{metrics['goodput_percentage']:.2f}%"))
        for name, value in rows:
            self._out(f"{name:<35}{value!s:>12}")

    def export_metrics(self, metrics: dict[str, Any], output_file: str) -> None:
        """Writes the figures as JSON.

        Raises:
            OSError: the file cannot be written.
        """
        with open(output_file, "w", encoding="utf-8") as file:
            json.dump(metrics, file, indent=2)
        self._out(f"\nMetrics exported to: {output_file}")


def _order(event: Mapping[str, Any]) -> tuple[float, int]:
    time = parse_stamp(event.get("timestamp"))
    return (time if time is not None else 0.0, EVENT_TYPE_ORDER.get(str(event.get("event_type")), 6))


def _step(event: Mapping[str, Any]) -> float:
    step = event.get("step", 0)
    return step if isinstance(step, (int, float)) and not isinstance(step, bool) else 0


def _intervals(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Time between consecutive saves."""
    saves = [event for event in events if event["event_type"] == EventKind.CHECKPOINT_SAVED]
    found = []
    for before, after in zip(saves, saves[1:], strict=False):
        begin, end = parse_stamp(before.get("timestamp")), parse_stamp(after.get("timestamp"))
        if begin is not None and end is not None:
            found.append({"start": before["timestamp"], "end": after["timestamp"], "duration_seconds": end - begin})
    return found


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="calculator", description="Goodput calculator for training jobs.")
    parser.add_argument("--job-name", required=True, help="name of the job")
    parser.add_argument("--log-file", type=absolute_path, help="local log: a file, or a folder of logs")
    parser.add_argument("--export", type=absolute_path, help="write the figures to this JSON file")
    parser.add_argument("--reference-step-time", type=float, default=None, help="seconds a step should take")
    parser.add_argument("--gcloud-logging-lookback-days", type=float, default=7.0, help="days of Cloud Logging to read")
    parser.add_argument("--verbose", action="store_true", help="print progress")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns 0, or 1 after an error (with a message on standard error) or when standard output
    was closed."""
    args = get_parser().parse_args(argv)
    calculator = GoodputCalculator(
        job_name=args.job_name,
        local_log_path=args.log_file,
        verbose=args.verbose,
        gcloud_logging_lookback_days=args.gcloud_logging_lookback_days,
    )
    try:
        events = calculator.preprocess_events(calculator.load_events(), args.job_name)
        metrics = calculator.calculate_goodput(events, args.reference_step_time)
        calculator.display_metrics(metrics)
        if args.export:
            calculator.export_metrics(metrics, args.export)
    except BrokenPipeError:  # the reader of our output has ended, as ``| head`` does
        return 1
    except (OSError, ResiliencyError) as error:
        sys.stderr.write(f"calculator: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
