"""Settings of a host monitor, and the command line of the launcher that it starts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from resiliency.errors import ConfigError
from resiliency.runtime.addresses import NAME

__all__ = ["MonitorSettings", "launcher_command"]


@dataclass(frozen=True, kw_only=True)
class MonitorSettings:
    """Settings of one host monitor.

    Attributes:
        host: the host's name, which the token is bound to.
        address: where other hosts reach this one.
        block: failure domain.
        command: command line of the launcher, see :func:`launcher_command`; ``{endpoint}`` becomes the socket's name.
        state_dir: folder on a local disk for the state that must survive the monitor.
        grace_s: seconds that a launcher has to end, before it is killed, when another one is to take its place.
        stop_s: the same when this monitor is told to end; longer, so that ranks can save.
        reset_command: resets devices; "": nvidia-smi.
        exit_when_completed: end when all workloads of the supervisor have ended.
        watch_only: only the watchdogs run: there is no launcher, and this machine is no host of a job.
    """

    host: str
    command: tuple[str, ...]
    state_dir: str
    address: str = ""
    block: str = ""
    grace_s: float = 5.0
    stop_s: float = 120.0
    reset_command: str = ""
    exit_when_completed: bool = False
    watch_only: bool = False

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.host):
            raise ConfigError(
                f"--host {self.host!r}: pass a name of 1 to 253 printable ASCII letters, digits, '.', '_' and '-' that"
                " begins and ends with a letter or digit; no supervisor takes another"
            )


def launcher_command(
    script: Sequence[str], *, nproc_per_node: str, address: str = "", launcher_args: Sequence[str] = ()
) -> tuple[str, ...]:
    """The command line of ``resiliency run`` for a script and its arguments."""
    local = ["--local-addr", address] if address else []
    return (
        *(sys.executable, "-m", "resiliency.cli", "run"),
        *("--rdzv-backend", "supervised", "--rdzv-endpoint", "{endpoint}"),
        *("--nproc-per-node", nproc_per_node),
        *local,
        *launcher_args,
        *script,
    )
