"""``ElasticityCallback``: lets a training job continue after a restart with another number of data parallel ranks.

``from resiliency.callbacks.elasticity import ElasticityCallback`` gives the class for the Lightning that is imported
(``lightning.pytorch`` or ``pytorch_lightning``); ``build(namespace)`` gives it for a named one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from resiliency.callbacks.checkpointing.trainer_session import places_loaders
from resiliency.errors import ConfigError
from resiliency.plugins import _lightning
from resiliency.plugins.elastic_data import Dealing, EpochPosition, dealing_of, make_reproducible, place_rest
from resiliency.plugins.elastic_progress import (
    begin_epoch,
    data_parallel_ranks,
    end_epoch,
    move_to_batch,
    place_in_epoch,
    train_loaders,
)
from resiliency.plugins.elastic_rates import read_rates, write_rates
from resiliency.plugins.elastic_rules import RULES, Rate, accumulation, rate_factor, rescaled
from resiliency.plugins.namespaces import AdapterClass, require_trainer_of
from resiliency.plugins.step_hooks import StepHooks
from resiliency.settings import lightning_seed

__all__ = ["ElasticityCallback", "build"]  # noqa: F822 - ElasticityCallback is built on first use

logger = logging.getLogger(__name__)

_VERSION = 1


class ContinuesAtAnySize(StepHooks):
    """Continues a training that restarts with another number of data parallel ranks.

    Each checkpoint, of this library or stock, stores the number of ranks in this callback's state. When a fit resumes
    with another number, the callback applies ``rule``, deals the rest of the interrupted epoch to the new ranks, calls
    ``on_world_resize`` and logs one line that says what was done. The rules compute from the size and settings that the
    job began with, so that a job that returns to an earlier size gets the numbers that it had at that size.

    In an interrupted epoch no sample is trained on twice and none is left out, except those that stock Lightning's
    sampler repeats (or leaves out) at the end of an epoch that does not divide by the number of ranks: fewer samples
    than there are ranks. Samples whose gradients were still being accumulated count as not seen. In a job of one rank a
    shuffled loader gets the order of torch's ``DistributedSampler`` instead of stock Lightning's, because jobs of
    several ranks have that order; the log says so.

    Thread: the training thread. Collective: no. Costs some microseconds per batch.

    Args:
        on_world_resize: called as ``on_world_resize(old, new, trainer)`` on every rank at the start of training, after
            everything is restored and the rule is applied. An exception that it raises ends the fit.
        rule: "keep_global_batch" sets ``accumulate_grad_batches`` so that the global batch stays the same; "linear_lr"
            and "sqrt_lr" multiply the learning rates, also those stored in schedulers, by the ratio of the sizes or by
            its square root. None: change nothing.
        nearest: when the global batch cannot be kept, take the nearest one and warn.
        exact_epoch: deal the rest of an interrupted epoch to the ranks. Needs one map-style loader whose order follows
            from seed and epoch: a stock sampler or torch's ``DistributedSampler``.

    Raises:
        ConfigError: an argument has a value that cannot work; at the start of a fit, the order of a loader is not
            known, or the global batch cannot be divided among the ranks.
    """

    def __init__(
        self,
        on_world_resize: Callable[[int, int, Any], None] | None = None,
        rule: str | None = None,
        *,
        nearest: bool = False,
        exact_epoch: bool = True,
    ) -> None:
        super().__init__()
        if on_world_resize is not None and not callable(on_world_resize):
            raise ConfigError(f"on_world_resize={on_world_resize!r}: pass a function of (old, new, trainer)")
        if rule is not None and rule not in RULES:
            raise ConfigError(f"rule={rule!r}; pass one of {', '.join(map(repr, RULES))}, or None")
        if nearest and rule != "keep_global_batch":
            raise ConfigError(f"nearest=True is about rule='keep_global_batch', and rule is {rule!r}")
        self._on_world_resize = on_world_resize
        self._rule = rule
        self._nearest = nearest
        self._exact_epoch = exact_epoch
        self._trainer: Any = None  # while a fit runs
        self._forget()

    def _forget(self) -> None:
        """Resets everything that belongs to one fit."""
        self._size = 1
        self._size_before: int | None = None  # number of ranks that wrote the restored checkpoint
        self._began_with: dict[str, int] = {}
        self._rates: list[Rate] = []
        self._factor = 1.0
        self._position: EpochPosition | None = None
        self._restored = False  # _position comes from a checkpoint, and the loader is not placed there yet
        self._trains = False
        self._sampler: Any = None  # sampler of the train loader
        self._whole: Dealing | None = None
        self._rest: Dealing | None = None  # rest of the interrupted epoch that this fit continues
        self._rest_epoch = -1
        self._epoch_ended = False  # the epoch of the restored checkpoint was at its end
        self._undo: list[Callable[[], None]] = []

    def __getstate__(self) -> dict[str, Any]:
        """A copy made in a fit has no trainer, no sampler and nothing to undo."""
        return {**vars(self), "_trainer": None, "_sampler": None, "_undo": []}

    @property
    def continues_epochs(self) -> bool:
        """True when a resumed fit continues an interrupted epoch with the rest of its samples."""
        return self._exact_epoch

    # -- state --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        self._note_position()  # a callback before this one may save at the end of a batch
        return {
            "version": _VERSION,
            "size": self._size,
            "began_with": dict(self._began_with),
            "factor": self._factor,
            "rates": [[rate.base, rate.placed] for rate in self._rates],
            "position": None if self._position is None else self._position.to_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["version"] > _VERSION:
            raise ConfigError(
                f"the checkpoint's state of ElasticityCallback has version {state_dict['version']}, this library reads"
                f" up to {_VERSION}; update it"
            )
        self._size_before = state_dict["size"]
        self._began_with = dict(state_dict["began_with"])
        self._factor = state_dict["factor"]
        self._rates = [Rate(base=base, placed=placed) for base, placed in state_dict["rates"]]
        position = state_dict["position"]
        self._position = None if position is None else EpochPosition(**position)
        self._restored = self._position is not None
        if self._trainer is not None:
            self._set_accumulation(self._trainer)  # now, because configure_optimizers may compute the number of steps

    # -- start --------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        require_trainer_of(self.namespace, trainer, "ElasticityCallback", __name__)
        super().setup(trainer, pl_module, stage)
        if stage != "fit" or trainer.fast_dev_run:
            return
        self._end()
        self._forget()
        self._check(trainer, pl_module)
        self._trainer = trainer
        self._size = data_parallel_ranks(trainer)
        self._began_with = {"size": self._size, "accumulated": trainer.accumulate_grad_batches}
        if self._exact_epoch:
            self._undo.append(_lightning.prepare_loaders(trainer, lambda loader: self._prepare(trainer, loader)))

    def _check(self, trainer: Any, pl_module: Any) -> None:
        limit = trainer.limit_train_batches
        if self._exact_epoch and (limit != 1.0 or isinstance(limit, int)):  # 1 is one batch, 1.0 is all
            raise ConfigError(
                f"limit_train_batches={limit} (or overfit_batches) cuts each epoch, so that what"
                " is left of it is not defined at another number of ranks; leave it out, or pass"
                " ElasticityCallback(exact_epoch=False)"
            )
        if self._rule != "keep_global_batch":
            return
        if not pl_module.automatic_optimization:
            raise ConfigError(
                "rule='keep_global_batch' sets accumulate_grad_batches, which manual optimisation does not use; use"
                " on_world_resize"
            )
        if any(type(one).__name__ == "GradientAccumulationScheduler" for one in trainer.callbacks):
            raise ConfigError(
                "rule='keep_global_batch' and GradientAccumulationScheduler both set accumulate_grad_batches; leave one"
                " out"
            )

    def _set_accumulation(self, trainer: Any) -> None:
        if self._rule != "keep_global_batch":
            return
        given = trainer.accumulate_grad_batches
        began_with, accumulated = self._began_with["size"], self._began_with["accumulated"]
        if given != accumulated:
            logger.warning(
                "accumulate_grad_batches=%d of the Trainer is not used: the job began with %d, on %d ranks, and"
                " rule='keep_global_batch' keeps that global batch",
                given,
                accumulated,
                began_with,
            )
        chosen = accumulation(began_with=began_with, accumulated=accumulated, size=self._size, nearest=self._nearest)
        if chosen * self._size != accumulated * began_with:
            logger.warning(
                "the global batch is now %d rank batches, not %d: %d ranks accumulate %d batches",
                chosen * self._size,
                accumulated * began_with,
                self._size,
                chosen,
            )
        trainer.accumulate_grad_batches = chosen

        def undo() -> None:
            trainer.accumulate_grad_batches = given

        self._undo.append(undo)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        if self._trainer is None:
            return
        loaders = train_loaders(trainer)
        if self._exact_epoch and loaders > 1:
            raise ConfigError(
                f"there are {loaders} train loaders, of which the positions are not kept over a resize; pass"
                " ElasticityCallback(exact_epoch=False) to begin an interrupted epoch anew"
            )
        if self._epoch_ended:
            begin_epoch(trainer)
        self._scale_rates(trainer)
        old, new = self._size_before, self._size
        if old is None or old == new:
            return
        _lightning.tell_user(trainer, f"World resized: {old} -> {new} data parallel ranks. {self._said(trainer)}")
        if self._on_world_resize is not None:
            self._on_world_resize(old, new, trainer)

    def _said(self, trainer: Any) -> str:
        parts = []
        if self._rule == "keep_global_batch":
            parts.append(f"Gradients of {trainer.accumulate_grad_batches} batches are accumulated.")
        elif self._rule is not None:
            parts.append(f"Learning rates are {self._factor:g} times those that the job began with.")
        if self._rest is not None and self._position is not None:
            parts.append(
                f"Epoch {self._rest_epoch} goes on after {self._rest.begun_at} of its {self._rest.samples} samples."
            )
        return " ".join(parts)

    def _scale_rates(self, trainer: Any) -> None:
        optimizers = trainer.optimizers
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        now = read_rates(optimizers, schedulers)
        if not self._rates:
            self._rates = [Rate(base=value / self._factor, placed=value) for value in now]
        factor = rate_factor(self._rule, began_with=self._began_with["size"], size=self._size)
        if factor == self._factor:
            return
        chosen = rescaled(self._rates, now, before=self._factor, factor=factor)
        write_rates(optimizers, schedulers, [rate.placed for rate in chosen])
        placed = read_rates(optimizers, schedulers)  # read back, because a rate that is a tensor rounds
        self._rates = [replace(rate, placed=value) for rate, value in zip(chosen, placed, strict=True)]
        self._factor = factor

    # -- data ---------------------------------------------------------------------------------------------------------

    def _prepare(self, trainer: Any, loader: Any) -> None:
        """Places the train loader. Lightning calls it with each loader before it opens it."""
        if self._trainer is not trainer or not trainer.training:
            return
        if self._size == 1:
            undo = make_reproducible(loader, lightning_seed())
            if undo is not None:
                self._undo.append(undo)
                if loader.sampler.shuffle:
                    logger.info(
                        "the train loader is shuffled in the order of torch's DistributedSampler, from seed %d and the"
                        " epoch, which other numbers of ranks have too",
                        loader.sampler.seed,
                    )
        self._whole = dealing_of(loader)
        self._sampler = loader.sampler
        position, restored = self._position, self._restored
        self._restored = False
        if position is None or not restored:
            return
        if position.samples != self._whole.samples:
            logger.warning(
                "the data set had %d samples at the save and has %d: which of them were seen in epoch %d is not known",
                position.samples,
                self._whole.samples,
                position.epoch,
            )
            return
        begins = position.begun_at if places_loaders(trainer) else position.seen
        if places_loaders(trainer) and begins == 0:
            return  # the epoch began in Lightning's own order, and exact_resume restores each rank's position in it
        if position.finished and not places_loaders(trainer):
            loader.sampler.set_epoch(position.epoch + 1)  # workers draw indices before Lightning sets the epoch
            end_epoch(trainer, self._whole.batches)
            self._epoch_ended = True
            return
        rest = replace(self._whole, begun_at=begins)
        self._rest, self._rest_epoch = rest, position.epoch
        self._undo.append(place_rest(loader, position, rest))
        if not places_loaders(trainer):
            _lightning.suppress_mid_epoch_warning(trainer)  # because the epoch continues where it was interrupted
            move_to_batch(trainer, self._whole.batches - rest.batches)
            self._position = replace(position, begun_at=begins)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._trains = True  # before the first batch, the trainer's counts are those of the restored checkpoint

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._note_position()

    def _note_position(self) -> None:
        whole, trainer, sampler = self._whole, self._trainer, self._sampler
        place = place_in_epoch(trainer) if trainer is not None and self._trains else None
        if place is None or whole is None:
            return
        epoch, done = place
        dealing = self._rest if self._rest is not None and self._rest_epoch == epoch else whole
        done -= whole.batches - dealing.batches
        taken_up = self._position if dealing is self._rest else None
        self._position = EpochPosition(
            epoch=epoch,
            seen=dealing.seen_after(done),
            begun_at=dealing.begun_at,
            samples=whole.samples,
            seed=sampler.seed if taken_up is None else taken_up.seed,
            shuffle=sampler.shuffle if taken_up is None else taken_up.shuffle,
            finished=done >= dealing.batches,
        )

    # -- end ----------------------------------------------------------------------------------------------------------

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        self._end()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        if stage == "fit":
            self._end()

    def _end(self) -> None:
        """Undoes all changes that this callback made to the trainer and its loaders. Idempotent."""
        undo, self._undo, self._trainer = self._undo, [], None
        for one in reversed(undo):
            one()


_adapter = AdapterClass(__name__, "ElasticityCallback", ContinuesAtAnySize, base="callbacks:Callback")
build = _adapter.build


def __getattr__(name: str) -> Any:
    return _adapter.attribute(name)
