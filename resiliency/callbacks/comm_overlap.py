"""Callbacks that overlap communication with computation, and log what they set.

``MegatronCommOverlapCallback`` is for Megatron's strategy, ``DDPCommOverlapCallback`` for ``strategy="ddp"``,
``FSDP2CommOverlapCallback`` for modules sharded by ``fully_shard``. Importing a class gives it for the Lightning that
is imported (``lightning.pytorch`` or ``pytorch_lightning``); ``build(namespace)`` of this module gives
``MegatronCommOverlapCallback`` for a named package.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from typing import Any

from resiliency.callbacks import _ddp_overlap, _fsdp2_overlap
from resiliency.errors import ConfigError
from resiliency.plugins.namespaces import AdapterClass, require_trainer_of
from resiliency.plugins.overlap_rules import MegatronOverlap, Parallelism, gradient_overlap, model_overlap
from resiliency.plugins.step_hooks import StepHooks

__all__ = [  # noqa: F822 - classes are built on first use
    "DDPCommOverlapCallback",
    "FSDP2CommOverlapCallback",
    "MegatronCommOverlapCallback",
    "build",
]

logger = logging.getLogger(__name__)


class OverlapsMegatron(StepHooks):
    """Decides from the strategy's parallelism which of Megatron's communication is overlapped.

    An argument that is None is decided as follows. In an interleaved pipeline sends and receives are overlapped; in
    another pipeline they are batched. With several data parallel ranks, gradients are reduced during backward in
    buckets of 128 Mi elements and parameters are gathered during forward, in an interleaved pipeline by all stages at
    the same time. Overlap within tensor parallel layers is set only if it is asked for and possible. Gathering
    parameters during the optimizer step is set only if it is asked for, because a save would read weights that have not
    arrived yet. What is set is logged.

    The strategy must be Megatron's: it has ``parallelism`` and ``ddp_config``, and its module has ``config`` and
    ``optim``. The callback changes these configurations in ``setup``, before Megatron uses them.

    Thread: the training thread. Collective: at the start of a fit, if ``tp_comm_overlap`` is set.

    Args:
        tp_comm_overlap: overlap communication within tensor parallel layers; needs at least 2 tensor parallel ranks,
            sequence parallelism and Transformer Engine.
        tp_comm_overlap_cfg: configuration of that overlap, passed on to Transformer Engine.
        tp_comm_bootstrap_backend: backend for Transformer Engine's buffers: "nccl", "mpi" or "gloo".
        overlap_p2p_comm: overlap sends and receives of an interleaved pipeline.
        batch_p2p_comm: send and receive in one operation.
        overlap_grad_reduce: overlap reductions of gradients with backward.
        overlap_param_gather: overlap gathers of parameters with forward.
        overlap_param_gather_with_optimizer_step: overlap gathers of parameters with the optimizer step, too.
        align_param_gather: all pipeline stages gather at the same time.
        bucket_size: number of elements in a bucket of gradients.
        defer_embedding_wgrad_compute: compute weight gradients of the embedding while the pipeline waits.
        wgrad_deferral_limit: number of micro-batches whose weight gradients are deferred so; -1: all.

    Raises:
        ConfigError: at the start of a fit, the strategy is not Megatron's, or settings contradict each other.
    """

    def __init__(
        self,
        tp_comm_overlap: bool | None = None,
        tp_comm_overlap_cfg: Any = None,
        tp_comm_bootstrap_backend: str | None = None,
        overlap_p2p_comm: bool | None = None,
        batch_p2p_comm: bool | None = None,
        overlap_grad_reduce: bool | None = None,
        overlap_param_gather: bool | None = None,
        overlap_param_gather_with_optimizer_step: bool | None = None,
        align_param_gather: bool | None = None,
        bucket_size: int | None = None,
        defer_embedding_wgrad_compute: bool | None = None,
        wgrad_deferral_limit: int | None = None,
    ) -> None:
        super().__init__()
        self._asked = MegatronOverlap(
            tp_comm_overlap=tp_comm_overlap,
            tp_comm_overlap_cfg=tp_comm_overlap_cfg,
            tp_comm_bootstrap_backend=tp_comm_bootstrap_backend,
            overlap_p2p_comm=overlap_p2p_comm,
            batch_p2p_comm=batch_p2p_comm,
            overlap_grad_reduce=overlap_grad_reduce,
            overlap_param_gather=overlap_param_gather,
            overlap_param_gather_with_optimizer_step=overlap_param_gather_with_optimizer_step,
            align_param_gather=align_param_gather,
            bucket_size=bucket_size,
            defer_embedding_wgrad_compute=defer_embedding_wgrad_compute,
            wgrad_deferral_limit=wgrad_deferral_limit,
        )
        self._starts_buffers = False

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        require_trainer_of(self.namespace, trainer, "MegatronCommOverlapCallback", __name__)
        super().setup(trainer, pl_module, stage)
        parallelism = _parallelism_of(trainer)
        config = getattr(pl_module, "config", None)
        if config is None:
            raise ConfigError(f"{type(pl_module).__name__} has no Megatron configuration (attribute config)")
        found = importlib.util.find_spec("transformer_engine") is not None
        settings, notes = model_overlap(parallelism, self._asked, transformer_engine=found)
        self._starts_buffers = settings["tp_comm_overlap"]
        _apply(settings, config)
        ddp = getattr(trainer.strategy, "ddp_config", None)
        optimizer = getattr(getattr(pl_module, "optim", None), "config", None)
        of_gradients, more = gradient_overlap(
            parallelism,
            self._asked,
            distributed_optimizer=optimizer is not None and bool(getattr(ddp, "use_distributed_optimizer", False)),
        )
        for each in (optimizer, ddp):
            _apply(of_gradients, each)
        if trainer.global_rank == 0 and stage == "fit":
            said = {name: value for name, value in {**settings, **of_gradients}.items() if value is not None}
            logger.info("Megatron's communication: %s", ", ".join(f"{name}={value}" for name, value in said.items()))
            for note in notes + more:
                logger.warning("%s", note)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_fit_start(trainer, pl_module)
        self._start_buffers(trainer, pl_module.config)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_validation_start(trainer, pl_module)
        self._start_buffers(trainer, pl_module.config)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        self._start_buffers(trainer, pl_module.config)

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        self._start_buffers(trainer, pl_module.config)

    def _start_buffers(self, trainer: Any, config: Any) -> None:
        """Creates Transformer Engine's buffers, once per ``setup``. Collective: over the tensor parallel ranks."""
        if not self._starts_buffers:
            return
        self._starts_buffers = False
        loader = getattr(trainer, "datamodule", None)
        micro_batch = getattr(loader, "micro_batch_size", None)
        if micro_batch is None:
            raise ConfigError(
                "tp_comm_overlap=True: the data module has no micro_batch_size, which the buffers' size needs"
            )
        parallelism = _parallelism_of(trainer)
        engine = importlib.import_module("transformer_engine.pytorch.module.base")
        more = (
            {}
            if self._asked.tp_comm_bootstrap_backend is None
            else {"bootstrap_backend": self._asked.tp_comm_bootstrap_backend}
        )
        engine.initialize_ub(
            shape=[config.seq_length * micro_batch // parallelism.context, config.hidden_size],
            tp_size=parallelism.tensor,
            use_fp8=bool(getattr(config, "fp8", None)),
            ub_cfgs=self._asked.tp_comm_overlap_cfg,
            **more,
        )


def _parallelism_of(trainer: Any) -> Parallelism:
    found: Any = getattr(trainer.strategy, "parallelism", None)
    if not hasattr(found, "tensor_model_parallel_size"):
        raise ConfigError(
            f"MegatronCommOverlapCallback is for Megatron's strategy, this Trainer has"
            f" {type(trainer.strategy).__name__}; DDPCommOverlapCallback is for strategy='ddp',"
            " FSDP2CommOverlapCallback for ModelParallelStrategy"
        )
    tensor = found.tensor_model_parallel_size
    pipeline = found.pipeline_model_parallel_size
    context = getattr(found, "context_parallel_size", None) or 1
    return Parallelism(
        tensor=tensor,
        pipeline=pipeline,
        virtual_pipeline=getattr(found, "virtual_pipeline_model_parallel_size", None) or 1,
        context=context,
        data=max(1, trainer.world_size // (tensor * pipeline * context)),
        sequence_parallel=bool(getattr(found, "sequence_parallel", False)),
    )


def _apply(settings: dict[str, Any], config: Any) -> None:
    """Sets those settings that are not None and that the configuration has as attributes."""
    for name, value in settings.items():
        if value is not None and hasattr(config, name):
            setattr(config, name, value)


_adapter = AdapterClass(__name__, "MegatronCommOverlapCallback", OverlapsMegatron, base="callbacks:Callback")
build = _adapter.build
_ELSEWHERE = {"DDPCommOverlapCallback": _ddp_overlap, "FSDP2CommOverlapCallback": _fsdp2_overlap}


def __getattr__(name: str) -> Any:
    return getattr(_ELSEWHERE[name], name) if name in _ELSEWHERE else _adapter.attribute(name)
