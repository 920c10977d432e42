"""The training itself, in NeMo's terms: start from here. Importing it imports NeMo."""

from __future__ import annotations

import argparse
import sys
from datetime import timedelta
from typing import Any

import nemo.collections.llm as llm  # before all other parts of NeMo, which import each other in circles
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig
from nemo import lightning as nl
from nemo.lightning.pytorch.optim import CosineAnnealingScheduler, MegatronOptimizerModule

from recipes.nemo_llama3_70b.data import Text
from recipes.nemo_llama3_70b.flags import model_of
from recipes.pretrain.callbacks import other_callbacks
from recipes.pretrain.data import load_tokenizer
from recipes.pretrain.logs import log_folder
from recipes.pretrain.models import Configuration
from resiliency import CheckpointerOptions
from resiliency.callbacks.comm_overlap import MegatronCommOverlapCallback
from resiliency.plugins.nemo import CheckpointEngine

__all__ = ["fit", "make_trainer"]


def fit(args: argparse.Namespace) -> nl.Trainer:
    """Trains as settled and checked flags say; a job of the same name goes on. Returns the Trainer."""
    data, trainer = _data(args), make_trainer(args)
    log = nl.NeMoLogger(
        log_dir=args.persistent_ckpt_dir, name=args.job_name, use_datetime_version=False, ckpt=_checkpoints(args)
    )
    resume = nl.AutoResume(resume_if_exists=True, resume_ignore_no_checkpoint=True, resume_past_end=True)
    llm.pretrain(_model(args, data), data, trainer, log=log, resume=resume)
    return trainer


def make_trainer(args: argparse.Namespace) -> nl.Trainer:
    """NeMo's Trainer for settled and checked flags."""
    cpu, parallel = args.accelerator == "cpu", args.parallel
    strategy = nl.MegatronStrategy(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual if parallel.virtual > 1 else None,
        context_parallel_size=parallel.context,
        sequence_parallel=parallel.tensor > 1 and not cpu,  # which Transformer Engine must be there for
        pipeline_dtype=torch.float32 if cpu else torch.bfloat16,
        ckpt_async_save=args.enable_async_ckpt or args.enable_optimized_async_ckpt,
        replace_progress_bar=False,
    )
    # Large tensors are copied during the next step; none is large enough where that is not asked for.
    lazy = {} if args.enable_optimized_async_ckpt else {"lazy_bytes": sys.maxsize}
    options = CheckpointerOptions(copy_threads=args.ckpt_threads_per_rank, **lazy)
    callbacks = [CheckpointEngine(run=args.job_name, options=options), *other_callbacks(args)]
    if args.enable_comm_overlap:
        callbacks.append(MegatronCommOverlapCallback())
    return nl.Trainer(
        accelerator="cpu" if cpu else "gpu",
        devices=args.num_gpus,
        num_nodes=args.num_nodes,
        strategy=strategy,
        plugins=None if cpu else nl.MegatronMixedPrecision(precision="bf16-mixed"),
        max_steps=args.max_steps,
        max_time=None if args.max_runtime is None else timedelta(seconds=args.max_runtime),
        val_check_interval=args.val_check_interval or args.save_interval,
        limit_val_batches=args.limit_val_batches if args.val_check_interval else 0,
        num_sanity_val_steps=0,
        log_every_n_steps=10,
        default_root_dir=log_folder(args),
        callbacks=callbacks,
        logger=False,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _checkpoints(args: argparse.Namespace) -> nl.ModelCheckpoint:
    return nl.ModelCheckpoint(
        every_n_train_steps=args.save_interval,
        filename="{step}-{consumed_samples}",
        monitor="consumed_samples",  # so that the newest are kept
        mode="max",
        save_top_k=-1 if args.topk_ckpt is None else args.topk_ckpt,
        save_last="link",
        save_optim_on_train_end=True,
    )


def _data(args: argparse.Namespace) -> Text:
    return Text(
        load_tokenizer(args.tokenizer_path),
        folder=args.data,
        length=args.seq_length,
        micro_batch=args.micro_bs,
        global_batch=args.global_bs,
        samples=args.max_steps * args.global_bs,
        val_samples=(args.limit_val_batches or 1) * args.global_bs,
        seed=args.seed,
        attention_mask=args.accelerator == "cpu",
    )


def _model(args: argparse.Namespace, data: Text) -> llm.LlamaModel:
    shape = model_of(args)
    config = llm.LlamaConfig(
        num_layers=shape.layers,
        hidden_size=shape.width,
        ffn_hidden_size=shape.mlp,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        seq_length=shape.length,
        rotary_base=int(shape.rope_base),
        vocab_size=max(shape.vocabulary, data.tokenizer.vocab_size),
        **(_on_cpu() if args.accelerator == "cpu" else {}),
    )
    return llm.LlamaModel(config, optim=_optimizer(args, shape), tokenizer=data.tokenizer)


def _on_cpu() -> dict[str, Any]:
    """Without kernels that need CUDA."""
    fusions = ("gradient_accumulation", "masked_softmax", "bias_dropout", "bias_activation", "apply_rope")
    off = {f"{name}_fusion": False for name in fusions}
    return {
        **off,
        "persist_layer_norm": False,
        "transformer_layer_spec": _local_layers,
        "use_cpu_initialization": True,
        "pipeline_dtype": torch.float32,
    }


def _local_layers(config: Any = None) -> Any:
    return get_gpt_layer_local_spec(normalization="RMSNorm")


def _optimizer(args: argparse.Namespace, shape: Configuration) -> MegatronOptimizerModule:
    mixed = args.accelerator != "cpu"
    warmup = max(1, min(2000, args.max_steps // 20))
    return MegatronOptimizerModule(
        config=OptimizerConfig(
            optimizer="adam",
            lr=shape.lr,
            weight_decay=0.1,
            adam_beta2=0.95,
            use_distributed_optimizer=True,
            bf16=mixed,
            fp16=False,
            params_dtype=torch.bfloat16 if mixed else torch.float32,
        ),
        lr_scheduler=CosineAnnealingScheduler(
            max_steps=args.max_steps, warmup_steps=warmup, constant_steps=0, min_lr=shape.lr / 10
        ),
    )
