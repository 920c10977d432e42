"""Named points in the code where tests make a process die, fail or stop; they cost nothing when no point is armed.

``RESILIENCY_FAULTS="agent.record.before:kill@3;save.fill:error"`` arms points in this process and its children:
``NAME:ACTION[@N][,rank=R]`` where ACTION is ``kill`` (SIGKILL to this process), ``stop`` (SIGSTOP), ``error``
(raises OSError EIO), ``full`` (OSError ENOSPC) or ``delay=SECONDS``; ``@N`` acts when the point is passed for the Nth
time (1 based, default 1; ``@*`` every time); ``rank=R`` only in the process of that rank. Never set it in production.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from dataclasses import dataclass

from resiliency.errors import ConfigError
from resiliency.settings import environment

__all__ = ["KNOWN", "arm", "hit"]

#: All points, in the order in which a save passes them. Tests iterate over this tuple; ``arm`` refuses other names.
KNOWN: tuple[str, ...] = (
    "save.begin",
    "save.eager",
    "save.block",
    "save.fill",
    "save.sealed",
    "agent.start",
    "agent.seal.received",
    "agent.record.write",
    "agent.join.write",
    "agent.join.record",
    "agent.manifest.write",
    "agent.name.write",
    "agent.committed",
    "agent.fsync",
    "agent.durable",
    "agent.prune.manifest",
    "agent.prune.record",
    "agent.prune.shard",
    "agent.upload.shard",
    "agent.upload.record",
    "agent.upload.manifest",
    "agent.upload.name",
    "agent.upload.done",
    "agent.drop.begin",
    "agent.drop.renamed",
    "agent.drop.removed",
    "restore.inventory",
    "restore.verify",
    "restore.load",
    "preemption.interrupt",
    "supervisor.lease.write",
    "supervisor.store.begin",
    "supervisor.store.write",
    "supervisor.store.committed",
    "supervisor.send",
    "supervisor.step.ended",
)


@dataclass
class _Armed:
    action: str
    at: int | None
    rank: int | None
    passed: int = 0


_lock = threading.Lock()
_armed: dict[str, _Armed] | None = None


def _parse(text: str) -> dict[str, _Armed]:
    armed: dict[str, _Armed] = {}
    for item in filter(None, (part.strip() for part in text.split(";"))):
        name, _, rest = item.partition(":")
        if name not in KNOWN:
            raise ConfigError(f"unknown fault point {name!r}; known: {', '.join(KNOWN)}")
        rest, _, where = rest.partition(",rank=")
        action, _, at = rest.partition("@")
        try:
            if action not in ("kill", "stop", "error", "full"):
                float(action.removeprefix("delay=") if action.startswith("delay=") else "no action")
            armed[name] = _Armed(action, None if at == "*" else int(at or 1), int(where) if where else None)
        except ValueError:
            raise ConfigError(
                f"fault {item!r} is invalid; write NAME:ACTION[@N][,rank=R] with kill, stop, error, full or delay=S"
            ) from None
    return armed


def arm(text: str) -> None:
    """Arms the points named in ``text`` in this process only (the empty string disarms all)."""
    global _armed
    with _lock:
        _armed = _parse(text)


def hit(name: str, *, rank: int | None = None) -> None:
    """Passes the named point. Blocks only when a test armed a delay or stop here.

    Raises:
        OSError: a test armed ``error`` or ``full`` here.
    """
    global _armed
    if _armed is None:
        with _lock:
            if _armed is None:
                _armed = _parse(environment().faults)
    if not _armed:
        return
    point = _armed.get(name)
    if point is None or (point.rank is not None and rank is not None and point.rank != rank):
        return
    with _lock:
        point.passed += 1
        if point.at is not None and point.passed != point.at:
            return
    if point.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif point.action == "stop":
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # not the process: it might stop too late
    elif point.action == "error":
        raise OSError(errno.EIO, f"fault injected at {name}")
    elif point.action == "full":
        raise OSError(errno.ENOSPC, f"fault injected at {name}")
    else:
        threading.Event().wait(float(point.action.removeprefix("delay=")))
