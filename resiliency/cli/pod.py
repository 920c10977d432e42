"""``resiliency pod``: process 1 of a workload's pod on Kubernetes."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(words: Sequence[str]) -> int:
    """Runs until the job is completed or SIGTERM.

    Args:
        words: the words of the command line after ``pod``.

    Returns:
        The exit status: 0 when the job is completed, 143 after SIGTERM, 2 for wrong arguments.
    """
    parser = _parser()
    own = list(words[: words.index("--")] if "--" in words else words)
    args, others = parser.parse_known_args(own)
    if "--" not in words:
        parser.error("pass the training script and its arguments behind --")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    from resiliency.monitor.pod import run_pod

    command = [sys.executable, "-m", "resiliency.cli", "host-monitor", "--exit-when-completed", *others]
    return run_pod([*command, *words[words.index("--") :]], drain_s=args.drain_timeout)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="resiliency pod",
        usage="resiliency pod [--drain-timeout SECONDS] [options of resiliency host-monitor] -- train.py [ARGS ...]",
        description="Process 1 of a pod: keeps a host monitor running, with its launcher and ranks, and ends when the"
        " job is completed and its checkpoints are uploaded. All other options are those of resiliency host-monitor.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--drain-timeout",
        type=float,
        default=1800.0,
        metavar="SECONDS",
        help="how long uploads may take after the end of the job (default: 1800)",
    )
    return parser
