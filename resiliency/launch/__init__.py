"""``resiliency run``: starts the ranks of a job on this host, and starts all of them again when one dies.

It is torchrun (:mod:`torch.distributed.run`) with another way to start a process: ranks are forked from a process that
has already imported torch and Lightning (:mod:`~resiliency.launch.zygote`), and the launcher sees their end through a
pidfd.
Flags, environment, rendezvous, error files, logs and exit codes are torchrun's own code.
"""

from __future__ import annotations

from resiliency.launch.survivor import AttemptEnded, restartable
from resiliency.runtime.heartbeat import beat, pause

__all__ = ["AttemptEnded", "beat", "pause", "restartable"]
