"""``resiliency run``: torchrun's command line with three flags more, run by torchrun's own code with our agent."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from resiliency.settings import all_variables, set_variable

__all__ = ["main"]

_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def main(words: Sequence[str]) -> int:
    """Runs a job on this host.

    Args:
        words: of the command line, behind ``run``.

    Returns:
        0 when every rank has finished. Otherwise torchrun's exceptions end the process.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import record

    parser = torchrun.get_args_parser()
    parser.prog = "resiliency run"
    _add_own_flags(parser)
    args = parser.parse_args(list(words))

    from resiliency.launch.elastic import StandbyOptions
    from resiliency.launch.processes import become_subreaper

    options = StandbyOptions(
        standby=not args.no_standby,
        preload=tuple(filter(None, args.preload.split(","))),
        crash_loop_s=args.crash_loop,
        leave_timeout_s=args.leave_timeout,
        one_host=torchrun.parse_min_max_nnodes(args.nnodes)[1] == 1,
    )
    # Torch 2.13 keeps one store for all attempts unless this is set, and gloo connects to processes that are gone. On
    # one host the agent makes a store for each attempt, which is faster.
    if options.one_host:
        set_variable(_OWN_STORE, None)
    else:
        set_variable(_OWN_STORE, all_variables().get(_OWN_STORE, "1"))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored the kernel keeps no exit status for us
    become_subreaper()
    with _agents_with(options):
        record(torchrun.run)(args)
    return 0


def _add_own_flags(parser: argparse.ArgumentParser) -> None:
    own = parser.add_argument_group("resiliency")
    own.add_argument(
        "--preload",
        default="",
        metavar="MODULE,...",
        help="modules to import once, in the process that ranks are forked from, beside torch and Lightning",
    )
    own.add_argument(
        "--crash-loop",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="attempts in a row that fail sooner than this after their start wait 1, 2, 4, up to 60 seconds; 0: never",
    )
    own.add_argument(
        "--leave-timeout",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="a rank that goes on in its process (restartable) and does not leave an attempt that has ended within this"
        " time is killed, and a new process takes its place",
    )
    own.add_argument(
        "--no-standby",
        action="store_true",
        help="start every rank as a fresh interpreter, as torchrun does (seconds instead of milliseconds)",
    )


@contextmanager
def _agents_with(options: Any) -> Iterator[None]:
    """Torch's launcher makes our agent."""
    from torch.distributed import launcher

    from resiliency.launch.elastic import StandbyAgent

    made: list[StandbyAgent] = []

    def make(*arguments: Any, **named: Any) -> StandbyAgent:
        agent = StandbyAgent(options, *arguments, **named)
        made.append(agent)
        return agent

    module: Any = launcher.api
    before = module.LocalElasticAgent
    module.LocalElasticAgent = make
    try:
        yield
    finally:
        module.LocalElasticAgent = before
        for agent in made:
            agent.close()
