"""Callbacks that overlap communication with computation, each where its settings are valid, and say what they set.

``MegatronCommOverlapCallback`` is for Megatron's strategy, ``DDPCommOverlapCallback`` for ``strategy="ddp"``,
``FSDP2CommOverlapCallback`` for modules sharded by ``fully_shard``. Importing one gives the class for the Lightning
that is imported (``lightning.pytorch`` or ``pytorch_lightning``); ``build(namespace)`` of this module gives the first
one for a named package.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from typing import Any

from resiliency.callbacks import _ddp_overlap, _fsdp2_overlap
from resiliency.callbacks._step_hooks import StepHooks
from resiliency.errors import ConfigError
from resiliency.plugins.namespaces import AdapterClass, require_trainer_of
from resiliency.plugins.overlap_rules import MegatronOverlap, Parallelism, gradient_overlap, model_overlap

__all__ = [  # noqa: F822 - classes are built on first use
    "DDPCommOverlapCallback",
    "FSDP2CommOverlapCallback",
    "MegatronCommOverlapCallback",
    "build",
]

logger = logging.getLogger(__name__)


class OverlapsMegatron(StepHooks):
    """Decides which of Megatron's communication is overlapped, from the strategy's parallelism.

    An argument that is None is decided: of an interleaved pipeline sends and receives are overlapped, of another one
    they are batched; with several data parallel ranks gradients are reduced in buckets of 128 Mi elements during
    backward and parameters gathered during forward, aligned over the stages of an interleaved pipeline. Overlap within
    tensor parallel layers is set where it is asked for and possible. Gathering parameters during the optimizer step is
    set only where it is asked for, because a save would read weights that are not there yet. What is set is logged.

    The strategy is Megatron's: it has ``parallelism`` and ``ddp_config``, its module ``config`` and ``optim``. Its
    configurations are changed in ``setup``, before they are used.

    Thread: the training thread. Collective: with ``tp_comm_overlap`` where it is possible, at the start of a fit.

    Args:
        tp_comm_overlap: within tensor parallel layers; needs 2 ranks, sequence parallelism and Transformer Engine.
        tp_comm_overlap_cfg: of it, passed on to Transformer Engine.
        tp_comm_bootstrap_backend: "nccl", "mpi" or "gloo", for Transformer Engine's buffers.
        overlap_p2p_comm: sends and receives of an interleaved pipeline.
        batch_p2p_comm: send and receive are one operation.
        overlap_grad_reduce: reductions of gradients with backward.
        overlap_param_gather: gathers of parameters with forward.
        overlap_param_gather_with_optimizer_step: and with the optimizer step.
        align_param_gather: all stages gather at the same time.
        bucket_size: elements of a bucket of gradients.
        defer_embedding_wgrad_compute: weight gradients of the embedding fill the pipeline's waits.
        wgrad_deferral_limit: micro-batches for which that is done; -1: all.

    Raises:
        ConfigError: at the start of a fit, another strategy, or settings that contradict each other.
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
        """Once in a process. Collective: over the tensor parallel ranks."""
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
    """Sets those that the configuration has, and that are decided."""
    for name, value in settings.items():
        if value is not None and hasattr(config, name):
            setattr(config, name, value)


_adapter = AdapterClass(__name__, "MegatronCommOverlapCallback", OverlapsMegatron, base="callbacks:Callback")
build = _adapter.build
_ELSEWHERE = {"DDPCommOverlapCallback": _ddp_overlap, "FSDP2CommOverlapCallback": _fsdp2_overlap}


def __getattr__(name: str) -> Any:
    return getattr(_ELSEWHERE[name], name) if name in _ELSEWHERE else _adapter.attribute(name)
