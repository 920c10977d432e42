"""Saves and restores the gradients of a save in the middle of gradient accumulation.

Lightning saves there when a validation with a monitored metric comes between two optimizer steps. It does not save the
accumulated gradients, so a run resumed from there would diverge. The gradients differ between ranks until they are
reduced, so each rank saves its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["copy_gradients", "place_gradients"]


def copy_gradients(trainer: Any) -> dict[str, Tensor]:
    """Copies of this rank's gradients on the CPU, by parameter name. Collective: no. Blocks: for the copy."""
    return {
        name: p.grad.detach().to("cpu", copy=True)
        for name, p in trainer.lightning_module.named_parameters()
        if p.grad is not None
    }


def place_gradients(trainer: Any, gradients: dict[str, Tensor]) -> None:
    """Puts gradients back, before the first batch after a resume."""
    for name, parameter in trainer.lightning_module.named_parameters():
        gradient = gradients.get(name)
        if gradient is not None:
            with torch.no_grad():
                parameter.grad = gradient.to(device=parameter.device, dtype=parameter.dtype, copy=True)
