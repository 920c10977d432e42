"""``resiliency run``: takes torchrun's command line, which torch's own parser reads."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

__all__ = ["main"]

#: With ``--spares``, flags for the cluster as a whole, which are not passed on to the launchers of its hosts.
_FOR_THE_CLUSTER = (
    "--nnodes",
    "--spares",
    "--state-dir",
    "--supervisor-set",
    "--network-namespaces",
    "--nproc-per-node",
    "--nproc_per_node",
    "--max-restarts",
    "--max_restarts",
)
#: With ``--spares``, flags that are refused, because the supervisor decides how hosts meet and when ranks have failed.
_REFUSED: tuple[str, ...] = (
    "--standalone",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--rdzv-conf",
)
_REFUSED += ("--node-rank", "--master-addr", "--master-port", "--hang-timeout", "--crash-loop")


def main(words: Sequence[str]) -> int:
    """See :func:`resiliency.launch.run.main`."""
    from resiliency.launch import run

    return run.main(words, local_cluster=_run_local_cluster)


def _run_local_cluster(parser: argparse.ArgumentParser, args: argparse.Namespace, flags: Sequence[str]) -> int:
    from torch.distributed import run as torchrun

    from resiliency.errors import ConfigError
    from resiliency.testing.hosts.local_cluster import LocalCluster, run_local_cluster

    fewest, hosts = torchrun.parse_min_max_nnodes(args.nnodes)
    script = ["-m"] * args.module + [args.training_script, *args.training_script_args]
    if args.nproc_per_node is None or not str(args.nproc_per_node).isdecimal():
        parser.error(f"--spares needs a number for --nproc-per-node, not {args.nproc_per_node}")
    try:
        cluster = LocalCluster(
            hosts=hosts,
            min_hosts=fewest,
            spares=args.spares,
            ranks_per_host=int(args.nproc_per_node),
            script=tuple(script),
            launcher_words=tuple(_for_each_host(parser, flags)),
            state_dir=args.state_dir,
            network_namespaces=args.network_namespaces,
            supervisor=dict(_setting(parser, each) for each in args.supervisor_set),
            workload={"max_in_job_restarts": args.max_restarts} if "--max-restarts" in " ".join(flags) else {},
        )
        return run_local_cluster(cluster)
    except ConfigError as error:
        parser.error(str(error))


def _setting(parser: argparse.ArgumentParser, text: str) -> tuple[str, object]:
    """Parses ``NAME=VALUE``; the value is YAML, or the text itself when it is not valid YAML."""
    import yaml

    name, equals, value = text.partition("=")
    if not equals or not name:
        parser.error(f"--supervisor-set {text}: pass NAME=VALUE, as in dwell_s=2")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError:
        return name, value


def _for_each_host(parser: argparse.ArgumentParser, flags: Sequence[str]) -> list[str]:
    """The flags that each host's launcher gets; ends the command when one of ``flags`` is refused."""
    kept: list[str] = []
    at = 0
    while at < len(flags):
        name, attached, _ = flags[at].partition("=")
        action = parser._option_string_actions.get(name)
        if action is None:
            parser.error(f"{name}: with --spares write flags out, as in --max-restarts 3")
        length = 1 if attached or action.nargs == 0 else 2
        strings = set(action.option_strings)
        if strings & set(_REFUSED):
            parser.error(f"{name} cannot be used with --spares, because the supervisor sets it; leave it out")
        if not strings & {*_FOR_THE_CLUSTER, "-m", "--module"}:
            kept += flags[at : at + length]
        at += length
    return kept
