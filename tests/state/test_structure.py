"""What is saved comes back as ``torch.save`` and ``torch.load`` would give it: any tree, by torch's reader and by ours."""

from __future__ import annotations

import collections
import datetime
import enum
import io
import pickle
import re
import signal
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from resiliency.checkpoint.options import LocalTierOptions
from resiliency.errors import ConfigError
from resiliency.state.harmless import harmless_classes
from resiliency.state.structure import dump, without_refused
from resiliency.state.unpickle import unpickle
from resiliency.storage.stage import Stage
from resiliency.testing.checkpoints import bytes_of, make_checkpointer
from tests.rings import few

pytestmark = pytest.mark.filterwarnings("ignore")  # torch says of sparse and quantized tensors that they are in beta

SOON = timedelta(seconds=20)


# ---- trees that are alike


def alike(one: Any, other: Any) -> list[str]:
    """Where two trees differ, in words: types, values, strides, attributes, and which tensors share memory."""
    pairs: list[tuple[Tensor, Tensor]] = []
    found = list(_differences(one, other, "", pairs))
    if not found:
        found = [
            f"tensors {i} and {j} share memory in one only"
            for i, (a, b) in enumerate(pairs)
            for j, (c, d) in enumerate(pairs[:i])
            if (_extent(a) == _extent(c)) != (_extent(b) == _extent(d)) or (a is c) != (b is d)
        ]
    return found


def _bits(tensor: Tensor) -> bytes:
    return bytes_of(tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format))


def _extent(tensor: Tensor) -> Any:
    """Equal for tensors that are tied; unlike any other for one that has no memory."""
    if tensor.layout is not torch.strided or tensor.is_meta or not tensor.numel():
        return object()
    contiguous = tensor.is_contiguous()  # then another shape makes no other tensor
    place = tensor.numel() if contiguous else (tensor.shape, _strides(tensor))
    return tensor.data_ptr(), tensor.dtype, tensor.is_neg(), place


def _strides(tensor: Tensor) -> list[int]:
    """Strides that mean something."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _differences(one: Any, other: Any, where: str, pairs: list[tuple[Tensor, Tensor]]) -> Iterator[str]:
    if type(one) is not type(other):
        yield f"{where}: {type(one)} and {type(other)}"
    elif isinstance(one, Tensor):
        pairs.append((one, other))
        yield from _tensor_differences(one, other, where)
        yield from _differences(vars(one), vars(other), f"{where}.", pairs)
    elif isinstance(one, np.ndarray):
        if one.dtype != other.dtype or one.shape != other.shape or one.tobytes() != other.tobytes():
            yield f"{where}: arrays differ"
    elif isinstance(one, dict):
        if list(map(repr, one)) != list(map(repr, other)):
            yield f"{where}: keys {list(one)} and {list(other)}"
        else:
            for (key, a), b in zip(one.items(), other.values(), strict=True):
                yield from _differences(a, b, f"{where}/{key}", pairs)
        if vars(one) if hasattr(one, "__dict__") else False:
            yield from _differences(vars(one), vars(other), f"{where}.", pairs)
    elif isinstance(one, list | tuple | collections.deque):
        if len(one) != len(other):
            yield f"{where}: {len(one)} and {len(other)} items"
        else:
            for number, (a, b) in enumerate(zip(one, other, strict=True)):
                yield from _differences(a, b, f"{where}/{number}", pairs)
    elif hasattr(one, "__dict__") and not isinstance(one, type | enum.Enum):
        yield from _differences(vars(one), vars(other), f"{where}.", pairs)
    elif repr(one) != repr(other):
        yield f"{where}: {one!r} and {other!r}"


def _tensor_differences(one: Tensor, other: Tensor, where: str) -> Iterator[str]:
    for what in ("dtype", "shape", "layout", "requires_grad", "device", "is_quantized"):
        if getattr(one, what) != getattr(other, what):
            yield f"{where}: {what} {getattr(one, what)} and {getattr(other, what)}"
            return
    if one.is_quantized:
        if one.qscheme() != other.qscheme():
            yield f"{where}: {one.qscheme()} and {other.qscheme()}"
        elif one.qscheme() is torch.per_tensor_affine:
            if (one.q_scale(), one.q_zero_point()) != (other.q_scale(), other.q_zero_point()):
                yield f"{where}: scales differ"
        elif not torch.equal(one.q_per_channel_scales(), other.q_per_channel_scales()):
            yield f"{where}: scales differ"
        one, other = one.int_repr(), other.int_repr()
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    elif one.is_meta:
        return
    elif one.numel() and _strides(one) != _strides(other):
        yield f"{where}: strides {one.stride()} and {other.stride()}"
    if one.is_conj() != other.is_conj() or _bits(one) != _bits(other):
        yield f"{where}: values differ"


def through_torch(tree: Any) -> Any:
    """What a user of ``torch.save`` gets back."""
    file = io.BytesIO()
    torch.save(tree, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


# ---- the round trip


class Round:
    """Saves with one checkpointer, again and again, and reads what it wrote in every way."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.steps = directory, count(1)
        self.checkpointer = make_checkpointer(LocalTierOptions(directory=str(directory), keep=1))

    def save(self, tree: Any, **how: Any) -> Path:
        step = next(self.steps)
        name = f"step={step}.ckpt"
        ticket = self.checkpointer.save(step, tree, per_rank={"own": tree}, names=[name], **how)
        assert ticket is not None
        self.checkpointer.fence()
        ticket.wait(Stage.COMMITTED, timeout=SOON)
        self.checkpointer.delete(name)
        return self.directory / name

    def problems(self, tree: Any, *, allow_pickle: bool = True, **how: Any) -> list[str]:
        expected = through_torch(tree)
        path = self.save(tree, **how)
        stock = torch.load(path, weights_only=False)
        mapped = torch.load(path, weights_only=False, mmap=True)
        ours = self.checkpointer.load(allow_pickle=allow_pickle)
        assert ours is not None
        found = [f"torch: {text}" for text in alike(expected, stock)]
        found += [f"mapped: {text}" for text in alike(expected, mapped)]
        found += [f"ours: {text}" for text in alike(expected, ours.state)]
        return found + [f"per rank: {text}" for text in alike(expected, ours.per_rank["own"])]


@pytest.fixture(scope="module")
def trip(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Round]:
    made = Round(tmp_path_factory.mktemp("round") / "c")
    # Its threads outlive one test: they are started before the check of leftovers looks for the first time.
    made.save({"first": torch.ones(1)})
    assert made.checkpointer.load() is not None
    made.checkpointer.warm_up(nbytes=2 << 20, slots=1)
    yield made
    made.checkpointer.close()


# ---- any tree


class Point(NamedTuple):
    x: Any
    y: Any


class Color(enum.Enum):
    RED = 1


@dataclass
class Plain:
    value: Any
    other: Any = None


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Slotted({self.value!r})"


class Reading:
    """Looks at its tensor while it is made: its memory must have its values by then."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.total = tensor, float(tensor.double().sum())

    def __reduce__(self) -> Any:
        return Reading, (self.tensor,)


class Listing(list):  # type: ignore[type-arg]
    """A container with attributes."""


class Marked(Tensor):
    """A tensor of a user's class."""


def marked(values: Tensor) -> Tensor:
    made = values.clone().as_subclass(Marked)
    made.note = "kept"  # type: ignore[attr-defined]
    return made


DTYPES = [
    getattr(torch, name) for name in (
        "float32 float64 float16 bfloat16 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool complex64 complex128"
        " complex32 float8_e4m3fn float8_e5m2 float4_e2m1fn_x2"
    ).split() if hasattr(torch, name)
]  # fmt: skip


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """A tensor of any dtype: whole, or a view that is transposed, sliced, expanded, strided, conjugated, flipped."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    nbytes = dtype.itemsize
    for size in shape:
        nbytes *= size
    raw = torch.arange(nbytes + 1, dtype=torch.int64).add_(draw(st.integers(0, 200))).remainder_(2).to(torch.uint8)
    tensor = raw[:nbytes].clone().view(dtype).view(shape) if nbytes else torch.empty(shape, dtype=dtype)
    how = draw(st.sampled_from(["whole", "whole", "slice", "turned", "expanded", "strided", "conj", "imag", "grad"]))
    if how == "slice" and shape and shape[0]:
        tensor = tensor[1:]
    elif how == "turned" and len(shape) > 1:
        tensor = tensor.transpose(0, -1)
    elif how == "expanded":
        tensor = tensor.unsqueeze(0).expand(3, *shape)
    elif how == "strided" and shape:
        tensor = tensor[::2]
    elif how == "conj" and dtype.is_complex and dtype is not torch.complex32:
        tensor = tensor.conj()
    elif how == "imag" and dtype.is_complex and dtype is not torch.complex32:
        tensor = tensor.conj().imag
    elif how == "grad" and dtype in (torch.float32, torch.float64, torch.bfloat16):
        tensor = draw(st.sampled_from([tensor.requires_grad_(), torch.nn.Parameter(tensor)]))
    return tensor


def odd_tensors() -> dict[str, Any]:
    """Tensors that torch describes by itself."""
    values = torch.arange(12.0).view(3, 4)
    parameter = torch.nn.Parameter(values.clone())
    parameter.tag = ("a", 1)  # type: ignore[attr-defined]
    return {
        "coo": values.to_sparse(),
        "coalesced": values.to_sparse().coalesce(),
        "csr": values.to_sparse_csr(),
        "qint8": torch.quantize_per_tensor(values, 0.1, 3, torch.qint8),
        "per channel": torch.quantize_per_channel(
            values, torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2]), 0, torch.qint8
        ),
        "meta": torch.empty(3, 4, device="meta"),
        "buffer": getattr(torch.nn, "Buffer", torch.nn.Parameter)(values.clone()),  # torch 2.4 has none
        "tagged": parameter,
        "marked": marked(values),
        "frozen": torch.nn.Parameter(values.clone(), requires_grad=False),
        "storage": values.untyped_storage(),
        "typed": values.storage(),
        "inference": _inference(),
    }


ODD = ["coo", "coalesced", "csr", "qint8", "per channel", "meta", "buffer", "tagged", "marked", "frozen", "storage"]
ODD += ["typed", "inference"]


def _inference() -> Tensor:
    with torch.inference_mode():
        return torch.arange(5.0)


numbers = (
    st.integers() | st.floats(allow_nan=False) | st.booleans() | st.none() | st.text(max_size=5) | st.binary(max_size=5)
)
scalars = numbers | st.sampled_from(
    [Color.RED, torch.float16, torch.device("cpu"), torch.Size([1, 2]), np.float32(1.5), np.arange(3), range(3), 1 << 70,
     float("nan"), complex(1, 2), slice(1, 2), Plain, timedelta(seconds=3), frozenset([1])]
)  # fmt: skip
leaves = scalars | tensors() | st.sampled_from(ODD).map(lambda name: odd_tensors()[name])


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def with_attribute(pair: tuple[Any, Any]) -> Any:
        made = OrderedDict(enumerate(pair))
        made._metadata = {"version": pair[0]}  # type: ignore[attr-defined]
        return made

    def listing(items: list[Any]) -> Listing:
        made = Listing(items)
        made.note = items[:1]  # type: ignore[attr-defined]
        return made

    keys = st.text(max_size=3) | st.integers(0, 3) | st.tuples(st.integers(0, 2)) | st.just(None)
    return (
        st.dictionaries(keys, inner, max_size=4)
        | st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3).map(listing)
        | st.lists(inner, max_size=3).map(collections.deque)
        | st.tuples(inner, inner).map(with_attribute)
        | st.builds(Point, inner, inner)
        | st.builds(Plain, inner)
        | st.lists(inner, max_size=2).map(lambda items: defaultdict(list, enumerate(items)))
        | inner.map(lambda item: [item, item])
    )


trees = st.recursive(leaves, containers, max_leaves=12)


@given(tree=trees, lazy=st.booleans())
@settings(deadline=None, database=None, max_examples=150, suppress_health_check=list(HealthCheck))
def test_any_tree_comes_back_as_torch_gives_it(trip: Round, tree: Any, lazy: bool) -> None:
    assert trip.problems(tree, lazy=lazy) == []


# ---- tied tensors, and what only looks like them


BASE = torch.arange(24.0)
TIES: dict[str, Any] = {
    "the same tensor": lambda: [BASE, BASE],
    "aliases": lambda: [BASE, BASE.detach(), BASE.view(4, 6), BASE.view(4, 6).view(-1)],
    "an alias behind a shorter view": lambda: [BASE, BASE[:5], BASE.detach(), BASE[:5].detach()],
    "an alias behind another dtype": lambda: [BASE, BASE.detach().requires_grad_(), BASE.detach()],
    "parameters": lambda: (lambda p: {"a": p, "b": p, "c": p.detach(), "d": torch.nn.Parameter(p.detach())})(
        torch.nn.Parameter(BASE.clone())
    ),
    "turned twice": lambda: [BASE.view(4, 6).t(), BASE.view(4, 6).t()],
    "empty ones are not tied": lambda: [torch.empty(0), torch.empty(0, 3), BASE[:0]],
    "equal ones are not tied": lambda: [BASE.clone(), BASE.clone()],
    "a negative view is not its base": lambda: [BASE, torch._neg_view(BASE), BASE],
    "a negative view alone": lambda: [torch._neg_view(BASE)],
    "one conjugate number": lambda: (lambda z: [z, z.conj(), z])(torch.tensor([1 + 2j])),
    "conjugates": lambda: (lambda z: [z, z.conj(), z.conj()])(torch.tensor([1 + 2j, 3 - 4j])),
    "one imaginary part": lambda: (lambda z: [z.imag, z.conj().imag])(torch.tensor([1 + 2j])),
    "imaginary parts": lambda: (lambda z: [z.imag, z.conj().imag, z.real])(torch.tensor([1 + 2j, 3 - 4j])),
    "a part of complex numbers": lambda: [torch.arange(6).to(torch.complex64)[2:4]],
    "a part of a matrix": lambda: [BASE.view(4, 6)[1:3], BASE.view(4, 6)[:, 1:3]],
}


@pytest.mark.parametrize("lazy", [False, True, lambda tensor: False], ids=["eager", "lazy", "chosen"])
@pytest.mark.parametrize("which", TIES)
def test_tensors_are_tied_as_torch_ties_them(trip: Round, which: str, lazy: Any) -> None:
    assert trip.problems(TIES[which](), lazy=lazy) == []


@pytest.mark.parametrize("which", ODD)
def test_tensors_that_torch_describes(trip: Round, which: str) -> None:
    odd = odd_tensors()[which]
    assert trip.problems({"odd": odd, "again": odd, "plain": torch.ones(3)}) == []


@pytest.mark.parametrize("lazy", [False, True, lambda tensor: False], ids=["eager", "lazy", "chosen"])
def test_large_tensors_of_every_kind(trip: Round, lazy: Any) -> None:
    """They take other ways than small ones: several blocks, background copies, private copies."""
    made = torch.Generator().manual_seed(0)
    base = torch.randn(300, 4000, generator=made)
    tree = {
        "plain": base,
        "turned": torch.randn(500, 700, generator=made).t(),
        "part of complex numbers": torch.randn(300_000, dtype=torch.complex64, generator=made)[1000:200_000],
        "conjugate": torch.randn(300_000, dtype=torch.complex64, generator=made).conj(),
        "channels last": torch.randn(2, 8, 100, 100, generator=made).to(memory_format=torch.channels_last),
        "negative": torch._neg_view(torch.randn(300_000, generator=made)),
        "quantized": torch.quantize_per_tensor(torch.randn(600, 700, generator=made), 0.1, 3, torch.qint8),
        "sparse": torch.randn(600, 700, generator=made).relu().to_sparse(),
        "float8": torch.randn(3_000_000, generator=made).to(torch.float8_e4m3fn),
        "tagged": marked(torch.randn(600_000, generator=made)),
    }
    assert trip.problems(tree, lazy=lazy) == []


# ---- objects


def test_a_tensor_that_is_in_a_table_and_elsewhere_stays_one_object(trip: Round) -> None:
    tensor, other = torch.arange(5.0), torch.ones(3)
    table = {"w": tensor, "u": other}
    noted = OrderedDict(table)
    noted._metadata = {"version": tensor}  # type: ignore[attr-defined]
    for tree in ([table, [tensor]], [[tensor], table], {"a": table, "b": {"w": tensor}}, [noted], [noted, noted]):
        assert trip.problems(tree) == []
        assert trip.problems(tree, lazy=True) == []


@pytest.mark.parametrize("inside", [[], {}, [1], {"lr": 0.1}, {"w": torch.ones(3)}], ids=repr)
def test_a_list_that_is_in_a_tuple_and_elsewhere_stays_one_object(inside: Any, trip: Round) -> None:
    shared = [inside]
    trees = [
        [inside, (shared, 1), shared],
        {"a": (shared, torch.ones(2)), "b": {"c": shared}},
        [[shared], (shared,), [[shared]]],
    ]
    for tree in trees:
        trip.save(tree)
        restored = trip.checkpointer.load()
        assert restored is not None and alike(restored.state, tree) == []
        assert shared_lists(restored.state) == shared_lists(tree)


def shared_lists(tree: Any) -> list[int]:
    """For each list, in order, the position of its first occurrence."""
    met: list[Any] = []

    def visit(value: Any) -> None:
        if isinstance(value, list):
            met.append(value)
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
            visit(item)

    visit(tree)
    return [next(index for index, other in enumerate(met) if other is value) for value in met]


def test_objects_of_any_class_come_back(trip: Round) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    shared = {"x": torch.ones(3)}
    tree = {
        "module": module,
        "weights": module.state_dict(),
        "plain": Plain([torch.ones(2)], Plain(None)),
        "slotted": Slotted(3),
        "numpy": [np.arange(6).reshape(2, 3), np.float64(2), np.random.default_rng(0).bit_generator.state],
        "random": torch.get_rng_state(),
        "optimizer": torch.optim.Adam(module.parameters()).state_dict(),
        "twice": [shared, shared],
        "class": Plain,
        "set": {1, 2},
        "path": Path("a/b"),
    }
    assert trip.problems(tree) == []
    back = trip.checkpointer.load(allow_pickle=True)
    assert back is not None and back.state["twice"][0] is back.state["twice"][1]
    weights, owned = back.state["weights"]["0.weight"], back.state["module"][0].weight
    assert weights.data_ptr() == owned.data_ptr(), "a module and its state_dict no longer share weights"


def test_empty_values_load_as_they_were_without_trust(trip: Round) -> None:
    """An empty bytes object is pickled in another way than others, namely as a call of its class."""
    tree = {"bytes": [b"", b"x", bytearray(), bytearray(b"x")], "rest": ["", (), [], {}, set(), frozenset(), range(0)]}
    trip.save(tree)
    restored = trip.checkpointer.load()
    assert restored is not None and restored.state == tree


def test_an_object_that_looks_at_its_tensor_while_it_is_made_sees_its_values(trip: Round) -> None:
    generator = torch.Generator().manual_seed(5)
    tree = {"reading": Reading(torch.arange(40.0)), "generator": generator}
    trip.save(tree)
    restored = trip.checkpointer.load(allow_pickle=True)
    assert restored is not None
    assert restored.state["reading"].total == 780.0
    assert torch.equal(restored.state["generator"].get_state(), generator.get_state())


def test_tensors_inside_objects_are_filled_when_the_rest_goes_into_a_given_state(trip: Round) -> None:
    weight = torch.arange(40.0)
    hidden = Plain(torch.arange(30.0), weight)
    sparse = torch.eye(5).to_sparse()
    trip.save({"w": weight, "hidden": hidden, "reading": Reading(torch.arange(10.0)), "sparse": [Plain(sparse)]})
    into = {"w": torch.zeros(40)}
    restored = trip.checkpointer.load(into=into, allow_pickle=True)
    assert restored is not None
    assert torch.equal(into["w"], weight) and restored.state["w"].data_ptr() == into["w"].data_ptr()
    assert torch.equal(restored.state["hidden"].value, torch.arange(30.0))
    assert torch.equal(restored.state["hidden"].other, weight)
    assert restored.state["reading"].total == 45.0
    assert torch.equal(restored.state["sparse"][0].value.to_dense(), torch.eye(5))


def test_user_classes_are_refused_with_torchs_advice_and_loaded_when_allowed(trip: Round) -> None:
    path = trip.save({"x": Plain(torch.ones(3))})
    with pytest.raises(pickle.UnpicklingError) as stock:
        torch.load(path, weights_only=True)
    with pytest.raises(pickle.UnpicklingError, match="add_safe_globals") as ours:
        trip.checkpointer.load()
    assert "Plain" in str(stock.value) and "Plain" in str(ours.value)
    with torch.serialization.safe_globals([Plain]):
        assert torch.equal(torch.load(path, weights_only=True)["x"].value, torch.ones(3))
        restored = trip.checkpointer.load()
    assert restored is not None and torch.equal(restored.state["x"].value, torch.ones(3))


def test_plain_trees_need_no_permission(trip: Round) -> None:
    tree = {
        "state_dict": torch.nn.Linear(3, 2).state_dict(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "list": [1, 2.0, "x", None, True, (1, 2), {3}, b"x"],
        "sparse": torch.eye(3).to_sparse(),
        "dtype": torch.float16,
        "size": torch.Size([2]),
        "strided": torch.ones(4, 4)[:, ::2],
        "float8": torch.ones(3).to(torch.float8_e5m2),
        **{name: torch.ones(3, dtype=getattr(torch, name)) for name in ("uint8", "uint16")},
    }
    expected = through_torch(tree)
    path = trip.save(tree)
    restored = trip.checkpointer.load()
    assert restored is not None
    assert alike(expected, torch.load(path, weights_only=True)) == [] and alike(expected, restored.state) == []


def test_a_load_leaves_nothing_for_torchs_next_check_of_sparse_tensors(trip: Round) -> None:
    from torch._utils import _sparse_tensors_to_validate

    trip.save({"sparse": torch.eye(3).to_sparse()})
    assert trip.checkpointer.load() is not None
    assert _sparse_tensors_to_validate == [], "torch's next load would check, and keep, tensors of ours"


# ---- what a dump is


def test_nothing_is_copied_or_changed_and_the_tree_may_change_after_the_dump() -> None:
    weight = torch.nn.Parameter(torch.randn(3))
    tree: dict[str, Any] = {"w": weight, "list": [1, 2]}
    dumped = dump(tree)
    ((tensor, address, nbytes),) = dumped.extents
    assert address == weight.data_ptr() and nbytes == 12 and tensor._version == weight._version
    tree["list"].append(3)
    tree["w"] = None
    storage = torch.UntypedStorage(12)
    back, _ = unpickle(dumped.data_pickle(), lambda key, nbytes: storage)
    assert back["list"] == [1, 2] and back["w"].requires_grad and back["w"].shape == (3,)
    with torch.no_grad():
        weight.add_(1)
    assert tensor._version == weight._version, "a change before the fence goes unnoticed"


@pytest.mark.parametrize(
    ("bad", "where"),
    [
        ({"a": [1, {"b/c": lambda: 0}]}, "a/1/b/c"),
        ((1, (2, lambda: 0)), "1/1"),
        ({"weights": {"w": torch.ones(2)}, "f": lambda: 0}, "f"),
        ({"a": Plain(lambda: 0)}, "a"),
        (lambda: 0, "the root"),
    ],
)
def test_what_cannot_be_pickled_is_named(bad: Any, where: str) -> None:
    with pytest.raises(ConfigError, match=f"at {where} is a"):
        dump(bad)


def test_what_is_nested_without_end_or_has_no_memory_is_refused() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ConfigError, match="nested"):
        dump(deep)
    freed = torch.ones(100)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ConfigError, match=r"x/0|no memory"):
        dump({"x": [freed]})


def test_a_tree_that_contains_itself_comes_back_so(trip: Round) -> None:
    tree: list[Any] = [torch.ones(2)]
    tree.append(tree)
    trip.save(tree)
    restored = trip.checkpointer.load()
    assert restored is not None and restored.state[1] is restored.state


def test_bytes_of_a_state_that_look_like_a_marker_stay() -> None:
    """The marker of a tensor has a number that is drawn anew each time, so that no state can hold it."""
    first, second = dump([torch.ones(1)]), dump([torch.ones(1)])
    assert first._nonce != second._nonce
    text = {"x": first._template, "t": torch.ones(1)}
    back, _ = unpickle(dump(text).data_pickle(), lambda key, nbytes: torch.UntypedStorage(nbytes))
    assert back["x"] == first._template


@pytest.mark.parametrize("name", ["w", "a/b", "a%2Fb", "ü"])
def test_the_place_of_a_storage_is_known(name: str) -> None:
    dumped = dump({"x": {name: torch.ones(3)}, "y": [torch.ones(2), Plain(torch.ones(4))]})
    dumped.set_keys([2, 0, 1])
    assert dumped.key_of(0) == f"x/{name}" and dumped.key_of(1) == "y/0"
    assert dumped.key_of(2) == "storage 2"


# ---- trees that are hard to walk


def _family(children: int) -> dict[str, Any]:
    parent: dict[str, Any] = {"weight": torch.ones(2), "children": []}
    parent["children"] = [{"parent": parent, "number": i, "weight": torch.full((2,), i)} for i in range(children)]
    return parent


def test_containers_within_themselves_come_back_as_the_same_containers(trip: Round) -> None:
    """Forty children of one parent: walked as a tree this would have no end."""
    endless: list[Any] = [torch.ones(1)]
    endless.append([endless])
    path = trip.save({"family": _family(40), "endless": endless})
    for tree in (torch.load(path, weights_only=True), trip.checkpointer.load().state):  # type: ignore[union-attr]
        family = tree["family"]
        assert all(child["parent"] is family for child in family["children"]) and len(family["children"]) == 40
        assert [float(child["weight"][0]) for child in family["children"]] == list(range(40))
        assert tree["endless"][1][0] is tree["endless"]


@pytest.mark.parametrize("name", ["\udc80", "a\udcffb", 1 << 70, 1 << 3000, -(1 << 2100)])
def test_names_that_only_pickle_can_spell_are_kept(trip: Round, name: Any) -> None:
    """A file name that is not UTF-8 is a text with lone surrogates; the state of a callback has file names as keys."""
    assert trip.problems({"table": {name: torch.ones(3)}, "inner": {"x": {name: torch.ones(2)}}}) == []


def test_nested_tensors_come_back() -> None:
    made = torch.nested.nested_tensor([torch.ones(2), torch.full((3,), 2.0)])
    for tree in ({"x": made}, [made], {"x": made, "y": torch.ones(1)}):
        assert dump(tree).extents


def test_threads_that_load_at_once_do_not_take_the_classes_from_each_other() -> None:
    """Torch has one list of them for the process."""
    inside, leave, failed = threading.Event(), threading.Event(), []

    def first() -> None:
        with harmless_classes():
            inside.set()
            leave.wait(10)

    def second() -> None:
        try:
            with harmless_classes():
                leave.set()
                other.join(10)  # with one list it would be taken back here
                data = torch.serialization.get_safe_globals()
                assert datetime.date in data
        except BaseException as error:
            failed.append(error)

    other = threading.Thread(target=first)
    other.start()
    assert inside.wait(10)
    threading.Timer(0.2, leave.set).start()
    last = threading.Thread(target=second)
    last.start()
    last.join(20)
    assert not last.is_alive() and failed == []


@pytest.mark.parametrize("module", ["numpy.core", "numpy._core"])
def test_arrays_of_any_numpy_are_loaded_without_trust(module: str) -> None:
    """Its modules have other names since 2.0."""
    named = re.sub(rb"cnumpy\._?core", b"c" + module.encode(), pickle.dumps([np.arange(3), np.float64(2)], protocol=2))
    (array, number), _ = unpickle(named, lambda key, nbytes: torch.UntypedStorage(nbytes))
    assert array.tolist() == [0, 1, 2] and number == 2.0


def test_values_of_numpy_are_loaded_without_trust(trip: Round) -> None:
    """An empty text of numpy's is pickled in another way than others."""
    tree = {
        "texts": [np.str_(""), np.str_("x"), np.bytes_(b""), np.bytes_(b"x"), np.array(["x", ""]), np.array([], "U3")],
        "times": [np.datetime64("2020-01-01"), np.timedelta64(3, "s")],
        "numbers": [np.bool_(True), np.float16(2), np.complex64(1 + 2j), np.longdouble(1.5)],
        "others": [np.void(b"abc"), np.array([1, "x"], object), np.array([(1, 2.0)], [("a", "i4"), ("b", "f4")])],
    }
    assert trip.problems(tree, allow_pickle=False) == []


@pytest.mark.parametrize("lazy", [False, True])
def test_weights_that_are_tied_in_the_checkpoint_fill_weights_that_are_not_and_the_other_way_round(
    trip: Round, lazy: bool
) -> None:
    weight = torch.arange(2000.0).view(40, 50)
    parameter = torch.nn.Parameter(weight.clone())
    trip.save({"a": parameter, "b": parameter, "c": weight, "d": [weight]}, lazy=lazy)
    apart: dict[str, Any] = {"a": torch.zeros(40, 50), "b": torch.zeros(40, 50).t().contiguous().t()}
    apart |= {"c": torch.nn.Parameter(torch.zeros(40, 50)), "d": [torch.zeros(40, 50, dtype=torch.float64)]}
    assert trip.checkpointer.load(into=apart) is not None
    assert all(torch.equal(tensor, weight) for tensor in (apart["a"], apart["b"], apart["c"]))
    assert torch.equal(apart["d"][0], weight.double())
    trip.save({"a": weight.clone(), "b": weight.clone()}, lazy=lazy)
    tied = torch.zeros(40, 50)
    assert trip.checkpointer.load(into={"a": tied, "b": tied}) is not None
    assert torch.equal(tied, weight)


def test_what_is_refused_is_left_out_of_a_copy_and_nothing_else() -> None:
    kept = {"w": torch.ones(3)}
    tree: dict[str, Any] = {"bad": lambda: 0, "list": [kept, {"worse": open}, (1, lambda: 0)], "kept": kept}
    tree["list"].append(tree)
    found = without_refused(tree)
    assert found == {"bad": None, "list": [kept, {"worse": open}, [1, None], None], "kept": kept}
    assert found["kept"] is kept and tree["bad"] is not None
    assert len(dump(found).extents) == 1


_MANY = 200_000
LARGE: dict[str, Callable[[], Any]] = {
    "a list of numbers": lambda: list(range(_MANY)),
    "a dict of numbers": lambda: {number: number for number in range(_MANY)},
    "lists in a list": lambda: [[number] for number in range(_MANY)],
    "dicts in a list": lambda: [{"number": number} for number in range(_MANY)],
    "dicts in a dict": lambda: {number: {"number": number} for number in range(_MANY)},
}


@pytest.mark.parametrize("also", few(["plain", "strided"], ["plain"]))
@pytest.mark.parametrize("make", LARGE.values(), ids=LARGE.keys())
def test_many_python_objects_take_about_as_long_as_to_pickle_them(make: Callable[[], Any], also: str) -> None:
    """The training thread waits meanwhile. Dicts in a list took 12 times as long, and numbers beside one tensor that is
    not in C order 28 times."""
    objects = make()
    tensor = torch.ones(2, 3, 4, 4)
    state = {"objects": objects, "w": tensor.to(memory_format=torch.channels_last) if also == "strided" else tensor}

    def fastest(work: Callable[[], Any]) -> float:
        took = []
        for _ in range(3):
            began = time.process_time()
            work()
            took.append(time.process_time() - began)
        return min(took)

    ours, bare = fastest(lambda: dump(state)), fastest(lambda: pickle.dumps(objects, 2))
    assert ours < 6 * bare, f"{ours:.3f} s, pickle takes {bare:.3f} s"


def test_what_a_signals_handler_raises_is_no_error_of_the_state() -> None:
    def handler(*_: Any) -> None:
        raise TimeoutError("of the handler")

    alarms = [signal.SIGALRM]

    class Slow:
        def __reduce__(self) -> Any:
            while alarms:
                signal.raise_signal(alarms.pop())
            return list, ()

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(TimeoutError, match="of the handler"):
            dump({"a": Slow()})
    finally:
        signal.signal(signal.SIGALRM, before)
