"""``AutoCheckpointCallback``: saves a checkpoint and exits when the job is preempted; the next start resumes from it.

``from resiliency.callbacks.autocheckpoint import AutoCheckpointCallback`` gives the class for the Lightning that is
imported (``lightning.pytorch`` or ``pytorch_lightning``); ``build(namespace)`` gives it for a named one.

Stock Lightning answers SIGTERM with a collective operation in the signal handler. It hangs unless all ranks are at the
same place, which they hardly ever are, and it exits with 0, which launchers take for success. Here a signal only sets a
flag. The rank that got the notice announces it to the other ranks through the job's store, each rank publishes the
batch it is in, and all ranks stop at the end of the latest of these batches (:mod:`resiliency.preemption.position`).
Without a notice no step waits for anything.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from resiliency.callbacks._notice_watch import NoticeWatch, Preempted
from resiliency.callbacks.checkpointing.saver import CheckpointSaver
from resiliency.callbacks.model_checkpoint import EngineModelCheckpoint
from resiliency.callbacks.model_checkpoint import build as build_model_checkpoint
from resiliency.checkpoint.ticket import Ticket
from resiliency.errors import ConfigError, ResiliencyError, TierError
from resiliency.launch.leaving import (
    end_loader_workers,
)
from resiliency.plugins import _lightning
from resiliency.plugins.namespaces import AdapterClass, require_trainer_of
from resiliency.plugins.nemo_checkpoints import nemo_checkpoint, save_last
from resiliency.plugins.resume.rank_state import is_step_boundary
from resiliency.plugins.step_hooks import StepHooks
from resiliency.preemption.shield import Shield
from resiliency.preemption.signals import has_native_handler
from resiliency.preemption.sources import metadata_address
from resiliency.preemption.stop import end_process
from resiliency.runtime.closing import close_when_left
from resiliency.runtime.exit_codes import PREEMPTED
from resiliency.storage.stage import Stage
from resiliency.storage.tiers import open_tier

__all__ = ["AutoCheckpointCallback", "Preempted", "build"]  # noqa: F822 - AutoCheckpointCallback is built on first use

logger = logging.getLogger(__name__)

#: File name, without the extension, of the checkpoint that is saved at a preemption.
FILE_NAME = "preempted"
#: Share of the remaining grace period within which the save must be committed; the rest is for slower tiers.
_COMMIT_SHARE = 0.6


class SavesWhenPreempted(StepHooks):
    """Saves the same step on all ranks and exits when one rank gets a notice that the job will be preempted.

    A notice is one of ``signals``, the appearance of ``notice_file``, or a preemption announced by Google Cloud's
    metadata server. All ranks agree on a batch at most two batches ahead. At its end (with gradient accumulation, at
    the end of the optimizer step) all ranks save, wait until the save is committed on the fastest tier and, if time is
    left, durable on the slower tiers, and leave ``fit`` with :class:`Preempted`, a ``SystemExit``. A rank that does not
    reach that batch within half of the grace period (its data loader is stuck, another rank is lost, a validation is
    long) is interrupted where it is and saves the last step that it has finished. A process that is still running at
    the end of the grace period is ended.

    The checkpoint is the newest step of the run of the Trainer's first
    :mod:`~resiliency.callbacks.model_checkpoint` callback (with ``checkpoint_dir``, the first that saves there), and a
    restart resumes from it as from any other step. Its file is ``preempted.ckpt``; it is removed once the next start
    has saved a newer checkpoint. While the file exists, every fit without ``ckpt_path`` resumes from this run, unless
    ``auto_resume`` is False: no launcher need say that it is a restart. Without such a callback this one keeps a run of
    its own in ``checkpoint_dir`` and resumes from there. In NeMo the checkpoint is the ``-last`` of NeMo's own
    ``ModelCheckpoint``, which ``AutoResume`` takes.

    Lightning's handler for SIGTERM is replaced while a fit trains; a SIGTERM handler of the user is still called. Under
    SLURM with ``auto_requeue``, Lightning's handler for the requeue signal is called when all ranks have stopped at the
    agreed batch. When the user has a handler for another signal than SIGTERM, that handler stays in place, and the
    signal is not a notice.

    Thread: the training thread. Collective: at the start of training. Costs some microseconds per batch.

    Args:
        checkpoint_dir: folder or address for the checkpoint; None: that of the Trainer's checkpoint callback.
        grace: time from the notice until the processes exit. Choose it below the time after which they are killed
            (``terminationGracePeriodSeconds`` of Kubernetes, ``KillWait`` of SLURM). At least one second.
        signals: the signals that are notices.
        notice_file: a path that is looked for every second. It may be on a shared folder: the notice of one rank counts
            for all ranks.
        metadata_server: address of the metadata server; "auto": Google's, on a machine in Google Cloud; None: none.
        exit_code: exit code of the processes, 1 to 255. ``resiliency run`` reads the default as "preempted, start again
            to resume".

    Raises:
        ConfigError: an argument has a value that cannot work.
    """

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        *,
        grace: timedelta = timedelta(seconds=25),
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1),
        notice_file: str | os.PathLike[str] | None = None,
        metadata_server: str | None = "auto",
        exit_code: int = PREEMPTED,
    ) -> None:
        super().__init__()
        if not isinstance(grace, timedelta) or grace < timedelta(seconds=1):
            raise ConfigError(f"grace={grace!r}: pass a timedelta of at least a second, as timedelta(seconds=25)")
        unknown = [number for number in signals if number not in set(signal.valid_signals()) - _NOT_CAUGHT]
        if unknown:
            raise ConfigError(f"signals={signals!r}: {unknown} cannot be caught; pass numbers as signal.SIGTERM")
        if not isinstance(exit_code, int) or not 0 < exit_code < 256:
            raise ConfigError(f"exit_code={exit_code!r}: pass a number from 1 to 255; 0 says that the job has finished")
        self._checkpoint_dir = None if checkpoint_dir is None else os.fspath(checkpoint_dir)
        self._grace = grace
        self._signals = tuple(signals)
        self._notice_file = None if notice_file is None else os.fspath(notice_file)
        self._metadata_server = metadata_server
        self._exit_code = exit_code
        self._own: Any = None  # a checkpoint callback that is not in the Trainer's list
        self._folder_may_change = False  # with the version of a logger
        self._watch: NoticeWatch | None = None
        self._undo: Callable[[], None] = _nothing

    def __getstate__(self) -> dict[str, Any]:
        """A copy made in a fit does not listen for notices."""
        return {**vars(self), "_watch": None, "_own": None, "_undo": _nothing}

    # -- the checkpoint callback that saves ---------------------------------------------------------------------------

    def _others(self, trainer: Any) -> list[EngineModelCheckpoint]:
        """The Trainer's checkpoint callbacks of this library that save more than weights, so that a fit can resume."""
        found = [one for one in trainer.callbacks if isinstance(one, EngineModelCheckpoint)]
        return [one for one in found if not one.save_weights_only]

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        require_trainer_of(self.namespace, trainer, "AutoCheckpointCallback", __name__)
        super().setup(trainer, pl_module, stage)
        if stage != "fit" or trainer.fast_dev_run:
            return
        self._undo()
        undo: list[Callable[[], None]] = []
        undo.append(_lightning.prepare_loaders(trainer, lambda one: undo.append(self._shield(trainer, one))))
        undo.append(_lightning.after_signal_handlers(trainer, lambda: self._begin(trainer)))

        def undo_all() -> None:
            for one in undo:
                one()

        self._undo = undo_all
        if nemo_checkpoint(trainer) is not None:
            return  # NeMo's AutoResume decides what is resumed
        others = self._others(trainer)
        wanted = self._checkpoint_dir
        if not others or (wanted is not None and not any(_is_dir_of(one, wanted) for one in others)):
            folder = wanted or getattr(trainer.checkpoint_callback, "dirpath", None)
            self._folder_may_change = folder is None
            asked = True if self._was_preempted(trainer, folder) else None
            self._own = build_model_checkpoint(self.namespace)(
                folder, save_top_k=0, filename=FILE_NAME, auto_resume=asked
            )
            self._own.setup(trainer, pl_module, stage)
            return
        self._folder_may_change = all(one.dirpath is None for one in others)
        for one in others:  # Lightning sets them up after this one
            if one._auto_resume is None and self._was_preempted(trainer, one.dirpath):
                one._auto_resume = True

    def _was_preempted(self, trainer: Any, folder: str | os.PathLike[str] | None) -> bool:
        """True when ``preempted.ckpt`` is in the folder: the job was preempted, has not saved since, and must resume.

        False, with a warning, when the folder cannot be listed. Collective: yes.
        """
        found = False
        if trainer.is_global_zero and folder is not None:
            name = FILE_NAME + ".ckpt"
            try:
                found = any(one.key == name for one in open_tier(os.fspath(folder), glance=True).list(name))
            except TierError as error:
                logger.warning("whether the job was preempted is not known: %s", error)
        return bool(trainer.strategy.broadcast(found))

    def _shield(self, trainer: Any, loader: Any) -> Callable[[], None]:
        """Makes the loader's worker processes ignore ``signals``, which are meant for the rank. Returns the undo."""
        if not getattr(loader, "num_workers", 0) or not hasattr(loader, "worker_init_fn"):
            return _nothing
        before = loader.worker_init_fn
        _lightning.add_worker_seeds(trainer, loader)  # as Lightning would later, which it does not if a function is set
        shield = loader.worker_init_fn = Shield(self._signals, loader.worker_init_fn)

        def undo() -> None:
            if loader.worker_init_fn is shield:
                loader.worker_init_fn = before

        return undo

    def _saver(self, trainer: Any) -> CheckpointSaver | None:
        """The saver of the callback whose run the checkpoint belongs to; None when Lightning's own code saves."""
        if self._own is not None:
            return self._own._saver  # type: ignore[no-any-return]
        others = self._others(trainer)
        if self._checkpoint_dir is not None:
            others = [one for one in others if _is_dir_of(one, self._checkpoint_dir)]
        return next((one._saver for one in others if one._saver is not None), None)

    # -- hooks --------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        if trainer.fast_dev_run:
            return
        if self._own is not None:
            self._own.on_train_start(trainer, pl_module)
        saver = self._saver(trainer)
        if saver is not None:
            saver.open()  # now, because it is collective and could not be opened while a rank is stuck
            path = self._path(trainer, saver)
            if saver.is_taken(path) and not saver.is_protected(path):
                saver.remove(path)  # takes effect once a newer checkpoint is durable
        if self._watch is not None:
            self._watch.saver = saver

    def _begin(self, trainer: Any) -> None:
        """Starts to listen for notices. Collective: yes."""
        if self._watch is not None:
            self._watch.close()
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "the fit does not run in the main thread, which alone gets signals: no signal is a preemption notice"
            )
            signals: tuple[int, ...] = ()
        else:
            signals = tuple(number for number in self._signals if _is_free(trainer, number))
        self._watch = NoticeWatch(
            trainer,
            grace_s=self._grace.total_seconds(),
            signals=signals,
            notice_file=self._notice_file,
            metadata_server=metadata_address(self._metadata_server),
            exit_code=self._exit_code,
        )
        close_when_left(self._watch, NoticeWatch.close)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._watch is not None:
            self._watch.stop.position.batch_began()
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._watch is not None:
            self._watch.stepping = True
        if self._own is not None:
            self._own.on_before_optimizer_step(trainer, pl_module, optimizer)
        super().on_before_optimizer_step(trainer, pl_module, optimizer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._own is not None:
            self._own.on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        watch = self._watch
        if watch is None:
            return
        watch.stepping = False
        if watch.stop.batch_ended() and is_step_boundary(trainer):
            # After the hooks of all callbacks and of the module, because what they change belongs to this step.
            _lightning.after_batch_end_hooks(trainer, lambda: self._leave_here(trainer, watch))

    def _leave_here(self, trainer: Any, watch: NoticeWatch) -> None:
        watch.leaves()
        _lightning.let_children_leave(trainer)
        self._requeue(trainer, watch)
        self._save(trainer, watch)
        raise Preempted(self._exit_code)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_validation_start(trainer, pl_module)
        if self._own is not None:
            self._own.on_validation_start(trainer, pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_validation_end(trainer, pl_module)
        if self._own is not None:
            self._own.on_validation_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        if self._own is not None:
            self._own.on_train_epoch_end(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_end(trainer, pl_module)
        if self._watch is not None:
            # No batch is left at which all ranks could stop. They end by themselves soon, or at the end of the grace.
            self._watch.leaves()
        if self._own is not None:
            self._own.on_train_end(trainer, pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        watch = self._watch
        told = watch is not None and watch.told_because_of(exception)
        try:
            if watch is not None and told:
                watch.leaves()
                _lightning.let_children_leave(trainer)
                if not isinstance(exception, Preempted) or watch.interrupted:
                    self._leave_in_the_middle(trainer, watch)
                end_loader_workers()  # because a loader waits 5 s for a worker that is stuck
        except Exception:  # Boundary: the user must get the exception that ended training, not a later one.
            logger.warning("no checkpoint could be saved before the job goes", exc_info=True)
        finally:
            if told:
                _lightning.leave_handlers(trainer, dict.fromkeys(self._signals, self._end_now))
                users_exit = watch.users_exit if watch is not None else None
                _lightning.after_teardown(trainer, lambda: self._gone(exception, users_exit))
            else:
                self._end_watch()
            if self._own is not None:
                own, self._own = self._own, None
                own.on_exception(trainer, pl_module, exception)

    def _gone(self, exception: BaseException, users_exit: BaseException | None) -> None:
        """Stops listening after teardown. Raises what the user's signal handler raised, else :class:`Preempted` when
        another exception ended the fit, so that the process exits as preempted."""
        self._end_watch()
        if users_exit is not None:
            raise users_exit
        if not isinstance(exception, Preempted):
            raise Preempted(self._exit_code) from exception

    def _end_now(self, *_: Any) -> None:
        """Handles a signal that comes after the save: exits at once with ``exit_code``, unlike the default handler."""
        end_process(self._exit_code)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        if stage != "fit":
            return
        self._end_watch()
        if self._own is not None:
            own, self._own = self._own, None
            own.teardown(trainer, pl_module, stage)

    def _end_watch(self) -> None:
        self._undo()
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    # -- leaving ------------------------------------------------------------------------------------------------------

    def _path(self, trainer: Any, saver: CheckpointSaver | None) -> str:
        if saver is not None:
            return os.path.join(saver.places.dirpath, FILE_NAME + ".ckpt")
        others = [one for one in trainer.checkpoint_callbacks if getattr(one, "dirpath", None)]
        folder = self._checkpoint_dir or (others[0].dirpath if others else trainer.default_root_dir)
        return os.path.join(folder, FILE_NAME + ".ckpt")

    def _requeue(self, trainer: Any, watch: NoticeWatch) -> None:
        """Under SLURM, lets Lightning save and requeue the job, now that all ranks have stopped at one batch."""
        notice = watch.stop.notice
        if notice is not None and notice.signal:
            _lightning.slurm_requeue(trainer, watch.handlers_before.get(notice.signal), notice.signal)

    def _leave_in_the_middle(self, trainer: Any, watch: NoticeWatch) -> None:
        if watch.stepping:
            logger.warning(
                "rank %d was ended within an optimizer step: it saves nothing, and the job resumes from the newest"
                " checkpoint before",
                trainer.global_rank,
            )
        elif not watch.stop.agreed(timeout_s=0):
            pass  # agreed() has logged why: without the other ranks there is nothing to save
        elif watch.saver is None:
            logger.warning(
                "rank %d exits without a save: Lightning's own code cannot save on one rank alone", trainer.global_rank
            )
        else:
            self._save(trainer, watch)

    def _save(self, trainer: Any, watch: NoticeWatch) -> None:
        """Saves to all tiers and waits for them. Blocks: up to the rest of the grace period."""
        saver, began, step = watch.saver, time.monotonic(), trainer.global_step
        path = self._path(trainer, saver)
        if saver is None:
            nemos = nemo_checkpoint(trainer)
            if nemos is None:
                trainer.save_checkpoint(path)
            else:
                path = save_last(trainer, nemos)
            if path:
                _lightning.tell_user(trainer, f"Preempted: step {step} is saved as {path}.")
            else:
                logger.warning("step %d is not saved before the job ends: there is no finished -last checkpoint", step)
            return
        saver.session.fence()
        left = timedelta(seconds=watch.stop.seconds_left * _COMMIT_SHARE)
        ticket = saver.save_to_leave(path, left / 2)
        saver.session.fence()
        reason = "it could not be begun"
        if ticket is not None:
            reason = _wait(ticket, Stage.COMMITTED, None, watch.stop.seconds_left * _COMMIT_SHARE)
        saver.session.deliver_outcomes()
        if ticket is None or reason:
            logger.warning(
                "rank %d: step %d was not saved before the job ends: %s; the job will resume from its newest earlier"
                " checkpoint",
                trainer.global_rank,
                step,
                reason,
            )
            return
        tiers = ticket.can_be_durable
        missing = [tier for tier in tiers if _wait(ticket, Stage.DURABLE, tier, watch.stop.seconds_left)]
        saver.session.deliver_outcomes()
        how = "started again, the job resumes from there"
        if self._folder_may_change:
            how = (
                f"to resume, pass fit(ckpt_path={path!r}), as Lightning's default folder changes with each start; with"
                " dirpath= the job resumes by itself"
            )
        _lightning.tell_user(
            trainer,
            f"Preempted: step {step} is saved as {path} ({time.monotonic() - began:.1f} s)"
            + (f"; not yet durable on {', '.join(missing)}, which the agent goes on with" if missing else "")
            + f". The processes exit with {self._exit_code}; {how}.",
        )


def _wait(ticket: Ticket, stage: Stage, tier: str | None, seconds: float) -> str:
    """Why a save has not reached a stage in time; "" when it has."""
    try:
        ticket.wait(stage, tier=tier, timeout=timedelta(seconds=seconds))
    except (ResiliencyError, OSError, RuntimeError) as error:  # RuntimeError: the store of a rank that has left
        return str(error)
    return ""


_NOT_CAUGHT = {signal.SIGKILL, signal.SIGSTOP}


def _nothing() -> None:
    """Does nothing; a function of the module, so that it can be pickled."""


def _is_dir_of(callback: EngineModelCheckpoint, folder: str) -> bool:
    theirs = callback.dirpath
    return theirs is not None and _real(os.fspath(theirs)) == _real(folder)


def _real(path: str) -> str:
    return path.rstrip("/") if "://" in path else os.path.realpath(path)


def _is_free(trainer: Any, number: int) -> bool:
    """True when the signal may be used as a notice: SIGTERM, and other signals for which the user has no handler."""
    if number == signal.SIGTERM:
        return True
    handler = signal.getsignal(number)
    if has_native_handler(number):
        logger.info(
            "%s is no preemption notice, because native code (such as faulthandler) handles it",
            signal.Signals(number).name,
        )
        return False
    if handler in (signal.SIG_DFL, signal.SIG_IGN) or _lightning.is_lightnings_handler(trainer, handler):
        return True
    logger.info("%s is no preemption notice, because your code has a handler for it", signal.Signals(number).name)
    return False


_adapter = AdapterClass(__name__, "AutoCheckpointCallback", SavesWhenPreempted, base="callbacks:Callback")
build = _adapter.build


def __getattr__(name: str) -> Any:
    return _adapter.attribute(name)
