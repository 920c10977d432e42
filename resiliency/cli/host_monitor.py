"""``resiliency host-monitor``: runs the host monitor, the process on each host that talks to the supervisor."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from functools import partial

from resiliency.errors import ResiliencyError
from resiliency.paths import absolute_path
from resiliency.settings import environment

__all__ = ["main"]


def main(words: Sequence[str]) -> int:
    """Runs until SIGTERM or Ctrl-C.

    Args:
        words: the words of the command line after ``host-monitor``.

    Returns:
        The exit status: 0 after a signal, or when all workloads have ended (``--exit-when-completed``); 2 for wrong
        arguments, a missing aiohttp, or when another monitor runs.
    """
    parser = _parser()
    args = parser.parse_args(list(words))
    script = args.script[1:] if args.script[:1] == ["--"] else args.script
    if not script and not args.watch_only:
        parser.error("pass the training script and its arguments behind --")
    if script and args.watch_only:
        parser.error("--watch-only starts no script: leave it out")
    level = logging.DEBUG if args.verbose else logging.INFO
    logging.basicConfig(level=level, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    try:
        return asyncio.run(_run(args, script))
    except ResiliencyError as error:
        print(f"resiliency host-monitor: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        print("resiliency host-monitor: aiohttp is missing: pip install 'resiliency[supervisor]'", file=sys.stderr)
        return 2


async def _run(args: argparse.Namespace, script: Sequence[str]) -> int:
    import aiohttp  # noqa: F401  here, so that its absence is said before anything is started

    from resiliency.monitor.connection import ConnectionSettings
    from resiliency.monitor.host_monitor import HostMonitor
    from resiliency.monitor.settings import MonitorSettings, launcher_command
    from resiliency.monitor.watchdogs.registry import WatchdogSettings, make_watchdogs
    from resiliency.runtime.addresses import supervisor_urls
    from resiliency.testing.hosts.local_network import Cable

    host = args.host or environment().node
    connection = ConnectionSettings(
        urls=supervisor_urls(args.supervisor or [environment().supervisor]),
        token_file=args.token_file,
        ca_file=args.ca,
        cert_file=args.cert,
        key_file=args.key,
        plain_http=args.insecure_plain_http,
    )
    if args.token_file:
        connection.token()  # reports a wrong file now, not at the first connection
    settings = MonitorSettings(
        host=host,
        command=launcher_command(
            script,
            nproc_per_node=args.nproc_per_node,
            address=args.address,
            launcher_args=[word for each in args.launcher_args for word in shlex.split(each)],
        ),
        state_dir=args.state_dir or _default_state_dir(host),
        address=args.address,
        block=args.block,
        grace_s=args.grace,
        stop_s=args.stop_timeout,
        reset_command=args.reset_command,
        exit_when_completed=args.exit_when_completed,
        watch_only=args.watch_only,
    )
    watched = WatchdogSettings(
        xid_source=args.xid_source,
        ecc_source=args.ecc_source,
        folders=tuple(args.watch_folder) or (settings.state_dir,),
        min_free_bytes=int(args.min_free_gb * (1 << 30)),
        min_available_bytes=int(args.min_memory_gb * (1 << 30)),
        notice_file=args.notice_file,
        metadata_server="" if args.metadata_server == "none" else args.metadata_server,
    )
    names = [] if args.watchdog == ["none"] else args.watchdog
    watchdogs = [] if args.watchdog == ["none"] else make_watchdogs(names, watched)
    monitor = HostMonitor(settings, connection, watchdogs, Cable.inherited(args.cable) if args.cable else None)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, monitor.stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))  # `resiliency pod` has it wait until here
    return await monitor.run()


def _default_state_dir(host: str) -> str:
    base = "/var/lib/resiliency" if os.getuid() == 0 else os.path.expanduser("~/.local/state/resiliency")
    return os.path.join(base, f"monitor-{host.replace(os.sep, '_')}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="resiliency host-monitor",
        usage="resiliency host-monitor --supervisor URL [options] -- train.py [ARGS ...]",
        description="Keeps one launcher running on this host, and does with it what the supervisor orders.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    word = partial(add, default="", metavar="NAME")
    file = partial(add, default="", type=absolute_path, metavar="FILE")
    folder = partial(add, type=absolute_path, metavar="DIR")
    several = partial(add, action="append", default=[])
    seconds = partial(add, type=float, metavar="SECONDS")
    several(
        "--supervisor",
        metavar="URL",
        help="https://HOST:PORT of the supervisor; when there are several, repeat the"
        " option or put commas between the addresses (default: RESILIENCY_SUPERVISOR)",
    )
    file("--token-file", help="file with the token of this host")
    word("--host", help="name of this host (default: the node's name)")
    word("--address", metavar="ADDRESS", help="address at which other hosts reach this one")
    word("--block", help="failure domain of this host, as its rack or NVLink domain")
    add("--nproc-per-node", default="1", metavar="N", help="number of ranks on this host (default: 1)")
    several(
        "--launcher-args",
        metavar="WORDS",
        help="further flags for resiliency run, quoted as one word: '--log-dir logs -r 3'; may be given again",
    )
    folder(
        "--state-dir",
        default="",
        help="folder on a local disk for the state that must survive this process (default: below /var/lib/resiliency"
        " or ~/.local/state/resiliency)",
    )
    file("--ca", help="CA certificates to check the supervisor's certificate with")
    file("--cert", help="certificate of this host, for mutual TLS")
    file("--key", help="private key of --cert")
    insecure = "allow plain http with a token, which others on the network can then read"
    add("--insecure-plain-http", action="store_true", help=insecure)
    several(
        "--watchdog",
        metavar="NAME",
        help="watchdog to run: xid, ecc, disk, memory, notice, the name of an installed one, or module:Class; may be"
        " given again; none: no watchdogs (default: these five)",
    )
    watched = "folder that must be writable and have free space; may be given again (default: the state folder)"
    folder("--watch-folder", action="append", default=[], help=watched)
    free, memory = "free space in each watched folder", "memory that must be available on this host"
    add("--min-free-gb", type=float, default=1.0, metavar="GB", help=f"{free} (default: 1)")
    add("--min-memory-gb", type=float, default=0.25, metavar="GB", help=f"{memory} (default: 0.25)")
    file("--notice-file", help="file that exists while this host has notice that it will be taken away")
    word(
        "--metadata-server",
        default="auto",
        metavar="URL",
        help="server that announces preemption and maintenance; auto: Google's, on a machine of Google's; none: no"
        " server (default: auto)",
    )
    file("--xid-source", help="file to read XIDs from (default: the kernel's log)")
    file("--ecc-source", help="file with ECC error counts, for tests (default: the driver)")
    reset = "command that resets devices (default: nvidia-smi --gpu-reset)"
    word("--reset-command", metavar="WORDS", help=reset)
    grace = "how long a launcher that is replaced may take to end before it is killed (default: 5)"
    seconds("--grace", default=5.0, help=grace)
    stop = "the same when this process is told to end, longer so that ranks can save (default: 120)"
    seconds("--stop-timeout", default=120.0, help=stop)
    completed = "end when all workloads of the supervisor have ended"
    add("--exit-when-completed", action="store_true", help=completed)
    watch_only = "run the watchdogs alone, for all hosts on this machine (the DaemonSet on Kubernetes)"
    add("--watch-only", action="store_true", help=watch_only)
    add("--verbose", action="store_true", help="log more")
    add("--cable", default="", help=argparse.SUPPRESS)  # only resiliency run passes it
    add("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser
