"""A state tree taken apart and put together: ties, keys, odd tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from resiliency.checkpoint.state import dtype_from_name, dtype_name, flatten, unflatten
from resiliency.errors import ConfigError
from resiliency.inspection.contents import tensor_keys
from resiliency.storage.tensor_table import TensorTable
from resiliency.testing.checkpoints import differences


def through(tree: Any) -> Any:
    """There and back, both as it is read and as the commands that walk through it see it."""
    flat = flatten(tree)
    skeleton = json.loads(json.dumps(flat.skeleton))
    tensors = {key: tensor.clone() for key, tensor in flat.tensors.items()}
    got = unflatten(skeleton, tensors)
    assert tensor_keys(skeleton) == set(flat.tensors), "a command that walks through it misses a tensor"
    return got


def test_tied_tensors_are_stored_once_and_tied_again() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 3))
    tree = {"a": {"w": weight}, "b": [weight, weight.detach()], "c": weight.clone()}
    assert len(flatten(tree).tensors) == 2
    got = through(tree)
    assert got["a"]["w"] is got["b"][0] is got["b"][1]
    assert got["c"] is not got["a"]["w"] and torch.equal(got["c"], weight)


def test_views_of_the_same_memory_that_differ_are_not_ties() -> None:
    base = torch.arange(12.0)
    tree = {
        "all": base,
        "head": base[:6],
        "matrix": base.view(3, 4),
        "turned": base.view(3, 4).t(),
        "bits": base.view(torch.int32),
    }
    assert differences(through(tree), tree) == []


def test_conjugate_and_negative_views_are_not_ties() -> None:
    """They share memory, shape and strides with their base, and differ only in a flag."""
    base = torch.tensor([1 + 2j, 3 - 4j])
    tree = {"base": base, "conj": base.conj(), "imag": base.imag, "neg": base.conj().imag}
    flat = flatten(tree)
    got = unflatten(
        flat.skeleton, {key: tensor.resolve_conj().resolve_neg().clone() for key, tensor in flat.tensors.items()}
    )
    assert differences(got, tree) == []


def test_empty_tensors_are_never_ties() -> None:
    tree = {"a": torch.empty(0, 3), "b": torch.empty(0, 3), "c": torch.empty(2, 0)}
    got = through(tree)
    assert differences(got, tree) == [] and got["a"] is not got["b"]


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
    assert differences(through(tree), tree) == []


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
def test_any_tree_of_tensors_some_of_them_tied(tree: Any) -> None:
    flat = flatten(tree)
    assert differences(through(tree), tree) == []
    assert tensor_keys(flat.skeleton) == set(flat.tensors), "a command that reads the listing misses a tensor"
    assert "" not in flat.tensors, "no name for a tensor in a file"


def test_a_dict_of_tensors_is_a_list_of_names() -> None:
    """A placeholder for each costs four times as long, while the training thread waits."""
    weight = torch.zeros(3)
    tree = {
        "m": {"a": weight, "b/c": torch.zeros(1), "tied": weight},
        "m/b": {"c": torch.ones(1)},
        "mixed": {"t": torch.ones(2), "n": 1},
    }
    skeleton = json.loads(json.dumps(flatten(tree).skeleton))
    assert skeleton == {
        "m": {"!": "tensors", "at": "m", "names": ["a", "b/c", "tied"], "keys": {"tied": "m/a"}},
        "m/b": {"!": "tensors", "at": "m%2Fb", "names": ["c"]},
        "mixed": {"t": {"!": "tensor", "key": "mixed/t"}, "n": 1},
    }
    table = TensorTable.from_json(skeleton["m"])
    assert dict(table.items()) == {"a": "m/a", "b/c": "m/b%2Fc", "tied": "m/a"}
    assert json.loads(json.dumps(table.to_json())) == skeleton["m"]


def test_a_lone_tensor_and_no_tensor() -> None:
    assert torch.equal(through(torch.tensor(3.0)), torch.tensor(3.0))
    assert flatten({"a": 1}).tensors == {} and through({"a": 1}) == {"a": 1} and through(None) is None


def test_nothing_is_copied_or_changed() -> None:
    weight = torch.nn.Parameter(torch.randn(3))
    tree = {"w": weight, "list": [1, 2]}
    flat = flatten(tree)
    assert flat.tensors["w"].data_ptr() == weight.data_ptr()
    assert not flat.tensors["w"].requires_grad and weight.requires_grad
    assert tree["w"] is weight and tree["list"] == [1, 2]
    tree["list"].append(3)  # type: ignore[attr-defined]
    assert unflatten(flat.skeleton, flat.tensors)["list"] == [1, 2], "the skeleton shares the list with the state"


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: torch.eye(3).to_sparse(), "to_dense"),
        (lambda: torch.eye(3).to_sparse_csr(), "to_dense"),
        (lambda: torch.empty(3, device="meta"), "meta"),
        (lambda: torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8), "quantized"),
    ],
    ids=["sparse", "csr", "meta", "quantized"],
)
@pytest.mark.filterwarnings("ignore")  # torch says of sparse and quantized tensors that they are in beta, or going away
def test_what_has_no_plain_bytes_is_refused_by_name(make: Callable[[], torch.Tensor], word: str) -> None:
    for tree, key in (
        ({"model": {"bad/one": [make()]}}, "model/bad%2Fone/0"),
        ({"model": {"a": torch.ones(1), "bad/one": make()}}, "model/bad%2Fone"),
    ):
        with pytest.raises(ConfigError) as caught:
            flatten(tree)
        assert word in str(caught.value) and repr(key) in str(caught.value)


def test_torch_objects_that_are_no_tensors() -> None:
    tree = {
        "size": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "nested": [(torch.float8_e4m3fn,)],
    }
    assert through(tree) == tree and isinstance(through(tree)["size"], torch.Size)


def test_tags_of_a_newer_version_are_refused() -> None:
    with pytest.raises(ConfigError, match="upgrade"):
        unflatten({"a": {"!": "hologram"}}, {})


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e5m2", "bool", "complex64", "uint16"])
def test_a_dtype_is_found_by_its_name(name: str) -> None:
    assert dtype_name(dtype_from_name(name)) == name


@pytest.mark.parametrize("name", ["float31", "nn", "__class__", "Tensor", ""])
def test_dtypes_this_torch_does_not_know(name: str) -> None:
    with pytest.raises(ConfigError, match="torch"):
        dtype_from_name(name)
