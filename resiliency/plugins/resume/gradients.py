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
    """Copies this rank's gradients to the CPU. Returns them by parameter name. Collective: no. Blocks: for the copy."""
    return {
        name: p.grad.detach().to("cpu", copy=True)
        for name, p in trainer.lightning_module.named_parameters()
        if p.grad is not None
    }


def place_gradients(trainer: Any, gradients: dict[str, Tensor]) -> None:
    """Puts the saved gradients back. Called before the first batch after a resume."""
    for name, parameter in trainer.lightning_module.named_parameters():
        gradient = gradients.get(name)
        if gradient is not None:
            with torch.no_grad():
                parameter.grad = gradient.to(device=parameter.device, dtype=parameter.dtype, copy=True)
