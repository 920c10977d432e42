"""Saves and restores gradients when a save falls into the middle of gradient accumulation.

Such a save happens when a validation with a monitored metric comes between two optimizer steps. Lightning does not save
the accumulated gradients, so a run resumed from there would diverge. The gradients differ between ranks until they are
reduced, so each rank saves its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["copy_gradients", "place_gradients"]


def copy_gradients(trainer: Any) -> dict[str, Tensor]:
    """Copies this rank's gradients to the CPU; of sharded ones its part. Returns them by parameter name.

    Collective: no. Blocks: for the copy.
    """
    return {
        name: _of_rank(p.grad, like=p).detach().to("cpu", copy=True)
        for name, p in trainer.lightning_module.named_parameters()
        if p.grad is not None
    }


def place_gradients(trainer: Any, gradients: dict[str, Tensor]) -> None:
    """Puts the saved gradients back. Called before the first batch after a resume."""
    for name, parameter in trainer.lightning_module.named_parameters():
        gradient = gradients.get(name)
        with torch.no_grad():
            # Of other parts (another number of ranks) this rank has nothing; the caller says what is not exact then.
            if gradient is not None and gradient.shape == _of_rank(parameter, like=parameter).shape:
                parameter.grad = torch.empty_like(parameter)
                _of_rank(parameter.grad, like=parameter).copy_(gradient)


def _of_rank(tensor: Any, *, like: Any) -> Tensor:
    """This rank's part of a DTensor that is divided as ``like`` is; any other tensor itself.

    So gradients that are partial sums are refused by name, as every DTensor in a rank's own state is.
    """
    divided = hasattr(tensor, "to_local") and tensor.placements == like.placements
    found: Tensor = tensor.to_local() if divided else tensor
    return found
