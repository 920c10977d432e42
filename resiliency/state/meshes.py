"""Reads torch's device meshes and placements as layouts."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from resiliency.errors import ConfigError
from resiliency.state.layouts import MeshLayout, Split

__all__ = ["mesh_layout", "splits_of"]


def splits_of(placements: Sequence[Any], ndim: int) -> tuple[Split | None, ...]:
    """How each dimension of a mesh divides a tensor of ``ndim`` dimensions.

    Raises:
        ConfigError: a placement is neither Shard, _StridedShard nor Replicate.
    """
    splits: list[Split | None] = []
    for placement in placements:
        dim = getattr(placement, "dim", None)
        if placement.is_replicate():
            splits.append(None)
        elif isinstance(dim, int) and not placement.is_partial():
            splits.append(Split(dim % ndim, int(getattr(placement, "split_factor", 1))))
        else:
            raise ConfigError(f"placement {placement} cannot be stored; redistribute the tensor to Shard or Replicate")
    return tuple(splits)


@functools.lru_cache(maxsize=256)
def mesh_layout(mesh: Any, placements: tuple[Any, ...], ndim: int) -> MeshLayout:
    """The layout of tensors with ``ndim`` dimensions on a torch ``DeviceMesh``; equal on all ranks.

    A submesh is one of several, one for each coordinate of the dimensions of its root mesh that it lacks. The tensors
    on them are taken for copies of each other: one on ``mesh["tp"]`` of a mesh (dp, tp) is replicated over dp.

    Raises:
        ConfigError: a placement is neither Shard, _StridedShard nor Replicate.
    """
    splits = splits_of(placements, ndim)
    shape, own, root = tuple(mesh.mesh.shape), mesh.mesh.flatten().tolist(), _root_of(mesh).mesh
    rank_at = dict(zip(itertools.product(*map(range, root.shape)), root.flatten().tolist(), strict=True))
    place_of = {rank: at for at, rank in rank_at.items()}
    if not place_of.keys() >= set(own):
        return MeshLayout(shape, tuple(own), splits)
    places = [place_of[rank] for rank in own]
    lacking = [dim for dim, size in enumerate(root.shape) if size > 1 and len({at[dim] for at in places}) == 1]
    ranks: list[int] = []
    for moved in itertools.product(*(range(root.shape[dim]) for dim in lacking)):
        to = dict(zip(lacking, moved, strict=True))
        ranks += [rank_at[tuple([to.get(dim, index) for dim, index in enumerate(at)])] for at in places]
    return MeshLayout(
        (*(root.shape[dim] for dim in lacking), *shape), tuple(ranks), (*(None for _ in lacking), *splits)
    )


def _root_of(mesh: Any) -> Any:
    """The mesh that a submesh was sliced from; a mesh that was not, itself."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources  # before torch 2.8

    return _mesh_resources.get_root_mesh(mesh)
