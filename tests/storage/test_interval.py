"""When a save also goes to a slower tier."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resiliency.errors import ConfigError
from resiliency.storage.interval import Interval, crossed


@given(st.lists(st.integers(0, 500), min_size=1, max_size=60, unique=True).map(sorted), st.integers(1, 50))
def test_first_save_of_each_block(steps: list[int], every: int) -> None:
    last, sent = None, []
    for step in steps:
        if crossed(last, step, every):
            last = step
            sent.append(step)
    assert sent[0] == steps[0]
    blocks = [step // every for step in sent]
    assert blocks == sorted({step // every for step in steps}), "one save for every block that has any"


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
