"""The state every contender saves, and the compute of a trainer during a save.

The state is a flat dict of equal float32 tensors whose pages are all touched. Its values change at every step, so a
contender that skips unchanged data gains nothing, and a digest taken before the save proves the restore.
"""

from __future__ import annotations

import time

import torch

__all__ = ["Compute", "digest", "make_state", "mutate", "nbytes", "wipe"]


def make_state(*, mebibytes: int, tensors: int) -> dict[str, torch.Tensor]:
    """Returns ``tensors`` float32 CPU tensors of ``mebibytes`` MiB together, every page touched and filled.

    The values are one block of varied numbers, repeated with an offset: quick to make and different in every tensor.
    """
    numel = mebibytes * 1024 * 1024 // 4 // tensors
    block = torch.rand(min(numel, 1 << 18), generator=torch.Generator().manual_seed(0))
    state = {}
    for index in range(tensors):
        tensor = torch.empty(numel)
        for start in range(0, numel, block.numel()):
            part = tensor[start : start + block.numel()]
            torch.add(block[: part.numel()], index + start / numel, out=part)
        state[f"layers.{index}.weight"] = tensor
    return state


def nbytes(state: dict[str, torch.Tensor]) -> int:
    """Bytes of all tensors together."""
    return sum(tensor.nbytes for tensor in state.values())


def mutate(state: dict[str, torch.Tensor]) -> None:
    """Changes every value in place, as an optimizer step does."""
    for tensor in state.values():
        tensor.add_(1.0)


def wipe(state: dict[str, torch.Tensor]) -> None:
    """Zeroes the state in place, so that a restore that does nothing is detected."""
    for tensor in state.values():
        tensor.zero_()


def digest(state: dict[str, torch.Tensor]) -> dict[str, int]:
    """A sum of the raw bits of each tensor: equal states have equal digests, a torn or outdated one has them almost
    never."""
    return {name: int(tensor.view(torch.int32).sum(dtype=torch.int64)) for name, tensor in state.items()}


class Compute:
    """A stand-in for forward and backward: matrix products with an in-place pass over a few MiB.

    One unit takes about a millisecond and uses as many threads as torch was given. Used by one thread.
    """

    def __init__(self) -> None:
        self._a = torch.rand(256, 256)
        self._b = torch.empty(256, 256)
        self._buffer = torch.rand(1 << 20)

    def unit(self) -> None:
        torch.mm(self._a, self._a, out=self._b)
        self._buffer.mul_(0.999)

    def rate(self, seconds: float) -> float:
        """Units per second, measured over ``seconds`` with nothing else running."""
        units = 0
        start = time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            self.unit()
            units += 1
        return units / elapsed
