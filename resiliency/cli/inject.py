"""``resiliency inject``: puts faults into a job on this host, to test that the job recovers."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from resiliency.errors import ResiliencyError
from resiliency.paths import absolute_path
from resiliency.settings import environment

if TYPE_CHECKING:
    from resiliency.testing.hosts.inject import Fault

__all__ = ["main"]


def main(words: Sequence[str]) -> int:
    """Puts in a fault, once or repeatedly. Blocks until the last one is done.

    Args:
        words: the words of the command line after ``inject``.

    Returns:
        The exit status: 0 when every fault was put in, 1 when one could not be, 130 after Ctrl-C.

    Raises:
        SystemExit: with 2, for wrong arguments.
    """
    from resiliency.testing.hosts.inject import Injector, Target, moments

    parser = _parser()
    args = parser.parse_args(list(words))
    if args.fault == "corrupt" and not (args.yes or args.dry_run):
        parser.error("corrupt destroys a checkpoint for good; pass --yes, or --dry-run to see which")
    target = Target(
        heartbeats=args.heartbeats or ("" if args.state_dir else environment().heartbeat_dir or ""),
        state_dir=args.state_dir,
        host=args.host or environment().node,
    )
    began_s = time.monotonic()
    try:
        fault = _fault(args)
    except ResiliencyError as error:
        parser.error(str(error))

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began_s:7.2f} s] {text}", flush=True)

    injector = Injector(target, say, seed=args.seed, dry_run=args.dry_run)
    status = 0
    try:
        for moment_s in moments(at_s=args.at, every_s=args.every, count=args.count):
            threading.Event().wait(max(0.0, began_s + moment_s - time.monotonic()))
            try:
                injector.inject(fault)
            except (ResiliencyError, OSError) as error:
                print(f"resiliency inject: {error}", file=sys.stderr)
                status = 1
    except KeyboardInterrupt:
        return 130
    return status


def _fault(args: argparse.Namespace) -> Fault:
    from resiliency.testing.hosts.inject import Fault

    return Fault(
        kind=args.fault,
        rank=args.rank,
        seconds=args.seconds,
        duty=args.duty,
        code=args.code,
        device=args.device,
        count=args.errors,
        source=args.source,
        folder=args.folder,
        most_bytes=int(args.most_gb * (1 << 30)),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="resiliency inject",
        description="Puts a fault into a job that runs on this host. Touches only processes and files of this user.",
        allow_abbrev=False,
    )
    faults = "kill stop hang slow xid ecc partition disk-full corrupt".split()
    parser.add_argument(
        "fault",
        choices=faults,
        metavar="FAULT",
        help="kill, stop, hang: SIGKILL, SIGTERM, SIGSTOP to a rank; slow: stop a rank for part of the time; xid, ecc:"
        " report a device fault; partition: cut off the supervisor; disk-full: fill a disk; corrupt: flip a bit of a"
        " checkpoint",
    )
    where = parser.add_argument_group("where the job is").add_argument
    folder = partial(where, default="", type=absolute_path, metavar="DIR")
    heartbeats = "folder of the ranks' heartbeats (default: RESILIENCY_HEARTBEAT_DIR, unless --state-dir is given)"
    folder("--heartbeats", help=heartbeats)
    folder("--state-dir", help="state folder of this host's monitor")
    host = "host name that the monitor was given (default: the node's name)"
    where("--host", default="", metavar="NAME", help=host)
    where("--rank", type=int, metavar="R", help="global rank to hit (default: one at random)")
    when = parser.add_argument_group("when").add_argument
    seconds = partial(when, type=float, default=0.0, metavar="SECONDS")
    seconds("--at", help="when the first comes, from now (default: 0)")
    seconds("--every", help="time from one fault to the next")
    number = partial(when, type=int, default=0, metavar="N")
    number("--count", help="number of faults (default: 1; with --every: no limit)")
    number("--seed", help="seed of random choices: equal seeds choose the same (default: 0)")
    what = parser.add_argument_group("what").add_argument
    lasts = "how long the fault lasts; slow, partition and disk-full need it (default: hang stops the rank for good)"
    what("--for", dest="seconds", type=float, default=0.0, metavar="SECONDS", help=lasts)
    duty = "slow: share of the time for which the rank is stopped (default: 0.8)"
    what("--duty", type=float, default=0.8, metavar="PART", help=duty)
    what("--code", type=int, default=79, metavar="N", help="xid: number of the XID (default: 79)")
    what("--device", default="0000:3b:00", metavar="ADDRESS", help="xid, ecc: PCI address of the device")
    what("--errors", type=int, default=1, metavar="N", help="ecc: number of errors (default: 1)")
    path = partial(what, default="", type=absolute_path)
    source = "xid, ecc: file that the monitor reads faults from (default: the monitor is told directly)"
    path("--source", metavar="FILE", help=source)
    filled = "disk-full: folder whose disk is filled; corrupt: folder with checkpoints, or a checkpoint file"
    path("--folder", metavar="DIR", help=filled)
    most = "disk-full: write at most this much (default: 1)"
    what("--most-gb", type=float, default=1.0, metavar="GB", help=most)
    parser.add_argument("--dry-run", action="store_true", help="only say what would be done")
    parser.add_argument("--yes", action="store_true", help="corrupt: really destroy a checkpoint")
    return parser
