"""One tree, and the builtin errors people catch."""

from __future__ import annotations

import pickle

import pytest

import resiliency
from resiliency import errors


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name != "ResiliencyError"])
def test_one_tree(name: str) -> None:
    assert issubclass(getattr(errors, name), errors.ResiliencyError)
    assert getattr(resiliency, name) is getattr(errors, name)


def test_builtin_errors() -> None:
    assert issubclass(errors.ConfigError, ValueError) and issubclass(errors.Timeout, TimeoutError)


def test_what_they_carry() -> None:
    error = errors.TierError("x", retryable=True)
    assert error.retryable and str(error) == "x"
    corrupt = errors.CorruptShard("bad", path="/a", ranges=[(1, 2)])
    assert corrupt.path == "/a" and corrupt.ranges == ((1, 2),) and str(corrupt) == "bad"
    assert errors.CorruptShard("bad", path="/a").ranges == ()


@pytest.mark.parametrize(
    "error",
    [
        errors.TierError("x", retryable=True),
        errors.CorruptShard("x", path="/a", ranges=[(1, 2)]),
        errors.ConfigError("x"),
    ],
)
def test_they_travel_between_processes(error: Exception) -> None:
    """Data loaders and launchers send exceptions through pickle; one that cannot be rebuilt hides the real error."""
    got = pickle.loads(pickle.dumps(error))
    assert type(got) is type(error) and vars(got) == vars(error) and str(got) == str(error)
