"""Tensors of a tree have keys that tell them apart, and can be put in each other's place."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from resiliency.errors import ConfigError
from resiliency.state.tree import dtype_from_name, dtype_name, is_leaf, keyed_leaves, replace_leaves


@pytest.mark.parametrize(
    "keys",
    [
        ["a/b", "a"],
        ["a%2Fb", "a/b"],
        ["a~", "a"],
        [1, "1"],
        [1, "1", "1~"],
        ["1~", "1", 1],
        ["", "/"],
        ["!objects", "!rank/x"],
        ["__metadata__"],
        ["w@0,0", "w"],
        [(1, 2), "(1, 2)"],
        [None, "None"],
        ["ü", "日本"],
        ["a" * 500, "a" * 499],
        [True, "True"],
        [b"x", "b'x'"],
        [0.5, "0.5"],
    ],
)
def test_keys_of_any_kind_come_back(keys: list[Any]) -> None:
    tree = {key: {"t": torch.tensor([float(i)])} for i, key in enumerate(keys)}
    tree["nested"] = {key: torch.tensor([10.0 + i]) for i, key in enumerate(keys)}
    if len(keys) > 1 and isinstance(keys[0], str) and isinstance(keys[1], str):
        tree["x"] = {keys[0]: {keys[1]: torch.tensor(1.0)}, f"{keys[0]}/{keys[1]}": torch.tensor(2.0)}
    found = keyed_leaves(tree)
    assert len(found) == len({id(leaf) for leaf in found.values()}) == 2 * len(keys) + (2 if "x" in tree else 0)
    assert "" not in found


names = st.text(st.sampled_from("ab/%~!.k0"), max_size=3)
tensors = st.sampled_from(
    [torch.zeros(2), torch.ones(2), torch.arange(6.0)[:2], torch.empty(0), torch.nn.Parameter(torch.ones(1))]
)
trees = st.recursive(
    tensors | st.integers() | st.none(),
    lambda inner: (
        st.dictionaries(names, tensors, max_size=4)
        | st.dictionaries(names, inner, max_size=4)
        | st.lists(inner, max_size=3)
    ),
    max_leaves=25,
)


@given(tree=trees)
def test_every_tensor_of_any_tree_has_a_key_and_can_be_replaced(tree: Any) -> None:
    found = keyed_leaves(tree)
    order = iter(found.values())
    seen = []

    def replacement(leaf: Any) -> Any:
        assert leaf is next(order)
        seen.append(torch.tensor(float(len(seen))))
        return seen[-1]

    new = replace_leaves(tree, replacement)
    assert list(keyed_leaves(new)) == list(found)
    assert [id(leaf) for leaf in keyed_leaves(new).values()] == [id(leaf) for leaf in seen]


def test_what_derives_from_containers_is_looked_into_and_keeps_its_class() -> None:
    class Pair(collections.namedtuple("Pair", "a b")):
        pass

    tree = {"p": Pair(torch.zeros(1), [torch.zeros(2)]), "d": collections.deque([torch.zeros(3)]), "o": object()}
    assert list(keyed_leaves(tree)) == ["p/0", "p/1/0", "d/0"]
    new = replace_leaves(tree, lambda leaf: leaf + 1)
    assert type(new["p"]) is Pair and new["p"].b[0].tolist() == [1, 1] and type(new["d"]) is collections.deque


def test_a_lone_tensor_and_no_tensor() -> None:
    assert list(keyed_leaves(torch.tensor(3.0))) == ["value"]
    assert keyed_leaves({"a": 1}) == {} and replace_leaves({"a": 1}, lambda leaf: None) == {"a": 1}


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e5m2", "bool", "complex64", "uint16"])
def test_a_dtype_is_found_by_its_name(name: str) -> None:
    assert dtype_name(dtype_from_name(name)) == name


@pytest.mark.parametrize("name", ["float31", "nn", "__class__", "Tensor", ""])
def test_dtypes_this_torch_does_not_know(name: str) -> None:
    with pytest.raises(ConfigError, match="torch"):
        dtype_from_name(name)


def nested(depth: int, inner: Any) -> Any:
    """A container in a container, twice in each: 2**depth paths lead to the inner one."""
    for _ in range(depth):
        inner = [inner, inner]
    return inner


def test_containers_without_leaves_are_looked_into_once() -> None:
    one = torch.ones(1)
    looked: list[Any] = []
    found = keyed_leaves({"deep": nested(60, [0]), "one": one}, lambda item: looked.append(item) or is_leaf(item))
    assert found == {"one": one} and len(looked) < 200


def test_containers_are_replaced_in_once_and_stay_one() -> None:
    new = torch.ones(1)
    pair = (torch.zeros(1), 1)
    tree = {"pairs": [pair, pair], "same": (pair,), "deep": nested(60, [torch.zeros(1)])}
    looked: list[Any] = []
    made = replace_leaves(tree, lambda leaf: new, lambda item: looked.append(item) or is_leaf(item))
    assert made["pairs"][0] is made["pairs"][1] is made["same"][0] and made["pairs"][0][0] is new
    inner = made["deep"]
    for _ in range(60):
        assert inner[0] is inner[1]
        inner = inner[0]
    assert inner == [new] and len(looked) < 200
