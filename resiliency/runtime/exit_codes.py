"""Exit codes by which ranks tell the launcher why they ended."""

from __future__ import annotations

__all__ = ["PREEMPTED"]

#: The rank was told to go, has saved what it could, and is to be restarted where there is room. The value is
#: ``EX_TEMPFAIL``; it differs from 143, the code of a process that SIGTERM has killed or that only cleaned up.
PREEMPTED = 75
