"""Decides from a job's parallelism which communication is overlapped with computation. Pure functions.

The rules for Megatron are those of NVIDIA's NeMo guide (communication overlap), with one exception: gathering
parameters is overlapped with the optimizer step only on request, because a save might read weights that have not
arrived yet. The rules for DDP follow from how torch groups gradients into buckets, each of which is reduced as soon as
its last gradient is known (Li et al., "PyTorch Distributed", VLDB 2020).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from resiliency.errors import ConfigError

__all__ = [
    "DDPOverlap",
    "MegatronOverlap",
    "Parallelism",
    "ddp_overlap",
    "gradient_overlap",
    "model_overlap",
]

_MIB = 1024 * 1024
#: Elements in a bucket of Megatron's gradients.
_MEGATRON_BUCKET = 128 * _MIB
#: Default bucket size of torch's DDP.
_TORCH_BUCKET_MIB = 25
#: The reduction of a smaller bucket would be mostly latency.
_SMALLEST_BUCKET_MIB = 1
#: With fewer buckets hardly anything is left to compute while the first one is reduced.
_BUCKETS = 4


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """How a model is divided: number of ranks in each dimension.

    Attributes:
        virtual_pipeline: number of model chunks in a pipeline stage; 1: the pipeline is not interleaved.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    data: int = 1
    sequence_parallel: bool = False


@dataclass(frozen=True, kw_only=True)
class MegatronOverlap:
    """Settings of Megatron's model, optimizer and DDP configurations, named as there; None: the rules decide.

    Attributes:
        bucket_size: number of elements in a bucket of gradients.
    """

    tp_comm_overlap: bool | None = None
    tp_comm_overlap_cfg: Any = None
    tp_comm_bootstrap_backend: str | None = None
    overlap_p2p_comm: bool | None = None
    batch_p2p_comm: bool | None = None
    overlap_grad_reduce: bool | None = None
    overlap_param_gather: bool | None = None
    overlap_param_gather_with_optimizer_step: bool | None = None
    align_param_gather: bool | None = None
    bucket_size: int | None = None
    defer_embedding_wgrad_compute: bool | None = None
    wgrad_deferral_limit: int | None = None


def model_overlap(
    parallelism: Parallelism, asked: MegatronOverlap, *, transformer_engine: bool
) -> tuple[dict[str, Any], list[str]]:
    """The settings of the model's configuration, by name, and warnings for the user.

    Raises:
        ConfigError: settings that contradict each other or the parallelism.
    """
    notes: list[str] = []
    interleaved = parallelism.pipeline > 1 and parallelism.virtual_pipeline > 1
    if asked.overlap_p2p_comm and asked.batch_p2p_comm:
        raise ConfigError(
            "overlap_p2p_comm=True and batch_p2p_comm=True: sends and receives that are batched cannot be overlapped;"
            " pass one of them"
        )
    if asked.overlap_p2p_comm and not interleaved:
        raise ConfigError(
            "overlap_p2p_comm=True needs an interleaved pipeline (pipeline_model_parallel_size > 1 and"
            f" virtual_pipeline_model_parallel_size > 1); this job has {parallelism.pipeline} stages of"
            f" {parallelism.virtual_pipeline} chunks"
        )
    if asked.defer_embedding_wgrad_compute and parallelism.pipeline == 1:
        raise ConfigError(
            "defer_embedding_wgrad_compute=True fills waits of a pipeline, and this job has one stage; leave it out"
        )
    if asked.wgrad_deferral_limit is not None and not asked.defer_embedding_wgrad_compute:
        raise ConfigError("wgrad_deferral_limit has an effect with defer_embedding_wgrad_compute=True only; pass both")
    overlap_p2p = _chosen(asked.overlap_p2p_comm, interleaved and not asked.batch_p2p_comm)
    settings = {
        "tp_comm_overlap": _tensor_overlap(parallelism, asked, transformer_engine, notes),
        "tp_comm_overlap_cfg": asked.tp_comm_overlap_cfg,
        "tp_comm_bootstrap_backend": asked.tp_comm_bootstrap_backend,
        "overlap_p2p_comm": overlap_p2p,
        "batch_p2p_comm": _chosen(asked.batch_p2p_comm, parallelism.pipeline > 1 and not overlap_p2p),
        "defer_embedding_wgrad_compute": bool(asked.defer_embedding_wgrad_compute),
        "wgrad_deferral_limit": _chosen(asked.wgrad_deferral_limit, -1),
    }
    return settings, notes


def _tensor_overlap(
    parallelism: Parallelism, asked: MegatronOverlap, transformer_engine: bool, notes: list[str]
) -> bool:
    """True when tensor parallel overlap is asked for and possible. When it is impossible, adds a note, as NeMo does."""
    if not asked.tp_comm_overlap:
        return False
    missing = []
    if parallelism.tensor < 2:
        missing.append(f"tensor_model_parallel_size of at least 2 (it is {parallelism.tensor})")
    if not parallelism.sequence_parallel:
        missing.append("sequence_parallel=True")
    if not transformer_engine:
        missing.append("the package transformer_engine")
    if missing:
        notes.append(f"tp_comm_overlap=True needs {' and '.join(missing)}: it is off")
    return not missing


def gradient_overlap(
    parallelism: Parallelism, asked: MegatronOverlap, *, distributed_optimizer: bool
) -> tuple[dict[str, Any], list[str]]:
    """The settings of the optimizer's and of Megatron DDP's configurations, by name, and warnings for the user.

    Without Megatron's distributed optimizer they have no effect, and an empty dict is returned.

    Raises:
        ConfigError: a setting is asked for that needs the distributed optimizer, or settings contradict each other.
    """
    names = (
        "overlap_grad_reduce",
        "overlap_param_gather",
        "overlap_param_gather_with_optimizer_step",
        "align_param_gather",
        "bucket_size",
    )
    if not distributed_optimizer:
        wanted = [name for name in names if getattr(asked, name)]
        if wanted:
            raise ConfigError(
                f"{', '.join(wanted)}: these need Megatron's distributed optimizer; pass"
                " DistributedDataParallelConfig(use_distributed_optimizer=True) to the strategy, or leave them out"
            )
        return {}, ["gradients are not overlapped: Megatron's distributed optimizer is not used"]
    several = parallelism.data > 1
    interleaved = parallelism.pipeline > 1 and parallelism.virtual_pipeline > 1
    settings = {
        "overlap_grad_reduce": _chosen(asked.overlap_grad_reduce, several),
        "overlap_param_gather": _chosen(
            asked.overlap_param_gather, several and _chosen(asked.overlap_grad_reduce, True)
        ),
        "overlap_param_gather_with_optimizer_step": bool(asked.overlap_param_gather_with_optimizer_step),
        "align_param_gather": _chosen(asked.align_param_gather, several and interleaved),
        "bucket_size": _chosen(asked.bucket_size, _MEGATRON_BUCKET if several else None),
    }
    if settings["overlap_param_gather"] and not settings["overlap_grad_reduce"]:
        raise ConfigError("overlap_param_gather=True needs overlap_grad_reduce=True; pass both or neither")
    if settings["overlap_param_gather_with_optimizer_step"] and not (interleaved and settings["overlap_param_gather"]):
        raise ConfigError(
            "overlap_param_gather_with_optimizer_step=True needs an interleaved pipeline and overlap_param_gather=True"
        )
    return settings, []


def _chosen(asked: Any, default: Any) -> Any:
    return default if asked is None else asked


@dataclass(frozen=True, kw_only=True)
class DDPOverlap:
    """Arguments of torch's ``DistributedDataParallel``; None: :func:`ddp_overlap` decides.

    Attributes:
        bucket_cap_mb: MiB of gradients that are reduced together.
        gradient_as_bucket_view: gradients are views of the buckets, which saves their copy.
        static_graph: the same parameters get gradients, in the same order, in every step.
    """

    bucket_cap_mb: float | None = None
    gradient_as_bucket_view: bool | None = None
    static_graph: bool | None = None


def ddp_overlap(
    asked: DDPOverlap, *, configured: Mapping[str, Any], gradient_bytes: int, accumulate: int = 1
) -> tuple[dict[str, Any], list[str]]:
    """The arguments to add to those that the strategy passes to ``DistributedDataParallel``, and warnings for the user.

    Args:
        configured: the arguments that the strategy passes; they are kept unless ``asked`` contradicts them.
        gradient_bytes: bytes of the gradients of all trained parameters.
        accumulate: number of batches whose gradients are added before they are reduced.

    Raises:
        ConfigError: ``asked`` and ``configured`` contradict each other, or a value cannot work.
    """
    if asked.static_graph and accumulate > 1:
        raise ConfigError(
            f"static_graph=True and accumulate_grad_batches={accumulate}: torch's DDP fails in the first backward of a"
            " static graph that reduces nothing (an internal assertion of its reducer); leave out one of them"
        )
    if asked.bucket_cap_mb is not None and not asked.bucket_cap_mb > 0:
        raise ConfigError(f"bucket_cap_mb={asked.bucket_cap_mb!r}: pass MiB above 0, as 25 (torch's default)")
    settings: dict[str, Any] = {}
    for field in fields(asked):
        name, value = field.name, getattr(asked, field.name)
        if value is None or name not in configured:
            continue
        if configured[name] != value:
            raise ConfigError(
                f"the strategy has {name}={configured[name]!r} and DDPCommOverlapCallback {name}={value!r}; pass one"
            )
    for name, value in (
        ("bucket_cap_mb", _chosen(asked.bucket_cap_mb, _bucket_mib(gradient_bytes))),
        ("gradient_as_bucket_view", _chosen(asked.gradient_as_bucket_view, True)),
        ("static_graph", asked.static_graph),
    ):
        if value is not None and name not in configured:
            settings[name] = value
    notes = []
    if settings.get("static_graph") and configured.get("find_unused_parameters"):
        notes.append("find_unused_parameters=True has no effect with static_graph=True, which finds them once")
    return settings, notes


def _bucket_mib(gradient_bytes: int) -> float | None:
    """Bucket size in MiB that makes about four buckets; None when torch's default makes at least four, or the gradients
    are too small to divide."""
    mib = gradient_bytes / _MIB
    if mib >= _BUCKETS * _TORCH_BUCKET_MIB or mib <= _SMALLEST_BUCKET_MIB:
        return None
    return max(_SMALLEST_BUCKET_MIB, round(mib / _BUCKETS, 2))
