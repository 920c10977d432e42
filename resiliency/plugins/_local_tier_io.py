"""Implements ``InClusterLocalCheckpointIO`` and ``CombinedCheckpointIO``, which have the same arguments."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from resiliency.checkpoint.options import CheckpointerOptions
from resiliency.plugins._guide_io import GuideIO, IOArguments

__all__ = ["LocalTierIO"]


class LocalTierIO(GuideIO):
    """Saves with the engine; below ``local_ckpt_dir`` without flushing to the disk.

    See :class:`GuideIO` for threads and waits.

    Args:
        save_ckpt_format, load_directly_on_device, load_strictness, async_save, torch_dist_multiproc,
            assume_constant_structure, use_ckpt_load_replication, local_ckpt_dir: see :class:`IOArguments`.
        persistent_parallel_save, persistent_parallel_save_within_dp, persistent_parallel_load, local_parallel_save,
            local_parallel_save_within_dp, local_parallel_load: have no effect, which is logged, because Lightning calls
            a plugin on rank 0 only. With this library's ModelCheckpoint every rank writes and reads its share.
        run, options, flush_timeout: as for ``TieredCheckpointIO``.

    Raises:
        ConfigError: a value that this library cannot do; the message says what to pass instead.
    """

    def __init__(
        self,
        save_ckpt_format: str = "torch_dist",
        load_directly_on_device: bool = True,
        load_strictness: Any = None,
        async_save: bool = False,
        torch_dist_multiproc: int | None = None,
        assume_constant_structure: bool = False,
        persistent_parallel_save: bool = False,
        persistent_parallel_save_within_dp: bool = False,
        persistent_parallel_load: bool = False,
        local_parallel_save: bool = False,
        local_parallel_save_within_dp: bool = False,
        local_parallel_load: bool = False,
        use_ckpt_load_replication: bool = False,
        local_ckpt_dir: str | os.PathLike[str] | None = None,
        *,
        run: str | None = None,
        options: CheckpointerOptions | None = None,
        flush_timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        asked = {
            "persistent_parallel_save": persistent_parallel_save,
            "persistent_parallel_save_within_dp": persistent_parallel_save_within_dp,
            "persistent_parallel_load": persistent_parallel_load,
            "local_parallel_save": local_parallel_save,
            "local_parallel_save_within_dp": local_parallel_save_within_dp,
            "local_parallel_load": local_parallel_load,
        }
        arguments = IOArguments(
            save_ckpt_format=save_ckpt_format,
            load_directly_on_device=load_directly_on_device,
            load_strictness=load_strictness,
            async_save=async_save,
            torch_dist_multiproc=torch_dist_multiproc,
            assume_constant_structure=assume_constant_structure,
            parallel=tuple(name for name, value in asked.items() if value),
            use_ckpt_load_replication=use_ckpt_load_replication,
            local_ckpt_dir=None if local_ckpt_dir is None else os.fspath(local_ckpt_dir),
        )
        super().__init__(arguments, run=run, options=options, flush_timeout=flush_timeout)
