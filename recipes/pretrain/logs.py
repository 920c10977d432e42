"""Where logs and traces of a job go, and how a rank logs."""

from __future__ import annotations

import argparse
import logging
import os
import tempfile

__all__ = ["log_folder", "profile_folder", "start_logging"]


def log_folder(args: argparse.Namespace) -> str:
    """Folder of logs and scalars: below ``--log-dir`` with ``--log-to-remote-storage``, else in this host's temporary
    folder."""
    root = args.log_dir if args.log_to_remote_storage else tempfile.gettempdir()
    return os.path.join(root, args.job_name, "log")


def profile_folder(args: argparse.Namespace) -> str:
    """Folder of traces."""
    return os.path.join(args.log_dir, args.job_name, "profile")


def start_logging(args: argparse.Namespace, rank: int) -> None:
    """Sends the log lines of each rank to ``rank-<r>.log`` in the log folder, and those of rank 0 also to stderr."""
    folder = log_folder(args)
    os.makedirs(folder, exist_ok=True)
    handlers: list[logging.Handler] = [logging.FileHandler(os.path.join(folder, f"rank-{rank}.log"))]
    if rank == 0:
        handlers.append(logging.StreamHandler())
    logging.basicConfig(
        level=args.log_level,
        handlers=handlers,
        format=f"%(asctime)s %(levelname)s rank {rank} %(name)s: %(message)s",
        force=True,
    )
