"""Words for ranks whose parts of a step do not belong together."""

from __future__ import annotations

from collections.abc import Collection, Iterable

__all__ = ["different_plans"]


def different_plans(groups: Iterable[Collection[int]]) -> str:
    """Why a step is not committed whose ranks planned differently.

    Args:
        groups: the ranks that planned alike, and the others, in one group or several.
    """
    ordered = sorted(map(sorted, groups), key=lambda group: (-len(group), group))
    most, *others = [_ranks(group) for group in ordered if group]
    return (
        f"ranks saved different sets of tensors: {' and '.join(others)} others than {most} (keys, shapes, dtypes or"
        " placements); every rank must pass the same state (what differs belongs into per_rank, tensors that only some"
        " ranks hold into a WritePlan)"
    )


def _ranks(group: Collection[int]) -> str:
    """ "ranks 0-2, 5"."""
    ranges: list[list[int]] = []
    for rank in sorted(group):
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
    return f"rank {text}" if len(group) == 1 else f"ranks {text}"
