"""Saves and restores the state of each rank that Lightning does not save: generators, loader positions, metrics.

Stock Lightning saves no random generator and only rank 0's loader state. When it resumes in the middle of an epoch, it
reads a plain ``DataLoader`` from the beginning, opens it before the sampler knows the epoch, and loses one batch of a
loader without length. :class:`RankState` saves what is missing. After a restart it opens the loaders when the first
batch is fetched: by then everything else is restored, and the generators are set right before training uses them.

Private attributes of Lightning used, all reached from the trainer object, so that the same code serves
``lightning.pytorch`` and ``pytorch_lightning`` (2.2 and later):
``fit_loop`` (``epoch_loop``, ``_combined_loader``, ``_data_fetcher``, ``reset``, ``on_advance_start``,
``_should_accumulate``, ``_last_train_dl_reload_epoch``),
``_checkpoint_connector`` (``dump_checkpoint``, ``restore_training_state``, ``_loaded_checkpoint``),
``epoch_loop`` (``run``, ``on_run_start``, ``batch_progress``, ``val_loop``),
the fetcher (``iterator``, ``batches``, ``fetched``) and the
combined loader (``flattened``, ``_iterator`` with ``iterators``, ``_idx``, ``_consumed``).

:mod:`resiliency.plugins.resume.loader_positions` handles torch's loaders,
:mod:`resiliency.plugins.resume.logged_metrics` the values that ``self.log`` has collected,
:mod:`resiliency.plugins.resume.trainable` what trains, and
:mod:`resiliency.plugins.resume.loop_repairs` what Lightning's own loops lose.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

from resiliency.plugins._lightning import module_overrides
from resiliency.plugins.resume import loader_positions, loop_repairs, rng
from resiliency.plugins.resume.gradients import copy_gradients, place_gradients
from resiliency.plugins.resume.loader_recorder import attach_recorder, detach_recorder
from resiliency.plugins.resume.logged_metrics import capture_logged, restore_logged
from resiliency.plugins.resume.metric_states import update_counts
from resiliency.plugins.resume.own_generators import set_states, states_of
from resiliency.plugins.resume.plain import NotPlain, from_plain, to_plain
from resiliency.plugins.resume.trainable import KEY as TRAINABLE
from resiliency.plugins.resume.trainable import Trainable

__all__ = ["RankState", "is_step_boundary"]

log = logging.getLogger(__name__)

_VERSION = 3  # 2: own generators of a loader as a list, those of torch only

#: Keys of the state that a save copies unchanged from the restored state if no batch was fetched since the restart.
_POSITION = ("gradients", "loaders", "index", "consumed", "ahead", "prefetched", "whole")


def is_step_boundary(trainer: Any) -> bool:
    """True when a save at this moment loses nothing: no gradients are being accumulated and no batch is in progress.

    With manual optimisation, gradients that the module itself accumulates are not detected.

    Thread: training. Collective: no.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(progress.ready == progress.processed and not trainer.fit_loop._should_accumulate())


class RankState:
    """Captures the state that differs between ranks, and restores it exactly.

    Thread: call every method on the training thread, on every rank. Collective: no, except :meth:`capture` at the end
    of an epoch.

    Args:
        reread: at a resume, read the batches of map-style loaders that were already seen and drop them, instead of only
            drawing their indices. Then a resume in the middle of an epoch is exact even when loader workers draw random
            numbers (augmentation), at the cost of loading these batches.
    """

    def __init__(self, *, reread: bool = False) -> None:
        self.reread = reread
        self._patches: list[tuple[Any, str, Any]] = []
        self._recorded: list[weakref.ref[Any]] = []
        self._trainer: Any = None
        self._pending: dict[str, Any] | None = None
        self._placed = self._advancing = self._restarted = self._finished_batch = False
        self._metrics_restored = False
        self._rng_before_validation: rng.Rng | None = None  # set while a validation runs or after an exception ended it
        self._rng_of_validation: rng.Rng | None = None  # states before the last validation
        self._persistent_open = False  # at the save, persistent workers of validation loaders were running
        self._validation_generators: list[Any] | None = None  # loaded, and not set yet
        self._generators_before_validation: list[Any] = []  # of the validation that runs, or the last one
        self._whole = False  # an epoch has had as many batches as its loaders say
        self._watched = 0  # number of epochs in which a loader may still be at its restored position
        self._counts: dict[int, int] = {}  # metric id -> number of updates before the current validation
        self._warned: set[str] = set()
        self._trainable = Trainable()

    # ---- attach and detach

    def attach(self, trainer: Any) -> None:
        """Patches the trainer's loops and records its train loaders. Call it in ``Callback.setup("fit")``. Idempotent.

        Consumes no random numbers and changes no batch.
        """
        if self._trainer is trainer:
            return
        if self._trainer is not None:
            self.detach(self._trainer)
        self._trainer = trainer
        fit_loop, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
        self._patch(trainer.strategy, "process_dataloader", self._process_dataloader)
        self._patch(trainer._checkpoint_connector, "dump_checkpoint", self._dump_checkpoint)
        self._patch(trainer._checkpoint_connector, "restore_training_state", self._restore_training_state)
        self._patch(fit_loop, "reset", self._reset)
        self._patch(fit_loop, "on_advance_start", self._on_advance_start)
        self._patch(epoch_loop, "run", self._run_epoch)
        self._patch(epoch_loop, "on_run_start", self._on_epoch_run_start)
        self._patch(epoch_loop.val_loop, "run", self._validate)
        if hasattr(epoch_loop.val_loop, "increment_progress_to_evaluation_end"):  # since Lightning 2.5
            self._patch(epoch_loop.val_loop, "increment_progress_to_evaluation_end", self._pass_over_validation)

    def detach(self, trainer: Any) -> None:
        """Undoes :meth:`attach`; call it in ``Callback.teardown``. Idempotent."""
        for target, name, patch in reversed(self._patches):
            if target.__dict__.get(name) is patch:
                delattr(target, name)
            else:
                log.debug("%s.%s was patched again by other code; that patch stays", type(target).__name__, name)
        for reference in self._recorded:
            if (loader := reference()) is not None:
                detach_recorder(loader)
        self._patches, self._recorded = [], []
        self._trainer = self._pending = self._rng_before_validation = self._validation_generators = None
        self._placed = self._advancing = self._restarted = self._finished_batch = False
        self._trainable = Trainable()

    # ---- save

    def capture(self, trainer: Any) -> dict[str, Any]:
        """Captures this rank's state as None, bool, int, float, str, bytes, list, tuple, dict and CPU tensors only.

        Call it where Lightning saves its loop state: in ``on_train_batch_end`` or after the module's own hook of that
        name, in ``on_validation_end``, ``on_train_epoch_end`` or ``on_exception``. The result shares no memory with
        live objects.

        Collective: at the end of an epoch, as :func:`~logged_metrics.capture_logged` says; otherwise no.

        Blocks: about 0.2 ms, plus 25 microseconds per metric, plus ``state_dict()`` of stateful loaders, plus a
        copy of one batch for loaders without length (Lightning has already fetched it).

        Returns:
            The state. Its ``caveats`` say what will not be exact after a restart from this save; usually empty.
        """
        pending = self._pending
        if pending is not None and not self._placed:  # the loaded state is not restored yet, so it is saved again
            return dict(pending)
        state: dict[str, Any] = {
            "version": _VERSION,
            "rank": trainer.global_rank,
            "world_size": trainer.world_size,
            "rng": rng.snapshot(),
            "persistent_validation": _has_persistent_workers(trainer),
        }
        if loop_repairs.repeats_validation(trainer):
            state["validated"] = self._rng_of_validation
        validation = _validation_loaders(trainer)
        state["validation_generators"] = [states_of(loader) for loader in validation]
        if self._rng_before_validation is not None and loop_repairs.is_within_validation(trainer):
            # because a restart runs the whole validation again
            state["rng"] = self._rng_before_validation
            state["validation_generators"] = self._generators_before_validation
        if hasattr(trainer.fit_loop, "_last_train_dl_reload_epoch"):
            state["last_reload"] = trainer.fit_loop._last_train_dl_reload_epoch
        caveats: list[str] = []
        if pending is None:
            self._capture_position(trainer, state, caveats)
        else:  # no batch was fetched since the restart
            state |= {key: pending[key] for key in _POSITION if key in pending}
            caveats += pending["caveats"]
        loop_repairs.note_plateau(trainer, state)
        if (left_out := loop_repairs.leaves_out_after_save(trainer)) is not None:
            caveats.append(left_out)
        state["between_batches"] = loop_repairs.is_between_batches(trainer)
        state["within_validation"] = loop_repairs.is_within_validation(trainer)
        state["logged"], lost = capture_logged(trainer, reset=self._validation_metrics(trainer))
        caveats += lost
        state["caveats"] = list(dict.fromkeys(caveats))
        for caveat in state["caveats"]:
            self._warn_once(caveat)
        return state

    def _validation_metrics(self, trainer: Any) -> set[int]:
        """Ids of the metrics that must be saved as reset, at a save during or after a validation; empty otherwise.

        These metrics were updated in the validation. If restored, they would count it twice, because a restart runs it
        again; or the module's own ``on_validation_end`` would have reset them.
        """
        ended_by_module = trainer.validating and module_overrides(trainer, "on_validation_end")
        if not (ended_by_module or loop_repairs.is_within_validation(trainer)):
            return set()
        counts = update_counts(trainer.lightning_module)
        return {metric for metric, count in counts.items() if count != self._counts.get(metric)}

    def _capture_position(self, trainer: Any, state: dict[str, Any], caveats: list[str]) -> None:
        """Adds to ``state`` this rank's position in the data, and its gradients during gradient accumulation."""
        progress = trainer.fit_loop.epoch_loop.batch_progress.current
        undone = int(progress.ready - progress.processed)
        fetcher = trainer.fit_loop._data_fetcher
        if hasattr(fetcher, "iterator_wrapper") and fetcher.length is None and fetcher.done:
            undone = 0  # a training_step that fetches its own batches found none left, so no step is in progress
        if undone:
            caveats.append("saved in the middle of a step: it will be repeated with other random numbers")
        elif not is_step_boundary(trainer):
            state["gradients"] = copy_gradients(trainer)  # in the middle of gradient accumulation

        combined = trainer.fit_loop._combined_loader
        mode = getattr(combined, "_iterator", None)
        iterators = list(getattr(mode, "iterators", ())) if mode is not None else []
        loaders = list(combined.flattened) if combined is not None else []
        iterators += [None] * (len(loaders) - len(iterators))
        index = int(getattr(mode, "_idx", 0))
        consumed = list(getattr(mode, "_consumed", ()))
        state["loaders"] = [
            loader_positions.capture_position(
                loader, iterator, taken=_taken(loader, index, i < len(consumed) and consumed[i]), undone=undone
            )
            for i, (loader, iterator) in enumerate(zip(loaders, iterators, strict=True))
        ]
        ended = bool(getattr(fetcher, "done", False))
        workers = [loader_positions.worker_caveat(loader, reread=self.reread, ended=ended) for loader in loaders]
        # A restart runs validations as a whole, so what their workers draw is repeated unless these outlive it.
        workers += [
            loader_positions.worker_caveat(one, reread=True, ended=True) for one in _validation_loaders(trainer)
        ]
        caveats += filter(None, workers)
        state["whole"] = self._whole or _is_whole(fetcher)
        state["index"], state["consumed"] = max(0, index - undone), consumed
        stateful = any(entry["kind"] == "stateful" for entry in state["loaders"])
        state["ahead"], state["prefetched"] = self._prefetched(fetcher, undone, stateful, caveats)
        caveats += [entry["caveat"] for entry in state["loaders"] if entry["caveat"]]

    # ---- restore

    def load(self, state: dict[str, Any]) -> None:
        """Takes a captured state, which is restored when the first batch is fetched. Call it before the loops run.

        Raises:
            ValueError: a newer version of this library wrote the state.
        """
        if state["version"] > _VERSION:
            raise ValueError(
                f"rank state has version {state['version']}, this library reads up to {_VERSION}; update it"
            )
        for caveat in state["caveats"]:
            self._warn_once(f"resumed from a checkpoint that was {caveat}" if caveat.startswith("saved") else caveat)
        self._pending, self._placed, self._restarted = dict(state), False, True
        self._metrics_restored = False
        self._persistent_open = bool(state.get("persistent_validation"))
        self._validation_generators = state.get("validation_generators")
        self._whole, self._watched = bool(state.get("whole")), 2

    @property
    def is_pending(self) -> bool:
        """True from :meth:`load` until the loaders are opened at their saved positions."""
        return self._pending is not None and not self._placed

    def patch_loaded_checkpoint(self, checkpoint: dict[str, Any], state: dict[str, Any]) -> None:
        """Replaces, in place, rank 0's loader states in a loaded checkpoint by those of this rank.

        Needed only by code that itself reads the checkpoint's loop state; an exact resume needs only :meth:`load`.
        """
        loop_state = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        own = [entry for entry in state["loaders"] if entry["kind"] == "stateful"]
        if "combined_loader" in loop_state and own and all(entry["state"] is not None for entry in own):
            loop_state["combined_loader"] = [from_plain(entry["state"]) for entry in own]

    # ---- patches of the trainer

    def _patch(self, target: Any, name: str, replacement: Callable[..., Any]) -> None:
        original = getattr(target, name, None)
        if original is None:
            self._warn_once(
                f"{type(target).__name__}.{name} does not exist in this version of Lightning; resume is not exact"
            )
            return

        @wraps(original)
        def patch(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs) if self._trainer is not None else original(*args, **kwargs)

        target.__dict__[name] = patch
        self._patches.append((target, name, patch))

    def _dump_checkpoint(self, original: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = original(*args, **kwargs)
        if "optimizer_states" in checkpoint and (changes := self._trainable.changes(self._trainer)):
            checkpoint[TRAINABLE] = changes
        return checkpoint

    def _restore_training_state(self, original: Callable[[], None]) -> None:
        """Runs after every hook of the setup, with the optimizers made and their state not yet loaded."""
        self._trainable = Trainable(self._trainer._checkpoint_connector._loaded_checkpoint.get(TRAINABLE))
        self._trainable.restore(self._trainer)
        original()

    def _process_dataloader(self, original: Callable[[Any], Any], dataloader: Any) -> Any:
        """Attaches a recorder to every train loader, after Lightning has set its distributed sampler."""
        loader = original(dataloader)
        if self._trainer.training and attach_recorder(loader, self._deferred):
            self._recorded.append(weakref.ref(loader))
        return loader

    def _deferred(self) -> bool:
        """True when ``iter()`` of a loader waits for the first batch: before the loaders are opened at their saved
        positions. False while Lightning reloads loaders at the start of an epoch."""
        return self._pending is not None and not self._advancing

    def _reset(self, original: Callable[[], None]) -> None:
        """Replaces ``fit_loop.reset``, which runs after the loops' state is restored and before ``on_train_start``."""
        if self._pending is None:
            original()
            return
        loop_repairs.begin_after_finished_epoch(self._trainer.fit_loop)
        loop_repairs.keep_epoch_open(self._trainer.fit_loop, original)

    def _on_advance_start(self, original: Callable[[], None]) -> None:
        """Replaces ``fit_loop.on_advance_start``. Its first call comes after every ``on_train_start`` and before the
        first ``on_train_epoch_start``, and restores the logged values and the generators."""
        state, self._advancing = self._pending, True
        try:
            if state is not None and not self._placed:
                fit_loop = self._trainer.fit_loop
                if "last_reload" in state:  # otherwise Lightning would count epochs from the restart
                    fit_loop._last_train_dl_reload_epoch = state["last_reload"]
                self._place_logged(state)
                loop_repairs.settle_plateau(self._trainer, state)
                loop_repairs.count_saved_batch(fit_loop)
                rng.restore(state["rng"])
                # Now, because Lightning may then reload the loaders, with generators that are new.
                for loader, entry in _matching(fit_loop._combined_loader, state["loaders"]):
                    set_states(loader, entry["generators"])
                if _validation_loaders(self._trainer):
                    self._place_validation_generators()
                self._placed = True
            self._trainable.begin(self._trainer)
            original()
        finally:
            self._advancing = False

    def _place_logged(self, state: dict[str, Any]) -> None:
        if "logged" not in state:
            self._warn_once("the checkpoint holds no logged metrics: those of this epoch start anew")
            return
        unknown = restore_logged(self._trainer, state["logged"])
        self._metrics_restored = not unknown and not state["caveats"]
        if unknown:
            self._warn_once(f"the module has no longer the metrics {unknown}: what they had collected is lost")

    def _run_epoch(self, original: Callable[[Any], None], data_fetcher: Any) -> None:
        epoch_loop = self._trainer.fit_loop.epoch_loop
        over = False
        if self._pending is not None:
            _defer_opening(data_fetcher, self._open_loaders)
            if self._restarted and epoch_loop.restarting:
                # Lightning before 2.5 calls on_train_epoch_start again in the middle of an epoch. Undo the random
                # numbers that it consumed and the values that it logged.
                rng.restore(self._pending["rng"])
                if not loop_repairs.has_stages(epoch_loop):
                    self._place_logged(self._pending)
                self._finished_batch = loop_repairs.finish_saved_batch(
                    self._trainer,
                    data_fetcher,
                    between_batches=self._pending.get("between_batches", False),
                    within_validation=self._pending.get("within_validation", False),
                )
                if self._finished_batch:
                    self._pending["rng"] = rng.snapshot()
                    over = epoch_loop.done
        if not over:
            original(data_fetcher)
            self._tell_short_epoch(data_fetcher)
        if self._restarted:
            loop_repairs.end_restart(self._trainer, metrics_restored=self._metrics_restored)
            self._restarted = False
        self._finished_batch = False

    def _tell_short_epoch(self, fetcher: Any) -> None:
        """Says when an epoch right after a resume has fewer batches than its loaders say, unless none ever had more."""
        if self._watched and self._whole and fetcher.done and fetcher.length is not None and not _is_whole(fetcher):
            names = ", ".join(dict.fromkeys(type(one).__name__ for one in fetcher.combined_loader.flattened))
            self._warn_once(
                f"{names} ended after {fetcher.fetched} of {fetcher.length} batches, right after a resume: it does not"
                " leave its restored position. Reset the position where its iteration begins"
            )
        self._watched = max(0, self._watched - 1)
        self._whole = self._whole or _is_whole(fetcher)

    def _on_epoch_run_start(self, original: Callable[[Any], None], data_fetcher: Any) -> None:
        original(data_fetcher)
        if self._finished_batch:
            self._finished_batch = False
            loop_repairs.continue_epoch(self._trainer.fit_loop.epoch_loop)

    def _validate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replaces the ``run`` of a validation. The validation draws from the generators of training, as without this
        library. When Lightning before 2.5 repeats the last validation before the save, the repetition gets the same
        random numbers, and the generators are then set as if it had not run."""
        if self._persistent_open:
            self._persistent_open = False
            self._open_persistent()
        if self._validation_generators is not None and not self._trainer.sanity_checking:
            self._trainer.fit_loop.epoch_loop.val_loop.setup_data()  # else the validation does it, if not done before
            self._place_validation_generators()
        self._generators_before_validation = [states_of(loader) for loader in _validation_loaders(self._trainer)]
        self._rng_before_validation = self._rng_of_validation = rng.snapshot()
        self._counts = update_counts(self._trainer.lightning_module)
        pending = self._pending if loop_repairs.validates_at_restart(self._trainer) else None
        repeated = pending.get("validated") if pending is not None else None
        if repeated is not None:
            rng.restore(repeated)  # the last validation before the save runs again, with the same random numbers
        self._trainable.validation_begins()
        result = original(*args, **kwargs)
        self._trainable.validation_ended()
        # Cleared only when the validation has ended, because a save in on_exception needs it.
        before, self._rng_before_validation = self._rng_before_validation, None
        if pending is not None:
            pending["rng"] = before if repeated is not None else rng.snapshot()
            rng.restore(pending["rng"])
        return result

    def _place_validation_generators(self) -> None:
        states, self._validation_generators = self._validation_generators, None
        for loader, saved in zip(_validation_loaders(self._trainer), states or (), strict=False):
            set_states(loader, saved)

    def _pass_over_validation(self, original: Callable[[], None]) -> None:
        """Keeps the generators unchanged while Lightning, at a restart, counts a finished validation as done, for which
        it opens the validation loaders."""
        with rng.preserved():
            original()

    def _open_persistent(self) -> None:
        """Starts the persistent workers that were running at the save, without changing the generators: only a loader's
        first iteration draws a seed for them, and that was before the save."""
        combined = self._trainer.fit_loop.epoch_loop.val_loop._combined_loader
        with rng.preserved():
            for loader in _persistent_loaders(combined):
                if loader._iterator is None:
                    iter(loader)

    def _open_loaders(self, fetcher: Any) -> None:
        """Restores gradients and opens the loaders at their saved positions, right before the first batch after a
        restart is fetched. Warns, and starts from the beginning, when the loaders have changed."""
        state, trainer = self._pending, self._trainer
        if state is None:
            return
        place_gradients(trainer, state.get("gradients") or {})
        combined = trainer.fit_loop._combined_loader
        if state["world_size"] != trainer.world_size:
            log.warning(
                "saved by %d ranks, resumed by %d: the order of the data and the random numbers are not those of an"
                " uninterrupted run",
                state["world_size"],
                trainer.world_size,
            )
        pairs = _matching(combined, state["loaders"])
        if len(pairs) < max(len(combined.flattened), len(state["loaders"])):
            log.warning(
                "number or kinds of the train loaders changed since the save (%s): they start from the beginning",
                [entry["kind"] for entry in state["loaders"]],
            )
        combined.reset()  # closes iterators that were opened while the trainer was set up
        if pairs and trainer.fit_loop.epoch_loop.batch_progress.current.ready > 0:
            self._continue_epoch(fetcher, combined, pairs, state)
        else:
            self._pending = None
            for loader, entry in pairs:
                self._tell_misplaced(loader, loader_positions.prepare_next_iteration(loader, entry))
            iter(fetcher)

    def _continue_epoch(self, fetcher: Any, combined: Any, pairs: list[tuple[Any, Any]], state: dict[str, Any]) -> None:
        fetched = fetcher.fetched
        fetcher.iterator = iter(combined)  # iter() of the loaders is still deferred
        fetcher.reset()
        self._pending = None
        mode, ahead = combined._iterator, state["ahead"]
        prefetched = None if state["prefetched"] is None else from_plain(state["prefetched"])
        states = [states_of(loader) for loader, _ in pairs]
        again = 0 if prefetched is not None else ahead  # batches fetched ahead that must be read again
        for i, (loader, entry) in enumerate(pairs):
            if again:
                entry = {**entry, "taken": max(0, entry["taken"] - again), "check": None}
            mode.iterators[i] = loader_positions.resume_iteration(loader, entry, reread=self.reread)
        mode._idx = state["index"] - again
        if hasattr(mode, "_consumed"):
            mode._consumed = list(state["consumed"])
        if ahead:
            fetcher.batches = prefetched or [batch for _ in range(again) if (batch := next(combined, None)) is not None]
        fetcher.fetched = fetched
        for (loader, entry), iterator in zip(pairs, mode.iterators, strict=True):
            self._tell_misplaced(loader, loader_positions.misplaced_generators(loader, iterator, entry))
        for (loader, entry), now in zip(pairs, states, strict=True):
            loader_positions.place_generators(loader, entry, now)
        rng.restore(state["rng"])

    # ---- helpers

    def _tell_misplaced(self, loader: Any, paths: list[str]) -> None:
        if paths:
            self._warn_once(
                f"{', '.join(paths)} of {type(loader).__name__} could not be brought to where it was at the save:"
                " samples may come twice or never. Make a generator in __init__, with a seed, and draw from it"
                " for this loader only"
            )

    def _prefetched(self, fetcher: Any, undone: int, stateful: bool, caveats: list[str]) -> tuple[int, Any]:
        """The number of batches that Lightning has fetched ahead, and copies of them. The copies are None when no batch
        is fetched ahead, when a step is in progress, or when a batch has no plain form."""
        batches = list(getattr(fetcher, "batches", None) or ())
        if not batches or undone:
            return len(batches), None
        try:
            return len(batches), to_plain(batches, "the batch fetched ahead")
        except NotPlain as error:
            if stateful:
                caveats.append(f"the batch fetched ahead is lost: {error}")
            return len(batches), None

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            log.warning("exact resume: %s", message)


def _matching(combined: Any, entries: list[Any]) -> list[tuple[Any, Any]]:
    """Pairs of the train loaders and their saved positions; none when the number or the kinds have changed."""
    loaders = list(combined.flattened) if combined is not None else []
    same = [loader_positions.kind_of(loader) for loader in loaders] == [entry["kind"] for entry in entries]
    return list(zip(loaders, entries, strict=True)) if same else []


def _validation_loaders(trainer: Any) -> list[Any]:
    return list(getattr(trainer.fit_loop.epoch_loop.val_loop._combined_loader, "flattened", ()))


def _is_whole(fetcher: Any) -> bool:
    """True when as many batches were fetched as the loaders say they have."""
    length = getattr(fetcher, "length", None)
    return length is not None and fetcher.fetched >= length > 0


def _persistent_loaders(combined: Any) -> list[Any]:
    return [loader for loader in getattr(combined, "flattened", ()) if getattr(loader, "persistent_workers", False)]


def _has_persistent_workers(trainer: Any) -> bool:
    """True when persistent workers of a validation loader are running."""
    combined = trainer.fit_loop.epoch_loop.val_loop._combined_loader
    return any(getattr(loader, "_iterator", None) is not None for loader in _persistent_loaders(combined))


def _taken(loader: Any, index: int, again: bool) -> int:
    """The number of batches taken from an iterator that does not count them, from the combined loader's index.

    ``again``: the loader has been read to its end and started again.
    """
    try:
        return index % len(loader) if again else min(index, len(loader))
    except TypeError:
        return index


def _defer_opening(fetcher: Any, open_loaders: Callable[[Any], None]) -> None:
    """Makes the fetcher open the loaders at its first ``next()`` instead of at ``iter()``. Idempotent."""
    base = type(fetcher)
    if getattr(base, "_resiliency_deferred", False):
        return

    def __iter__(self: Any) -> Any:
        self.reset()
        return self

    def __next__(self: Any) -> Any:
        self.__class__ = base
        open_loaders(self)
        return next(self)

    names = {"__iter__": __iter__, "__next__": __next__, "__module__": base.__module__, "_resiliency_deferred": True}
    fetcher.__class__ = type(base.__name__, (base,), names)
