"""Saves, names and removes checkpoints with the engine, for one callback during one fit."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import proxy

from torch import Tensor

from resiliency.callbacks.checkpointing.names import engine_name, names_on_disk
from resiliency.callbacks.checkpointing.places import CheckpointPlaces
from resiliency.callbacks.checkpointing.stock_writer import StockWriter
from resiliency.callbacks.checkpointing.trainer_session import TrainerSession
from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.lightning_forms import META
from resiliency.checkpoint.options import CheckpointerOptions
from resiliency.checkpoint.save_trace import SaveTrace
from resiliency.checkpoint.ticket import LOCAL, Outcome, Ticket
from resiliency.compat.model_checkpoint import without_optimizer
from resiliency.errors import AgentError, ConfigError, DirectoryInUse, ResiliencyError, TierError
from resiliency.plugins import _lightning
from resiliency.plugins.resume.rank_state import is_step_boundary
from resiliency.plugins.strategies.base import StrategyAdapter
from resiliency.runtime import heartbeat
from resiliency.spans import traced
from resiliency.storage.manifest import EVENTS_DIR, META_DIR
from resiliency.storage.names import link_symbolically
from resiliency.storage.stage import Stage
from resiliency.storage.stock import is_stock
from resiliency.to_thread import raised_by_a_handler, to_thread

if TYPE_CHECKING:
    from resiliency.callbacks.checkpointing.stock import StockModelCheckpoint

__all__ = ["CheckpointSaver"]

logger = logging.getLogger(__name__)

#: How long a save that may be the last of a fit waits for the save before it; other saves are skipped sooner.
_LAST_SAVE_TIMEOUT = timedelta(minutes=2)
#: From this state size on, the engine is opened and shard files are prepared before training. Smaller jobs open the
#: engine in their first save, so that a fit that saves nothing does not pay for it.
_LARGE_BYTES = 32 * 1024 * 1024
#: Errors of making a path at which no folder can be. ENOENT: in /proc, say; the folders above would be made. EPERM: in
#: /sys; EACCES: below a folder of somebody else.
_NO_FOLDER = (
    errno.EEXIST,
    errno.ENOTDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.ENOENT,
    errno.EPERM,
    errno.EACCES,
    errno.EROFS,
)


class CheckpointSaver:
    """Replaces the stock class's file operations for one callback in one fit.

    Inside :meth:`collect`, requests to save and remove are collected, and at its end one checkpoint is saved under all
    names. Outside, each request is carried out at once.

    Threads: training thread. All methods are called on every rank.

    Args:
        callback: the callback whose settings apply; loggers get it in ``after_save_checkpoint``.
        lazy: copy tensors during the next forward and backward, if the tensor rules and the hook allow it.
        flush_timeout: the longest time that the end of training waits for saves.
        must_resume: the fit may be a restart of the job that is still using the folder: it waits for that job's end.
    """

    def __init__(
        self,
        callback: StockModelCheckpoint,
        session: TrainerSession,
        adapter: StrategyAdapter,
        places: CheckpointPlaces,
        *,
        options: CheckpointerOptions,
        lazy: bool,
        flush_timeout: timedelta,
        must_resume: bool = False,
    ) -> None:
        self.session = session
        self.places = places
        #: None until the engine is open. When it cannot be opened, later saves try again.
        self.engine: Checkpointer | None = None
        self._thread = threading.get_ident()
        self._callback = callback
        self._trainer = session.trainer
        self._adapter = adapter
        self._options = options
        self._lazy = lazy
        self._must_resume = must_resume
        self._flush_timeout = flush_timeout
        self._collecting = False
        self._overlap = False
        self._everywhere = False
        self._unnamed = False  # a save is requested that needs no name
        self._missed_saves = 0
        self._told_why = False
        #: path -> the file that the module's hook has found there, which is saved again with what the hook changes.
        self._read_in_hook: dict[str, object] = {}
        #: What was requested in on_train_batch_end waits for the end of the module's hook of that name.
        self._later = False
        #: The engine could not be opened for the save that comes next.
        self._failed_just_now = False
        self._left_to_stock = False
        self._pid = os.getpid()
        #: Paths to save under and names to remove, as requested in the current hook.
        self._save_paths: list[str] = []
        self._removed_names: list[str] = []
        #: The state that a ``trainer.save_checkpoint`` replaced by other code has dumped in the current hook, or None.
        self._dumped: dict[str, Any] | None = None
        #: The callback's (last step saved, last path saved) before the first request in the current hook.
        self.before_request: tuple[int, str] | None = None
        #: Names whose removal waits for the next save that succeeds.
        self._postponed_removals: list[str] = []
        #: (step, file written by the stock class): removed once a save of that step or a later one is durable.
        self._stock_removals: list[tuple[int, str]] = []
        self._safe_step = -1  # the newest step for which that was done
        #: name -> number of this fit's save that the name points to.
        self._save_numbers: dict[str, int] = {}
        self._saves = 0
        #: link path -> path: at the end of the fit, link path becomes a symbolic link to path, as in the stock class.
        self._links: dict[str, str] = {}
        #: name -> ticket of the save that the name will point to, for names that may not exist yet.
        self._tickets: dict[str, Ticket] = {}
        self._stock_writer = StockWriter(self._trainer)

    # -- the engine ---------------------------------------------------------------------------------------------------

    @property
    def left_to_stock(self) -> bool:
        """True when another job uses the folder, the engine cannot start, or this is a forked child that trains on: the
        stock class writes the checkpoints of this fit. The same on all ranks, but for the child."""
        return self._left_to_stock or os.getpid() != self._pid

    def open(self) -> bool:
        """Opens the engine unless it is open. Returns False, on all ranks, when it cannot be used. Collective: yes.

        Blocks: about 0.2 s the first time, for the start of the agent.

        Raises:
            Timeout: a rank is missing.
            OSError: ``dirpath`` can be no folder: it is a file, or below one, or its name is too long. The stock class
                raises the same error.
        """
        if self.engine is not None or self.left_to_stock:
            return not self.left_to_stock
        try:
            self.engine = self.session.open(self.places, self._options_with_log()).engine
        except (AgentError, TierError) as error:  # others: a rank is missing, the settings or the checkpoints are wrong
            _raise_if_no_folder(self.places.dirpath, error)
            # Where a tier fails the stock class could not write either.
            if not isinstance(error, TierError) and not (isinstance(error, DirectoryInUse) and self._must_resume):
                self._left_to_stock = True
                logger.warning(
                    "the checkpoint engine cannot be used: %s. Lightning's own code saves the checkpoints of this fit"
                    " (slower, not verified, not used by auto_resume)",
                    error,
                    exc_info=error.__cause__ is not None,
                )
                return False
            logger.log(
                logging.DEBUG if self._told_why else logging.ERROR,
                "no checkpoints are written to %s: %s; training goes on, and later saves try again",
                self.places.local.directory,
                error,
            )
            self._told_why = True
            return False
        return True

    def leaves_to_stock(self) -> bool:
        """Whether the stock class writes the checkpoints of this fit, as another job uses the folder or the engine
        cannot start. The same on all ranks. Collective: when no save was tried yet; then it opens the engine, which may
        take 20 s beside that job."""
        if (
            self.engine is None
            and not self.left_to_stock
            and not self._missed_saves
            and not self._others_may_be_missing
        ):
            self._failed_just_now = not self._open_for_save()
        return self.left_to_stock

    def _options_with_log(self) -> CheckpointerOptions:
        """The options; when all tiers are addresses or a ramdisk, with a folder below the Trainer's root folder for the
        event log, so that the log outlives the job."""
        root = str(self._trainer.default_root_dir)
        folders = [remote for remote in self.places.remotes if "://" not in remote.address]
        if self._options.events_dir or folders or self.places.local.durable or "://" in root:
            return self._options
        return replace(self._options, events_dir=os.path.join(root, META_DIR, self.places.key.run, EVENTS_DIR))

    def _open_for_save(self) -> bool:
        """Opens the engine for a save. After a failure it is tried again at saves 2, 3, 5, 9, ...

        Returns False when the save cannot be taken. Collective: when it tries to open.
        """
        if self.engine is not None:
            return True
        if self._failed_just_now:  # for this very save
            self._failed_just_now = False
            return False
        if self._missed_saves & (self._missed_saves - 1) or self._others_may_be_missing:
            self._missed_saves += 1
            return False
        began = time.monotonic()
        opened = self.open()
        self.session.steps.stall(time.monotonic() - began)
        self._missed_saves += not opened
        return opened

    @property
    def _others_may_be_missing(self) -> bool:
        return bool(self._trainer.world_size > 1 and self._trainer.state.status == "interrupted")

    def warm_up(self) -> None:
        """Opens the engine and prepares shard files before training, so that no step has to. Only for a state of at
        least 32 MiB, several ranks, or an engine that is open already.

        Collective: yes. Blocks: about 1-3 s per GiB, because each page of the files is touched for the first time.
        """
        if self._callback.save_weights_only:
            expected: dict[str, Tensor] = {}
        else:
            expected = self._adapter.expected_tensors(self._trainer)
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in expected.values())
        large = nbytes >= _LARGE_BYTES or self._trainer.world_size > 1
        if (self.engine is not None or large) and self.open() and expected:
            self.session.warm_up(self.places.key, expected)

    def settle(self, stage: Stage, timeout: timedelta) -> timedelta:
        """Waits until all saves have reached ``stage``, and delivers their outcomes.

        Blocks: up to ``timeout``, less the time that earlier calls have waited in this fit, for this or another
        callback, so that a tier that is down costs the end of a fit its timeout only once.

        Returns:
            The rest of ``timeout``; zero when it is used up.
        """
        began = time.monotonic()
        deadline = began + timeout.total_seconds() - self.session.waited_at_end

        def left() -> timedelta:
            return timedelta(seconds=max(0.0, deadline - time.monotonic()))

        if self.engine is None:
            return left()
        try:
            self.engine.flush(stage, timeout=left())
            self.session.deliver_outcomes()
        except ResiliencyError as error:  # not fatal, because training is over and the agent finishes sealed saves
            if error is self.session.logger_error:
                raise
            logger.warning("not every save was %s at the end; the next start finishes them", stage, exc_info=True)
        finally:
            self.session.waited_at_end += time.monotonic() - began
        return left()

    def wait_for_all_ranks(self) -> None:
        """With several agents, waits until all ranks have settled, because they need rank 0's store until then.

        Ranks of several agents count each other's records in the store of rank 0, which ends with rank 0's process. A
        single agent sees all records itself; then a rank ends without waiting for another, as with the stock class.

        Collective: with several agents. Blocks: as long as the strategy's barrier.
        """
        if self.engine is None or self._trainer.world_size == 1 or self.engine.session.together:
            return
        try:
            self._trainer.strategy.barrier("resiliency: every shard is recorded")
        except RuntimeError as error:  # of torch
            logger.warning("another rank has ended before its last saves were recorded: %s", error)

    def close(self, close_engine: Callable[[Checkpointer], None]) -> None:
        """Ends this saver. Calls ``close_engine`` if no other callback uses the engine."""
        _lightning.forget_batch_end_actions(self._trainer)
        self._stock_writer.summarise()
        self.engine = None
        try:
            try:
                if self._trainer.is_global_zero:
                    # Before the engine ends, which gives each name that is no symbolic link a file of its own.
                    to_thread(self._make_links)
            finally:
                self.session.release(self, close=close_engine)
        except ResiliencyError:
            logger.warning(
                "the checkpoint engine did not close cleanly; the agent finishes the saves it has", exc_info=True
            )

    def _make_links(self) -> None:
        for linkpath, path in self._links.items():
            try:
                link_symbolically(linkpath, path)
            except OSError as error:
                logger.warning("%s cannot be made a link to %s, and is a file of its own: %s", linkpath, path, error)

    # -- names --------------------------------------------------------------------------------------------------------

    def name_of(self, path: str) -> str | None:
        """The engine's name for a path; None when only the stock class can write the path."""
        return None if self.left_to_stock else engine_name(str(path), self.places.dirpath)

    @property
    def _names(self) -> set[str]:
        """Names in use below ``dirpath``. Collective: the first time in a fit."""
        known = self.session.names.get(self.places.dirpath)
        if known is None:
            found: list[str] = []
            if self._trainer.is_global_zero:
                ending = self._callback.FILE_EXTENSION
                found = to_thread(lambda: names_on_disk(self.places.dirpath, self.places.key.run, ending))
            known = set(self._trainer.strategy.broadcast(found))
            self.session.names[self.places.dirpath] = known
        return known

    def is_taken(self, path: str) -> bool:
        """True when a checkpoint has this path or will have it. Collective: the first time in a fit; all ranks know the
        same names.

        A job of one rank also checks whether another program has put a file there since, as the stock class does.
        """
        if self.name_of(path) in self._names or path in self._save_paths:
            return True
        return self._trainer.world_size == 1 and "://" not in path and os.path.exists(path) and not self._goes(path)

    def _goes(self, path: str) -> bool:
        """True for a file whose removal was requested, but which is kept until a newer checkpoint is safe."""
        return path in self.session.going or any(path == other for _, other in self._stock_removals)

    def is_protected(self, path: str) -> bool:
        """True for a path that the user named to resume from. A step that auto_resume chose is not protected."""
        return str(path) in self.session.resume.protected

    def wait_for(self, paths: Iterable[str], timeout: timedelta) -> None:
        """Waits until checkpoints of this fit exist at these paths; only warns when one does not exist in time.

        Collective: no, but the other ranks must have saved. Blocks: up to ``timeout`` for all paths together, until
        their saves are committed; with a separate local tier, until they are durable on ``dirpath``'s tier, if they are
        uploaded there. Does nothing in threads other than the training thread, because the engine does not serve them.

        A save that waits for the end of the module's ``on_train_batch_end``, which reads the path, is made first, and
        once more at its end, unless the hook has changed, moved or deleted the file; but not with several ranks,
        because the others may not read it.
        """
        if threading.get_ident() != self._thread:
            return
        paths, read = list(paths), []
        if self._later and self._trainer.world_size == 1 and not set(paths).isdisjoint(self._save_paths):
            read = list(self._save_paths)
            self._carry_out_later()
        deadline = time.monotonic() + timeout.total_seconds()
        for path in paths:
            ticket = self._tickets.get(self.name_of(path) or "")
            if ticket is None or self._is_there(ticket) or ticket.failed is not None:
                continue
            self.session.fence()
            left = timedelta(seconds=max(0.0, deadline - time.monotonic()))
            try:
                if self.places.announced_tier == LOCAL:
                    ticket.wait(Stage.COMMITTED, timeout=left)
                else:
                    ticket.wait(Stage.DURABLE, tier=self.places.announced_tier, timeout=left)
            except ResiliencyError as error:
                # Boundary: the user asked for a path and gets it. The warning says why no checkpoint is there.
                logger.warning("there is no checkpoint at %s yet: %s", path, error)
        for path in read:
            self._read_in_hook[path] = _file_at(path)

    def _is_there(self, ticket: Ticket) -> bool:
        """True when the save is committed on the tier where users look for its names, or will not go to that tier."""
        tier = self.places.announced_tier
        if tier == LOCAL:
            return ticket.has_reached(Stage.COMMITTED)
        return tier not in ticket.tiers or ticket.has_reached(Stage.DURABLE, tier=tier)

    # -- requests of the stock class ----------------------------------------------------------------------------------

    @contextmanager
    def collect(self, *, overlap: bool = False) -> Iterator[None]:
        """Turns all saves requested in the block into one step with several names, written once, at its end.

        ``overlap``: the trainer runs another batch next, so that tensors may be copied late.
        """
        self._collecting, self._overlap = True, overlap
        try:
            yield
        finally:
            self._collecting = False
            self._carry_out()
            self._overlap = False

    @contextmanager
    def collect_for_later(self) -> Iterator[None]:
        """Like :meth:`collect`, but for ``on_train_batch_end``: saves after the module's own hook of that name.

        So the save contains what that hook changes, often a moving average. If the hook raises, the requests wait for
        the next :meth:`collect`, which is in ``on_exception``.
        """
        self._collecting = True
        try:
            yield
        finally:
            self._collecting = False
            if self._save_paths or self._removed_names or self._unnamed:
                self._later = True
                _lightning.after_batch_end_hooks(self._trainer, self._carry_out_later)

    def _carry_out_later(self) -> None:
        self._later = False
        read, self._read_in_hook = self._read_in_hook, {}
        self._save_paths += [path for path, file in read.items() if _file_at(path) == file]
        overlap = is_step_boundary(self._trainer) and _lightning.next_is_another_batch(self._trainer)
        with self.collect(overlap=overlap):
            pass

    def save(self, path: str) -> None:
        """Saves the current step under this path. Blocks: for the copy of the tensors that are not copied late."""
        self._save_paths.append(path)
        self._carry_out_unless_collecting()

    def save_unnamed(self) -> None:
        """Saves the current step on all tiers without a name; it serves a resume until a newer step replaces it."""
        self._unnamed = True
        self._carry_out_unless_collecting()

    def save_at_once(self, path: str, timeout: timedelta) -> None:
        """Saves the current step under this path, even within :meth:`collect`, and waits until the checkpoint exists.

        Blocks: for the copy and up to ``timeout`` for the commit.
        """
        collecting, self._collecting = self._collecting, False
        try:
            self.save(path)
        finally:
            self._collecting = collecting
        self.wait_for([path], timeout)

    def save_to_leave(self, path: str, timeout: timedelta) -> Ticket | None:
        """Saves the current step under this path on all tiers, before the process ends.

        Blocks: up to ``timeout`` for the previous save to be recorded, and for the copy.

        Returns:
            The ticket of the save; None when the step could not be saved.
        """
        if self.engine is not None:
            self.engine.flush(Stage.RECORDED, timeout=timeout)
        self._everywhere = True
        try:
            self.save(path)
        finally:
            self._everywhere = False
        return self._tickets.get(self.name_of(path) or "")

    def save_by_trainer(self, path: str) -> None:
        """Saves through a ``trainer.save_checkpoint`` that other code has replaced.

        The replacement sees every path, and may use the file once Lightning's method has returned. When it does not
        call that method, nothing is saved.

        Collective: yes, because Lightning's method has a barrier. Blocks: for the copy and for the commit. Raises: what
        the replacement raises.
        """

        saved: list[str] = []

        def catch(checkpoint: dict[str, Any], filepath: Any) -> bool:
            if self.name_of(filepath) is None:
                return False
            self._dumped = checkpoint
            saved.append(str(filepath))
            self.save_at_once(str(filepath), self._flush_timeout)
            return True

        with _lightning.catch_save(self._trainer, catch):
            self._trainer.save_checkpoint(path, self._callback.save_weights_only)
        gone = [path for path in saved if "://" not in path and not os.path.lexists(path)]
        self.give_up_names(self._trainer.strategy.broadcast(gone) if self._trainer.world_size > 1 else gone)

    def give_up_names(self, paths: Iterable[str]) -> None:
        """Called when other code has moved, deleted or replaced the files: the steps are not kept for their names. The
        same on all ranks. Collective: no."""
        names = [name for name in map(self.name_of, paths) if name in self._save_numbers]
        if names and self.engine is not None:
            self.engine.delete(*names)
            self._names.difference_update(names)
            for name in names:
                self._save_numbers.pop(name, None)
                self._tickets.pop(name, None)

    def link(self, path: str, linkpath: str) -> None:
        """Makes ``linkpath`` another name of the step of ``path``.

        If ``path`` was saved in an earlier hook, the current step is saved under ``linkpath`` instead.

        During training ``linkpath`` is a hard link, which outlives ``path``; at the end it becomes a symbolic link.
        """
        self._links[linkpath] = path
        if path not in self._save_paths:
            number = self._save_numbers.get(self.name_of(path) or "")
            if number is not None and number == self._save_numbers.get(self.name_of(linkpath) or ""):
                return  # both are names of one step already
        if linkpath not in self._save_paths:
            self._save_paths.append(linkpath)
        self._carry_out_unless_collecting()

    def remove(self, path: str) -> None:
        """Requests the removal of a checkpoint of the engine or of the stock class; it is kept until a newer one is
        safe."""
        name = self.name_of(path)
        renamed = _lightning.save_is_wrapped(self._trainer) and name not in self._save_numbers
        if name is None or renamed or is_stock(path):
            self._stock_removals.append((self._trainer.global_step, path))
            self._remove_stock_files(self._safe_step)
            if name not in self._save_numbers:
                return
            # Other code has written another file there; the step that had the name is not kept for it.
        self._removed_names.append(name)
        self.session.going.add(path)
        self._carry_out_unless_collecting()

    # -- saving -------------------------------------------------------------------------------------------------------

    def _carry_out_unless_collecting(self) -> None:
        if not self._collecting:
            self._carry_out()

    def _carry_out(self) -> None:
        """Saves one checkpoint under all requested names, then passes the removals to the engine."""
        paths, self._save_paths = self._save_paths, []
        removed, self._removed_names = self._removed_names, []
        dumped, self._dumped = self._dumped, None
        before, self.before_request = self.before_request, None
        unnamed, self._unnamed = self._unnamed, False
        if not paths and not removed and not unnamed:
            return
        names = list(dict.fromkeys(name for name in map(self.name_of, paths) if name is not None))
        if self._trainer.is_global_zero:
            for path in paths:
                if "/../" in path and "://" not in path:
                    os.makedirs(os.path.dirname(path), exist_ok=True)  # else that path leads nowhere
        if not self._open_for_save():
            self._postponed_removals += removed
            return
        assert self.engine is not None
        removed = [name for name in dict.fromkeys([*self._postponed_removals, *removed]) if name not in names]
        self._postponed_removals = []
        try:
            path = paths[0] if paths else ""
            everywhere, self._everywhere = self._everywhere, self._everywhere or unnamed
            try:
                taken = not (names or unnamed) or self._take_checkpoint(self.engine, path, names, removed, dumped)
            finally:
                self._everywhere = everywhere
        except BaseException:
            # For example from a hook that returns state. Undo the note of the save, because the stock class notes only
            # saves that were taken.
            if before is not None:
                self._callback._last_global_step_saved, self._callback._last_checkpoint_saved = before
            raise
        if not taken:
            # Removals wait for the next save that succeeds.
            self._postponed_removals = removed
            return
        if removed:
            self.engine.delete(*removed)
            self._names.difference_update(removed)

    def _take_checkpoint(
        self,
        engine: Checkpointer,
        path: str,
        names: list[str],
        supersedes: list[str],
        dumped: dict[str, Any] | None,
    ) -> bool:
        trace = self.session.trace_save(self.places.key)
        if trace is None:
            return self._take(engine, path, names, supersedes, dumped, None)
        try:
            return self._take(engine, path, names, supersedes, dumped, trace)
        except BaseException as error:
            trace.end(f"{type(error).__name__}: {error}")  # no effect if the engine has ended the trace already
            raise

    def _take(
        self,
        engine: Checkpointer,
        path: str,
        names: list[str],
        supersedes: list[str],
        dumped: dict[str, Any] | None,
        trace: SaveTrace | None,
    ) -> bool:
        trainer, callback = self._trainer, self._callback
        if engine.pending:
            self.session.fence()
        self.session.level_lines()
        ends = _lightning.about_to_end(trainer)
        if ends:
            engine.flush(Stage.COMMITTED, timeout=_LAST_SAVE_TIMEOUT)
        with traced(trace, "state"):
            state = dumped or self._adapter.dump_state(trainer, weights_only=callback.save_weights_only)
            stripped = without_optimizer(callback, trainer, state)
            state = state if stripped is None else stripped
        rank_state = self.session.resume.rank_state
        per_rank = None
        if rank_state is not None and not callback.save_weights_only:
            per_rank = {"rank_state": rank_state.capture(trainer)}
        info: dict[str, Any] = {"epoch": trainer.current_epoch}
        score = vars(callback)["best_k_models"].get(path)
        if score is not None and callback.monitor:
            info[callback.monitor] = float(score)
        # Not exact, for example, in the middle of gradient accumulation; a resume prefers another save of this step.
        exact = stripped is None and (per_rank is None or not per_rank["rank_state"]["caveats"])
        rules = self._adapter.tensor_rules(trainer)
        try:
            stored = self._adapter.stored_state(trainer, state)
            ticket = engine.save(
                trainer.global_step,
                stored,
                per_rank=per_rank,
                names=names,
                supersedes=supersedes,
                info=info,
                exact=exact,
                lazy=rules.may_copy_late if self._lazy and self._overlap and self.session.lazy else False,
                replicated=rules.is_replicated,
                beside={META: stored[META]} if self._adapter.is_sharded else None,
                # A save that may be the last one goes to all tiers, because the local one may be lost with its host.
                # Decided by facts that all ranks share.
                everywhere=self._everywhere or _lightning.reached_its_end(trainer) or trainer.should_stop,
                trace=trace,
            )
        except Exception as error:  # Boundary: a state may hold anything, and training outlives a save of it.
            refused = isinstance(error, ConfigError) or not isinstance(error, (ResiliencyError, OSError))
            if raised_by_a_handler(error) and not isinstance(error, ConfigError):
                raise
            if refused and not self._adapter.is_sharded:  # rank 0 has the whole state
                return self._write_as_stock(state, names, error)
            logger.warning(
                "no checkpoint at step %d; training goes on, the next save tries again",
                trainer.global_step,
                exc_info=True,
            )
            ticket = None
        if ticket is None:
            self._not_saved(names)
            return False
        self._saves += 1
        self._tickets = {name: known for name, known in self._tickets.items() if not self._is_there(known)}
        self._tickets.update(dict.fromkeys(names, ticket))
        self._save_numbers.update(dict.fromkeys(names, self._saves))
        self._names.update(names)
        self.session.going.difference_update(os.path.join(self.places.dirpath, name) for name in names)
        self.session.register_save(self.places.key, ticket, self)
        if ends and not self._others_may_be_missing:
            # The end of training would wait for this save a moment later. Waiting now makes the checkpoint exist in the
            # on_train_end of other callbacks.
            self.session.fence()
            self.settle(Stage.COMMITTED, self._flush_timeout)
        return True

    def _write_as_stock(self, state: dict[str, Any], names: list[str], refusal: Exception) -> bool:
        """Saves, on rank 0, with ``torch.save`` a state that the engine has refused. Returns False when that fails."""
        if not self._stock_writer.write(state, [os.path.join(self.places.dirpath, name) for name in names], refusal):
            self._not_saved(names)
            return False
        for name in names:
            self._tickets.pop(name, None)
            self._save_numbers.pop(name, None)
        self._names.update(names)
        self._tell_loggers()
        self._remove_stock_files(self._trainer.global_step)
        return True

    def _not_saved(self, names: list[str]) -> None:
        if self._trainer.world_size == 1:
            self._callback._last_global_step_saved = 0  # so that the next trigger at this step saves
        else:
            # All ranks must keep the same names, and the other ranks may have saved.
            self._names.update(names)

    def save_outcome(self, outcome: Outcome) -> None:
        """Handles an outcome of a save. Once users see the checkpoint on the announced tier, notifies the loggers. Once
        it is durable there (committed, if the tier cannot be durable), removes the stock files that it replaces."""
        if outcome.stage is Stage.COMMITTED and outcome.tier == LOCAL:
            heartbeat.committed(outcome.step)
        local = self.places.announced_tier == LOCAL
        if outcome.tier != self.places.announced_tier:
            return
        if outcome.stage is (Stage.COMMITTED if local else Stage.DURABLE) and outcome.names:
            self._tell_loggers()
        durable = self.engine is None or self.engine.can_be_durable or not local
        if outcome.stage is (Stage.DURABLE if durable else Stage.COMMITTED):
            self._remove_stock_files(outcome.step)

    def _tell_loggers(self) -> None:
        if self._trainer.is_global_zero:
            try:
                for log in self._trainer.loggers:
                    log.after_save_checkpoint(proxy(self._callback))
            except Exception as error:
                self.session.logger_error = error  # settle() raises it, because it comes from the user's code
                raise

    def _remove_stock_files(self, step: int) -> None:
        """Removes the files of the stock class whose removal was requested at this step or an earlier one."""
        self._safe_step = max(self._safe_step, step)
        due = [path for number, path in self._stock_removals if number <= step]
        self._stock_removals = [item for item in self._stock_removals if item[0] > step]
        for path in due:
            self._trainer.strategy.remove_checkpoint(path)


def _file_at(path: str) -> object:
    """A value that stays equal while the path is the same file, and nobody writes into it; None: nothing is there, or
    it is an address."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _raise_if_no_folder(path: str, cause: Exception) -> None:
    """Raises the error of making a folder where none can be; waiting does not help then.

    Raises:
        OSError: as ``os.makedirs``.
    """
    if "://" in path:
        return
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        if error.errno in _NO_FOLDER:
            raise error from cause
