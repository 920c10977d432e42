"""``resiliency run``: torchrun's command line and code, with additional flags and this library's agent."""

from __future__ import annotations

import argparse
import logging
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from resiliency.paths import absolute_path
from resiliency.runtime.exit_codes import PREEMPTED
from resiliency.settings import all_variables, set_variable

__all__ = ["EXIT_GAVE_UP", "RunLocalCluster", "main", "make_parser"]

logger = logging.getLogger(__name__)

#: Runs a job with ``--spares``. Takes the parser, the parsed arguments, and the words before the script; returns the
#: exit status.
RunLocalCluster = Callable[[argparse.ArgumentParser, argparse.Namespace, Sequence[str]], int]
#: Exit status when all restarts are used up.
EXIT_GAVE_UP = 3
#: Most bytes in the name of an abstract unix socket.
_MOST_NAME = 107
_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def main(words: Sequence[str], *, local_cluster: RunLocalCluster | None = None) -> int:
    """Runs a job on this host. Blocks: until it has ended. Thread: main.

    Args:
        words: the command line after ``run``.
        local_cluster: runs a job with ``--spares``. It is passed in, because it needs a supervisor, and this package
            may not import that one.

    Returns:
        Exit status: 0 when every rank has finished; :data:`EXIT_GAVE_UP` when restarts were allowed and none is left;
        :data:`~resiliency.runtime.exit_codes.PREEMPTED` when the ranks were told to go and have saved and left; else
        128 plus the number of the signal that ended the launcher.

    Raises:
        ChildFailedError: torchrun's exception, when a rank failed and no restart was allowed; it ends the process with
            1.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record

    parser = make_parser()
    args = _parse(parser, list(words))

    if args.spares is not None:
        if local_cluster is None:
            parser.error("--spares needs the resiliency command")
        return local_cluster(parser, args, words[: _end_of_flags(parser, words)])
    for flag in ("--state-dir", "--supervisor-set", "--network-namespaces"):
        if _was_given(parser, args, flag):
            parser.error(f"{flag} needs --spares: without it there is no supervisor")
    from resiliency.launch.elastic import StandbyAgent, StandbyOptions
    from resiliency.launch.supervised import BACKEND, register
    from resiliency.launch.supervised_agent import SupervisedAgent
    from resiliency.runtime.processes import become_subreaper

    register()
    supervised = args.rdzv_backend == BACKEND
    if supervised and (problem := _no_supervision(parser, args)):
        parser.error(problem)
    options = StandbyOptions(
        standby=not args.no_standby,
        preload=tuple(filter(None, args.preload.split(","))),
        crash_loop_s=args.crash_loop,
        hang_timeout_s=0.0 if supervised else args.hang_timeout,  # the supervisor compares all hosts' ranks instead
        leave_timeout_s=args.leave_timeout,
        one_host=not supervised and torchrun.parse_min_max_nnodes(args.nnodes)[1] == 1,
    )
    # Unless this variable is set, torch 2.13 uses one store for all attempts, and gloo connects to processes that are
    # gone. On one host, and below a supervisor, the launcher makes a store for each attempt, which is faster.
    if options.one_host or supervised:
        set_variable(_OWN_STORE, None)
    else:
        set_variable(_OWN_STORE, all_variables().get(_OWN_STORE, "1"))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # while it is ignored, the kernel keeps no exit status
    become_subreaper()
    agents: list[StandbyAgent] = []
    try:
        with _agents_with(SupervisedAgent if supervised else StandbyAgent, options, agents):
            record(torchrun.run)(args)
    except SignalException as error:
        if any(agent.preempted for agent in agents):
            logger.warning("%s has ended the job; the ranks of this host have saved and ended", error.sigval.name)
            return PREEMPTED
        logger.warning("%s has ended the job; the ranks of this host have ended", error.sigval.name)
        return 128 + error.sigval
    except ChildFailedError:
        if any(agent.preempted for agent in agents):
            return PREEMPTED
        if args.max_restarts == 0:
            raise
        traceback.print_exc()
        return EXIT_GAVE_UP
    return 0


def make_parser() -> argparse.ArgumentParser:
    """torchrun's own parser, with this library's flags added."""
    from torch.distributed import run as torchrun

    parser = torchrun.get_args_parser()
    parser.prog = "resiliency run"
    parser._option_string_actions["--log-dir"].type = absolute_path  # torch leaves it relative, also for ranks
    _add_own_flags(parser)
    return parser


def _parse(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """Parses torchrun's flags apart from those of the script: argparse would refuse a script's ``--h`` when two flags
    of the launcher begin with it, although they belong to the script."""
    at = _end_of_flags(parser, words)
    if at == len(words):
        return parser.parse_args(words)  # reports what is missing, or prints the help
    script = argparse.ArgumentParser(add_help=False)
    script.add_argument("training_script")
    script.add_argument("training_script_args", nargs=argparse.REMAINDER)
    found = script.parse_args(words[at:])
    args = parser.parse_args([*words[:at], "script"])  # placeholder, because the real one may begin with a dash
    args.training_script, args.training_script_args = found.training_script, found.training_script_args
    return args


def _end_of_flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Index of the first word that is neither a flag nor its value: the script, or a ``--`` before it."""
    known = parser._option_string_actions
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-", "--"):
        found = {known[name] for name in known if name == words[at]}
        if not found and words[at].startswith("--"):  # an abbreviated flag
            found = {known[name] for name in known if name.startswith(words[at])}
        takes_value = any(action.nargs != 0 for action in found)  # no match: "--flag=value", or argparse reports it
        at += 2 if takes_value else 1
    return at


def _no_supervision(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """Why this launcher cannot run below a supervisor; "" when it can."""
    wrong = ["--standalone", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--rdzv-conf"]
    given = [flag for flag in wrong if _was_given(parser, args, flag)]
    if given:
        return f"--rdzv-backend supervised: the monitor of the host says who takes part; leave out {', '.join(given)}"
    name = args.rdzv_endpoint
    if not name or len(name.encode()) > _MOST_NAME:
        return f"--rdzv-backend supervised: --rdzv-endpoint={name!r} is no name of a monitor's socket"
    return ""


def _was_given(parser: argparse.ArgumentParser, args: argparse.Namespace, flag: str) -> bool:
    name = flag.removeprefix("--").replace("-", "_")
    return bool(getattr(args, name) != parser.get_default(name))


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
        "--hang-timeout",
        type=float,
        default=1800.0,
        metavar="SECONDS",
        help="a rank that beats (with a callback of this library, or resiliency.launch.beat) and has made no progress"
        " for this long, and for ten times its longest step, is killed; 0: never",
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
        "--spares",
        type=int,
        default=None,
        metavar="N",
        help="run all hosts of --nnodes, and N more that wait (0: none), on this machine under a supervisor, which"
        " swaps a host that is lost for one of them",
    )
    own.add_argument(
        "--state-dir",
        type=absolute_path,
        default="",
        metavar="FOLDER",
        help="with --spares: where supervisor and hosts keep their state, tokens and events (default: a temporary one)",
    )
    own.add_argument(
        "--supervisor-set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="with --spares: a setting of that supervisor, as in supervisor.yaml: dwell_s=2; may be given again",
    )
    own.add_argument(
        "--network-namespaces",
        action="store_true",
        help="with --spares: each host has a network namespace of its own, so that it can be cut off; needs root, and"
        " ranks reach neither this machine's localhost nor other machines",
    )
    own.add_argument(
        "--no-standby",
        action="store_true",
        help="start every rank as a fresh interpreter, as torchrun does (seconds instead of milliseconds)",
    )


@contextmanager
def _agents_with(kind: Callable[..., Any], options: Any, made: list[Any]) -> Iterator[None]:
    """Within the context, torch's launcher makes agents of this kind; they are added to ``made``, and closed at
    exit."""
    from torch.distributed import launcher

    def make(*arguments: Any, **named: Any) -> Any:
        agent = kind(options, *arguments, **named)
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
