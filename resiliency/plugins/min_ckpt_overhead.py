"""``MinCkptOverheadCheckpointIO``: a CheckpointIO plugin of the guide that saves with this library's engine.

It is :class:`resiliency.plugins.checkpoint_io.TieredCheckpointIO` with the guide's arguments. ``build(namespace)``
gives the class for a named Lightning package.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from resiliency.checkpoint.options import CheckpointerOptions
from resiliency.plugins._guide_io import GuideIO, IOArguments
from resiliency.plugins.namespaces import AdapterClass

__all__ = ["MinCkptOverheadCheckpointIO", "build"]  # noqa: F822 - built on first use


class MinOverheadIO(GuideIO):
    """Saves with the engine; see :class:`GuideIO` for threads and waits, :class:`IOArguments` for the arguments.

    Args:
        save_ckpt_format, load_directly_on_device, load_strictness, async_save, torch_dist_multiproc,
            assume_constant_structure: see :class:`IOArguments`.
        parallel_save, parallel_save_within_dp, parallel_load: have no effect, which is logged, because Lightning calls
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
        parallel_save: bool = False,
        parallel_save_within_dp: bool = False,
        parallel_load: bool = False,
        *,
        run: str | None = None,
        options: CheckpointerOptions | None = None,
        flush_timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        asked = {
            "parallel_save": parallel_save,
            "parallel_save_within_dp": parallel_save_within_dp,
            "parallel_load": parallel_load,
        }
        arguments = IOArguments(
            save_ckpt_format=save_ckpt_format,
            load_directly_on_device=load_directly_on_device,
            load_strictness=load_strictness,
            async_save=async_save,
            torch_dist_multiproc=torch_dist_multiproc,
            assume_constant_structure=assume_constant_structure,
            parallel=tuple(name for name, value in asked.items() if value),
        )
        super().__init__(arguments, run=run, options=options, flush_timeout=flush_timeout)


_adapter = AdapterClass(__name__, "MinCkptOverheadCheckpointIO", MinOverheadIO, base="plugins.io:TorchCheckpointIO")
build = _adapter.build


def __getattr__(name: str) -> Any:
    return _adapter.attribute(name)
