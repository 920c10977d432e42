"""What goes in comes out, or comes out as something plainer; nothing stored is ever executed unless the reader vouches for it."""

from __future__ import annotations

import base64
import collections
import dataclasses
import datetime
import enum
import functools
import json
import math
import os
import pathlib
import pickle
import types
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from resiliency.errors import ConfigError
from resiliency.storage.codec import Opaque, decode, encode

SETTINGS = settings(deadline=None, database=None, max_examples=150, suppress_health_check=list(HealthCheck))


class Point(NamedTuple):
    x: int
    y: Any


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 3


class Text(str):
    pass


class Bag(dict):  # type: ignore[type-arg]
    pass


@dataclasses.dataclass(frozen=True)
class Settings:
    lr: float = 0.1


class Evil:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.mark,))


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("not me")


def refuse(item: Any, path: tuple[str, ...] = ()) -> Any:
    return NotImplemented


def unknown(item: dict[str, Any]) -> Any:
    raise ConfigError(f"unknown {item['!']}")


def through(value: Any, **options: Any) -> Any:
    text = json.dumps(encode(value, leaf=refuse), allow_nan=True)
    return decode(json.loads(text), leaf=unknown, **options)


def same(one: Any, other: Any) -> bool:
    """Equal, of the same type, with NaN equal to NaN and -0.0 not to 0.0."""
    if type(one) is not type(other):
        return isinstance(one, pathlib.PurePath) and one == other
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or (
            one == other and math.copysign(1, one) == math.copysign(1, other)
        )
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, dict):
        factory = getattr(one, "default_factory", None) is getattr(other, "default_factory", None)
        return (
            factory
            and len(one) == len(other)
            and all(same(a, b) and same(one[a], other[b]) for a, b in zip(one, other, strict=True))
        )
    if isinstance(one, collections.deque):
        return one.maxlen == other.maxlen and same(list(one), list(other))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, slice):
        return same([one.start, one.stop, one.step], [other.start, other.stop, other.step])
    if isinstance(one, types.SimpleNamespace):
        return same(vars(one), vars(other))
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return bool(one == other)


numbers = st.one_of(st.integers(), st.integers(-(10**400), 10**400), st.floats(), st.complex_numbers())
keys = st.one_of(
    st.text(),
    st.integers(),
    st.floats(allow_nan=False),
    st.booleans(),
    st.none(),
    st.binary(max_size=4),
    st.tuples(st.integers(), st.text()),
)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    numbers,
    st.text(),
    st.binary(),
    st.binary().map(bytearray),
    st.just("!"),
    st.datetimes(),
    st.dates(),
    st.timedeltas(),
    st.datetimes(timezones=st.just(datetime.timezone.utc)),
    st.builds(range, st.integers(), st.integers(), st.integers(1, 9)),
    st.sampled_from([Path("/a/b"), Path("."), pathlib.PurePosixPath("x")]),
    st.sets(st.integers()),
    st.frozensets(st.text()),
    st.builds(np.float32, st.floats(width=32)),
    st.sampled_from([np.int8(-3), np.bool_(True), np.str_("ü"), np.datetime64("2020-01-01")]),
    st.sampled_from(
        [
            np.zeros((2, 0, 3)),
            np.arange(6, dtype=">i4").reshape(2, 3),
            np.float64([np.nan, np.inf]),
            np.array(3),
            np.array(["a", "bcd"]),
        ]
    ),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(st.sampled_from(["!", "value", "keys", "attributes"]), inner, max_size=4),
        st.dictionaries(keys, inner, max_size=3).map(collections.OrderedDict),
        st.lists(inner, max_size=3).map(lambda v: collections.deque(v, maxlen=5)),
        st.dictionaries(keys, inner, max_size=3).map(lambda v: collections.defaultdict(list, v)),
        st.dictionaries(st.text(), inner, max_size=3).map(lambda v: types.SimpleNamespace(**v)),
        st.tuples(inner).map(lambda v: slice(None, *v)),
    ),
    max_leaves=12,
)


@SETTINGS
@given(trees)
def test_what_was_encoded_comes_back(value: Any) -> None:
    assert same(through(value), value)


@SETTINGS
@given(trees)
def test_encoding_changes_nothing(value: Any) -> None:
    before = pickle.dumps(value)
    encode(value, leaf=refuse)
    assert pickle.dumps(value) == before


def test_integers_of_any_size_come_back() -> None:
    """Random states of other languages and cryptographic counters have thousands of digits; Python's int() has a limit of 4300."""
    value = {"n": 7**9000, "negative": -(3**10000)}
    assert through(value) == value


@pytest.mark.parametrize("text", ["\ud800", "a\udcffb", "\0", "\u2028", "é" * 3])
def test_odd_text_comes_back(text: str) -> None:
    assert through({text: [text]}) == {text: [text]}


def test_dictionaries_of_every_kind_come_back() -> None:
    for value in (
        collections.Counter("aab"),
        collections.OrderedDict([(2, "b"), (1, "a")]),
        collections.defaultdict(None, a=1),
        collections.defaultdict(int, {3: 4}),
        {1: "int", "1": "str", True and 2: "two"},
        {"!": "tuple", "value": [1]},
        {(1, "a"): {b"x": 1}},
    ):
        got = through(value)
        assert same(got, value) and list(got) == list(value)


def test_structured_arrays_keep_their_fields() -> None:
    value = np.zeros(3, dtype=[("a", "i4"), ("b", "f8")])
    value["b"] = [1, 2, 3]
    got = through(value)
    assert got.dtype == value.dtype and (got["b"] == value["b"]).all()


def test_arrays_are_writable_and_their_own() -> None:
    value = np.arange(4)
    got = through(value)
    got += 1
    assert value.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Point(1, (2,)), (1, (2,))),
        (Level.HIGH, 3),
        (Text("a"), "a"),
        (Bag(a=[1], b=Point(1, 2)), {"a": [1], "b": (1, 2)}),
        ([Level.HIGH], [3]),
        ({Level.HIGH: Text("x")}, {3: "x"}),
    ],
)
def test_subclasses_become_their_builtin(value: Any, plain: Any) -> None:
    assert same(through(value), plain)
    assert through(value, allow_pickle=True) == value and type(through(value, allow_pickle=True)) is type(value)


@pytest.mark.parametrize("value", [Colour.RED, Settings(), datetime.time(1, 2), object, len])
def test_other_classes_become_opaque(value: Any) -> None:
    got = through([value])[0]
    assert isinstance(got, Opaque)
    assert type(value).__qualname__ in repr(got)
    assert through(value, allow_pickle=True) == value


@pytest.mark.parametrize(
    "wrap",
    [lambda e: e, lambda e: [e], lambda e: {"a": (e,)}, lambda e: {e: 1}, lambda e: Point(1, e), lambda e: Bag(a=e)],
)
def test_nothing_is_unpickled_unless_asked_for(wrap: Any, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    value = encode(wrap(Evil(str(mark))), leaf=refuse)
    mark.rmdir() if mark.exists() else None
    decode(json.loads(json.dumps(value)), leaf=unknown)
    assert not mark.exists(), "stored code was run"
    decode(value, leaf=unknown, allow_pickle=True)
    assert mark.exists(), "the test proves nothing"


def test_a_pickle_hidden_in_every_known_tag_does_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    evil = {"!": "pickle", "class": "x", "value": base64.b64encode(pickle.dumps(Evil(str(mark)))).decode()}
    tags = [
        "tuple",
        "dict",
        "set",
        "frozenset",
        "slice",
        "OrderedDict",
        "Counter",
        "defaultdict",
        "deque",
        "namespace",
        "path",
        "ndarray",
        "bytes",
        "complex",
    ]
    for tag in tags:
        for v in (evil, [evil], {"a": evil}, [[evil, evil]]):
            try:
                decode(
                    {"!": tag, "value": v, "dtype": "|O", "shape": [1], "factory": "list", "maxlen": None}, leaf=unknown
                )
            except Exception:  # noqa: S112 - whatever it says, it must not run
                continue
    assert not mark.exists()


def test_object_arrays_are_not_read_as_raw_memory() -> None:
    got = through(np.array([{"a": 1}], dtype=object))
    assert isinstance(got, Opaque)
    with pytest.raises((ValueError, TypeError)):
        decode(
            {"!": "ndarray", "dtype": "|O", "shape": [1], "value": base64.b64encode(b"12345678").decode()}, leaf=unknown
        )


@pytest.mark.parametrize("tag", ["tensor", "nonsense", "", "__import__", "list"])
def test_unknown_tags_are_the_readers_to_refuse(tag: str) -> None:
    with pytest.raises(ConfigError, match="unknown"):
        decode([{"!": tag}], leaf=unknown)


@pytest.mark.parametrize("value", [lambda: 0, Unpicklable(), collections.defaultdict(lambda: 0), (i for i in ())])
def test_what_cannot_be_stored_is_named(value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        encode({"loops": [1, {"cache": value}]}, leaf=refuse)
    assert "loops/1/cache" in str(caught.value) and type(value).__name__ in str(caught.value)


def test_a_defaultdict_of_a_partial_comes_back_as_a_dict() -> None:
    value = collections.defaultdict(functools.partial(int, 3), a=1)
    got = through(value)
    assert dict(got) == {"a": 1}


def test_a_function_that_is_called_like_a_builtin_is_not_taken_for_it() -> None:
    def list() -> int:  # noqa: A001
        return 5

    with pytest.raises(ConfigError):  # a local function cannot be pickled; it must not come back as the builtin either
        encode(collections.defaultdict(list), leaf=refuse)


def test_a_tree_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ConfigError):
        encode({"a": loop}, leaf=refuse)


def test_leaf_is_asked_before_anything_is_pickled() -> None:
    asked = []

    def leaf(item: Any, path: tuple[str, ...]) -> Any:
        asked.append(path)
        return {"!": "mine"} if isinstance(item, Settings) else NotImplemented

    value = encode({"a": [Settings()], "b": 1}, leaf=leaf)
    assert asked == [(), ("a", "0")], "dicts are offered too: what holds nothing but leaves can be written at once"
    assert decode(value, leaf=lambda item: "yes") == {"a": ["yes"], "b": 1}
