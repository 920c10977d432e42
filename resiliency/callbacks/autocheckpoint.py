"""``AutoCheckpointCallback``: saves and leaves when the job is to go, and is found by the next start.

``from resiliency.callbacks.autocheckpoint import AutoCheckpointCallback`` gives the class for the Lightning that is
imported (``lightning.pytorch`` or ``pytorch_lightning``); ``build(namespace)`` gives it for a named one.

Stock Lightning answers SIGTERM with a collective operation in the signal handler, and hangs when ranks are not all at
the same place, which they hardly ever are; it then exits with 0, which launchers take for success. Here a signal only
sets a flag. The rank that was told tells the others through the job's store, each publishes the batch it is in, and all
stop at the end of the last of these (:mod:`resiliency.preemption.position`). No step waits for anything before that.
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
from resiliency.callbacks._saver import CheckpointSaver
from resiliency.callbacks._step_hooks import StepHooks
from resiliency.callbacks.model_checkpoint import EngineModelCheckpoint
from resiliency.callbacks.model_checkpoint import build as build_model_checkpoint
from resiliency.checkpoint.ticket import Ticket
from resiliency.errors import ConfigError, ResiliencyError, TierError
from resiliency.launch.exit_codes import PREEMPTED
from resiliency.launch.leaving import (
    close_when_left,
    end_loader_workers,
)
from resiliency.plugins import _lightning
from resiliency.plugins.namespaces import AdapterClass, require_trainer_of
from resiliency.plugins.resume.rank_state import is_step_boundary
from resiliency.preemption.shield import Shield
from resiliency.preemption.signals import has_native_handler
from resiliency.preemption.sources import metadata_address
from resiliency.preemption.stop import end_process
from resiliency.storage.stage import Stage
from resiliency.storage.tiers import open_tier

__all__ = ["AutoCheckpointCallback", "Preempted", "build"]  # noqa: F822 - AutoCheckpointCallback is built on first use

logger = logging.getLogger(__name__)

#: Of the checkpoint that is saved when the job goes.
FILE_NAME = "preempted"
#: Of what is left of the grace, the share in which the save must be committed; the rest is for slower tiers.
_COMMIT_SHARE = 0.6


class SavesWhenPreempted(StepHooks):
    """Saves the same step on all ranks and leaves, when one of them is told that the job is to go.

    A notice is a signal, a file that appears, or what the metadata server of Google's cloud says. At the end of the
    batch that all ranks agree on (at the end of the optimizer step, with gradient accumulation), within at most two
    batches, all ranks save, wait until the save is committed on the fastest tier and, while there is time, durable on
    the slower ones, and leave ``fit`` with :class:`Preempted`, a ``SystemExit``. A rank that does not come to that
    place within half of the grace (its data loader is stuck, another rank is lost, a validation is long) is interrupted
    where it is, and saves the last step that it has finished. A process that is not done when the grace is over ends.

    The checkpoint belongs to the run of the first :mod:`~resiliency.callbacks.model_checkpoint` callback of the
    Trainer, and is the newest of it: a restart resumes from it as from any other. It is called ``preempted.ckpt``, and
    is removed when the next start has saved a newer one. While it is there a fit resumes without being asked, whoever
    starts it. Without such a callback this one has a run of its own, in ``checkpoint_dir``, and resumes from there.

    Lightning's own handler for SIGTERM is replaced while a fit trains; a handler of the user is called as well. Under
    SLURM with ``auto_requeue`` Lightning's handler for the requeue signal is called, at the place where all ranks stop.
    A handler of the user for another signal than SIGTERM is left alone, and that signal is no notice.

    Thread: the training thread. Collective: at the start of training. Costs some microseconds a batch.

    Args:
        checkpoint_dir: folder or address for the checkpoint; None: that of the Trainer's checkpoint callback.
        grace: from the notice until the processes are killed: ``terminationGracePeriodSeconds``, SLURM's ``KillWait``.
            Stay below it.
        signals: that are notices.
        notice_file: a path that is looked for each second; on a shared folder one rank's notice is all ranks'.
        metadata_server: address of the metadata server, "auto" for Google's on a machine of Google's, None for none.
        exit_code: of the processes; ``resiliency run`` reads the default as: preempted, start again to resume.

    Raises:
        ConfigError: a value that cannot work.
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
        """A copy made in a fit watches nothing."""
        return {**vars(self), "_watch": None, "_own": None, "_undo": _nothing}

    # -- the checkpoint callback that saves ---------------------------------------------------------------------------

    def _others(self, trainer: Any) -> list[EngineModelCheckpoint]:
        """Those that save what a resume needs."""
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
        """True when the job was preempted and has not saved since: then it is meant to go on. Collective: yes."""
        found = False
        if trainer.is_global_zero and folder is not None:
            name = FILE_NAME + ".ckpt"
            try:
                found = any(one.key == name for one in open_tier(os.fspath(folder), glance=True).list(name))
            except TierError as error:
                logger.warning("whether the job was preempted is not known: %s", error)
        return bool(trainer.strategy.broadcast(found))

    def _shield(self, trainer: Any, loader: Any) -> Callable[[], None]:
        """Workers of this loader outlive signals that are not for them. Returns what undoes it."""
        if not getattr(loader, "num_workers", 0) or not hasattr(loader, "worker_init_fn"):
            return _nothing
        before = loader.worker_init_fn
        _lightning.add_worker_seeds(trainer, loader)  # where there is no other function, as Lightning does later
        shield = loader.worker_init_fn = Shield(self._signals, loader.worker_init_fn)

        def undo() -> None:
            if loader.worker_init_fn is shield:
                loader.worker_init_fn = before

        return undo

    def _saver(self, trainer: Any) -> CheckpointSaver | None:
        """Of the callback whose run the checkpoint belongs to; None where Lightning's own code saves."""
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
            saver.open()  # now: when a rank is stuck it could not be opened
            path = self._path(trainer, saver)
            if saver.is_taken(path) and not saver.is_protected(path):
                saver.remove(path)  # once a newer one is committed
        if self._watch is not None:
            self._watch.saver = saver

    def _begin(self, trainer: Any) -> None:
        """Listens from here on. Collective: yes."""
        if self._watch is not None:
            self._watch.close()
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "the fit does not run in the main thread, the only one that Python tells of signals: none is a notice"
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
            # After the hooks of all callbacks and of the module: what they change is of this step.
            _lightning.after_batch_end_hooks(trainer, lambda: self._leave_here(trainer, watch))

    def _leave_here(self, trainer: Any, watch: NoticeWatch) -> None:
        watch.stop.leaves()
        _lightning.let_children_leave(trainer)
        if not self._requeue(trainer, watch):
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
            # Nothing stops all ranks at one place any more. They end by themselves, and soon; else they are ended.
            self._watch.stop.leaves()
        if self._own is not None:
            self._own.on_train_end(trainer, pl_module)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        super().on_exception(trainer, pl_module, exception)
        watch = self._watch
        told = watch is not None and watch.told_because_of(exception)
        try:
            if watch is not None and told:
                watch.stop.leaves()
                _lightning.let_children_leave(trainer)
                if not isinstance(exception, Preempted) or watch.interrupted:
                    self._leave_in_the_middle(trainer, watch)
                end_loader_workers()  # a loader waits for 5 s for one that is stuck
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
        """What this process still does is not watched over. Whatever ended the fit, it ends as the job is to go."""
        self._end_watch()
        if users_exit is not None:
            raise users_exit
        if not isinstance(exception, Preempted):
            raise Preempted(self._exit_code) from exception

    def _end_now(self, *_: Any) -> None:
        """A signal that comes when all is saved: the exit code says so, as the default handler's would not."""
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

    def _requeue(self, trainer: Any, watch: NoticeWatch) -> bool:
        """Under SLURM: lets Lightning save and requeue the job, now that all ranks are at one place."""
        notice = watch.stop.notice
        if notice is None or not notice.signal:
            return False
        return _lightning.slurm_requeue(trainer, watch.handlers_before.get(notice.signal), notice.signal)

    def _leave_in_the_middle(self, trainer: Any, watch: NoticeWatch) -> None:
        if watch.stepping:
            logger.warning(
                "rank %d was ended within an optimizer step: it saves nothing, and the job resumes from the newest"
                " checkpoint before",
                trainer.global_rank,
            )
        elif not watch.stop.agreed(timeout_s=0):
            pass  # it has been said: without the others there is nothing to save
        elif watch.saver is None:
            logger.warning("rank %d leaves without a save: only the engine can save on one rank", trainer.global_rank)
        else:
            self._save(trainer, watch)

    def _save(self, trainer: Any, watch: NoticeWatch) -> None:
        """Saves on all tiers, and waits as far as the grace allows. Blocks: up to what is left of it."""
        saver, began, step = watch.saver, time.monotonic(), trainer.global_step
        path = self._path(trainer, saver)
        if saver is None:
            trainer.save_checkpoint(path)
            _lightning.tell_user(trainer, f"Preempted: step {step} is saved as {path}.")
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
                "rank %d: the save of step %d before the job goes is not there: %s; the job resumes from the newest"
                " checkpoint that is",
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
    """Does nothing; can be pickled."""


def _is_dir_of(callback: EngineModelCheckpoint, folder: str) -> bool:
    theirs = callback.dirpath
    return theirs is not None and _real(os.fspath(theirs)) == _real(folder)


def _real(path: str) -> str:
    return path.rstrip("/") if "://" in path else os.path.realpath(path)


def _is_free(trainer: Any, number: int) -> bool:
    """True when the signal may be taken over: SIGTERM, and others without a handler of the user."""
    if number == signal.SIGTERM:
        return True
    handler = signal.getsignal(number)
    if has_native_handler(number):
        logger.info("%s has a native handler, as of faulthandler, and is no notice", signal.Signals(number).name)
        return False
    if handler in (signal.SIG_DFL, signal.SIG_IGN) or _lightning.is_lightnings_handler(trainer, handler):
        return True
    logger.info("%s has a handler of its own, and is no notice", signal.Signals(number).name)
    return False


_adapter = AdapterClass(__name__, "AutoCheckpointCallback", SavesWhenPreempted, base="callbacks:Callback")
build = _adapter.build


def __getattr__(name: str) -> Any:
    return _adapter.attribute(name)
