"""``PersistentCheckpointProcessIO``: a CheckpointIO plugin of the guide, on the engine of this library.

Around another plugin of this library it saves in the background with a helper process that stays, the host agent.
``build(namespace)`` gives it for a named Lightning package.
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
    """Saves as the given plugin would, in the background, and lets the host agent do the agent's work.

    See :class:`GuideIO` for threads and waits.

    Args:
        checkpoint_io: a plugin of this library, whose settings are taken over.
        profile_dir: traces of saves are written by ``ProfileCheckpointCallback``; a folder given here is said to have
            no effect.

    Raises:
        ConfigError: ``checkpoint_io`` is of another library.
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
            replace(inner, async_save=True, parallel=(), use_ckpt_load_replication=False),  # it has said these
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
