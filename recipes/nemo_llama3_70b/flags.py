"""The flags of ``recipes.pretrain`` for NeMo, those of Megatron's parallelism, and which go together."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

from recipes.nemo_llama3_70b.parallelism import PARALLELISM, Plan, layer_problems
from recipes.pretrain import checks
from recipes.pretrain.flags import make_parser as pretraining_parser
from recipes.pretrain.models import CONFIGURATIONS, Configuration

__all__ = ["make_parser", "model_of", "plan_of", "problems", "settle"]

#: Flags that NeMo has no use for -> why, and what to do.
_NOT_HERE = {
    "local_ckpt_dir": "NeMo's AutoResume looks into one folder that all hosts see; pass --ckpt-dir",
    "local_ckpt_interval": "there is one folder of checkpoints; pass --checkpoint-interval",
    "enable_in_cluster_local_ckpt": "NeMo's AutoResume looks into one folder that all hosts see; leave it out",
    "num_optimizer_replicas": "Megatron's distributed optimizer divides the state over all data parallel ranks; leave"
    " it out",
    "enable_dist_ckpt": "NeMo's own CheckpointIO stays in place, and CheckpointEngine writes for it; leave it out",
    "profile_ckpt_interval": "only saves of this library's ModelCheckpoint can be traced; leave it out, or use"
    " --trace-name",
}


def make_parser() -> argparse.ArgumentParser:
    """The parser. :func:`problems` checks the values and which flags go together."""
    parser = pretraining_parser()
    parser.description = "Trains a Llama with NeMo 2; checkpoints go through the engine of resiliency."
    parser.set_defaults(num_nodes=None)
    group = parser.add_argument_group("parallelism; default: by the model")
    for axis in ("tensor", "pipeline", "context"):
        group.add_argument(f"--{axis}-parallel", type=int, metavar="N", help=f"ranks of the {axis} parallel axis")
    group.add_argument("--virtual-pipeline", type=int, metavar="N", help="stages that each pipeline rank has")
    group.add_argument("--layers", type=int, metavar="N", help="layers of the model, for tests; default: its own")
    group = parser.add_argument_group("without GPUs")
    group.add_argument(
        "--cpu",
        dest="accelerator",
        action="store_const",
        const="cpu",
        help="train on the CPU in float32; the device 'cuda' means the CPU then: a test of everything but the devices",
    )
    group.add_argument("--plan", action="store_true", help="print what a save costs, and end; needs no NeMo")
    group.add_argument(
        "--bandwidth", type=float, metavar="GB/S", help="of --plan: a host's copies; default: measured on this one"
    )
    return parser


def settle(args: argparse.Namespace, *, launched_ranks: int | None = None) -> argparse.Namespace:
    """Returns the flags with aliases and defaults resolved, and ``parallel`` with them. Without ``--num-nodes`` the
    number of hosts is that of the launcher, which may have lost some.

    Raises:
        ConfigError: a flag and its alias are both given, and differ.
    """
    hosts = args.num_nodes or max(1, (launched_ranks or 1) // (args.num_gpus or 1))
    args = argparse.Namespace(**{**vars(args), "num_nodes": hosts})
    known = PARALLELISM[args.model]
    given = {
        "tensor": args.tensor_parallel,
        "pipeline": args.pipeline_parallel,
        "context": args.context_parallel,
        "virtual": args.virtual_pipeline,
    }
    if args.pipeline_parallel is not None or args.layers is not None:
        known = replace(known, virtual=1)
    parallel = replace(known, **{axis: ranks for axis, ranks in given.items() if ranks is not None})
    settled = checks.settle(args, ranks_of_replica=max(1, parallel.ranks))
    settled.parallel = parallel
    return settled


def problems(args: argparse.Namespace, *, launched_ranks: int | None = None) -> list[str]:
    """What is wrong with settled flags, one sentence each; empty when they can be used."""
    axes = list(_parallel(args))
    if axes or args.plan:
        return axes
    return [*_not_here(args), *checks.problems(args, launched_ranks=launched_ranks), *_folder(args)]


def _parallel(args: argparse.Namespace) -> Iterator[str]:
    named = {f"{axis}-parallel": getattr(args.parallel, axis) for axis in ("tensor", "pipeline", "context")}
    named |= {"virtual-pipeline": args.parallel.virtual, "layers": 1 if args.layers is None else args.layers}
    wrong = [f"--{name} {number}: pass 1 or more" for name, number in named.items() if number < 1]
    wrong += [] if args.bandwidth is None or args.bandwidth > 0 else [f"--bandwidth {args.bandwidth}: pass GB/s"]
    yield from wrong
    if wrong:
        return
    yield from layer_problems(model_of(args), args.parallel)
    if not args.ranks or args.ranks % args.parallel.ranks:
        yield (
            f"--num-nodes {args.num_nodes} times --num-gpus {args.num_gpus} is no multiple of the"
            f" {args.parallel.ranks} ranks of a replica ({args.parallel}); pass as many, or less parallelism"
        )


def _not_here(args: argparse.Namespace) -> Iterator[str]:
    default = pretraining_parser()
    for name, why in _NOT_HERE.items():
        if getattr(args, name) != default.get_default(name):
            yield f"--{name.replace('_', '-')}: {why}"


def _folder(args: argparse.Namespace) -> Iterator[str]:
    folder = args.persistent_ckpt_dir or ""
    if "://" in folder:
        yield f"--ckpt-dir {folder} is an address, which AutoResume cannot list; pass a folder that all hosts see"
    if args.seq_length is not None and args.seq_length % (2 * args.parallel.context) and args.parallel.context > 1:
        yield (
            f"--seq-length {args.seq_length} is no multiple of twice --context-parallel {args.parallel.context}, into"
            " which a sequence is cut"
        )


def model_of(args: argparse.Namespace) -> Configuration:
    """The shape of the model for settled flags."""
    model = replace(CONFIGURATIONS[args.model], length=args.seq_length)
    return model if args.layers is None else replace(model, layers=args.layers)


def plan_of(args: argparse.Namespace) -> Plan:
    """The plan for settled and checked flags."""
    return Plan(
        name=args.model,
        model=model_of(args),
        parallel=args.parallel,
        ranks=args.ranks,
        ranks_per_host=args.num_gpus,
        mixed=args.accelerator != "cpu",
    )
