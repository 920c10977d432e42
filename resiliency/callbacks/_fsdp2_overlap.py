"""``FSDP2CommOverlapCallback``: gathers parameters of layers ahead, for modules sharded by ``fully_shard``."""

from __future__ import annotations

import logging
from typing import Any

from resiliency.errors import ConfigError
from resiliency.plugins.namespaces import AdapterClass, require_trainer_of
from resiliency.plugins.step_hooks import StepHooks

__all__ = ["FSDP2CommOverlapCallback", "build"]  # noqa: F822 - FSDP2CommOverlapCallback is built on first use

logger = logging.getLogger(__name__)


class GathersAhead(StepHooks):
    """Lets each layer gather the parameters of the next layers while it computes.

    By default FSDP2 gathers a layer's parameters in forward after the CPU has issued the layer before it, and in
    backward one layer ahead. When the CPU is late (small layers) or gathers are slow (several hosts), gathering further
    ahead hides more of the communication, and keeps the parameters of that many layers in memory. The layers are the
    innermost modules that ``configure_model`` has sharded, in the order in which they were registered. If they run in
    another order, results are the same, and memory is held longer.

    Thread: the training thread. Collective: no.

    Args:
        forward_prefetch: layers to gather ahead in forward; 0: FSDP2's default.
        backward_prefetch: layers to gather ahead in backward; 0 or 1: FSDP2's default.

    Raises:
        ConfigError: a value is no whole number of at least 0; at the start of a fit with several ranks, no module is
            sharded by ``fully_shard``.
    """

    def __init__(self, forward_prefetch: int = 1, backward_prefetch: int = 1) -> None:
        super().__init__()
        for name, value in (("forward_prefetch", forward_prefetch), ("backward_prefetch", backward_prefetch)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"{name}={value!r}: pass a number of layers, 0 for FSDP2's own way")
        self._forward = forward_prefetch
        self._backward = backward_prefetch

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        require_trainer_of(self.namespace, trainer, "FSDP2CommOverlapCallback", __name__)
        super().setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_fit_start(trainer, pl_module)
        sharded = [one for one in pl_module.modules() if hasattr(one, "set_modules_to_forward_prefetch")]
        if not sharded:
            if trainer.world_size == 1:
                logger.info("one process: there is no communication to overlap")
                return
            raise ConfigError(
                f"FSDP2CommOverlapCallback found no module sharded by fully_shard in {type(pl_module).__name__}; shard"
                " its layers in configure_model (ModelParallelStrategy), or use DDPCommOverlapCallback with"
                " strategy='ddp'"
            )
        layers = [one for one in sharded if not any(one is not other and _holds(one, other) for other in sharded)]
        if len(layers) < 2:
            logger.warning(
                "FSDP2: only %d layer is sharded, there is none to gather ahead; shard each block", len(layers)
            )
            return
        for at, layer in enumerate(layers):
            if self._forward and at + 1 < len(layers):
                layer.set_modules_to_forward_prefetch(layers[at + 1 : at + 1 + self._forward])
            if self._backward > 1 and at:
                layer.set_modules_to_backward_prefetch(layers[max(0, at - self._backward) : at][::-1])
        if trainer.global_rank == 0:
            logger.info(
                "FSDP2: %d layers gather %d ahead in forward and %d in backward",
                len(layers),
                self._forward,
                max(1, self._backward),
            )


def _holds(module: Any, other: Any) -> bool:
    return any(one is other for one in module.modules())


_adapter = AdapterClass(__name__, "FSDP2CommOverlapCallback", GathersAhead, base="callbacks:Callback")
build = _adapter.build


def __getattr__(name: str) -> Any:
    return _adapter.attribute(name)
