"""When a save also goes to a slower tier."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resiliency.errors import ConfigError
from resiliency.storage.interval import Interval, crossed


@given(st.lists(st.integers(1, 500), min_size=1, max_size=60, unique=True).map(sorted), st.integers(1, 50))
def test_the_first_save_at_or_after_each_multiple(steps: list[int], every: int) -> None:
    last, sent = 0, []
    for step in steps:
        if crossed(last, step, every):
            last = step
            sent.append(step)
    after = [next((step for step in steps if step >= multiple), None) for multiple in range(every, 501, every)]
    assert sent == sorted({step for step in after if step is not None})


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 100))
def test_a_restart_changes_nothing(spacing: int, every: int, restarted: int) -> None:
    """Where each save is a step that the job can go on from."""
    last, whole, parts = 0, [], []
    for step in range(spacing, 200, spacing):
        if crossed(last, step, every):
            last = step
            whole.append(step)
    last = 0
    for step in range(spacing, 200, spacing):
        if step - spacing <= restarted < step:
            last = step - spacing
        if crossed(last, step, every):
            last = step
            parts.append(step)
    assert whole == parts


def test_going_back_to_an_older_step_sends_again_when_it_is_passed() -> None:
    assert not crossed(100, 60, 50)
    assert crossed(100, 150, 50)


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"steps": 0}, "1 or more"),
        ({"steps": -5}, "1 or more"),
        ({"time": timedelta(0)}, "positive"),
        ({"steps": 1, "time": timedelta(1)}, "one of them"),
    ],
)
def test_wrong_intervals_are_refused(values: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        Interval(**values)  # type: ignore[arg-type]
