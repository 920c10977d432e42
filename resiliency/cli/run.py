"""``resiliency run``: torchrun's words, which torch's own parser reads."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(words: Sequence[str]) -> int:
    """See :func:`resiliency.launch.run.main`."""
    from resiliency.launch import run

    return run.main(words)
