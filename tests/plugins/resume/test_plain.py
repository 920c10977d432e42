"""Batches and loader states become plain data and come back as they were."""

from __future__ import annotations

import random
from collections import OrderedDict, deque, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from resiliency.plugins.resume import rng
from resiliency.plugins.resume.plain import NotPlain, from_plain, to_plain

PLAIN = (type(None), bool, int, float, str, bytes, list, tuple, dict, torch.Tensor)
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.binary(max_size=5)
)
keys = st.text(max_size=5) | st.integers() | st.tuples(st.integers(), st.text(max_size=3))
trees = st.recursive(
    scalars | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(keys, inner, max_size=3)
        | st.frozensets(st.integers(), max_size=3)
        | st.lists(inner, max_size=2).map(lambda items: deque(items, 7))
    ),
    max_leaves=12,
)


def leaves_are_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(type(key) is str and leaves_are_plain(item) for key, item in value.items())
    if type(value) in (list, tuple):
        return all(map(leaves_are_plain, value))
    return type(value) in PLAIN


@given(trees)
def test_plain_trees_come_back_equal(tree: Any) -> None:
    plain = to_plain(tree)
    assert leaves_are_plain(plain)
    again = from_plain(plain)
    assert again == tree and type(again) is type(tree)


@pytest.mark.parametrize(
    "array", [np.arange(6.0).reshape(2, 3), np.float32(1.5), np.array([], dtype=np.int8), np.array(True)]
)
def test_numpy_arrays_come_back_equal(array: Any) -> None:
    plain = to_plain({"a": array})
    assert leaves_are_plain(plain)
    again = from_plain(plain)["a"]
    assert type(again) is type(array) and again.dtype == array.dtype and np.array_equal(again, array)


def test_the_plain_form_shares_no_memory() -> None:
    live = {"tensor": torch.zeros(3), "list": [1]}
    plain = to_plain(live)
    live["tensor"] += 1
    live["list"].append(2)
    again = from_plain(plain)
    again["tensor"] += 5
    assert plain["tensor"].tolist() == [0, 0, 0] and plain["list"] == [1]


def test_ordered_dicts_come_back_as_dicts() -> None:
    assert from_plain(to_plain(OrderedDict(b=1, a=2))) == {"b": 1, "a": 2}


@pytest.mark.parametrize("thing", [namedtuple("Pair", "a b")(1, 2), object(), lambda: None, np.array(["text"])])
def test_what_has_no_plain_form_is_refused_with_its_place(thing: Any) -> None:
    with pytest.raises(NotPlain, match=r"batch\['x'\]\[1\] is a "):
        to_plain({"x": [0, thing]}, "batch")


def test_generators_are_put_back_and_not_advanced() -> None:
    with rng.preserved():
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        random.gauss(0, 1)  # leaves half a pair behind, which is state too
        np.random.standard_normal()

        def draw() -> list[float]:
            return [
                random.random(),
                random.gauss(0, 1),
                np.random.rand(),
                np.random.standard_normal(),
                float(torch.rand(())),
            ]

        taken = rng.snapshot()
        first = draw()
        rng.restore(taken)
        assert draw() == first
        rng.restore(taken)
        rng.snapshot()
        assert draw() == first
    assert leaves_are_plain(taken)


@pytest.mark.gpu
def test_cuda_generators_are_put_back() -> None:
    with rng.preserved():
        torch.rand(1, device="cuda")
        taken = rng.snapshot()
        first = torch.rand(4, device="cuda")
        rng.restore(taken)
        assert torch.equal(torch.rand(4, device="cuda"), first)
