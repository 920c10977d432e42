"""The ``resiliency`` command: runs the subcommand. A subcommand's module is imported only when it is called."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from resiliency._version import __version__

__all__ = ["SUBCOMMANDS", "main"]

#: Subcommand -> (module, one line of help). The module has a Typer ``app``, or a ``main(words)`` that parses the words
#: itself.
SUBCOMMANDS: dict[str, tuple[str, str]] = {
    "ckpt": ("resiliency.cli.ckpt", "list, verify and convert checkpoints"),
    "run": ("resiliency.cli.run", "start a job as torchrun does, and restart it quickly when a rank dies"),
    "supervisor": ("resiliency.cli.supervisor", "keep training jobs alive on many hosts, and show how they are"),
    "heartbeat": ("resiliency.cli.heartbeat", "show what the ranks of this host are doing, even when they hang"),
    "goodput": ("resiliency.cli.goodput", "say where the time of a run went"),
    "host-monitor": ("resiliency.cli.host_monitor", "run the launcher of this host as a supervisor orders"),
    "pod": ("resiliency.cli.pod", "process 1 of a job's pod on Kubernetes: monitor, launcher and ranks"),
    "inject": ("resiliency.cli.inject", "put a fault into a job on this host, to test that it recovers"),
    "doctor": ("resiliency.cli.doctor", "check what would work on this host, and say what to do about the rest"),
}


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, SUBCOMMANDS))
    listing = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in SUBCOMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="resiliency",
        usage="resiliency [-h] [--version] COMMAND ...",
        description="Fault tolerant training: checkpoints, recovery, goodput.",
        epilog=f"commands:\n{listing}\n\nresiliency COMMAND --help lists the options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"resiliency {__version__}")
    parser.add_argument("command", choices=list(SUBCOMMANDS), metavar="COMMAND", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Args:
        argv: words after the program's name; ``sys.argv[1:]`` when None.

    Returns:
        The exit status of the subcommand (0 success, 1 failure, 2 bad arguments, others as its documentation says); 2
        without one.

    Raises:
        SystemExit: with the exit status, after ``--help``, ``--version`` or bad arguments, and by a Typer app always.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if not words:
        parser.print_help()
        return 2
    # Only the first word is parsed here: the subcommand answers "resiliency ckpt --help".
    command: str = parser.parse_args(words[:1]).command
    module = importlib.import_module(SUBCOMMANDS[command][0])
    if hasattr(module, "main"):
        status: int = module.main(words[1:])
        return status

    import typer  # here, so that "resiliency --help" stays quick

    # A Typer app that holds one command would drop that command's name; mounted below a parent it keeps it.
    root = typer.Typer(add_completion=False)
    root.add_typer(module.app, name=command)
    root(args=words, prog_name="resiliency")
    return 0
