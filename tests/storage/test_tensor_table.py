"""A table of tensors says the same after JSON as before."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resiliency.errors import ConfigError
from resiliency.storage.tensor_table import TensorTable

names = st.text(st.sampled_from("ab/%~!.k0"), max_size=3)


@given(at=names, keys=st.dictionaries(names, names.filter(bool), min_size=1, max_size=5))
def test_what_goes_in_comes_out(at: str, keys: dict[str, str]) -> None:
    table = TensorTable(at, tuple(keys)).with_keys(list(keys.values()))
    assert dict(table.items()) == keys
    assert TensorTable.from_json(json.loads(json.dumps(table.to_json()))) == table


def test_keys_are_spelled_out_only_where_they_differ() -> None:
    table = TensorTable("m", ("a", "b/c"))
    assert table.keys == ["m/a", "m/b%2Fc"] and "keys" not in table.to_json()
    assert table.with_keys(["m/a", "m/a"]).to_json()["keys"] == {"b/c": "m/a"}


@pytest.mark.parametrize("item", [{"at": "m", "k": ["a"]}, {"names": ["a"]}, {"at": "m", "names": 3}])
def test_a_table_of_another_version_is_refused_with_a_sentence(item: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="another version of resiliency"):
        TensorTable.from_json({"!": "tensors", **item})
