"""A GPT small enough to learn some Python in half a minute on one core."""

from __future__ import annotations

import math
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["TinyGPT"]


class _Block(nn.Module):
    """Attention and MLP, each with layer norm before and dropout after. Input and output: [batch, time, width]."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, time, width)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class TinyGPT(pl.LightningModule):
    """Byte level language model with dropout, AdamW and a warm-up and cosine schedule, all with state to restore."""

    def __init__(
        self,
        *,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
        length: int = 128,
        steps: int = 200,
        lr: float = 2e-3,
    ) -> None:
        super().__init__()
        self.steps, self.lr = steps, lr
        self.embed, self.position = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([_Block(width, heads, dropout=0.1) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [batch, time] to logits [batch, time, 256]."""
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        warmup = max(1, self.steps // 20)

        def factor(step: int) -> float:
            done = min(1.0, max(0, step - warmup) / max(1, self.steps - warmup))
            return min(1.0, (step + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * done))

        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.05)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
