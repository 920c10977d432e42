"""The GPT as a LightningModule, in plain torch."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recipes.pretrain.models import Configuration

__all__ = ["GPT"]


class _RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


class _Block(nn.Module):
    """Attention and MLP, each with a norm before it. Input and output: [batch, time, width]."""

    def __init__(self, model: Configuration) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = model.heads, model.kv_heads, model.width // model.heads
        kv = model.kv_heads * self.head
        self.norm1, self.norm2 = _RMSNorm(model.width), _RMSNorm(model.width)
        self.q, self.k, self.v, self.out = (
            nn.Linear(*shape, bias=False)
            for shape in ((model.width, model.width), (model.width, kv), (model.width, kv), (model.width, model.width))
        )
        self.gate, self.up = (nn.Linear(model.width, model.mlp, bias=False) for _ in range(2))
        self.down = nn.Linear(model.mlp, model.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, time, width = x.shape
        y = self.norm1(x)
        q = _rotate(self.q(y).view(batch, time, self.heads, self.head).transpose(1, 2), cos, sin)
        k = _rotate(self.k(y).view(batch, time, self.kv_heads, self.head).transpose(1, 2), cos, sin)
        v = self.v(y).view(batch, time, self.kv_heads, self.head).transpose(1, 2)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions. ``x``: [batch, heads, time, head]; ``cos``, ``sin``: [time, head / 2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class GPT(pl.LightningModule):
    """A language model with AdamW, and a warm-up and cosine schedule. Batches: int64 [batch, time + 1].

    Args:
        model: the shape of the model.
        steps: the learning rate is lowest after so many optimizer steps.
        replicas: number of ranks that hold the same optimizer state; within each group of ``world_size / replicas``
            ranks parameters and state are sharded. None: the strategy alone decides.
    """

    def __init__(self, model: Configuration, *, steps: int, replicas: int | None = None) -> None:
        super().__init__()
        self.save_hyperparameters({**vars(model), "steps": steps})
        self.shape, self.steps, self.replicas = model, steps, replicas
        self.embed = nn.Embedding(model.vocabulary, model.width)
        self.blocks = nn.ModuleList([_Block(model) for _ in range(model.layers)])
        self.norm, self.head = _RMSNorm(model.width), nn.Linear(model.width, model.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def configure_model(self) -> None:
        """With ``replicas``: shards the parameters over the ranks of a group, and replicates the groups."""
        if self.replicas is None or getattr(self, "_sharded", False):
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        world = self.trainer.world_size
        mesh = init_device_mesh(
            self.device.type, (self.replicas, world // self.replicas), mesh_dim_names=("replicate", "shard")
        )
        mesh = mesh if self.replicas > 1 else mesh["shard"]
        for block in self.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self, mesh=mesh)
        self._sharded = True

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [batch, time] to logits [batch, time, vocabulary]."""
        half = self.shape.width // self.shape.heads // 2
        rates = self.shape.rope_base ** (-torch.arange(half, device=tokens.device) / half)
        angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * rates
        cos, sin = angles.cos(), angles.sin()
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))

    def _loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        self.log("train_loss", loss, batch_size=batch.shape[0])
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), batch_size=batch.shape[0], sync_dist=True)

    def configure_optimizers(self) -> Any:
        warmup = max(1, min(2000, self.steps // 20))

        def factor(step: int) -> float:
            done = min(1.0, max(0, step - warmup) / max(1, self.steps - warmup))
            return min(1.0, (step + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * done))

        optimizer = torch.optim.AdamW(self.parameters(), lr=self.shape.lr, betas=(0.9, 0.95), weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
