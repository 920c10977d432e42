"""How a model is divided over ranks, and what a checkpoint of it costs. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from recipes.pretrain.models import Configuration, parameters_of

__all__ = ["PARALLELISM", "Parallelism", "Plan", "layer_problems"]

#: Steps that a RAM disk holds at the same time: one is kept, one is written, one is uploaded.
STEPS_ON_RAM_DISK = 3
_UNITS = (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1.0, "bytes")


@dataclass(frozen=True, kw_only=True)
class Parallelism:
    """Ranks over which each axis divides a replica of the model.

    Attributes:
        virtual: stages that each pipeline rank has.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    context: int = 1

    @property
    def ranks(self) -> int:
        """Ranks of a replica."""
        return self.tensor * self.pipeline * self.context

    def __str__(self) -> str:
        stages = f" ({self.virtual} stages each)" if self.virtual > 1 else ""
        return f"tensor {self.tensor}, pipeline {self.pipeline}{stages}, context {self.context}"


#: Those that NeMo's own recipes of these sizes use for sequences of 8192 tokens; of other models the smallest.
PARALLELISM: dict[str, Parallelism] = {
    "tiny": Parallelism(),
    "36M": Parallelism(),
    "2B": Parallelism(),
    "8B": Parallelism(context=2),
    "70B": Parallelism(tensor=4, pipeline=4, virtual=5, context=2),
    "70Bt": Parallelism(tensor=4, context=2),
    "405B": Parallelism(tensor=8, pipeline=9, virtual=7, context=2),
    "405Bt": Parallelism(tensor=8, context=2),
}


def layer_problems(model: Configuration, parallel: Parallelism) -> Iterator[str]:
    """Why a model cannot be divided so."""
    stages = parallel.pipeline * parallel.virtual
    if model.layers % stages:
        yield (
            f"--pipeline-parallel {parallel.pipeline}: {model.layers} layers cannot be divided evenly over its"
            f" {stages} stages; pass --pipeline-parallel and --virtual-pipeline whose product divides {model.layers}"
        )
    if parallel.virtual > 1 and parallel.pipeline == 1:
        yield f"--virtual-pipeline {parallel.virtual} without a pipeline; pass --pipeline-parallel of 2 or more"
    for what, count in ("attention heads", model.heads), ("key and value heads", model.kv_heads):
        if count % parallel.tensor:
            yield f"--tensor-parallel {parallel.tensor} does not divide the {count} {what}; pass a number that does"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What training a model so holds and saves.

    Attributes:
        ranks: of the whole job.
        ranks_per_host: of them on each host.
        mixed: bfloat16 weights beside float32 ones, as on GPUs; else float32 alone.
    """

    name: str
    model: Configuration
    parallel: Parallelism
    ranks: int
    ranks_per_host: int
    mixed: bool

    @property
    def parameters(self) -> int:
        return parameters_of(self.model)

    @property
    def checkpoint_bytes(self) -> int:
        """Weights of the model, and of the optimizer: float32 weights and two moments. Written once, by all ranks
        together."""
        return self.parameters * ((2 if self.mixed else 4) + 12)

    @property
    def bytes_of_rank(self) -> int:
        return self.checkpoint_bytes // self.ranks

    @property
    def bytes_of_host(self) -> int:
        return self.bytes_of_rank * self.ranks_per_host

    @property
    def ram_disk_bytes(self) -> int:
        return STEPS_ON_RAM_DISK * self.bytes_of_host

    @property
    def memory_of_rank(self) -> int:
        """Bytes of weights, float32 gradients, and this rank's share of the optimizer's state."""
        own = self.parameters // (self.parallel.tensor * self.parallel.pipeline)
        return own * ((2 if self.mixed else 4) + 4) + 12 * self.parameters // self.ranks

    def lines(self, bytes_per_second: float, measured: str) -> Iterator[str]:
        """The plan for people.

        Args:
            bytes_per_second: at which a host copies.
            measured: where that figure comes from.
        """
        checkpoint, held = self.checkpoint_bytes, "weights, gradients and optimizer, without activations"
        copy_s = self.bytes_of_host / bytes_per_second
        hosts = self.ranks // self.ranks_per_host
        rows = {
            "model": f"{self.name}, {self.parameters / 1e9:.3g} billion parameters",
            "ranks": f"{self.ranks} on {hosts} hosts",
            "parallelism": f"{self.parallel}, data {self.ranks // self.parallel.ranks}",
            "memory of a rank": f"{_size(self.memory_of_rank)} of {held}",
            "a checkpoint": f"{_size(checkpoint)}, {checkpoint // self.parameters} bytes a parameter",
            "of a rank": _size(self.bytes_of_rank),
            "of a host": _size(self.bytes_of_host),
            "RAM disk of a host": f"{_size(self.ram_disk_bytes)}: a step is kept, one is written, one is uploaded",
            "copy of a save": f"{copy_s:.3g} s at {bytes_per_second / 1e9:.3g} GB/s a host ({measured})",
            "stall": f"{copy_s:.3g} s; with --enable-optimized-async-ckpt only what is left of it after the next step's"
            " forward and backward",
        }
        width = max(map(len, rows))
        yield from (f"{name:<{width}}  {value}" for name, value in rows.items())


def _size(count: int) -> str:
    scale, unit = next((scale, unit) for scale, unit in _UNITS if count >= scale)
    return f"{count / scale:.3g} {unit}"
