"""Checks which flags go together; what is wrong comes back as sentences that say why. Writes nothing."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

from recipes.pretrain.faults import FaultPlan
from recipes.pretrain.models import CONFIGURATIONS, parameters_of
from resiliency.errors import ConfigError
from resiliency.storage.tiers import unknown_store

__all__ = ["memory_problem", "problems", "settle"]

#: float32 weights, gradients and two moments of the optimizer, in bytes.
BYTES_PER_PARAMETER = 16


def settle(args: argparse.Namespace, *, ranks_of_replica: int = 1) -> argparse.Namespace:
    """Returns the flags with their aliases resolved and with the defaults that depend on other flags.

    Args:
        ranks_of_replica: ranks that share a replica of the model, and get the same sequences.

    Raises:
        ConfigError: a flag and its alias are both given, and differ.
    """
    settled = argparse.Namespace(**vars(args))
    for name, alias in (("persistent_ckpt_dir", "ckpt_dir"), ("persistent_ckpt_interval", "checkpoint_interval")):
        value, other = getattr(args, name), getattr(args, alias)
        if value is not None and other is not None and value != other:
            raise ConfigError(f"{_flag(name)} {value} and {_flag(alias)} {other} are the same flag; pass one of them")
        setattr(settled, name, other if value is None else value)
    settled.ranks = (args.num_nodes or 0) * (args.num_gpus or 0)
    settled.data_ranks = settled.ranks // ranks_of_replica
    settled.global_bs = args.global_bs if args.global_bs is not None else (args.micro_bs or 0) * settled.data_ranks
    settled.seq_length = CONFIGURATIONS[args.model].length if args.seq_length is None else args.seq_length
    settled.save_interval = _least(settled.local_ckpt_interval, settled.persistent_ckpt_interval)
    return settled


def problems(args: argparse.Namespace, *, launched_ranks: int | None = None) -> list[str]:
    """Returns what is wrong with settled flags, one sentence each; empty when they can be used.

    Args:
        launched_ranks: number of ranks of the job, as the launcher says; None without a launcher.
    """
    return [
        *_numbers(args),
        *_words(args),
        *_tiers(args),
        *_folders(args),
        *_parallel(args, launched_ranks),
        *_watching(args),
        *_data(args),
    ]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _least(*values: int | None) -> int | None:
    return min((value for value in values if value is not None), default=None)


def _numbers(args: argparse.Namespace) -> Iterator[str]:
    needed = ("num_nodes", "num_gpus", "max_steps", "micro_bs", "ckpt_threads_per_rank")
    optional = ("max_runtime", "val_check_interval", "local_ckpt_interval", "persistent_ckpt_interval", "topk_ckpt")
    for name in (*needed, *optional, "profile_ckpt_interval", "seq_length", "num_optimizer_replicas", "global_bs"):
        value = getattr(args, name)
        if value is None and name in needed:
            yield f"{_flag(name)} has no value; pass 1 or more"
        elif value is not None and value < 1 and (name != "global_bs" or args.micro_bs):
            yield f"{_flag(name)} {value}: pass 1 or more"
    if args.limit_val_batches is None or args.limit_val_batches < 0:
        yield f"--limit-val-batches {args.limit_val_batches}: pass 0 or more"
    elif args.limit_val_batches and args.limit_val_batches_given and args.val_check_interval is None:
        yield (
            f"--limit-val-batches {args.limit_val_batches} without --val-check-interval: there is no validation whose"
            " batches it could limit; pass both"
        )


def _words(args: argparse.Namespace) -> Iterator[str]:
    for name in ("job_name", "trace_name"):
        word = getattr(args, name)
        if word is None and name == "trace_name":
            continue
        if not word or "/" in word or word.startswith("."):
            yield f"{_flag(name)} {word!r}: pass a word that can name a file, such as 'pretrain-7b'"
    if args.accelerator not in ("auto", "cpu", "gpu"):
        yield f"--accelerator {args.accelerator}: pass auto, cpu or gpu"
    if args.seed is None or not 0 <= args.seed < 2**32:
        yield f"--seed {args.seed}: pass a number from 0 to {2**32 - 1}"
    for name in ("persistent_ckpt_dir", "local_ckpt_dir", "log_dir"):
        if getattr(args, name) == "" or (name == "log_dir" and args.log_dir is None):
            yield f"{_flag(name)} has no value; pass a folder"


def _tiers(args: argparse.Namespace) -> Iterator[str]:
    local, persistent = args.local_ckpt_dir, args.persistent_ckpt_dir
    local_every, persistent_every = args.local_ckpt_interval, args.persistent_ckpt_interval
    if args.enable_high_scale_ckpt:
        if local is None or os.path.normpath(local) != "/local" or persistent is not None:
            yield (
                "--enable-high-scale-ckpt: the replicator watches /local and makes the persistent copies itself; pass"
                " --local-ckpt-dir /local and no --persistent-ckpt-dir"
            )
        yield (
            "--enable-high-scale-ckpt needs what talks to the GKE replicator, which this version does not have; pass"
            " --local-ckpt-dir and --persistent-ckpt-dir, and the host agent makes the persistent copies"
        )
    if local is None and persistent is None:
        yield (
            "there is no folder for checkpoints; pass --persistent-ckpt-dir (or --ckpt-dir), --local-ckpt-dir, or both,"
            " each with its interval"
        )
    for folder, every, name in ((local, local_every, "local"), (persistent, persistent_every, "persistent")):
        if folder is not None and every is None:
            yield f"--{name}-ckpt-dir {folder} without --{name}-ckpt-interval would never be saved to; pass both"
        if folder is None and every is not None and not (name == "local" and args.enable_in_cluster_local_ckpt):
            yield f"--{name}-ckpt-interval {every} without --{name}-ckpt-dir saves nowhere; pass both"
    if local is not None and "://" in local:
        yield f"--local-ckpt-dir {local} is an address; the local tier is a folder of each host"
    if local and persistent and "://" not in persistent and os.path.abspath(local) == os.path.abspath(persistent):
        yield f"--local-ckpt-dir and --persistent-ckpt-dir are both {local}: one folder cannot be both tiers"
    if args.enable_in_cluster_local_ckpt and local is None and persistent is None:
        yield (
            "--enable-in-cluster-local-ckpt chooses the folder of the local tier by the one of the persistent"
            " tier; pass"
            " --persistent-ckpt-dir, or name the folder with --local-ckpt-dir"
        )
    if local_every and persistent_every and persistent_every < local_every:
        yield (
            f"--persistent-ckpt-interval {persistent_every} is less than --local-ckpt-interval {local_every}:"
            f" every save"
            " goes to the local tier first, and to the persistent one from there"
        )
    if args.enable_ckpt_load_replication:
        if local is None and not args.enable_in_cluster_local_ckpt:
            yield "--enable-ckpt-load-replication is about local checkpoints; pass --local-ckpt-dir"
        if (args.num_optimizer_replicas or args.ranks) < 2:
            yield (
                "--enable-ckpt-load-replication: with one replica of the optimizer state no other rank has what"
                " a rank has"
                " lost; pass --num-optimizer-replicas of 2 or more"
            )
        yield (
            "--enable-ckpt-load-replication needs a transfer from rank to rank, which this version does not have; pass"
            " --persistent-ckpt-dir: a host without its local checkpoint reads that tier"
        )
    if args.topk_ckpt is not None and persistent is None:
        yield "--topk-ckpt counts checkpoints of the persistent tier, and there is none; pass --persistent-ckpt-dir"


def _folders(args: argparse.Namespace) -> Iterator[str]:
    for name in ("persistent_ckpt_dir", "local_ckpt_dir", "log_dir"):
        folder = getattr(args, name) or ""
        if "://" not in folder:
            file = _file_on_the_way(folder)
            if file:
                yield f"{_flag(name)} {folder}: {file} is a file; pass a folder, or a path that does not exist yet"
        elif name == "persistent_ckpt_dir" and unknown_store(folder):
            yield f"{_flag(name)} {folder}: {unknown_store(folder)}"


def _file_on_the_way(folder: str) -> str:
    """Returns ``folder`` or its nearest ancestor that exists, if that is a file; else ""."""
    while folder and not os.path.exists(folder):
        folder = os.path.dirname(folder)
    return "" if not folder or os.path.isdir(folder) else folder


def _parallel(args: argparse.Namespace, launched: int | None) -> Iterator[str]:
    ranks, replicas = args.ranks, args.num_optimizer_replicas
    if launched is not None and launched != ranks:
        yield (
            f"the launcher has started {launched} ranks, and --num-nodes {args.num_nodes} times --num-gpus"
            f" {args.num_gpus}"
            f" is {ranks}; --num-gpus is the number on each host"
        )
    if args.data_ranks and args.micro_bs and args.global_bs % (args.micro_bs * args.data_ranks):
        yield (
            f"--global-bs {args.global_bs} is no multiple of {args.data_ranks} ranks times --micro-bs {args.micro_bs}:"
            f" batches would"
            " differ between ranks"
        )
    if replicas and ranks and ranks % replicas:
        yield f"--num-optimizer-replicas {replicas} does not divide {ranks} ranks: replicas would differ in size"
    if args.enable_comm_overlap and ranks == 1:
        yield "--enable-comm-overlap: one rank has no communication that could be overlapped"
    if replicas and replicas < ranks and "://" in (args.persistent_ckpt_dir or ""):
        yield (
            f"--num-optimizer-replicas {replicas} of {ranks} ranks shards the state (FSDP2), whose checkpoints"
            f" are folders:"
            f" --persistent-ckpt-dir {args.persistent_ckpt_dir} is an address; pass a folder that all hosts see"
        )
    if replicas and replicas < ranks and (args.local_ckpt_dir or args.enable_in_cluster_local_ckpt):
        yield (
            f"--num-optimizer-replicas {replicas} of {ranks} ranks shards the state (FSDP2), whose checkpoints"
            f" are written"
            " by Lightning's own code, which knows one folder; leave --local-ckpt-dir and"
            " --enable-in-cluster-local-ckpt"
            " out, or have a replica on every rank"
        )


def _watching(args: argparse.Namespace) -> Iterator[str]:
    every = args.profile_ckpt_interval
    if every and args.save_interval and every % args.save_interval:
        yield (
            f"--profile-ckpt-interval {every} is no multiple of {args.save_interval}, the steps between saves: at"
            f" some of"
            " its steps there is nothing to trace"
        )
    if every and not args.save_interval:
        yield f"--profile-ckpt-interval {every}: there are no saves to trace"
    if "://" in (args.log_dir or ""):
        yield f"--log-dir {args.log_dir}: traces and logs are files; mount the bucket, or pass a folder"
    if args.sim_fault_desc:
        try:
            FaultPlan.parse(args.sim_fault_desc)
        except ConfigError as error:
            yield str(error)


def _data(args: argparse.Namespace) -> Iterator[str]:
    for name in ("tokenizer_path", "data"):
        path = getattr(args, name)
        if path is not None and not os.path.exists(path):
            yield f"{_flag(name)} {path}: there is nothing of that name"
    if args.data is not None and os.path.isfile(args.data):
        yield f"--data {args.data} is a file; pass the folder that it is in"


def memory_problem(args: argparse.Namespace, available: int) -> str:
    """Why the model does not fit into the ``available`` bytes of memory of a rank; "" when it fits."""
    replicas = args.num_optimizer_replicas or args.ranks
    count = parameters_of(CONFIGURATIONS[args.model])
    needed = count * BYTES_PER_PARAMETER * replicas // args.ranks
    if needed <= available:
        return ""
    return (
        f"--model {args.model} has {count / 1e9:.1f} billion parameters: a rank needs {needed / 2**30:.0f} GiB"
        f" for its share"
        f" of weights, gradients and optimizer state, and has {available / 2**30:.0f}; pass more ranks with a lower"
        " --num-optimizer-replicas, or a smaller --model"
    )
