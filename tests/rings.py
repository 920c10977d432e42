"""Which cases of a parametrisation are in each run, and which in the nightly one alone."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest

__all__ = ["few"]


def few(cases: Iterable[Any], always: Container[Any]) -> list[Any]:
    """Cases of several arguments are tuples. The others show no more of the code than those that run always do."""
    return [_case(case, [] if case in always else [pytest.mark.nightly]) for case in cases]


def _case(case: Any, marks: list[pytest.MarkDecorator]) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks)
