"""A run of real NeMo: a GPT of two layers with ``nl.MegatronStrategy``, on the CPU over gloo; one process of each rank.

``python tests/nemo/nemo_job.py '{"out": ..., "steps": 4}'``, with the variables of a launcher for several ranks. Prints
a line "NEMO {json}" for each thing that a test asks about.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from datetime import timedelta
from typing import Any

warnings.filterwarnings("ignore")
#: Of the model and the data.
SEQUENCE, VOCABULARY, BATCH = 32, 128, 2


def tell(**what: Any) -> None:
    os.write(1, f"\nNEMO {json.dumps(what)}\n".encode())  # at once: several ranks have one output


def main(
    *,
    out: str,
    steps: int = 4,
    ours: bool = True,
    asynchronous: bool = True,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    distributed_optimizer: bool = False,
    overlap: bool = False,
    every: int = 2,
    save_last: Any = True,
    callbacks: bool = False,
    kill_at: int | None = None,
    kill_signal: int = 9,
    checkpoint_of: str = "nemo",
    finalizes: bool = False,
    hidden: int = 64,
    lazy_bytes: int = 1,
    nvrx: bool = False,
) -> None:
    """Trains to ``steps``, resuming what ``out`` holds.

    Args:
        ours: checkpoints go through the engine; False: NeMo's own IO.
        callbacks: this library's callbacks take part.
        finalizes: a checkpoint is finished before the next one is saved; else, with steps this short, perhaps none is
            when the run is killed, and NeMo refuses to resume.
        hidden: size of the model.
        lazy_bytes: of the engine's options.
        nvrx: every ``every`` steps nvidia-resiliency-ext saves a local checkpoint, and NeMo saves only the last step.
        kill_at: the last rank gets ``kill_signal`` before it begins this step, if the run has not been restarted.
        checkpoint_of: whose ``ModelCheckpoint`` it is: "nemo", or "resiliency".
    """
    import torch

    from resiliency.testing import cuda_on_cpu

    cuda_on_cpu.install()
    if distributed_optimizer:
        cuda_on_cpu.install_fused_adam()
    import lightning.pytorch as pl
    import nemo.collections.llm as llm
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig
    from nemo import lightning as nl
    from nemo.lightning.callback_group import CallbackGroup
    from nemo.lightning.pytorch.callbacks import ModelCheckpoint
    from nemo.lightning.pytorch.optim import MegatronOptimizerModule

    world = int(os.environ.get("WORLD_SIZE", "1"))

    class Observer(pl.Callback):
        def __init__(self) -> None:
            self.began, self.saving_s = 0.0, 0.0

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            load = trainer.strategy.load_checkpoint

            def timed(*arguments: Any, **options: Any) -> Any:
                began = time.monotonic()
                loaded = load(*arguments, **options)
                tell(restoring_s=time.monotonic() - began)
                return loaded

            trainer.strategy.load_checkpoint = timed

        def on_train_start(self, trainer: Any, *_: Any) -> None:
            tell(start=trainer.global_step, rank=trainer.global_rank)
            save = trainer.strategy.save_checkpoint

            def timed(*arguments: Any, **options: Any) -> None:
                began = time.monotonic()
                save(*arguments, **options)
                if trainer.global_step < steps:
                    self.saving_s += time.monotonic() - began

            trainer.strategy.save_checkpoint = timed
            self.began = time.monotonic()

        def on_train_end(self, *_: Any) -> None:
            tell(training_s=time.monotonic() - self.began, saving_s=self.saving_s)

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if finalizes and trainer.global_step % every == every - 1:
                trainer.strategy.checkpoint_io.maybe_finalize_save_checkpoint(blocking=True)
            last = trainer.global_rank == world - 1
            if trainer.global_step == kill_at and last and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
                os.kill(os.getpid(), kill_signal)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.is_global_zero:
                loss = float(trainer.callback_metrics.get("reduced_train_loss", -1))
                tell(step=trainer.global_step, loss=loss, at=time.monotonic())

    config = llm.GPTConfig(
        num_layers=2,
        hidden_size=hidden,
        ffn_hidden_size=2 * hidden,
        num_attention_heads=4,
        seq_length=SEQUENCE,
        vocab_size=VOCABULARY,
        make_vocab_size_divisible_by=VOCABULARY,
        transformer_layer_spec=lambda config=None: get_gpt_layer_local_spec(),
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        share_embeddings_and_output_weights=False,
        pipeline_dtype=torch.float32,
    )
    data = _data(llm, world // tensor_parallel // pipeline_parallel)
    optimizer = MegatronOptimizerModule(
        config=OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            use_distributed_optimizer=distributed_optimizer,
            bf16=False,
            fp16=False,
            params_dtype=torch.float32,
        )
    )
    model = llm.GPTModel(config, optim=optimizer, tokenizer=data.tokenizer)
    strategy = nl.MegatronStrategy(
        tensor_model_parallel_size=tensor_parallel,
        pipeline_model_parallel_size=pipeline_parallel,
        pipeline_dtype=torch.float32,
        ckpt_async_save=asynchronous,
        replace_progress_bar=False,
    )
    taking_part: list[Any] = [Observer()]
    if ours:
        from resiliency.checkpoint.options import CheckpointerOptions
        from resiliency.plugins.nemo import CheckpointEngine

        # All tensors are copied late, even those of so small a model.
        taking_part.append(CheckpointEngine(options=CheckpointerOptions(lazy_bytes=lazy_bytes)))
    if overlap:
        if callbacks:
            from resiliency.callbacks.comm_overlap import MegatronCommOverlapCallback
        else:
            from nemo.lightning.pytorch.callbacks.megatron_comm_overlap import MegatronCommOverlapCallback

        taking_part.append(MegatronCommOverlapCallback(tp_comm_overlap=False))
    if callbacks:
        taking_part += _callbacks(out)
    trainer = nl.Trainer(
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        accelerator="cpu",
        strategy=strategy,
        max_steps=steps,
        callbacks=taking_part,
        logger=False,
        limit_val_batches=0,
        val_check_interval=2,
        log_every_n_steps=1,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    if checkpoint_of == "resiliency":
        from resiliency import ModelCheckpoint
    checkpoint = ModelCheckpoint(
        save_last=save_last,
        monitor="reduced_train_loss",
        save_top_k=2,
        every_n_train_steps=steps if nvrx else every,
        filename="{step}",
        save_optim_on_train_end=True,
    )
    if nvrx:
        from nemo.lightning.pytorch.local_ckpt import LocalCheckpointCallback, update_trainer_local_checkpoint_io

        trainer.callbacks.insert(0, LocalCheckpointCallback(every_n_train_steps=every))
    logger = nl.NeMoLogger(log_dir=out, name="run", use_datetime_version=False, ckpt=checkpoint)
    logger.setup(trainer, resume_if_exists=True)
    nl.AutoResume(resume_if_exists=True, resume_ignore_no_checkpoint=True).setup(trainer, model)
    if nvrx:
        update_trainer_local_checkpoint_io(trainer, out, lambda path: -1)
    tell(resumes=str(trainer.ckpt_path or ""))
    if "RANK" in os.environ:
        CallbackGroup.get_instance().update_config(nemo_version="v2", trainer=trainer, data=data)
    trainer.fit(model, data)
    tell(ended=trainer.global_step, rank=trainer.global_rank)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _callbacks(out: str) -> list[Any]:
    from resiliency import AutoCheckpointCallback
    from resiliency.callbacks.goodput import GoodputCallback
    from resiliency.callbacks.heartbeat import HeartbeatCallback
    from resiliency.callbacks.logging import MemoryLoggingCallback, StepLoggingCallback, TPSLoggingCallback
    from resiliency.callbacks.profile import ProfileCheckpointCallback

    return [
        AutoCheckpointCallback(metadata_server=None, grace=timedelta(minutes=2)),
        HeartbeatCallback(),
        GoodputCallback(os.path.join(out, "events"), prog_bar=False, log=False),
        StepLoggingCallback(),
        TPSLoggingCallback(BATCH, SEQUENCE),
        MemoryLoggingCallback(),
        ProfileCheckpointCallback(os.path.join(out, "traces"), 1),
    ]


def _data(llm: Any, replicas: int) -> Any:
    """NeMo's mock data, with an attention mask, and with the consumed samples among its state, as NeMo's real data have
    them."""
    from megatron.core.num_microbatches_calculator import update_num_microbatches
    from nemo.collections.llm.gpt.data.mock import _MockGPTDataset

    class Data(llm.MockDataModule):  # type: ignore[misc, name-defined]
        def setup(self, stage: str = "") -> None:
            def made(name: str, samples: int) -> Any:
                return _MockGPTDataset(self.tokenizer, name, samples, self.seq_length, create_attention_mask=True)

            self._train_ds, self._validation_ds, self._test_ds = (
                made("train", 1000),
                made("valid", 10),
                made("test", 10),
            )

        def train_dataloader(self) -> Any:
            self.init_global_step = self.trainer.global_step
            self.data_sampler.init_global_step = self.init_global_step
            return super().train_dataloader()

        def state_dict(self) -> dict[str, Any]:
            done = self.trainer.global_step - self.init_global_step
            return {"consumed_samples": self.data_sampler.compute_consumed_samples(done)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            consumed = state["consumed_samples"]
            self.data_sampler.init_consumed_samples = self.data_sampler.prev_consumed_samples = consumed
            update_num_microbatches(consumed_samples=consumed, consistency_check=False)
            self.data_sampler.if_first_step = 1

    return Data(
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        global_batch_size=BATCH * replicas,
        num_train_samples=1000,
        num_val_samples=10,
        num_test_samples=10,
        num_workers=0,
        persistent_workers=False,
        pin_memory=False,
        tokenizer=Tokenizer(),
    )


class Tokenizer:
    vocab_size = VOCABULARY
    eod = eos_id = pad_id = 0
    bos_id = 1

    def text_to_ids(self, _: str) -> list[int]:
        return [1]


if __name__ == "__main__":  # megatron-core starts processes that import this again
    main(**json.loads(sys.argv[1]))
