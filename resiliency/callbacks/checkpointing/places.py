"""Chooses the tiers and the run for the checkpoints of one callback."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from resiliency.checkpoint.options import LocalTierOptions, RemoteTierOptions
from resiliency.checkpoint.ticket import LOCAL
from resiliency.errors import ConfigError
from resiliency.settings import environment
from resiliency.storage.interval import Interval
from resiliency.storage.manifest import META_DIR, STEPS_DIR

__all__ = ["IN_CLUSTER", "CheckpointPlaces", "EngineKey", "choose_places"]

#: The local tier's folder in the older library: a ramdisk that is mounted into the container on every host.
IN_CLUSTER = "/local"


@dataclass(frozen=True)
class EngineKey:
    """Identifies an engine among those of one trainer: folder of its local tier, and run."""

    directory: str
    run: str

    @property
    def newest(self) -> str:
        """A path that stands for the newest step of the run, the same on every rank: the folder of its step folders,
        which may be missing."""
        return os.path.join(self.directory, META_DIR, self.run, STEPS_DIR)


@dataclass(frozen=True)
class CheckpointPlaces:
    """The places of one callback's checkpoints.

    Attributes:
        dirpath: folder or address below which users see names.
        key: of the engine that writes there.
        local, remotes: the engine's tiers.
        announced_tier: loggers are notified of a checkpoint once it is committed on this tier.
    """

    dirpath: str
    key: EngineKey
    local: LocalTierOptions
    remotes: tuple[RemoteTierOptions, ...]
    announced_tier: str


def choose_places(
    dirpath: str | os.PathLike[str],
    *,
    local_dir: str | os.PathLike[str] | None,
    persist: Interval,
    remotes: Sequence[RemoteTierOptions],
    run: str | None,
    weights_only: bool,
    only_files: bool = False,
    in_cluster: bool = False,
    durable: bool = True,
) -> CheckpointPlaces:
    """Chooses the places for ``dirpath``. ``run`` and ``local_dir`` default to :func:`resiliency.settings.environment`.

    With a ``local_dir``, ``dirpath`` is a tier that the agent uploads to. When ``dirpath`` is an address, ``local_dir``
    defaults to a folder on the ramdisk. Weights-only checkpoints get a run of their own, because no fit can resume from
    them.

    Args:
        only_files: as in :class:`LocalTierOptions`; used only when ``dirpath`` is the local tier.
        in_cluster: use a local tier even if ``dirpath`` is a folder: in :data:`IN_CLUSTER` if that is writable, else on
            the ramdisk.
        durable: False: ``dirpath`` is the local tier, and its files need not survive a power loss.

    Raises:
        ConfigError: with ``durable=False``, ``dirpath`` is an address, or ``local_dir`` is given, too.
    """
    if not durable and "://" in str(dirpath):
        raise ConfigError(
            f"dirpath={str(dirpath)!r} is an address, and use_in_cluster_local_ckpts=True with"
            " is_persistent_storage=False asks for a local tier there; pass a folder of this host"
        )
    if not durable and local_dir is not None:
        raise ConfigError(
            f"local_dir={os.fspath(local_dir)!r} and is_persistent_storage=False: the second says that"
            f" dirpath={str(dirpath)!r}"
            " is the local tier; pass one of them"
        )
    settings = environment()
    text = str(dirpath)
    run = (run or settings.run) + ("-weights" if weights_only else "")
    local_dir = local_dir or settings.local_dir
    if local_dir is None and in_cluster and os.path.isdir(IN_CLUSTER) and os.access(IN_CLUSTER, os.W_OK):
        local_dir = os.path.join(IN_CLUSTER, run, "checkpoint")
    if not durable or (local_dir is None and "://" not in text and not in_cluster):
        local = LocalTierOptions(directory=text, only_files=only_files, durable=durable)
        return CheckpointPlaces(text, EngineKey(local.directory, run), local, tuple(remotes), announced_tier=LOCAL)
    if local_dir is None:
        text_of_place = text.replace("://", "-") if "://" in text else os.path.abspath(text).lstrip("/")
        local_dir = f"/dev/shm/resiliency-{os.getuid()}/{text_of_place.replace('/', '-')}"
    ramdisk = os.path.abspath(local_dir).startswith("/dev/shm")
    local = LocalTierOptions(directory=os.fspath(local_dir), keep=1, keep_named=False, durable=not ramdisk)
    persistent = RemoteTierOptions(address=text, name="persistent", interval=persist)
    key = EngineKey(local.directory, run)
    return CheckpointPlaces(text, key, local, (persistent, *remotes), announced_tier=persistent.name)
