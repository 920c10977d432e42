"""Calls a method before each optimizer step of torch, whoever makes the step."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["StepHook"]


class StepHook:
    """A global hook of ``torch.optim.Optimizer.step``. Thread: any.

    Fused optimizers, and all optimizers of DTensors, change parameters without counting it in the version counters of
    torch, so this hook is the only sign of their steps.

    Args:
        before_step: a bound method, called before the step on the thread that makes it, with the optimizer and whether
            ``step`` was given a closure. Held weakly, because torch keeps the hook for the life of the process.
    """

    def __init__(self, before_step: Callable[[Optimizer, bool], None]) -> None:
        weak = weakref.WeakMethod(before_step)

        def hook(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            method = weak()
            if method is not None:
                method(optimizer, bool(args[1:]) or kwargs.get("closure") is not None)

        self._handle = register_optimizer_step_pre_hook(hook)
        weakref.finalize(self, self._handle.remove)

    def remove(self) -> None:
        """Ends the calls. Idempotent."""
        self._handle.remove()
