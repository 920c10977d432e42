"""``DDPCommOverlapCallback``: overlaps gradient reductions with the backward pass, for ``strategy="ddp"``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from resiliency.errors import ConfigError
from resiliency.plugins import _lightning
from resiliency.plugins.namespaces import AdapterClass, require_trainer_of
from resiliency.plugins.overlap_rules import DDPOverlap, ddp_overlap
from resiliency.plugins.step_hooks import StepHooks

__all__ = ["DDPCommOverlapCallback", "build"]  # noqa: F822 - DDPCommOverlapCallback is built on first use

logger = logging.getLogger(__name__)


class OverlapsReductions(StepHooks):
    """Sets the DDP arguments that decide how much communication is hidden behind the backward pass.

    Arguments that the user gave to the strategy are kept. What this callback sets is logged once per fit, on rank 0. In
    a job of one process (``devices=1``) there is no communication, and nothing is set.

    Thread: the training thread. Collective: no.

    Args:
        bucket_cap_mb: MiB of gradients that are reduced together. None: torch's 25, or less if the model's gradients
            would fill fewer than four buckets, because the last bucket can only be reduced when backward is done.
        gradient_as_bucket_view: gradients are views of the buckets, which saves a copy and its memory. None: True.
            Then a script that keeps ``param.grad`` from one step to the next sees its values change.
        static_graph: True promises that each step trains the same parameters in the same order. Torch then does not
            search for unused parameters, and activations may be checkpointed several times. None: not set, because only
            the user can promise it.

    Raises:
        ConfigError: an argument has a value that cannot work; at the start of a fit, the strategy has no DDP, was given
            another value, or accumulates gradients with ``static_graph``, which torch cannot do.
    """

    def __init__(
        self,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool | None = None,
        static_graph: bool | None = None,
    ) -> None:
        super().__init__()
        self._asked = DDPOverlap(
            bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=gradient_as_bucket_view, static_graph=static_graph
        )
        ddp_overlap(self._asked, configured={}, gradient_bytes=0)  # raises ConfigError for values that cannot work
        self._undo: Callable[[], None] = _nothing

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_undo": _nothing}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        require_trainer_of(self.namespace, trainer, "DDPCommOverlapCallback", __name__)
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        strategy = trainer.strategy
        if not hasattr(strategy, "configure_ddp"):
            if trainer.world_size == 1:
                logger.info("one process: there is no communication to overlap")
                return
            raise ConfigError(
                f"DDPCommOverlapCallback is for strategy='ddp', this Trainer has {type(strategy).__name__};"
                " FSDP2CommOverlapCallback is for ModelParallelStrategy"
            )
        self._undo()
        self._undo = _lightning.before_ddp_wraps(trainer, lambda: self._decide(trainer))

    def _decide(self, trainer: Any) -> None:
        # Not in setup, because the module may create its layers later, in configure_model.
        trained = [one for one in trainer.lightning_module.parameters() if one.requires_grad]
        arguments = _lightning.ddp_arguments(trainer)
        settings, notes = ddp_overlap(
            self._asked,
            configured=arguments,
            gradient_bytes=sum(one.numel() * one.element_size() for one in trained),
            accumulate=trainer.accumulate_grad_batches,
        )
        arguments.update(settings)
        if trainer.global_rank == 0:
            said = ", ".join(f"{name}={value}" for name, value in sorted(settings.items())) or "nothing"
            logger.info("DDP's communication: this callback has set %s", said)
            for note in notes:
                logger.warning("%s", note)

        def undo() -> None:
            """Removes the arguments, because a second fit of the Trainer, perhaps of another model, decides anew."""
            for name in settings:
                arguments.pop(name, None)

        self._undo = undo

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        self._undo()
        self._undo = _nothing


def _nothing() -> None: ...


_adapter = AdapterClass(__name__, "DDPCommOverlapCallback", OverlapsReductions, base="callbacks:Callback")
build = _adapter.build


def __getattr__(name: str) -> Any:
    return _adapter.attribute(name)
