"""Sizes of the models. Those of 8B and more are Llama 3's; a "t" at the end: cut to a few layers, for tests."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["CONFIGURATIONS", "Configuration", "parameters_of"]


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A GPT with grouped attention, rotary positions, RMSNorm and SwiGLU, without biases.

    Attributes:
        layers, width, heads, kv_heads, mlp: shape; ``width`` is a multiple of ``heads``, ``heads`` of ``kv_heads``.
        length: tokens of a sequence.
        vocabulary: number of tokens; raised to that of the tokenizer when it has more.
        rope_base: base of the rotary positions.
        lr: peak learning rate.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp: int
    length: int = 8192
    vocabulary: int = 128_256
    rope_base: float = 500_000.0
    lr: float = 3e-4


_70B = Configuration(layers=80, width=8192, heads=64, kv_heads=8, mlp=28_672, lr=1.5e-4)
_405B = Configuration(layers=126, width=16_384, heads=128, kv_heads=8, mlp=53_248, lr=8e-5)

CONFIGURATIONS: dict[str, Configuration] = {
    "tiny": Configuration(
        layers=2, width=32, heads=4, kv_heads=2, mlp=64, length=32, vocabulary=256, rope_base=10_000.0, lr=2e-3
    ),
    "36M": Configuration(
        layers=10, width=512, heads=8, kv_heads=8, mlp=1664, length=128, vocabulary=256, rope_base=10_000.0, lr=1e-3
    ),
    "2B": Configuration(layers=24, width=2048, heads=16, kv_heads=8, mlp=8192),
    "8B": Configuration(layers=32, width=4096, heads=32, kv_heads=8, mlp=14_336),
    "70B": _70B,
    "70Bt": replace(_70B, layers=4),
    "405B": _405B,
    "405Bt": replace(_405B, layers=2),
}


def parameters_of(model: Configuration) -> int:
    """Number of parameters."""
    head = model.width // model.heads
    attention = 2 * model.width * model.width + 2 * model.width * model.kv_heads * head
    layer = attention + 3 * model.width * model.mlp + 2 * model.width
    return model.layers * layer + 2 * model.vocabulary * model.width + model.width
