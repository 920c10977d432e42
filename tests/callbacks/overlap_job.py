"""What each rank runs in :mod:`tests.callbacks.test_comm_overlap`."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn

from resiliency.callbacks.comm_overlap import DDPCommOverlapCallback, FSDP2CommOverlapCallback
from tests.callbacks.harness import loader

warnings.filterwarnings("ignore")


class Net(pl.LightningModule):
    """Layers that are made in ``configure_model``, of 2.5 MiB of gradients in all."""

    def __init__(self, *, shard: bool) -> None:
        super().__init__()
        self.shard = shard
        self.layers: Any = None
        self.seen: dict[str, Any] = {}

    def configure_model(self) -> None:
        if self.layers is not None:
            return
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 400), *(nn.Linear(400, 400) for _ in range(4)), nn.Linear(400, 1))
        if self.shard:
            from torch.distributed.fsdp import fully_shard

            for layer in self.layers:
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_end(self) -> None:
        wrapped = self.trainer.strategy.model
        if not self.shard:
            names = ("bucket_bytes_cap", "gradient_as_bucket_view", "static_graph")
            self.seen = {name: getattr(wrapped, name) for name in names}
            return
        states = [layer._get_fsdp_state() for layer in self.layers]
        for name in ("forward", "backward"):
            ahead = [getattr(state, f"_states_to_{name}_prefetch") for state in states]
            self.seen[name] = [[states.index(one) for one in each] for each in ahead]


def train(*, result: str, strategy: str, callback: dict[str, Any] | None, fits: int = 1, **arguments: Any) -> None:
    accumulate = arguments.pop("accumulate", 1)
    shard = strategy == "fsdp2"
    made: Any = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    if not shard:
        made = DDPStrategy(process_group_backend="gloo", **arguments)
    kind = FSDP2CommOverlapCallback if shard else DDPCommOverlapCallback
    trainer: Any = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=made,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        callbacks=[] if callback is None else [kind(**callback)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    answer: dict[str, Any] = {"error": ""}
    try:
        for _ in range(fits):
            net = Net(shard=shard)
            trainer.fit(net, loader())
            trainer.fit_loop.epoch_progress.reset()
        weights = hashlib.sha256()
        for parameter in net.parameters():
            whole = parameter.full_tensor() if shard else parameter  # type: ignore[attr-defined]
            weights.update(whole.detach().numpy().tobytes())
        answer.update(seen=net.seen, weights=weights.hexdigest(), left=sorted(getattr(made, "_ddp_kwargs", {})))
    except Exception as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    Path(f"{result}.{trainer.global_rank}").write_text(json.dumps(answer))
