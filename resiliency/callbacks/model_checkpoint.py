"""A drop-in ``ModelCheckpoint`` with the stock semantics that saves with the checkpoint engine.

``from resiliency.callbacks.model_checkpoint import ModelCheckpoint`` gives the class for the Lightning that is imported
(``lightning.pytorch`` or ``pytorch_lightning``); ``build(namespace)`` gives it for a named one.

The stock class's own code decides when to save, what to save, the names, top-k and exceptions. Only the storage
operations are replaced: a save is copied on every rank and committed in the background; a removal waits until a newer
save is durable (on a ramdisk: committed); ``last`` is a second name of the same step; loggers are notified once a
checkpoint is committed (on ``dirpath``'s tier, with a separate local tier: durable); and a fit without ``ckpt_path``
resumes from the newest step of its run when it is a restart of the job that wrote it.

All names requested in one hook become one save. So the callback state in each checkpoint contains that checkpoint's own
``last_model_path``; the stock class writes two files, and only the second contains it.
"""

from __future__ import annotations

import itertools
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from resiliency.callbacks.checkpointing.arguments import check_own, refuse_unknown
from resiliency.callbacks.checkpointing.committed_paths import CommittedPaths
from resiliency.callbacks.checkpointing.earlier import newest_file
from resiliency.callbacks.checkpointing.places import CheckpointPlaces, choose_places
from resiliency.callbacks.checkpointing.resume import Process
from resiliency.callbacks.checkpointing.saver import CheckpointSaver
from resiliency.callbacks.checkpointing.trainer_session import load_in_session, sessions_using, trainer_session
from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.options import CheckpointerOptions, RemoteTierOptions
from resiliency.compat import model_checkpoint as compat
from resiliency.compat.markers import UnfinishedMarkers
from resiliency.compat.model_checkpoint import OlderArguments
from resiliency.errors import TierError
from resiliency.plugins import _lightning
from resiliency.plugins.namespaces import AdapterClass, require_trainer_of
from resiliency.plugins.resume.rank_state import is_step_boundary
from resiliency.plugins.step_hooks import StepHooks, wants_log
from resiliency.plugins.strategies.base import StrategyAdapter
from resiliency.plugins.strategies.registry import adapter_for
from resiliency.runtime import heartbeat
from resiliency.runtime.start_times import callback_made
from resiliency.settings import environment
from resiliency.storage.interval import Interval
from resiliency.storage.manifest import META_DIR
from resiliency.storage.stage import Stage
from resiliency.storage.stock import is_stock
from resiliency.storage.tiers import open_tier, unknown_store
from resiliency.to_thread import to_thread

if TYPE_CHECKING:
    from resiliency.callbacks.checkpointing.stock import StockModelCheckpoint
else:
    StockModelCheckpoint = object

__all__ = ["ModelCheckpoint", "ResilientModelCheckpoint", "build"]  # noqa: F822 - built on first use

logger = logging.getLogger(__name__)

_EXCEPTION_TIMEOUT = timedelta(seconds=30)
_STRATEGIES = "docs/guarantees.md lists the strategies that it supports"
#: Methods of the stock class after which a derived class may use the file that was saved.
_FILE_METHODS = (
    "_save_checkpoint",
    "_remove_checkpoint",
    "_link_checkpoint",
    "_save_topk_checkpoint",
    "_save_monitor_checkpoint",
    "_save_none_monitor_checkpoint",
    "_save_last_checkpoint",
    "_update_best_and_save",
)


class _OfInstances:
    """Descriptor: on the class the stock class's static method, on an instance the instance method ``method``."""

    def __init__(self, method: str) -> None:
        self._method = method

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._owner, self._name = owner, name

    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        return getattr(super(self._owner, owner), self._name) if instance is None else getattr(instance, self._method)


class EngineModelCheckpoint(UnfinishedMarkers, StockModelCheckpoint):
    """Adds the checkpoint engine to a stock ``ModelCheckpoint``; see the module docstring.

    If a derived class overrides a method of the stock class that saves, links or removes a file (``_save_checkpoint``,
    ``_save_topk_checkpoint``, ``_save_last_checkpoint``, ...), the file exists when this class's method returns, as
    with the stock class.

    The stock class writes a checkpoint whose path is not below ``dirpath``, is hidden there, or is not a valid UTF-8
    file name. It writes all checkpoints when the engine does not support the strategy, when the Trainer has a
    CheckpointIO plugin of another library, or when ``torch.save`` has been replaced: the stock class calls the plugin
    or the replacement.

    Args:
        *args, **kwargs: arguments of the stock class.
        lazy: copy parameters and optimizer state while the next forward and backward run. False copies before the
            hook returns; choose it when something changes parameters between the end of a batch and the optimizer step.
        auto_resume: whether a fit without ``ckpt_path`` continues from the newest step of this run in ``dirpath``.
            None: only in the first fit of the process, and only when the launcher says that this process is a restart
            of the job that wrote that step; see :class:`resiliency.settings.Launch`. True: always. False: never. A
            trainer that has already trained continues with its state in memory, as in stock Lightning.
        exact_resume: save and restore the random generators and data loader positions of every rank. "reread": at a
            resume, also read the batches that the interrupted epoch has trained on again and drop them; needed when
            loader worker processes draw random numbers.
        local_dir: a faster folder (ramdisk, local SSD) for the newest step; ``dirpath`` is then a tier that the agent
            uploads to. When ``dirpath`` is an address, a local folder is needed; the default is ``/dev/shm/...``.
        persist: which saves also go to ``dirpath`` when ``local_dir`` is used; the last save of a training always does.
        remotes: further tiers to upload to.
        run: name of the run; None: ``RESILIENCY_RUN``, ``JOB_IDENTIFIER`` or "default".
        options: options of the engine; None: the defaults.
        flush_timeout: the longest time that the end of training waits for uploads.
        save_optim_on_train_end: False: the checkpoint that is saved when ``max_steps`` or ``max_epochs`` is reached has
            no optimizer state. None: as the stock class. ``save_optim_on_train_ends`` is another spelling of it.
        always_save_context: write module, hyperparameters, versions and command line to ``<name>-context/`` beside
            every checkpoint; save_context_on_train_end: beside the last one.
        preprocess_files: write ``cmd-args.log`` and ``git-info.log`` to the Trainer's root folder.
        use_in_cluster_local_ckpts: the job uses a local tier. With is_persistent_storage=False, ``dirpath`` is the
            folder of the local tier, and saves do not wait until files are on its disk. With True, ``dirpath`` is the
            persistent tier, and another callback saves to the local tier. With None, this callback saves to
            ``local_dir`` (when that is None: ``/local/<run>/checkpoint`` if ``/local`` is writable, else the ramdisk)
            and uploads from there to ``dirpath``.
        enable_high_scale_ckpt: True raises ConfigError; the message says what it would need.
        delete_unfinished_ckpt_on_start: delete checkpoints in ``dirpath`` that have an ``-unfinished`` marker and were
            not written by this library.
        priority: when several callbacks want to save the same step, the one with the highest priority saves it.

    Raises:
        ConfigError: an argument of this library has a value that cannot work.
        TypeError: an unknown argument, or an argument of this library with a value of the wrong type.
        Lightning's exceptions: for arguments of the stock class.
    """

    best_model_path = CommittedPaths()
    last_model_path = CommittedPaths()
    kth_best_model_path = CommittedPaths()
    best_k_models = CommittedPaths()

    def __init__(
        self,
        *args: Any,
        lazy: bool = True,
        auto_resume: bool | None = None,
        exact_resume: bool | Literal["reread"] = True,
        local_dir: str | os.PathLike[str] | None = None,
        persist: Interval | None = None,
        remotes: Sequence[RemoteTierOptions] = (),
        run: str | None = None,
        options: CheckpointerOptions | None = None,
        flush_timeout: timedelta = timedelta(minutes=10),
        save_optim_on_train_end: bool | None = None,
        save_optim_on_train_ends: bool | None = None,
        always_save_context: bool | None = None,
        save_context_on_train_end: bool | None = None,
        preprocess_files: bool | None = None,
        use_in_cluster_local_ckpts: bool | None = None,
        is_persistent_storage: bool | None = None,
        enable_high_scale_ckpt: bool | None = None,
        delete_unfinished_ckpt_on_start: bool | None = None,
        priority: int | None = None,
        **kwargs: Any,
    ) -> None:
        older = OlderArguments(
            save_optim_on_train_end=save_optim_on_train_end,
            save_optim_on_train_ends=save_optim_on_train_ends,
            always_save_context=always_save_context,
            save_context_on_train_end=save_context_on_train_end,
            preprocess_files=preprocess_files,
            use_in_cluster_local_ckpts=use_in_cluster_local_ckpts,
            is_persistent_storage=is_persistent_storage,
            enable_high_scale_ckpt=enable_high_scale_ckpt,
            delete_unfinished_ckpt_on_start=delete_unfinished_ckpt_on_start,
            priority=priority,
        )
        check_own(
            lazy=lazy,
            auto_resume=auto_resume,
            exact_resume=exact_resume,
            local_dir=local_dir,
            persist=persist,
            remotes=remotes,
            run=run,
            options=options,
            flush_timeout=flush_timeout,
        )
        refuse_unknown(kwargs, super().__init__, EngineModelCheckpoint.__init__)
        vars(self).update(older.attributes())
        self._older = older
        self._lazy = lazy
        self._auto_resume = auto_resume
        self._exact_resume = exact_resume
        self._local_dir = local_dir
        self._persist = persist or Interval()
        self._remotes = tuple(remotes)
        self._run_name = run
        self._engine_options = options or CheckpointerOptions()
        self._flush_timeout = flush_timeout
        self._saver: CheckpointSaver | None = None  # while a fit uses the engine
        self._in_own_hook = 0  # nesting depth; in it paths do not wait: the stock class reads those of saves just begun
        self._warned_of_stock_file = False
        super().__init__(*args, **kwargs)
        callback_made()

    def __getstate__(self) -> dict[str, Any]:
        """The attributes to copy or pickle, without the engine. The checkpoints at its paths exist when this returns.

        Blocks: in a fit, until the saves of these paths are committed, up to ``flush_timeout`` for each path.
        """
        if vars(self).get("_saver") is not None:
            for name in ("best_model_path", "last_model_path", "kth_best_model_path", "best_k_models"):
                getattr(self, name)  # CommittedPaths waits in its getter
        return {**vars(self), "_saver": None, "_in_own_hook": 0}

    def _generate_state_key(self, **kwargs: Any) -> str:
        """The stock class's key, so that each class reads the other's checkpoints. Derived classes have their own."""
        key = super()._generate_state_key(**kwargs)
        return key.replace(_QUALNAME, "ModelCheckpoint", 1) if type(self).__qualname__ == _QUALNAME else key

    # -- start --------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Finds earlier checkpoints and prepares the choice of the one to resume from. Collective: yes.

        Opens the engine only when the event log must contain the start of the job, or to raise on a step of an
        unsupported format.
        """
        require_trainer_of(self.namespace, trainer, "ModelCheckpoint", __name__)
        super().setup(trainer, pl_module, stage)
        _lightning.find_last_again(trainer)
        if stage == "fit" and not trainer.fast_dev_run:
            compat.fit_begins(self, trainer)
        adapter = adapter_for(trainer.strategy)
        other = _lightning.other_writer(trainer, has_adapter=adapter is not None)
        if other:
            if stage == "fit" and self._is_new_fit(trainer):
                advice = other.advice or (
                    "Without it the checkpoint engine writes them"
                    if adapter is not None and not other.is_strategy
                    else f"The checkpoint engine does not write those of {type(trainer.strategy).__name__}, whatever"
                    f" plugins the Trainer has; {_STRATEGIES}"
                )
                logger.warning(
                    "checkpoints are written by %s, as with the stock ModelCheckpoint: training waits for each save,"
                    " and auto_resume is off. %s",
                    other.words,
                    advice,
                )
            return
        sharded = adapter is not None and adapter.is_sharded
        _lightning.patch_load_checkpoint(trainer, partial(load_in_session, trainer), of_strategy=sharded)
        if stage != "fit" or trainer.fast_dev_run or not self._is_new_fit(trainer):
            return
        unsuited = self._unsuited(self.dirpath) or self._used_by_another_fit(trainer)
        if unsuited:
            logger.warning(
                "%s; Lightning's own code saves these checkpoints (slower, not verified, not used by auto_resume)",
                unsuited,
            )
            return
        if adapter is None:
            logger.log(
                logging.WARNING if trainer.is_global_zero else logging.DEBUG,
                "%s is not supported by the checkpoint engine%s; Lightning's own code saves its checkpoints (slower,"
                " not verified); %s",
                type(trainer.strategy).__name__,
                " with save_distributed_checkpoint=False"
                if getattr(trainer.strategy, "_save_distributed_checkpoint", True) is False
                else "",
                _STRATEGIES,
            )
            return
        self._use_engine(trainer, adapter)

    def _unsuited(self, dirpath: Any) -> str:
        """Why the engine cannot write to ``dirpath`` although the stock class can; "" when the engine can."""
        unknown = unknown_store(str(dirpath))
        if unknown:
            return unknown
        if str(dirpath) == "":
            return "dirpath='' means the folder that is the working directory at each save"
        if str(dirpath).startswith("memory://") and self._engine_options.agent != "embedded":
            return f"{dirpath} is memory of this process, which the agent does not share"
        return ""

    def _used_by_another_fit(self, trainer: Any) -> str:
        """Why the engine cannot be used: another fit in this process writes the same run there. "" when none does."""
        key = self._places(self.dirpath).key
        if any(session is not trainer_session(trainer) for session in sessions_using(key)):
            return f"another fit in this process saves checkpoints of run {key.run!r} to {key.directory}"
        return ""

    def _ModelCheckpoint__warn_if_dir_not_empty(self, dirpath: Any) -> None:
        """Warns as the stock class does, but looks at a local folder itself: the stock class imports every installed
        object store package for that.

        No warning when the fit may resume: the checkpoints it resumes from are expected there.
        """
        if self._auto_resume or (self._auto_resume is None and environment().launch.restarts):
            return
        if "://" in str(dirpath):
            if self._is_silent(str(dirpath)):
                return
            try:
                super()._ModelCheckpoint__warn_if_dir_not_empty(dirpath)
            except Exception as error:  # Boundary: a client library raises anything for what a proxy or store answers.
                if unknown_store(str(dirpath)):
                    raise  # the engine cannot write there, so the stock class would, and it cannot either
                logger.warning("whether %s is empty is not known: %r; training goes on", dirpath, error)
        elif self.save_top_k != 0 and os.path.isdir(dirpath) and os.listdir(dirpath):
            module = f"{self.namespace}.callbacks.model_checkpoint"
            _lightning.warn_as(module, f"Checkpoint directory {dirpath} exists and is not empty.")

    @staticmethod
    def _is_silent(dirpath: str) -> bool:
        """True when the store does not answer. The stock class would then wait for it without a limit.

        Blocks: for one short listing.
        """
        if unknown_store(dirpath):
            return False
        try:
            open_tier(dirpath, glance=True).list(f"{META_DIR}/")
        except TierError as error:
            logger.debug("%s cannot be listed: %s", dirpath, error)  # look() warns of it when it searches for steps
            return bool(error.retryable)
        return False

    def _is_new_fit(self, trainer: Any) -> bool:
        """False when this fit has set up this callback already, else True.

        Closes the session of an earlier fit whose last hooks did not reach this callback.
        """
        saver = self._saver
        if saver is None:
            return True
        if saver.session is trainer_session(trainer) and not saver.session.training:
            return False  # set up twice
        self._saver = None
        saver.session.abandon()
        return True

    def _use_engine(self, trainer: Any, adapter: StrategyAdapter) -> None:
        session = trainer_session(trainer)
        places = self._places(self.dirpath, only_files=not wants_log(trainer))
        saver = CheckpointSaver(
            self,
            session,
            adapter,
            places,
            options=self._engine_options,
            lazy=self._lazy,
            flush_timeout=self._flush_timeout,
            must_resume=bool(self._auto_resume or environment().launch.restarts),
        )
        session.register(saver)
        self._saver = saver
        if self._exact_resume:
            session.resume.keep_rank_state(reread=self._exact_resume == "reread")
        if wants_log(trainer) or session.resume.found(places.key).unsupported:
            saver.open()  # raises an error that names the format when it is unsupported
        session.resume.intercept()
        session.save_after_slurm()
        if self._auto_resume is not False and not self.save_weights_only and trainer.global_step == 0:
            session.resume.offer(places.key, asked=self._auto_resume)

    def _places(self, dirpath: str | os.PathLike[str] | None, *, only_files: bool = False) -> CheckpointPlaces:
        return choose_places(
            str(dirpath),
            local_dir=self._local_dir,
            persist=self._persist,
            remotes=self._remotes,
            run=self._run_name,
            weights_only=self.save_weights_only,
            only_files=only_files,
            in_cluster=self._older.wants_local_tier,
            durable=not self._older.is_local_tier,
        )

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        found = super()._find_last_checkpoints(trainer)
        if self.save_weights_only or trainer.state.fn != "fit":
            return found
        adapter = adapter_for(trainer.strategy)
        if adapter is None or _lightning.other_writer(trainer, has_adapter=True):
            return found
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dirpath = self.dirpath or self._ModelCheckpoint__resolve_ckpt_dir(trainer)
            if self._unsuited(dirpath):
                return found
            key = self._places(dirpath).key
        ours = {path for path in found if not is_stock(path)}
        # "last" means the newest step, whatever its name, so that every rank finds the same step.
        newest = {key.newest} if os.path.isdir(key.newest) else to_thread(lambda: newest_file(key, prefer=ours))
        candidates = newest or ours
        trainer_session(trainer).resume.last_candidates |= candidates | {key.newest}
        return (found - ours) | candidates

    # -- storage ------------------------------------------------------------------------------------------------------

    def _saver_of(self, path: str) -> CheckpointSaver | None:
        """The saver when the engine writes and removes this path; None when the stock class does."""
        return self._saver if self._saver is not None and self._saver.name_of(path) is not None else None

    def _should_skip_saving_checkpoint(self, trainer: Any) -> bool:
        skips: bool = super()._should_skip_saving_checkpoint(trainer)
        return skips or compat.leaves_step_to_another(self, trainer)

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        self._save_file(trainer, filepath)
        compat.checkpoint_saved(self, trainer, filepath)

    def _save_file(self, trainer: Any, filepath: str) -> None:
        saver = self._saver_of(filepath)
        if saver is None or saver.leaves_to_stock():
            self._warn_of_stock_file(filepath)
            super()._save_checkpoint(trainer, filepath)
            return
        before = self._last_global_step_saved, self._last_checkpoint_saved
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath
        if _lightning.save_is_wrapped(trainer):
            try:
                saver.save_by_trainer(filepath)
            except BaseException:
                self._last_global_step_saved, self._last_checkpoint_saved = before
                raise
            return
        saver.before_request = saver.before_request or before
        if self._uses_files:
            saver.save_at_once(filepath, self._flush_timeout)
        else:
            saver.save(filepath)

    @property
    def _uses_files(self) -> bool:
        """True when code of others may use a file as soon as it is saved."""
        return any(map(self._overrides, _FILE_METHODS))

    def _overrides(self, method: str) -> bool:
        """True when a derived class overrides the method, or other code has replaced it on the instance."""
        if method in vars(self):
            return True
        derived = itertools.takewhile(lambda base: base is not EngineModelCheckpoint, type(self).__mro__)
        return any(method in vars(base) for base in derived)

    def _warn_of_stock_file(self, filepath: str) -> None:
        if self._saver is not None and not self._saver.left_to_stock and not self._warned_of_stock_file:
            self._warned_of_stock_file = True
            logger.warning(
                "%s is not below %s, or hidden there, or not a name that the engine can give; such checkpoints are"
                " written by the stock class (slow, not verified, not used by auto_resume); pass the folder as"
                " dirpath=",
                filepath,
                self._saver.places.dirpath,
            )

    _link_checkpoint = _OfInstances("_link")

    def _link(self, trainer: Any, filepath: str, linkpath: str) -> None:
        saver = self._saver_of(linkpath)
        wrapped = _lightning.save_is_wrapped(trainer)  # and may have moved the file, or not written it
        if saver is None or wrapped or (self._uses_files and os.path.isfile(filepath)):
            super()._link_checkpoint(trainer, filepath, linkpath)
        else:
            saver.link(filepath, linkpath)

    def file_exists(self, filepath: Any, trainer: Any) -> bool:
        saver = self._saver_of(str(filepath))
        return super().file_exists(filepath, trainer) if saver is None else saver.is_taken(str(filepath))

    def _should_remove_checkpoint(self, trainer: Any, previous: str, current: str) -> bool:
        saver = self._saver
        if saver is None or saver.name_of(previous) is None:
            return super()._should_remove_checkpoint(trainer, previous, current)
        return previous != current and not saver.is_protected(previous)

    def _remove_checkpoint(self, trainer: Any, filepath: str) -> None:
        compat.checkpoint_removed(self, trainer, str(filepath))
        # A file that the stock class wrote is removed at once only when its replacement is such a file, too.
        saver = self._saver_of(str(filepath)) or self._saver_of(self._last_checkpoint_saved)
        if saver is None or (is_stock(str(filepath)) and is_stock(self._last_checkpoint_saved)):
            super()._remove_checkpoint(trainer, filepath)
            if saver is not None:
                saver.give_up_names([str(filepath)])
        else:
            saver.remove(str(filepath))

    # -- hooks of training --------------------------------------------------------------------------------------------

    @contextmanager
    def _own_hook(self) -> Iterator[None]:
        self._in_own_hook += 1
        try:
            yield
        finally:
            self._in_own_hook -= 1

    @contextmanager
    def _collect(self, *, overlap: bool = False) -> Iterator[None]:
        """Turns all saves requested in the block into one step with several names, written once.

        ``overlap``: tensors may be copied after the hook returns, while the next batch runs.
        """
        with self._own_hook(), nullcontext() if self._saver is None else self._saver.collect(overlap=overlap):
            yield

    def _wait_until_committed(self, paths: Iterable[str]) -> None:
        if self._saver is not None and not self._in_own_hook:
            self._saver.wait_for(paths, self._flush_timeout)

    def state_dict(self) -> dict[str, Any]:
        with self._own_hook():  # called while a checkpoint is being saved: reading a path must not wait for that save
            return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        with self._own_hook():
            super().load_state_dict(state_dict)

    def _fence(self) -> None:
        if self._saver is not None:
            self._saver.session.fence()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        if self._saver is not None:
            self._saver.session.training = True
            self._saver.session.resume.set_aside.end()
            Process.begins_to_train()
            self._saver.warm_up()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._settle()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        super().on_before_backward(trainer, pl_module, loss)
        if self._saver is not None:
            self._saver.session.resume.set_aside.see(loss)
        self._settle()

    def _settle(self) -> None:
        """Lets a save that is copied by now be committed before the step's end, which may be minutes away."""
        if self._saver is not None:
            self._saver.session.settle()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._saver is None:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            return
        self._saver.session.deliver_outcomes()
        module_follows = _lightning.module_overrides(trainer, "on_train_batch_end")
        if module_follows:
            # The module's hook may change tensors that are still being copied. While gradients accumulate, no optimizer
            # step has fenced that copy.
            self._fence()
        boundary = is_step_boundary(trainer)
        if not boundary and (self.monitor is None or self._train_time_interval is not None):
            # Not within an optimizer step. At its end the stock class checks its triggers again; only a monitored
            # metric may have another value by then.
            return
        if _saves_kept_weights(pl_module):
            # The stock class puts other weights into the module during its hook, so each save must copy inside it.
            with self._own_hook():
                super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            return
        if module_follows:
            # The module's hook runs after this hook, and what it changes belongs to this step.
            with self._saver.collect_for_later():
                if boundary:
                    self._save_if_wanted(trainer, self._saver)
                super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            return
        # The next batch would add to half accumulated gradients while they are copied.
        with self._collect(overlap=boundary and _lightning.next_is_another_batch(trainer)):
            if boundary:
                self._save_if_wanted(trainer, self._saver)
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._lazy:
            self._saver.session.batch_ended()

    def _save_if_wanted(self, trainer: Any, saver: CheckpointSaver) -> None:
        """Saves this step, without a name, if a supervisor has asked for it, as it does before it restarts the job, or
        if SLURM is about to requeue the job."""
        if self.save_weights_only:
            return
        step = trainer.global_step
        if heartbeat.save_is_wanted(step) or saver.session.take_wanted_save(step):
            saver.save_unnamed()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._fence()
        super().on_before_optimizer_step(trainer, pl_module, optimizer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._fence()
        super().on_validation_start(trainer, pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        with self._collect():
            super().on_validation_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._fence()
        with self._collect():
            super().on_train_epoch_end(trainer, pl_module)
        if _lightning.users_code_has(trainer, "on_train_epoch_start"):
            # That hook comes next, and may list the folder, or upload what is new in it. Hooks of batches do not wait.
            self._wait_until_committed({self.best_model_path, self.last_model_path, *self.best_k_models})

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        with self._collect():
            super().on_train_end(trainer, pl_module)
        self._fence()
        if self._saver is not None and self._saver.engine is not None:
            # Before strategies tear down the model. teardown() waits for the slower tiers.
            self._saver.settle(Stage.COMMITTED, self._flush_timeout)
            self._saver.wait_for_all_ranks()
        compat.training_ended(self, trainer)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        compat.warn_of_missing_optimizer(checkpoint, trainer)
        super().on_load_checkpoint(trainer, pl_module, checkpoint)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._saver is None:
            super().on_exception(trainer, pl_module, exception)
            return
        try:
            self._fence()
            with self._collect():
                super().on_exception(trainer, pl_module, exception)
            # With several ranks wait for RECORDED only: the other ranks may never get here.
            self._saver.settle(Stage.RECORDED if trainer.world_size > 1 else Stage.COMMITTED, _EXCEPTION_TIMEOUT)
        except Exception:  # Boundary: the user must get the exception that ended training, not a later one.
            logger.warning("no checkpoint could be saved after the exception", exc_info=True)
        finally:
            self._stop_saving(lambda engine: engine.close(flush=False, reason="exception"))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        if stage != "fit" or self._saver is None:
            return
        left = timedelta(0)
        try:
            left = self._saver.settle(Stage.DURABLE, self._flush_timeout)
        finally:
            self._stop_saving(lambda engine: engine.close(timeout=left))

    def _stop_saving(self, close_engine: Callable[[Checkpointer], None]) -> None:
        saver, self._saver = self._saver, None
        if saver is not None:
            saver.close(close_engine)


def _saves_kept_weights(module: Any) -> bool:
    """True when the stock class (2.6) saves weights that the module kept from before the optimizer step: with manual
    optimisation, when the module keeps them in ``saved_models``.
    """
    return not module.automatic_optimization and bool(getattr(module, "saved_models", None))


_QUALNAME = "ResilientModelCheckpoint"

_adapter = AdapterClass(
    __name__,
    "ModelCheckpoint",
    StepHooks,
    EngineModelCheckpoint,
    base="callbacks:ModelCheckpoint",
    qualname=_QUALNAME,
)
build = _adapter.build


def __getattr__(name: str) -> Any:
    return _adapter.attribute(name)
