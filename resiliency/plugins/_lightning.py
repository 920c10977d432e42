"""Uses Lightning's private attributes for saving and resuming.

All attributes are reached from the trainer object, so that the code serves both namespaces and all versions from 2.2.
Code for the loops in an exact resume is in :mod:`resiliency.plugins.resume.rank_state`, code that differs between
strategies in :mod:`resiliency.plugins.strategies`.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from resiliency.plugins.nemo_checkpoints import is_nemos

__all__ = [
    "about_to_end",
    "add_worker_seeds",
    "after_signal_handlers",
    "after_slurm_save",
    "after_batch_end_hooks",
    "after_teardown",
    "around_load",
    "asked_path",
    "before_ddp_wraps",
    "catch_save",
    "ddp_arguments",
    "find_last_again",
    "forget_batch_end_actions",
    "has_own_writes",
    "highest_step",
    "in_a_run",
    "intercept_resume",
    "is_handling_exception",
    "leave_handlers",
    "let_children_leave",
    "is_lightnings_handler",
    "module_overrides",
    "next_is_another_batch",
    "other_writer",
    "patch_load_checkpoint",
    "prepare_loaders",
    "save_as_stock",
    "save_is_wrapped",
    "slurm_requeue",
    "stop_asking_for_sigterm",
    "suppress_mid_epoch_warning",
    "tell_fetches",
    "tell_user",
    "torch_save_is_replaced",
    "users_code_has",
    "users_handler",
    "warn_as",
]

#: What the trainer runs for each of its verbs.
_RUNS = ("_fit_impl", "_validate_impl", "_test_impl", "_predict_impl")
_TRAINER_MODULES = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")

logger = logging.getLogger(__name__)

#: Beginnings of the modules whose classes are not the user's.
_NOT_THE_USERS = ("lightning.pytorch.", "pytorch_lightning.", "resiliency.")


def tell_user(trainer: Any, message: str) -> None:
    """Logs a message on rank 0 through the logger of Lightning's own messages to the user."""
    importlib.import_module(f"{_namespace_of(trainer)}.utilities.rank_zero").rank_zero_info(message)


def warn_as(module: str, message: str) -> None:
    """Warns on rank 0 as this module of Lightning does itself, so that a user's filter by module applies to it."""
    place = importlib.import_module(module)
    namespace = module.split(".callbacks")[0]
    if importlib.import_module(f"{namespace}.utilities.rank_zero").rank_zero_only.rank == 0:
        registry = vars(place).setdefault("__warningregistry__", {})
        warnings.warn_explicit(message, UserWarning, str(place.__file__), 1, module, registry)


def _namespace_of(trainer: Any) -> str:
    return next(name for name in ("lightning.pytorch", "pytorch_lightning") if _is_of(trainer, name))


def _is_of(trainer: Any, namespace: str) -> bool:
    return any(cls.__module__.startswith(namespace + ".") for cls in type(trainer).__mro__)


class _Told:
    """Calls a function of Lightning together with one of this library. A copy or pickle is Lightning's function alone.

    ``original`` is Lightning's function; ``first`` and ``second`` are the two functions in the order of the calls.
    """

    def __init__(self, original: Callable[[], None], first: Callable[[], None], second: Callable[[], None]) -> None:
        self._original, self._first, self._second = original, first, second

    def __call__(self) -> None:
        self._first()
        self._second()

    def __reduce__(self) -> tuple[Any, ...]:
        return _same, (self._original,)


def _same(function: Callable[[], None]) -> Callable[[], None]:
    return function


def tell_fetches(trainer: Any, started: Callable[[], None], ended: Callable[[], None]) -> None:
    """Calls ``started`` before and ``ended`` after each ``next()`` of the training loader, from the next epoch on.

    Wraps the two functions of the epoch loop that Lightning's fetcher calls there for the profiler. Idempotent.
    """
    loop = trainer.fit_loop.epoch_loop
    before, after = getattr(loop, "_on_before_fetch", None), getattr(loop, "_on_after_fetch", None)
    if before is None or after is None or isinstance(before, _Told):
        return
    loop._on_before_fetch = _Told(before, before, started)
    loop._on_after_fetch = _Told(after, ended, after)


# -- saving ------------------------------------------------------------------------------------------------------------


def next_is_another_batch(trainer: Any) -> bool:
    """In ``on_train_batch_end``: True when the next thing Lightning does is to fetch and run another training batch.

    False when a validation, the end of the epoch or the end of training comes first, because there callbacks and the
    module may swap or average weights in hooks that run before those of this library's callbacks.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    if epoch_loop.batch_progress.is_last_batch or _stopping(trainer) or epoch_loop._is_training_done:
        return False
    return not _validation_follows(trainer)


def _stopping(trainer: Any) -> bool:
    return bool(trainer.should_stop or getattr(trainer, "received_sigterm", False))


def _validation_follows(trainer: Any) -> bool:
    if not getattr(trainer, "enable_validation", False):
        return False
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        return True  # it may follow: Lightning looks at the clock a moment later
    check = trainer.fit_loop.epoch_loop._should_check_val_fx
    return bool(check(trainer.fit_loop._data_fetcher))


def save_is_wrapped(trainer: Any) -> bool:
    """True when other code has replaced or overridden ``trainer.save_checkpoint``: it wants to see each save."""
    save = trainer.__dict__.get("save_checkpoint", type(trainer).save_checkpoint)
    where = f"{getattr(save, '__module__', '')}:{getattr(save, '__qualname__', '')}"
    # functools.wraps copies both names, but sets __wrapped__.
    return not where.endswith(".trainer.trainer:Trainer.save_checkpoint") or hasattr(save, "__wrapped__")


@contextmanager
def catch_save(trainer: Any, save: Callable[[dict[str, Any], Any], bool]) -> Iterator[None]:
    """Within the block, ``trainer.save_checkpoint`` calls ``save(checkpoint, path)`` instead of writing; the strategy
    writes only if that returns False."""
    strategy = trainer.strategy
    original = strategy.save_checkpoint

    def save_checkpoint(checkpoint: dict[str, Any], filepath: Any, *args: Any, **kwargs: Any) -> None:
        if not save(checkpoint, filepath):
            original(checkpoint, filepath, *args, **kwargs)

    shadowed = strategy.__dict__.get("save_checkpoint")
    strategy.save_checkpoint = save_checkpoint
    try:
        yield
    finally:
        if shadowed is None:
            del strategy.save_checkpoint
        else:
            strategy.save_checkpoint = shadowed


def save_as_stock(trainer: Any, checkpoint: dict[str, Any], path: str) -> None:
    """Writes a dumped checkpoint as unmodified Lightning does: with ``torch.save``.

    Raises: what ``torch.save`` raises, for an object that cannot be pickled or a folder that cannot be used.
    """
    plugins = importlib.import_module(f"{_namespace_of(trainer)}.plugins.io")
    plugins.TorchCheckpointIO().save_checkpoint(checkpoint, path)


def about_to_end(trainer: Any) -> bool:
    """True when probably no training batch follows in this fit, so that a save now may be the last save."""
    return _stopping(trainer) or reached_its_end(trainer)


def reached_its_end(trainer: Any) -> bool:
    """True when the fit has trained for its ``max_steps`` or ``max_epochs``."""
    epoch_loop = trainer.fit_loop.epoch_loop
    if trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps:
        return True
    last_epoch = trainer.max_epochs not in (None, -1) and trainer.current_epoch + 1 >= trainer.max_epochs
    return bool(last_epoch and (epoch_loop.batch_progress.is_last_batch or epoch_loop._is_training_done))


def module_overrides(trainer: Any, hook: str) -> bool:
    """True when the user's LightningModule has its own ``hook``."""
    return _overrides(trainer.lightning_module, hook)


def users_code_has(trainer: Any, hook: str) -> bool:
    """True when the user's LightningModule, or a callback of neither Lightning nor ours, has its own ``hook``."""
    return any(_overrides(one, hook) for one in (trainer.lightning_module, *trainer.callbacks))


def _overrides(one: Any, hook: str) -> bool:
    if hook in getattr(one, "__dict__", {}):
        return True
    owner = next((cls for cls in type(one).__mro__ if hook in cls.__dict__), None)
    return owner is not None and not owner.__module__.startswith(_NOT_THE_USERS)


def after_batch_end_hooks(trainer: Any, action: Callable[[], None]) -> None:
    """In a callback's ``on_train_batch_end``: calls ``action`` once, right after the module's own hook of that name.

    Lightning calls first the callbacks, then the module, then its logger connector; the action runs right before the
    logger connector. Step numbers, progress and logged metrics are still those of the hook. When the module's hook
    raises, the action is not called.
    """
    connector = trainer._logger_connector
    waiting = getattr(connector.on_batch_end, "_resiliency_actions", None)
    if waiting is not None:
        waiting.append(action)
        return
    original, actions = connector.on_batch_end, [action]

    def on_batch_end() -> None:
        forget_batch_end_actions(trainer)
        for each in actions:
            each()
        original()

    on_batch_end._resiliency_actions = actions  # type: ignore[attr-defined]
    connector.on_batch_end = on_batch_end


def forget_batch_end_actions(trainer: Any) -> None:
    """Drops the actions of :func:`after_batch_end_hooks` that were not called. Idempotent."""
    patched = trainer._logger_connector.__dict__.get("on_batch_end")
    if hasattr(patched, "_resiliency_actions"):
        del trainer._logger_connector.on_batch_end


# -- resuming ----------------------------------------------------------------------------------------------------------


def asked_path(trainer: Any, chosen: Any) -> Any:
    """What the user of the running fit, validation, test or prediction has named to load: a path, a word ("last",
    "best", "hpc"), or None. ``chosen`` is what Lightning has made of it, which is the answer where this is not known.

    Lightning keeps only what it has made of it, which may be a path although the user has named none: under SLURM, say.
    """
    if trainer._checkpoint_connector._user_managed:  # by the setter of trainer.ckpt_path
        return chosen
    frame = sys._getframe(1)
    while (above := frame.f_back) is not None:
        if frame.f_code.co_name in _RUNS and frame.f_globals.get("__name__") in _TRAINER_MODULES:
            # Its own variable has changed by now. Each of Lightning's launchers calls it as function(*args, **kwargs).
            names = frame.f_code.co_varnames[1 : frame.f_code.co_argcount]
            passed = dict(zip(names, above.f_locals.get("args", ()), strict=False)) | above.f_locals.get("kwargs", {})
            return passed.get("ckpt_path", chosen)
        frame = above
    return chosen


def intercept_resume(trainer: Any, decide: Callable[[Any], Any]) -> Callable[[], None]:
    """Makes the run that is being set up load the path that ``decide(path)`` returns; ``path`` is Lightning's choice,
    or None. Replaces what an earlier call has set.

    Lightning resolves ``ckpt_path`` before any callback hook runs, each rank in its own file system. Only after that
    can the ranks agree on one path, and are all callbacks there: ``path`` is then made of "last" once more.

    Returns:
        A function that undoes this if the run has not called ``decide`` yet. Idempotent.
    """
    connector = trainer._checkpoint_connector
    original = getattr(connector.resume_start, "_resiliency_original", connector.resume_start)

    def resume_start(checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        undo()  # because the change is for this run only
        if asked_path(trainer, checkpoint_path) == "last":
            checkpoint_path = _last(trainer) or checkpoint_path
        original(decide(checkpoint_path), *args, **kwargs)

    def undo() -> None:
        if connector.__dict__.get("resume_start") is resume_start:
            del connector.resume_start

    resume_start._resiliency_original = original  # type: ignore[attr-defined]
    connector.resume_start = resume_start
    return undo


def find_last_again(trainer: Any) -> None:
    """Lets the run that is being set up find the "last" checkpoint of callbacks that came after Lightning had looked
    for it, such as those of ``LightningModule.configure_callbacks``. Idempotent."""
    if asked_path(trainer, None) == "last" and "resume_start" not in vars(trainer._checkpoint_connector):
        intercept_resume(trainer, lambda path: path)


def _last(trainer: Any) -> Any:
    """What Lightning makes of "last" with the callbacks that the trainer has now."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is none, it has said already
        return trainer._checkpoint_connector._select_ckpt_path(
            trainer.state.fn, "last", model_provided=True, model_connected=True
        )


@dataclass(frozen=True, kw_only=True)
class OtherWriter:
    """Code that must write a trainer's checkpoints instead of the engine.

    Attributes:
        words: what it is, for people.
        is_strategy: the strategy would write them itself, or with a plugin of its own, also without the user's plugins.
        advice: what to do so that the engine writes them; "": that follows from the words.
    """

    words: str
    is_strategy: bool = False
    advice: str = ""


def other_writer(trainer: Any, *, has_adapter: bool = False) -> OtherWriter | None:
    """The code that must write this trainer's checkpoints instead of the engine; None when there is none.

    A CheckpointIO or strategy that the user passed may encrypt or upload, and so may a replacement of ``torch.save``.

    Args:
        has_adapter: an adapter of the engine supports the strategy, with the methods that it has for saving.
    """
    strategy, io = trainer.strategy, trainer.strategy.checkpoint_io
    if is_nemos(strategy):
        return OtherWriter(words=f"NeMo's {type(strategy).__name__}", is_strategy=True, advice=_IN_NEMO)
    stock = type(io).__name__ == "TorchCheckpointIO" and type(io).__module__.startswith(_FABRICS)
    if not stock and not type(io).__module__.startswith("resiliency."):
        was_passed = io is trainer._accelerator_connector.checkpoint_io
        if was_passed or type(strategy).__module__.startswith(_FABRICS):
            makes_one = _is_users(strategy, "checkpoint_io") or (not has_adapter and has_own_writes(strategy))
            words = f"the CheckpointIO plugin {type(io).__name__} of this Trainer"
            return OtherWriter(words=words, is_strategy=makes_one)
        words = f"the strategy {type(strategy).__name__}, which has set a CheckpointIO of its own, {type(io).__name__}"
        return OtherWriter(words=words, is_strategy=True)
    if not has_adapter and has_own_writes(strategy):
        words = f"the strategy {type(strategy).__name__} of this Trainer, which has methods of its own for that"
        return OtherWriter(words=words, is_strategy=True)
    if stock and _is_replaced(io):
        return OtherWriter(words=f"a function that other code has put in the place of one of {type(io).__name__}")
    if torch_save_is_replaced():
        return OtherWriter(words=f"a function that other code has put in the place of torch.save ({torch.save!r})")
    return None


def _is_replaced(io: Any) -> bool:
    """True when other code has replaced what Lightning's own CheckpointIO saves or removes with: it wants to see the
    checkpoints."""
    if not set(_WRITES).isdisjoint(vars(io)):
        return True
    saves = type(io).save_checkpoint, getattr(sys.modules[type(io).__module__], "_atomic_save", None)
    return any(one is not None and _is_of_others(one) for one in (*saves, type(io).remove_checkpoint))


def _is_of_others(function: Any) -> bool:
    """True for a function of code outside Lightning, or one that such code has wrapped."""
    of_lightning = str(getattr(function, "__module__", "")).startswith(_FABRICS)
    return not of_lightning or hasattr(function, "__wrapped__")


def has_own_writes(strategy: Any) -> bool:
    """True when code outside Lightning has overridden or replaced how a strategy writes or removes checkpoints."""
    return any(_is_users(strategy, name) for name in _WRITES)


def _is_users(strategy: Any, name: str) -> bool:
    """True when code outside Lightning has overridden or replaced a method or property of a strategy."""
    if name in vars(strategy):
        return True
    owner = next(cls for cls in type(strategy).__mro__ if name in vars(cls))
    return not owner.__module__.startswith(_FABRICS)


def torch_save_is_replaced() -> bool:
    """True when other code has replaced ``torch.save``: it wants to see the saves."""
    return torch.save is not torch.serialization.save


_IN_NEMO = (
    "Pass NeMo's own ModelCheckpoint in its place, without which AutoResume finds nothing, and add"
    " resiliency.plugins.nemo.CheckpointEngine() to the Trainer's callbacks (docs/nemo.md)"
)
#: Methods of strategies and of CheckpointIO plugins that write or remove a checkpoint.
_WRITES = ("save_checkpoint", "remove_checkpoint")
#: Prefixes of the modules that belong to Lightning's packages.
_FABRICS = ("lightning.fabric.", "lightning_fabric.", "lightning.pytorch.", "pytorch_lightning.")


def weights_only_of(namespace: str, given: bool | None) -> bool | None:
    """The ``weights_only`` that a load uses. It is ``given``, except that None means False, which trusts all files,
    with Lightning before 2.6, which lacks the argument."""
    stock = importlib.import_module(f"{namespace}.plugins.io").TorchCheckpointIO
    knows = "weights_only" in inspect.signature(stock.load_checkpoint).parameters
    if given is None and not knows:
        return False
    return given


def patch_load_checkpoint(
    trainer: Any, load: Callable[[str, bool | None], dict[str, Any] | None], *, of_strategy: bool = False
) -> None:
    """Makes the strategy's CheckpointIO call ``load(path, weights_only)`` first, and its own method if it gets None.

    A function that other code has put in the place of that method gets every file, as in stock Lightning.

    Args:
        of_strategy: patch the strategy itself, which loads without a CheckpointIO.
    """
    place: Any = trainer.strategy if of_strategy else trainer.strategy.checkpoint_io
    name, outer = "load_checkpoint", vars(place).get("load_checkpoint")
    if isinstance(outer, _AroundLoad):  # it is told of these loads, too
        place, name = outer, "original"
    # Replaces an earlier patch, because several trainers may use one plugin object, one after the other.
    current = getattr(place, name)
    original = current.original if isinstance(current, _LoadOursFirst) else current
    setattr(place, name, _LoadOursFirst(load, original, weights_only_of(_namespace_of(trainer), None)))


class _LoadOursFirst:
    """Replaces a ``load_checkpoint``. A class, so that the trainer can still be pickled."""

    def __init__(
        self,
        load: Callable[[str, bool | None], dict[str, Any] | None],
        original: Callable[..., Any],
        weights_only: bool | None,
    ) -> None:
        self.load = load
        self.original = original
        self.weights_only = weights_only

    def __call__(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("weights_only")
        ours = str(getattr(self.original, "__module__", "")).startswith("resiliency.")
        if not ours and _is_of_others(self.original) and os.path.isfile(path):
            return self.original(path, *args, **kwargs)
        found = self.load(os.fspath(path), self.weights_only if given is None else given)
        return self.original(path, *args, **kwargs) if found is None else found


def around_load(trainer: Any, began: Callable[[], None], ended: Callable[[], None]) -> Callable[[], None]:
    """Calls ``began`` before the strategy loads a checkpoint, and ``ended`` afterwards. Call it in ``setup`` of a fit.

    Returns:
        A function that undoes this. Idempotent.
    """
    strategy = trainer.strategy
    shadowed = "load_checkpoint" in vars(strategy)
    around = strategy.load_checkpoint = _AroundLoad(strategy.load_checkpoint, began, ended)

    def undo() -> None:
        if vars(strategy).get("load_checkpoint") is not around:
            return
        if shadowed or isinstance(around.original, _LoadOursFirst):
            strategy.load_checkpoint = around.original
        else:
            del strategy.load_checkpoint

    return undo


class _AroundLoad:
    """Replaces a strategy's ``load_checkpoint``, which is :attr:`original`."""

    def __init__(self, original: Callable[..., Any], began: Callable[[], None], ended: Callable[[], None]) -> None:
        self.original = original
        self._began = began
        self._ended = ended

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._began()
        try:
            return self.original(*args, **kwargs)
        finally:
            self._ended()


def suppress_mid_epoch_warning(trainer: Any) -> None:
    """Suppresses, at the next restart, Lightning's warning that it cannot resume in the middle of an epoch."""
    epoch_loop = trainer.fit_loop.epoch_loop
    if "reset" in epoch_loop.__dict__:
        return
    original = epoch_loop.reset

    def reset() -> None:
        del epoch_loop.reset  # because the change is for this restart only
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="You're resuming from a checkpoint that ended before the epoch ended"
            )
            original()

    epoch_loop.reset = reset


# -- distributed data parallel -----------------------------------------------------------------------------------------


def before_ddp_wraps(trainer: Any, action: Callable[[], None]) -> Callable[[], None]:
    """Calls ``action`` once, right before DDP wraps the module. The module has all its layers then.

    Call it in ``setup`` of a fit.

    Returns:
        A function that undoes this. Idempotent.
    """
    strategy = trainer.strategy
    original, shadowed = strategy.configure_ddp, vars(strategy).get("configure_ddp")

    def configure_ddp() -> None:
        undo()
        action()
        original()

    def undo() -> None:
        if vars(strategy).get("configure_ddp") is not configure_ddp:
            return
        if shadowed is None:
            del strategy.configure_ddp
        else:
            strategy.configure_ddp = shadowed

    strategy.configure_ddp = configure_ddp
    return undo


def ddp_arguments(trainer: Any) -> dict[str, Any]:
    """The arguments that the strategy passes to torch's ``DistributedDataParallel``; change the dict in place."""
    arguments: dict[str, Any] = trainer.strategy._ddp_kwargs
    return arguments


# -- signals -----------------------------------------------------------------------------------------------------------


def is_lightnings_handler(trainer: Any, handler: Any) -> bool:
    """True for a signal handler that Lightning has set for a fit."""
    return type(handler).__name__ == "_HandlersCompose" and type(handler).__module__.startswith(_FABRICS)


def users_handler(trainer: Any, number: int, handler: Any) -> Any:
    """The user's handler of a signal: ``handler`` itself, or the one that Lightning's handler has replaced, or None."""
    if not is_lightnings_handler(trainer, handler):
        return handler
    return trainer._signal_connector._original_handlers.get(number)


def prepare_loaders(trainer: Any, prepare: Callable[[Any], None]) -> Callable[[], None]:
    """Calls ``prepare`` with each data loader before the trainer opens it. Call it in ``setup`` of a fit.

    Returns:
        A function that undoes this. Idempotent.
    """
    strategy = trainer.strategy
    original, shadowed = strategy.process_dataloader, vars(strategy).get("process_dataloader")

    def process_dataloader(loader: Any, *args: Any, **kwargs: Any) -> Any:
        prepare(loader)
        return original(loader, *args, **kwargs)

    def undo() -> None:
        if vars(strategy).get("process_dataloader") is not process_dataloader:
            return
        if shadowed is None:
            del strategy.process_dataloader
        else:
            strategy.process_dataloader = shadowed

    strategy.process_dataloader = process_dataloader
    return undo


def add_worker_seeds(trainer: Any, loader: Any) -> None:
    """Sets the loader's ``worker_init_fn`` that seeds workers, if ``seed_everything(workers=True)`` asks for it and the
    loader has none. The trainer would do the same later."""
    package = "lightning.fabric" if _is_of(trainer, "lightning.pytorch") else "lightning_fabric"
    utilities = importlib.import_module(f"{package}.utilities.data")
    utilities._auto_add_worker_init_fn(loader, trainer.global_rank)


def after_signal_handlers(trainer: Any, action: Callable[[], None]) -> Callable[[], None]:
    """Calls ``action`` once, right after the trainer has set its signal handlers, which is before the sanity check.

    Call it in ``setup`` of a fit.

    Returns:
        A function that undoes this. Idempotent.
    """
    connector = trainer._signal_connector
    original = connector.register_signal_handlers

    def register_signal_handlers() -> None:
        undo()
        original()
        action()

    def undo() -> None:
        if vars(connector).get("register_signal_handlers") is register_signal_handlers:
            del connector.register_signal_handlers

    connector.register_signal_handlers = register_signal_handlers
    return undo


def is_handling_exception(frame: FrameType | None) -> bool:
    """True when the frame runs while the trainer handles the exception that has ended the fit, its hooks included."""
    while frame is not None:
        if frame.f_code.co_name == "_interrupt" and frame.f_globals.get("__name__", "").startswith(_FABRICS):
            return True
        frame = frame.f_back
    return False


def leave_handlers(trainer: Any, handlers: Mapping[int, Any]) -> None:
    """Sets signal handlers that become active once the trainer has removed its own, where the default would be."""
    originals = trainer._signal_connector._original_handlers
    for number, handler in handlers.items():
        if originals.get(number) == signal.SIG_DFL:
            originals[number] = handler


def let_children_leave(trainer: Any) -> None:
    """If rank 0 has started the other ranks, lets them end with a status other than 0. Otherwise Lightning's launcher
    would kill rank 0 within 5 s."""
    launcher = trainer.strategy.launcher
    if type(launcher).__name__ == "_SubprocessScriptLauncher":
        launcher.procs.clear()  # in place, because the launcher's thread watches this list object


def slurm_requeue(trainer: Any, handler: Any, number: int) -> None:
    """Lets Lightning save its checkpoint and requeue the SLURM job, if its handler of this signal does that.

    Collective: yes. Blocks: as long as Lightning's save.

    Args:
        handler: the signal's handler that the trainer has set.
        number: number of the signal.
    """
    requeue = getattr(trainer._signal_connector, "_slurm_sigusr_handler_fn", None)
    if requeue and is_lightnings_handler(trainer, handler) and requeue in getattr(handler, "signal_handlers", ()):
        requeue(number, None)


def after_slurm_save(trainer: Any, action: Callable[[], None]) -> Callable[[], None]:
    """Calls ``action`` in Lightning's signal handler that saves its own checkpoint and requeues the SLURM job, after it
    has done both; all ranks are there then. Does nothing where there is no such handler. Call it in ``setup`` of a fit.

    Returns:
        A function that undoes this. Idempotent.
    """
    connector = trainer._signal_connector
    original = getattr(connector, "_slurm_sigusr_handler_fn", None)
    if original is None or not getattr(trainer._accelerator_connector.cluster_environment, "auto_requeue", False):
        return lambda: None

    def handle(*args: Any) -> None:
        original(*args)
        action()

    def undo() -> None:
        if vars(connector).get("_slurm_sigusr_handler_fn") is handle:
            del connector._slurm_sigusr_handler_fn

    connector._slurm_sigusr_handler_fn = handle
    return undo


def highest_step(trainer: Any) -> int:
    """The highest ``global_step`` of any rank. Collective: yes."""
    step = torch.tensor(trainer.global_step, device=trainer.strategy.root_device)
    return int(trainer.strategy.reduce(step, reduce_op="max"))


def stop_asking_for_sigterm(trainer: Any) -> Callable[[], None]:
    """Ends Lightning's broadcast (2.6) at each batch of whether rank 0 got SIGTERM, because all ranks wait for it.

    Returns:
        A function that undoes this. Idempotent.
    """
    loop = trainer.fit_loop.epoch_loop
    if not hasattr(loop, "_broadcast_sigterm_tensor"):
        return lambda: None

    def ask_nobody() -> None: ...

    loop._broadcast_sigterm_tensor = ask_nobody

    def undo() -> None:
        if vars(loop).get("_broadcast_sigterm_tensor") is ask_nobody:
            del loop._broadcast_sigterm_tensor

    return undo


def after_teardown(trainer: Any, action: Callable[[], None]) -> None:
    """Calls ``action`` after Lightning's teardown; ``fit`` raises what it raises. Call it in ``on_exception``."""
    original = trainer._teardown

    def teardown() -> None:
        del trainer._teardown
        try:
            original()
        finally:
            action()

    trainer._teardown = teardown


def in_a_run() -> bool:
    """True when a fit, validation, test or prediction of a trainer has called: its teardown follows. A CheckpointIO is
    told neither of the trainer nor of the beginning of a run."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_run" and frame.f_globals.get("__name__") in _TRAINER_MODULES:
            return True
        frame = frame.f_back
    return False
