"""Which pickles are read without torch's unpickler, and that nothing else is."""

from __future__ import annotations

import copyreg
import io
import pickle
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn
from torch.storage import UntypedStorage

from resiliency.state import plain_pickle
from resiliency.state.plain_pickle import NotPlainPickle, StoredTensor, describe_plain, load_plain
from resiliency.state.tree import keyed_leaves
from resiliency.state.unpickle import unpickle
from resiliency.testing.checkpoints import differences


def stored(value: Any) -> tuple[bytes, dict[str, UntypedStorage]]:
    """The pickle and the storages of what ``torch.save`` writes."""
    file = io.BytesIO()
    torch.save(value, file)
    with zipfile.ZipFile(file) as archive:
        found: dict[str, UntypedStorage] = {}
        for name in archive.namelist():
            if name.startswith("archive/data/"):
                data = archive.read(name)
                found[name.rpartition("/")[2]] = torch.UntypedStorage(list(data))
        return archive.read("archive/data.pkl"), found


def read(value: Any) -> tuple[Any, Counter[str]]:
    data, storages = stored(value)
    return unpickle(data, lambda key, nbytes: storages[key])


def training_state() -> dict[str, Any]:
    """As Lightning's ``dump_checkpoint`` gives it."""
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(3, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return {
        "epoch": 3,
        "global_step": 1 << 40,
        "pytorch-lightning_version": "2.6",
        "state_dict": net.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [scheduler.state_dict()],
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best_model_score": torch.tensor(0.5), "kth": None}},
        "loops": {"fit_loop": {"ready": True, "share": 0.25, "sizes": (1, 2, 3, 4), "none": ()}},
        "hyper_parameters": {"dtype": torch.half},
    }


def test_a_training_state_needs_no_other_unpickler(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*arguments: Any, **named: Any) -> None:
        raise AssertionError("torch's unpickler was asked, which takes four times as long")

    state = training_state()
    data, storages = stored(state)
    by_torch = torch.load(io.BytesIO(saved_bytes(state)))
    monkeypatch.setattr("torch._weights_only_unpickler.Unpickler", other)
    back, uses = unpickle(data, lambda key, nbytes: storages[key])
    assert uses == dict.fromkeys(storages, 1)
    assert differences(back, by_torch) == []
    assert type(back["state_dict"]) is OrderedDict
    assert back["state_dict"]._metadata == by_torch["state_dict"]._metadata != {}
    assert back["global_step"] == 1 << 40 and back["loops"] == state["loops"]


def saved_bytes(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def test_what_torchs_unpickler_reads_counts_each_use_of_a_storage_once() -> None:
    """The first reader has seen both tensors before it finds what it does not know."""
    base = torch.arange(6.0)
    (back, uses) = read([base, base[2:], Fraction(1, 3)])
    assert uses == {"0": 2}
    assert torch.equal(back[1], base[2:]) and back[2] == Fraction(1, 3)


REDUCE_ON = b"\x80\x02%sX\x01\x00\x00\x00x\x85R."
BUILD_ON = b"\x80\x02%s}X\x08\x00\x00\x00__name__X\x01\x00\x00\x00xsb."
HOSTILE = {
    "a call of what it names": b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R.",
    "a builtin": b"\x80\x02c__builtin__\neval\nX\x01\x00\x00\x001\x85R.",
    "a part of a module": b"\x80\x02ctorch\nserialization.load\n.",
    "a class of torch": b"\x80\x02ctorch\nTensor\n.",
    "a call of a storage class": REDUCE_ON % b"ctorch\nFloatStorage\n",
    "a call of a string": REDUCE_ON % b"X\x01\x00\x00\x00x",
    "attributes of a function": BUILD_ON % b"ctorch._utils\n_rebuild_tensor_v2\n",
    "attributes of a storage class": BUILD_ON % b"ctorch\nFloatStorage\n",
    "attributes of a class": BUILD_ON % b"ccollections\nOrderedDict\n",
    "slots of an ordered dict": b"\x80\x02ccollections\nOrderedDict\n)R}}\x86b.",
    "a new object": b"\x80\x02ccollections\nOrderedDict\n)\x81.",
    "an object of a class": b"\x80\x02(ccollections\nOrderedDict\no.",
    "an instance": b"\x80\x02(icollections\nOrderedDict\n.",
    "an extension": b"\x80\x02\x82\x01.",
    "a name from the stack": b"\x80\x02X\x02\x00\x00\x00osX\x06\x00\x00\x00system\x93.",
    "text for eval": b"\x80\x02S'x'\n.",
    "a buffer": b"\x80\x02\x97.",
    "protocol 4": pickle.dumps({"a": 1}, protocol=4),
    "no stop": b"\x80\x02}",
    "nothing on the stack": b"\x80\x02s.",
    "nothing": b"",
    "a memo that it has not": b"\x80\x02j\xff\xff\xff\xff.",
    "a text of more bytes than there are": b"\x80\x02X\xff\xff\xff\xffx.",
    "a key that cannot be one": b"\x80\x02}}K\x01s.",
    "slots of a function": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nN}X\x0c\x00\x00\x00__defaults__Ns\x86b.",
    "state of a dtype": BUILD_ON % b"ctorch\nfloat32\n",
    "a class in the place of another": b"\x80\x02ccollections\nOrderedDict\n)RN}X\x09\x00\x00\x00__class__"
    b"ctorch\nSize\ns\x86b.",
    "a method that is a number": b"\x80\x02ccollections\nOrderedDict\n)R}X\x05\x00\x00\x00itemsK\x01sb.",
}


#: What this reader makes of some of them: nothing that could be wrong.
HARMLESS = {"slots of an ordered dict", "a new object", "an object of a class", "an instance", "text for eval"}


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_outside_of_the_table_is_named_called_or_changed(name: str) -> None:
    before = {name: dict(vars(value)) for name, value in _python_objects().items()}
    if name in HARMLESS:
        assert describe_plain(HOSTILE[name])[0] in (OrderedDict(), "x")
    else:
        with pytest.raises(NotPlainPickle):
            load_plain(HOSTILE[name], lambda key, nbytes: torch.UntypedStorage(nbytes))
        with pytest.raises(NotPlainPickle):
            describe_plain(HOSTILE[name])
    assert {name: dict(vars(value)) for name, value in _python_objects().items()} == before


def test_numbers_that_stand_for_registered_classes_are_for_torchs_unpickler() -> None:
    copyreg.add_extension("fractions", "Fraction", 251)
    try:
        assert pickle.loads(b"\x80\x02\x82\xfb.") is Fraction  # the interpreter keeps it
        with pytest.raises(NotPlainPickle):
            describe_plain(b"\x80\x02\x82\xfbK\x01K\x03\x86R.")
    finally:
        copyreg.remove_extension("fractions", "Fraction", 251)
        copyreg.clear_extension_cache()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("place", ["a key", "a part of a key", "a set", "an attribute", "an attribute's part"])
def test_a_tensor_where_no_leaf_is_looked_for_is_for_torchs_unpickler(place: str, shared: bool) -> None:
    """Also if it is a leaf elsewhere."""
    tensor = torch.arange(3.0)
    noted: Any = OrderedDict(a=1)
    noted.extra = tensor if place == "an attribute" else [tensor]
    value = {"a key": {tensor: 1}, "a part of a key": {(1, tensor): 1}, "a set": {tensor}}.get(place, noted)
    data, storages = stored([tensor, value] if shared else [value])
    with pytest.raises(NotPlainPickle):
        describe_plain(data)
    back, uses = unpickle(data, lambda key, nbytes: storages[key])
    last = back[-1]
    found = {"a part of a key": lambda: next(iter(last))[1], "an attribute": lambda: last.extra}
    one = found.get(place, lambda: last.extra[0] if type(last) is OrderedDict else next(iter(last)))()
    assert torch.equal(one, tensor) and uses == {"0": 1} and (not shared or one is back[0])


def test_a_list_that_holds_itself_is_read() -> None:
    value: list[Any] = [torch.ones(2)]
    value.append(value)
    (back, _) = read(value)
    assert back[1] is back and torch.equal(back[0], torch.ones(2))


@pytest.mark.parametrize("make", [lambda inner: [inner, inner], lambda inner: {"a": inner, "b": inner}])
def test_containers_in_very_many_places_are_left_to_torchs_unpickler(make: Callable[[Any], Any]) -> None:
    """A path for each place would take hours."""
    value: Any = [torch.ones(2)]
    for _ in range(40):
        value = make(value)
    data, storages = stored(value)
    with pytest.raises(NotPlainPickle, match="in very many places"):
        describe_plain(data)
    found, _ = unpickle(data, lambda key, nbytes: storages[key])
    for _ in range(40):
        first, second = found if isinstance(found, list) else found.values()
        assert first is second
        found = first
    assert torch.equal(found[0], torch.ones(2))


def test_containers_in_some_places_are_plain() -> None:
    """The betas of an optimizer, say."""
    betas, groups = (0.9, 0.999), [{"params": [0, 1], "lr": 0.1}]
    value = {"a": [betas] * 3, "b": groups, "c": groups, "d": [[] for _ in range(50)], "e": [None] * 50}
    assert describe_plain(stored(value)[0])[0] == value


def test_a_parameter_and_a_tensor_named_twice_come_back_as_they_were() -> None:
    parameter, tensor = nn.Parameter(torch.ones(2)), torch.arange(3)
    frozen = nn.Parameter(torch.arange(4), requires_grad=False)
    back, uses = read([parameter, frozen, tensor, (tensor, torch.ones(1, requires_grad=True))])
    assert [type(one) for one in back[:3]] == [nn.Parameter, nn.Parameter, torch.Tensor]
    assert [one.requires_grad for one in (*back[:3], back[3][1])] == [True, False, False, True]
    assert back[3][0] is back[2] and sum(uses.values()) == 4


def _python_objects() -> dict[str, Any]:
    named = {".".join(name): value for name, value in plain_pickle._NAMES.items()}
    return {name: value for name, value in named.items() if hasattr(value, "__dict__")}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_nothing_comes_of_them_elsewhere_either(data: bytes) -> None:
    """Or a class that was named, an empty mapping, or a text comes of it."""
    try:
        value, _ = unpickle(data, lambda key, nbytes: torch.UntypedStorage(nbytes))
    except Exception as error:  # noqa: BLE001 - whichever torch has for it
        assert not isinstance(error, AssertionError | NotPlainPickle)
    else:
        assert isinstance(value, type) or value in ({}, "x")


def described(value: torch.Tensor) -> StoredTensor:
    tree, _ = describe_plain(stored({"t": value})[0])
    found: StoredTensor = tree["t"]
    return found


def test_a_described_tensor_is_what_torch_would_have_made() -> None:
    state = training_state()
    state["views"] = [torch.arange(24.0).view(2, 3, 4)[1:, ::2], torch.tensor(1.0).expand(3), torch.empty(2, 0)]
    data, storages = stored(state)
    _, made = describe_plain(data)
    by_torch = keyed_leaves(state)
    assert list(made) == list(by_torch)
    for key, tensor in by_torch.items():
        one = made[key]
        assert (one.dtype, one.offset) == (tensor.dtype, tensor.storage_offset())
        assert (one.shape, one.strides) == (tuple(tensor.shape), tensor.stride())
        assert one.contiguous == tensor.is_contiguous() and one.requires_grad == tensor.requires_grad
        typed = storages[one.storage]
        assert tensor.numel() == 0 or (one.offset + one.extent) * tensor.itemsize <= typed.nbytes()


OUTSIDE = {
    "an offset behind the storage": {"storage_offset": 5},
    "a negative offset": {"storage_offset": -1},
    "a negative stride": {"stride": (-1,)},
    "a negative size": {"size": (-4,)},
    "more elements than there are": {"size": (5,)},
    "steps that lead outside": {"stride": (2,)},
    "a stride too few": {"stride": ()},
    "a size that is no number": {"size": ("4",)},
    "a size of a truth": {"size": (True,), "stride": (1,)},
    "a stride of a truth": {"stride": (True,)},
    "an offset of a truth": {"storage_offset": False},
    "a negative size behind none": {"size": (0, -1), "stride": (1, 1)},
    "a negative stride of one element": {"size": (1,), "stride": (-1,)},
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("change", OUTSIDE.values(), ids=OUTSIDE)
def test_a_tensor_that_reaches_outside_of_its_storage_is_not_described(change: dict[str, Any]) -> None:
    class Rebuilt:
        def __reduce__(self) -> Any:
            arguments = {"storage_offset": 0, "size": (4,), "stride": (1,), **change}
            storage = torch.arange(4.0).storage()
            return torch._utils._rebuild_tensor_v2, (storage, *arguments.values(), False, OrderedDict())

    with pytest.raises(NotPlainPickle):
        describe_plain(stored({"t": Rebuilt()})[0])
    assert described(torch.arange(4.0)).extent == 4
