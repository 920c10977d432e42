"""Exit codes of ranks that a launcher reads."""

from __future__ import annotations

__all__ = ["PREEMPTED"]

#: The rank was told to go, has done what it could to save, and is to be started again where there is room:
#: ``EX_TEMPFAIL``. It differs from 143, with which a process ends that SIGTERM has killed or that has only tidied up.
PREEMPTED = 75
