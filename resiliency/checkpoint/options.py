"""Settings of a :class:`~resiliency.checkpoint.checkpointer.Checkpointer`, one dataclass per topic."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from resiliency.errors import ConfigError
from resiliency.storage.interval import Interval

__all__ = ["CheckpointerOptions", "LocalTierOptions", "RemoteTierOptions"]


@dataclass(frozen=True, kw_only=True)
class LocalTierOptions:
    """The folder whose files are mapped: a ramdisk, a local SSD, or simply the checkpoint directory.

    Attributes:
        directory: made when missing.
        keep: number of newest steps without a name to keep; None: all. Files of older steps are reused, which makes
            saves fast.
        keep_named: also keep a step while one of its names points to it (until ``delete``). False on a ramdisk, with
            ``keep=1``: it then holds the newest step and the one being written, whatever their names.
        durable: fsync before anything older is deleted. Always False on a ramdisk, where nothing survives a power loss.
        shared: True when all hosts of the job see the same folder; None: determined at start.
        only_files: when the job has ended in order, the directory holds only checkpoints: the run's folder in
            ``.resiliency`` is removed, with its event log. The next start makes it again from the files. Without
            effect for a job with ranks on several hosts or with several tiers, and while a step has no name directly
            in the folder, or more than 64 MiB of per-rank data.
    """

    directory: str
    keep: int | None = 3
    keep_named: bool = True
    durable: bool = True
    shared: bool | None = None
    only_files: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.directory, (str, os.PathLike)) or not os.fspath(self.directory):
            raise ConfigError(f"directory={self.directory!r}: pass the path of a folder as str or Path")
        if "://" in os.fspath(self.directory):
            raise ConfigError(
                f"directory={self.directory!r} is an address; it belongs into remotes=[RemoteTierOptions(address=...)]"
            )
        object.__setattr__(self, "directory", os.path.abspath(os.path.expanduser(os.fspath(self.directory))))
        _check_keep(self.keep)
        if self.keep is None and not self.keep_named:
            raise ConfigError("keep=None with keep_named=False would never delete anything; pass keep=1 or more")


def _check_keep(keep: int | None) -> None:
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise ConfigError(f"keep={keep!r} is not a number of checkpoints to keep; pass 1 or more, or None")


@dataclass(frozen=True, kw_only=True)
class RemoteTierOptions:
    """A tier the agent uploads to: an object store or another folder (NFS, Lustre, FUSE).

    Attributes:
        address: "gs://bucket/job", "/mnt/ckpts", any fsspec URL.
        name: name in listings and events; unique among the tiers.
        interval: which saves go there.
        keep: number of newest steps without a name to keep there; None: all.
        keep_named: as for the local tier.
        storage_options: passed to fsspec.
    """

    address: str
    name: str = "object_store"
    interval: Interval = Interval()
    keep: int | None = 3
    keep_named: bool = True
    storage_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not self.address:
            raise ConfigError("a remote tier needs an address such as gs://bucket/job")
        _check_keep(self.keep)
        if self.name == "local":
            raise ConfigError("the name 'local' is taken by the local tier; give the remote tier another")


@dataclass(frozen=True, kw_only=True)
class CheckpointerOptions:
    """Settings of a checkpointer's behaviour.

    Attributes:
        agent: "process" starts one helper process per host; "embedded" does its work in the trainer.
        previous_save_timeout: how long a save may wait for the rank's previous one before it is skipped.
        fence_timeout: how long a fence may wait for a copy; then it waits as long again, but at most 10 s, and raises.
        agree_timeout: how long ranks wait for each other at start and restore.
        drain_timeout: how long the agent may continue uploads after the last rank has disconnected.
        lazy_bytes: tensors with fewer bytes are copied at once, even in a lazy save.
        copy_threads: threads of a rank that copy a save, besides the training thread at the fence. More than one helps
            where one core cannot use the memory's bandwidth and cores are idle; they take cores from training on CPUs.
        events_dir: folder for event logs where ``RESILIENCY_EVENTS_DIR`` is not set; None: below the first tier that is
            a folder.
    """

    agent: Literal["process", "embedded"] = "process"
    previous_save_timeout: timedelta = timedelta(seconds=2)
    fence_timeout: timedelta = timedelta(minutes=10)
    agree_timeout: timedelta = timedelta(minutes=5)
    drain_timeout: timedelta = timedelta(minutes=2)
    lazy_bytes: int = 64 * 1024
    copy_threads: int = 1
    events_dir: str | None = None

    def __post_init__(self) -> None:
        if self.agent not in ("process", "embedded"):
            raise ConfigError(f"agent={self.agent!r}; pass 'process' or 'embedded'")
        if isinstance(self.lazy_bytes, bool) or not isinstance(self.lazy_bytes, int) or self.lazy_bytes < 0:
            raise ConfigError(f"lazy_bytes={self.lazy_bytes!r}; pass a number of bytes, 0 or more")
        if isinstance(self.copy_threads, bool) or not isinstance(self.copy_threads, int) or self.copy_threads < 1:
            raise ConfigError(f"copy_threads={self.copy_threads!r}; pass a number of threads, 1 or more")
        for name in ("previous_save_timeout", "fence_timeout", "agree_timeout", "drain_timeout"):
            value = getattr(self, name)
            if not isinstance(value, timedelta) or value < timedelta(0):
                raise ConfigError(f"{name}={value!r}; pass a timedelta of zero or more")
