"""``PersistentCheckpointProcessIO``: a CheckpointIO plugin of the guide that saves with this library's engine.

It takes the settings of another plugin of this library and saves in the background with the host agent, a helper
process that keeps running between saves. ``build(namespace)`` gives the class for a named Lightning package.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Any

from resiliency.errors import ConfigError
from resiliency.plugins._guide_io import GuideIO, IOArguments
from resiliency.plugins.checkpoint_io import TieredIO
from resiliency.plugins.namespaces import AdapterClass

__all__ = ["PersistentCheckpointProcessIO", "build"]  # noqa: F822 - built on first use

logger = logging.getLogger(__name__)


class PersistentProcessIO(GuideIO):
    """Saves with the settings of the given plugin, but in the background and with a host agent as a process of its own.

    See :class:`GuideIO` for threads and waits.

    Args:
        checkpoint_io: a plugin of this library, whose settings are copied.
        profile_dir: has no effect; a warning names ``ProfileCheckpointCallback``, which writes traces of saves.

    Raises:
        ConfigError: ``checkpoint_io`` is a plugin of another library.
    """

    def __init__(self, checkpoint_io: Any, profile_dir: str | os.PathLike[str] | None = None) -> None:
        if not isinstance(checkpoint_io, TieredIO):
            raise ConfigError(
                f"PersistentCheckpointProcessIO(checkpoint_io={type(checkpoint_io).__name__}(...)) needs a plugin"
                f" of this"
                " library, such as MinCkptOverheadCheckpointIO; for another one use Lightning's AsyncCheckpointIO"
            )
        if profile_dir is not None:
            logger.warning(
                "profile_dir=%s has no effect; ProfileCheckpointCallback(trace_dir=...,"
                " profile_checkpoint_interval=...)"
                " writes traces of saves, with what the agent does",
                os.fspath(profile_dir),
            )
        inner = checkpoint_io._arguments if isinstance(checkpoint_io, GuideIO) else IOArguments()
        super().__init__(
            # Without the arguments that have no effect, because the given plugin has logged that already.
            replace(inner, async_save=True, parallel=(), use_ckpt_load_replication=False),
            run=checkpoint_io._run,
            options=replace(checkpoint_io._options, agent="process"),
            flush_timeout=checkpoint_io._flush_timeout,
        )


_adapter = AdapterClass(
    __name__, "PersistentCheckpointProcessIO", PersistentProcessIO, base="plugins.io:TorchCheckpointIO"
)
build = _adapter.build


def __getattr__(name: str) -> Any:
    return _adapter.attribute(name)
