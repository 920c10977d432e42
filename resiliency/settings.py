"""The only reader of ``os.environ``: every variable the library reads is named here.

Variables are read when :func:`environment` is called, never at import.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from resiliency.errors import ConfigError

__all__ = ["Environment", "child_environment", "environment"]


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What the process environment says about this process and its job.

    Attributes:
        run: name of the run (``RESILIENCY_RUN`` or ``JOB_IDENTIFIER``); "default" when neither is set.
        rank: global rank (``RANK``), 0 when unset.
        world_size: number of ranks (``WORLD_SIZE``), 1 when unset.
        node: name of this host, as the failure domain (``RESILIENCY_NODE``, else ``NODE_NAME``, else the host name).
        restart: restart count set by the launcher (``TORCHELASTIC_RESTART_COUNT``), 0 when unset.
        events_dir: folder for event logs (``RESILIENCY_EVENTS_DIR``), None: below the checkpoint directory.
        local_dir: folder of the fast local tier (``RESILIENCY_LOCAL_DIR``), None: chosen by the caller.
        file_tracking: True when ``GOODPUT_USE_FILE_TRACKING`` is set (to anything, as the older library reads it).
        faults: fault points to trip, for tests (``RESILIENCY_FAULTS``), see :mod:`resiliency.faultpoints`.
    """

    run: str
    rank: int
    world_size: int
    node: str
    restart: int
    events_dir: str | None
    local_dir: str | None
    file_tracking: bool
    faults: str


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"environment variable {name}={text!r} is not a whole number; unset it or fix the launcher"
        ) from None


def environment(env: Mapping[str, str] | None = None) -> Environment:
    """Reads the process environment once.

    Args:
        env: mapping to read instead of ``os.environ`` (tests).

    Raises:
        ConfigError: a variable that must be a whole number is not.
    """
    source = os.environ if env is None else env
    return Environment(
        run=source.get("RESILIENCY_RUN") or source.get("JOB_IDENTIFIER") or "default",
        rank=_integer(source, "RANK", 0),
        world_size=_integer(source, "WORLD_SIZE", 1),
        node=source.get("RESILIENCY_NODE") or source.get("NODE_NAME") or socket.gethostname(),
        restart=_integer(source, "TORCHELASTIC_RESTART_COUNT", 0),
        events_dir=source.get("RESILIENCY_EVENTS_DIR") or None,
        local_dir=source.get("RESILIENCY_LOCAL_DIR") or None,
        file_tracking="GOODPUT_USE_FILE_TRACKING" in source,
        faults=source.get("RESILIENCY_FAULTS", ""),
    )


def child_environment(package_parent: str) -> dict[str, str]:
    """The environment for a helper process: this process's, with this copy of the package importable."""
    env = dict(os.environ)
    paths = [package_parent, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return env
