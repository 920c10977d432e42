"""Tensors that are unlike others: without memory of their own, of dtypes that few operations know, of special layouts.

Each is saved and loaded in a process of its own, because a mistake there ends the process or spoils its memory.
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from resiliency.testing.zygote import Zygote

#: A process that hangs ends after this time.
_LIMIT_S = 60


class Wrapper(Tensor):
    """Elements lie in another tensor, as torchao's do."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        return made

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return Wrapper(args[0].inner)
        raise NotImplementedError(str(function))


class Hostile(Wrapper):
    """Answers nothing."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("no answer")


class Marked(Tensor):
    """A tensor of a user's class, with memory of its own."""


def values(dtype: torch.dtype, count: int = 24) -> Tensor:
    """A tensor of any dtype, with other bits in each element."""
    raw = torch.arange(count * dtype.itemsize).mul_(37).add_(11).remainder_(251).to(torch.uint8)
    return raw.remainder(2).bool() if dtype is torch.bool else raw.view(dtype)


def masked() -> Any:
    from torch.masked import masked_tensor

    return masked_tensor(torch.arange(6.0).view(2, 3), torch.tensor([[True, False, True], [False, True, True]]))


def fake() -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(300, 4)


def freed(tensor: Any, left: int = 0) -> Any:
    """With a storage of so many bytes, as FSDP leaves parameters that it has given away."""
    tensor.untyped_storage().resize_(left)
    return tensor


def part_of_freed() -> Tensor:
    """A parameter in FSDP's flat one: its address is not 0, though nothing is there."""
    flat = torch.ones(1 << 20)
    part = flat[1 << 19 : (1 << 19) + 1000]
    freed(flat)
    return part


def per_channel(dtype: torch.dtype) -> Tensor:
    return torch.quantize_per_channel(
        torch.linspace(-3, 3, 35).view(5, 7), torch.full((5,), 0.1), torch.zeros(5), 0, dtype
    )


#: Dtypes of which torch stores tensors, and such of which it does not.
DTYPES = """bool uint8 uint16 uint32 uint64 int8 bfloat16 complex32 complex64 complex128 float8_e4m3fn float8_e5m2
 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 bits8 bits16 bits1x8 bits2x4 bits4x2""".split()
SUB_BYTE = "uint1 uint4 uint7 int1 int2 int4".split()


def _of_dtypes(names: list[str]) -> dict[str, Callable[[], Any]]:
    known = {name: getattr(torch, name) for name in names if hasattr(torch, name)}
    made: dict[str, Callable[[], Any]] = {name: lambda dtype=dtype: values(dtype) for name, dtype in known.items()}
    for name in ("complex32", "float8_e5m2", "float4_e2m1fn_x2", "bits8"):
        if name not in known:
            continue
        dtype = known[name]
        made[f"{name}, turned"] = lambda dtype=dtype: values(dtype).view(4, 6).t()
        made[f"{name}, one"] = lambda dtype=dtype: values(dtype, 1).view(())
        made[f"{name}, none"] = lambda dtype=dtype: torch.empty(0, dtype=dtype)
    return made


#: What torch.save writes and torch.load reads.
KEPT: dict[str, Callable[[], Any]] = {
    **_of_dtypes(DTYPES),
    "qint8": lambda: torch.quantize_per_tensor(torch.linspace(-3, 3, 24), 0.1, 3, torch.qint8),
    "quint8": lambda: torch.quantize_per_tensor(torch.linspace(-3, 3, 24), 0.1, 3, torch.quint8),
    "qint32": lambda: torch.quantize_per_tensor(torch.linspace(-3, 3, 24), 0.1, 3, torch.qint32),
    "qint8 per channel": lambda: per_channel(torch.qint8),
    "quint4x2": lambda: per_channel(torch.quint4x2),
    "quint2x4": lambda: torch._empty_affine_quantized([8, 4], scale=1.0, zero_point=0, dtype=torch.quint2x4),
    "masked": masked,
    "masked parameter": lambda: nn.Parameter(masked()),
    "wrapper": lambda: Wrapper(torch.arange(300.0)),
    "wrapper parameter": lambda: nn.Parameter(Wrapper(torch.arange(300.0))),
    "meta": lambda: torch.empty(300, 4, device="meta"),
    "meta parameter": lambda: nn.Parameter(torch.empty(300, 4, device="meta")),
    "meta, sub-byte": lambda: torch.empty(300, dtype=torch.uint4, device="meta"),
    "freed, but empty": lambda: freed(torch.ones(8)[:0]),
    "coo": lambda: torch.eye(5).to_sparse(),
    "coo parameter": lambda: nn.Parameter(torch.eye(5).to_sparse()),
    "coo of rows": lambda: torch.ones(4, 3).to_sparse(1),
    "csr": lambda: torch.eye(5).to_sparse_csr(),
    "bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.full((3,), 2.0)]),
    "expanded": lambda: torch.ones(1).expand(1000),
    "expanded beyond all memory": lambda: torch.ones(1).expand(1 << 42),
    "expanded parameter": lambda: nn.Parameter(torch.ones(1).expand(1000)),
    "overlapping": lambda: torch.arange(10.0).as_strided((8, 3), (1, 1)),
    "conjugate": lambda: torch.arange(6).to(torch.complex64).conj(),
    "negative": lambda: torch._neg_view(torch.arange(6.0)),
    "not made yet": nn.UninitializedParameter,
}

#: What torch.save refuses, or writes so that torch.load refuses it.
REFUSED: dict[str, Callable[[], Any]] = {
    **_of_dtypes(SUB_BYTE),
    "fake": fake,
    "hostile": lambda: Hostile(torch.arange(300.0)),
    "functional": lambda: torch._to_functional_tensor(torch.ones(4)),  # type: ignore[attr-defined]
    "zero tensor": lambda: torch._efficientzerotensor(10),
    "freed": lambda: freed(torch.ones(4096)),
    "freed parameter": lambda: freed(nn.Parameter(torch.ones(4096))),
    "part of a freed one": part_of_freed,
    "made smaller": lambda: freed(torch.ones(1 << 20), left=400),
    "freed, of a user's class": lambda: freed(torch.ones(4096).as_subclass(Marked)),
    "freed float8": lambda: freed(values(torch.float8_e5m2)),
    "freed, quantized": lambda: freed(torch.quantize_per_tensor(torch.ones(24), 0.1, 3, torch.qint8)),
    "freed conjugate": lambda: freed(torch.ones(100, dtype=torch.complex64)).conj(),
    "sparse with freed values": lambda: (lambda s: (freed(s._values()), s)[1])(torch.eye(200).to_sparse().coalesce()),
}


def tree(odd: Any) -> dict[str, Any]:
    """A state with an odd tensor between two others."""
    return {"state_dict": {"first": torch.arange(1000.0), "odd": odd, "last": torch.arange(500.0)}, "epoch": 3}


def stored(state: Any) -> bytes:
    """What ``torch.save`` makes of a state that was loaded: equal for two that are equal bit for bit, ties included."""
    file = io.BytesIO()
    odd = state["state_dict"]["odd"]
    if odd.layout is torch.sparse_coo:  # torch stores more than its parts, if they are views
        odd = [odd.layout, odd.shape, odd.is_coalesced(), _clone(odd._indices()), _clone(odd._values())]
    elif odd.layout in (torch.sparse_csr, torch.sparse_bsc):
        rows = odd.layout is torch.sparse_csr
        indices = [odd.crow_indices(), odd.col_indices()] if rows else [odd.ccol_indices(), odd.row_indices()]
        odd = [odd.layout, odd.shape, _clone(odd.values()), *map(_clone, indices)]
    torch.save({**state, "state_dict": {**state["state_dict"], "odd": odd}}, file)
    return file.getvalue()


def _clone(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def reload(state: Any) -> Any:
    """What the stock functions make of a state."""
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def _keep(make: Callable[[], Any], folder: Path) -> list[str]:
    """Saves an odd tensor in each way and loads it in each way. Returns what went wrong."""
    from resiliency.errors import ConfigError
    from resiliency.testing.checkpoints import make_checkpointer

    state = tree(make())
    expected = stored(reload(state))
    found: list[str] = []
    with make_checkpointer(folder) as checkpointer:
        for step, lazy in enumerate((False, True), 1):
            ticket = checkpointer.save(step, state, names=[f"{step}.ckpt"], per_rank=state, lazy=lazy)
            assert ticket is not None
            ticket.wait()
            path = folder / f"{step}.ckpt"
            restored = checkpointer.load(allow_pickle=True)
            assert restored is not None and restored.step == step
            for what, loaded in {
                "torch.load": torch.load(path, weights_only=False),
                "torch.load, mapped": torch.load(path, weights_only=False, mmap=True),
                "load": restored.state,
                "load, per rank": restored.per_rank,
            }.items():
                if stored(loaded) != expected:
                    found.append(f"{what} gives something else (lazy={lazy})")
        into = tree(make())
        into["state_dict"]["first"].zero_()
        try:
            restored = checkpointer.load(into=into, allow_pickle=True)
        except ConfigError as error:  # what cannot be filled in place is said by its name
            if "odd" not in str(error):
                found.append(f"load(into=) refuses without the name: {error}")
        else:
            if not torch.equal(into["state_dict"]["first"], torch.arange(1000.0)):
                found.append("load(into=) fills nothing")
            if restored is None or stored(restored.state) != stored(reload(restored.state)):
                found.append("load(into=) gives something else")
    return found


def _refuse(make: Callable[[], Any], folder: Path) -> list[str]:
    """Saves what cannot be stored, and what can afterwards; loads into it. Returns what went wrong."""
    from resiliency.errors import ConfigError
    from resiliency.testing.checkpoints import make_checkpointer

    found: list[str] = []
    with make_checkpointer(folder) as checkpointer:
        for how in ({"lazy": False}, {"lazy": True}, {"per_rank": tree(make())}):
            state = {"fine": torch.ones(3)} if "per_rank" in how else tree(make())
            try:
                checkpointer.save(1, state, **how)  # type: ignore[arg-type]
            except ConfigError as error:
                if "state_dict/odd" not in str(error):
                    found.append(f"refused without the name: {error}")
            else:
                found.append(f"saved with {list(how)}")
        ticket = checkpointer.save(2, tree(torch.ones(4096)))
        assert ticket is not None
        ticket.wait()
        try:
            checkpointer.load(into=tree(make()), allow_pickle=True)
        except ConfigError as error:
            if "odd" not in str(error):
                found.append(f"load(into=) refuses without the name: {error}")
        else:
            found.append("load(into=) fills what has no place for it")
        restored = checkpointer.load()
        assert restored is not None and restored.step == 2
    return found


def run(*, kind: str, name: str, folder: str, result: str) -> None:
    """Saves and loads one of them in this process. Writes a list of what went wrong as JSON."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    given, work = {"kept": (KEPT, _keep), "refused": (REFUSED, _refuse)}[kind]
    Path(result).write_text(json.dumps(work(given[name], Path(folder))))


def found_by(zygote: Zygote, target: str, folder: Path, *, env: Mapping[str, str] | None = None, **given: str) -> Any:
    """What ``target`` finds in a process of its own; fails when that ends in another way than by itself.

    Args:
        target: a function such as :func:`run`, "module:name".
        folder: an empty one; what is saved goes there, too.
    """
    (folder / "run").mkdir()
    result = folder / "found.json"
    arguments = {**given, "folder": str(folder / "run"), "result": str(result)}
    worker = zygote.start(target, arguments, env=env)
    try:
        assert worker.wait(timeout_s=_LIMIT_S) == 0
    finally:
        worker.kill()
    return json.loads(result.read_text())
