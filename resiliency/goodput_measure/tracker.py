"""The older library's goodput tracker: ``log_event(...)`` and its command line. Neither raises into a job.

``python -m resiliency.goodput_measure.tracker --event-type user_scheduled`` appends one line to
``./<job>-goodput.log`` when ``GOODPUT_USE_FILE_TRACKING`` is set, else it goes to Google Cloud Logging; without the
cloud library it writes to the file, with a warning. The job's name is ``JOB_IDENTIFIER``, by default "training-job".
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Sequence
from functools import cache
from typing import Any

from resiliency.events import Event, EventKind, EventSink, JsonlSink, boot_seconds
from resiliency.settings import environment
from resiliency.telemetry.sinks import CloudLoggingSink, cloud_logging_available

__all__ = ["GoodputLogger", "get_parser", "log_event", "main"]

logger = logging.getLogger(__name__)

DEFAULT_JOB = "training-job"


class GoodputLogger:
    """Writes events under the older library's names. Thread: any. Never raises, never blocks for long.

    Args:
        folder: where the file goes in file mode; the working directory by default, like the older library.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        settings = environment()
        self.job_name = settings.run if settings.run != "default" else DEFAULT_JOB
        self.log_name = f"{self.job_name}-goodput"
        self.use_gcloud_logging = not settings.file_tracking
        self._rank = settings.rank
        self._host = settings.node
        self._restart = settings.restart
        self._sink: EventSink
        if self.use_gcloud_logging and not cloud_logging_available():
            logger.warning("google-cloud-logging is not installed; goodput events go to %s.log", self.log_name)
            self.use_gcloud_logging = False
        if self.use_gcloud_logging:
            self._sink = CloudLoggingSink(self.log_name)
        else:
            self._sink = JsonlSink(
                os.path.join(os.fspath(folder) if folder is not None else "", f"{self.log_name}.log")
            )

    def log_event(self, event_type: str, **fields: Any) -> None:
        """Writes one event; ``fields`` are the older library's (``step``, ``node_rank``) or any others."""
        step = fields.pop("step", None)
        event = Event(
            kind=event_type,
            time=time.time(),
            monotonic_s=boot_seconds(),
            run=self.job_name,
            attempt=self._restart,
            # Job-wide events have no rank, so that they are not counted as a trainer's.
            rank=-1
            if event_type in (EventKind.USER_SCHEDULED, EventKind.USER_TERMINATED) or "node_rank" in fields
            else self._rank,
            host=self._host,
            step=step,
            fields=fields,
        )
        self._sink.emit(event)

    def close(self) -> None:
        """Sends pending events. Blocks: up to the sink's deadline."""
        self._sink.close()


@cache
def _logger() -> GoodputLogger:
    return GoodputLogger()


def log_event(event_type: str, **fields: Any) -> None:
    """See :meth:`GoodputLogger.log_event`; one logger for the process, made at the first event."""
    _logger().log_event(event_type, **fields)


def get_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tracker", description="Writes one goodput event for the user.")
    choices = [EventKind.USER_SCHEDULED, EventKind.USER_TERMINATED]
    parser.add_argument("--event-type", choices=choices, required=True, help="what happened")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns 0 whenever the arguments are valid, because a failing log must not fail the script
    of a job."""
    args = get_parser().parse_args(argv)
    tracker = GoodputLogger()
    tracker.log_event(event_type=args.event_type)
    tracker.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
