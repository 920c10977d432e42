"""The kinds of tensors (leaves) of a state: how each is described, cut into boxes and filled.

A *leaf* is an object of a state tree whose elements go into shards as raw bytes: a plain tensor, a ``DTensor``, or a
framework's own tensor class. Each kind is a class with the :class:`LeafKind` interface; :func:`register_leaf_kind` adds
one. An object's class determines its kind, which is looked up once per class.

Boxes are in coordinates of the whole (global) tensor. A kind describes the boxes this process holds, into which a
restore reads, and the boxes that every rank holds (its :class:`~resiliency.state.layouts.Layout`), from which each rank
works out by itself what it writes.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from resiliency.errors import ConfigError
from resiliency.state.layouts import Box, Layout, pieces_at
from resiliency.state.meshes import mesh_layout, splits_of

__all__ = [
    "Box",
    "LeafDescription",
    "LeafKind",
    "box_of",
    "has_memory",
    "kind_of",
    "kind_of_class",
    "refusal",
    "register_leaf_kind",
]


@dataclass(frozen=True, kw_only=True)
class LeafDescription:
    """Shape, dtype and boxes of a leaf, for the planner.

    Attributes:
        shape: of the whole tensor.
        dtype: of its elements.
        boxes: the boxes this process holds; may be empty.
        layout: the boxes that every rank holds, the same on every rank; None: every rank holds the whole tensor, and
            rank 0's is stored.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    layout: Layout | None = None


class LeafKind(Protocol):
    """How the engine handles leaves of one kind. Thread: training; no method may communicate with other ranks.

    Attributes:
        name: for messages; unique.
        replicated: True when every rank holds each leaf whole. False when ranks hold parts; such a kind describes each
            leaf with its layout.
    """

    name: str
    replicated: bool

    def takes(self, class_: type) -> bool:
        """True for the classes this kind handles."""
        ...

    def detach(self, leaf: Any, key: str) -> Any:
        """The leaf as it is used during a save: the same memory, detached from autograd. Copies no elements.

        Raises:
            ConfigError: the leaf cannot be stored; the error names ``key`` and says what to do instead.
        """
        ...

    def describe(self, leaf: Any) -> LeafDescription:
        """The leaf's shape and dtype, and the boxes this process holds."""
        ...

    def structure(self, leaf: Any) -> Hashable:
        """A key that is equal for leaves of equal shape, dtype, layout and device. Called at every save, so it should
        take a few microseconds; never leaves the process."""
        ...

    def local(self, leaf: Any, box: Box) -> Tensor:
        """One of the boxes of :meth:`describe` as a tensor of shape ``box.sizes`` that shares the leaf's memory.

        Raises:
            ConfigError: the leaf does not hold that box.
        """
        ...


def box_of(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """A view of one box of a plain tensor."""
    if tuple(sizes) == tuple(tensor.shape):
        return tensor
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


class _Plain:
    """``torch.Tensor``, parameters, and subclasses that no other kind takes: every rank holds them whole."""

    name = "tensor"
    replicated = True

    def takes(self, class_: type) -> bool:
        return issubclass(class_, Tensor)

    def detach(self, leaf: Any, key: str) -> Any:
        tensor = _detached(leaf, key)
        if not has_memory(tensor):
            raise refusal(tensor, key)
        return tensor

    def describe(self, leaf: Any) -> LeafDescription:
        shape = tuple(leaf.shape)
        return LeafDescription(shape=shape, dtype=leaf.dtype, boxes=(Box((0,) * len(shape), shape),))

    def structure(self, leaf: Any) -> Hashable:
        return leaf.dtype, leaf.shape, leaf.device, leaf.layout

    def local(self, leaf: Any, box: Box) -> Tensor:
        return box_of(leaf, box.offsets, box.sizes)


class _Distributed:
    """``DTensor`` and classes with its interface: each rank holds a shard, which other ranks may replicate."""

    name = "dtensor"
    replicated = False

    def takes(self, class_: type) -> bool:
        # Recognised by attributes, because importing torch.distributed.tensor takes a third of a second.
        return hasattr(class_, "device_mesh") and hasattr(class_, "placements")

    def detach(self, leaf: Any, key: str) -> Any:
        partial = [placement for placement in leaf.placements if placement.is_partial()]
        if partial:
            raise ConfigError(
                f"tensor {key!r} is a {type(leaf).__qualname__} with placement {partial[0]}: its values are sums that"
                " have not been added up yet; call .redistribute() to Shard or Replicate before it is saved or loaded"
            )
        return _detached(leaf, key)

    def describe(self, leaf: Any) -> LeafDescription:
        shape = tuple(leaf.shape)
        layout = mesh_layout(leaf.device_mesh, tuple(leaf.placements), len(shape))
        return LeafDescription(shape=shape, dtype=leaf.dtype, boxes=tuple(_held(leaf)), layout=layout)

    def structure(self, leaf: Any) -> Hashable:
        return leaf.dtype, leaf.shape, leaf.device, leaf.placements, leaf.device_mesh

    def local(self, leaf: Any, box: Box) -> Tensor:
        # Not to_local, which takes ten times as long.
        local: Tensor = getattr(leaf, "_local_tensor", None)  # type: ignore[assignment]
        if type(local) is not Tensor:
            local = leaf.to_local().detach()
        if local.shape == box.sizes:  # then it is the only box that this rank holds
            return local
        held = _held(leaf)
        if box not in held or local.numel() != sum([math.prod(box.sizes) for box in held]):
            raise ConfigError(
                f"the local shard has shape {tuple(local.shape)}, which is not what {leaf.placements} on"
                f" {leaf.device_mesh} leave for this rank: {list(held)}"
            )
        if not all(box.sizes):  # one rank writes a tensor without elements, whatever the shape of its part
            return local.new_empty(box.sizes)
        return box_of(local, held[box], box.sizes)


def _held(leaf: Any) -> dict[Box, tuple[int, ...]]:
    """The boxes that this process holds of a DTensor, and where each begins in the local tensor."""
    mesh = leaf.device_mesh
    at = mesh.get_coordinate()  # None: this rank is outside the mesh
    return {} if at is None else _held_at(leaf.shape, mesh, tuple(at), leaf.placements)


@functools.lru_cache(maxsize=1 << 14)
def _held_at(
    shape: Sequence[int], mesh: Any, at: tuple[int, ...], placements: Sequence[Any]
) -> dict[Box, tuple[int, ...]]:
    pieces = pieces_at(tuple(shape), tuple(mesh.shape), splits_of(placements, len(shape)), at)
    return {piece.box: piece.at for piece in pieces}


def _detached(leaf: Any, key: str) -> Any:
    tensor: Tensor = leaf.detach()
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise refusal(tensor, key)
    return tensor


def has_memory(tensor: Tensor) -> bool:
    """False for a tensor without memory of its own elements: a wrapper subclass, a fake or nested tensor, or a storage
    that was freed or made smaller. A copy to or from such a tensor would touch memory of something else."""
    try:
        elements = tensor.numel()
        if elements == 0:
            return True
        storage = tensor.untyped_storage()
        strides = tensor.stride()
        if tensor.is_contiguous():
            last = elements - 1
        else:
            last = sum([(size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True)])
        return storage.data_ptr() != 0 and storage.nbytes() >= (tensor.storage_offset() + last + 1) * tensor.itemsize
    except RuntimeError:  # torch raises it for fake and nested tensors
        return False


def refusal(tensor: Tensor, key: str) -> ConfigError:
    """The error for a tensor whose elements cannot be stored as plain bytes."""
    if tensor.layout is not torch.strided:
        return ConfigError(
            f"tensor {key!r} has layout {tensor.layout}; only dense tensors can be stored: call .to_dense() first"
        )
    if tensor.is_nested:
        return ConfigError(f"tensor {key!r} is nested; only dense tensors can be stored so: call .unbind() first")
    if tensor.is_quantized:
        return ConfigError(f"tensor {key!r} is quantized; store its int_repr() and scales instead")
    if not tensor.is_meta:
        return ConfigError(
            f"tensor {key!r} is a {type(tensor).__qualname__} without memory of its own (it wraps others, or its"
            " storage was freed); store the tensors it wraps (of a DTensor its to_local()), or register a leaf kind for"
            " it"
        )
    return ConfigError(f"tensor {key!r} is on the meta device and has no data; materialise the model before saving")


_plain = _Plain()
#: Tried in this order; the plain kind, last, takes every tensor that no other kind takes.
_kinds: list[LeafKind] = [_Distributed(), _plain]
_of_class: dict[type, LeafKind] = {}
_lock = threading.Lock()


def register_leaf_kind(kind: LeafKind) -> Callable[[], None]:
    """Adds a kind. It is tried before kinds registered earlier, so it may take classes that they would otherwise take.

    Call it on every rank before the first save or load with such a leaf.

    Returns:
        A function that removes the kind.

    Raises:
        ConfigError: a kind of this name is registered already.
    """
    with _lock:
        if any(known.name == kind.name for known in _kinds):
            raise ConfigError(f"a leaf kind named {kind.name!r} is registered already; register each kind once")
        _kinds.insert(0, kind)
        _of_class.clear()

    def remove() -> None:
        with _lock:
            if kind in _kinds:
                _kinds.remove(kind)
            _of_class.clear()

    return remove


def kind_of_class(class_: type) -> LeafKind | None:
    """The kind of the class's objects; None when they are not leaves."""
    found = _of_class.get(class_)
    if found is None:
        with _lock:
            found = next((kind for kind in _kinds if kind.takes(class_)), None)
            if found is not None:  # other classes are not cached, because a user's state may have many
                _of_class[class_] = found
    return found


def kind_of(leaf: Any) -> LeafKind:
    """The kind of a leaf.

    Raises:
        ConfigError: the object is not a leaf.
    """
    kind = kind_of_class(type(leaf))
    if kind is None:
        raise ConfigError(f"a {type(leaf).__qualname__} is no tensor of a registered kind; see register_leaf_kind")
    return kind
