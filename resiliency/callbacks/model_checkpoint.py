"""A drop-in ``ModelCheckpoint``: stock semantics, our engine underneath.

``from resiliency.callbacks.model_checkpoint import ModelCheckpoint`` gives the class for the Lightning that is imported
(``lightning.pytorch`` or ``pytorch_lightning``); ``build(namespace)`` gives it for a named one.

When and what to save, names, top-k and exceptions are the stock class's own code. Replaced is only what touches
storage: a save is captured on every rank and committed in the background, a removal waits for the newer commit,
``last`` is a second name of the same step, loggers hear of a checkpoint once it exists, and a fit that names no
checkpoint resumes from the newest step of its run.

All names of one hook are one save, so a checkpoint's callback state already knows its own ``last_model_path``; the
stock class writes twice and only the second file does.
"""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from resiliency.callbacks._arguments import check_own, check_stock, misconfigured
from resiliency.callbacks._names import is_stock, names_on_disk
from resiliency.callbacks._saving import SavesThroughEngine
from resiliency.callbacks._trainer_session import EngineKey, TrainerSession, trainer_session
from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.options import CheckpointerOptions, LocalTierOptions, RemoteTierOptions
from resiliency.errors import AgentError, ConfigError, TierError, Timeout
from resiliency.plugins import _lightning
from resiliency.plugins._namespace import default_namespace
from resiliency.plugins.resume.rank_state import RankState, is_step_boundary
from resiliency.settings import environment
from resiliency.storage.interval import Interval
from resiliency.storage.stage import Stage

__all__ = ["ModelCheckpoint", "build"]  # noqa: F822 - ModelCheckpoint is built on first use

logger = logging.getLogger(__name__)

_EXCEPTION_WAIT = timedelta(seconds=30)


class EngineModelCheckpoint(SavesThroughEngine):
    """Adds the engine to a stock ``ModelCheckpoint``; see the module docstring.

    Args:
        *args, **kwargs: those of the stock class.
        lazy: copy parameters and optimizer state while the next forward and backward run. False copies before the
            hook returns; choose it when something changes parameters between the end of a batch and the optimizer step.
        auto_resume: a fit without ``ckpt_path`` continues from the newest step of this run in ``dirpath``; not when the
            trainer has trained already, which goes on with what it has in memory, as always.
        exact_resume: keep generators and data loader positions of every rank.
        local_dir: a faster folder (ramdisk, local SSD) for the newest step; ``dirpath`` then is a tier the agent
            uploads to. Needed, and chosen as ``/dev/shm/...``, when ``dirpath`` is an address.
        persist: which saves also go to ``dirpath`` when ``local_dir`` is used.
        remotes: further tiers.
        run: name of the run; None: ``RESILIENCY_RUN``, ``JOB_IDENTIFIER`` or "default".
        options: of the engine.
        flush_timeout: how long the end of training waits for uploads.
        save_optim_on_train_end, save_optim_on_train_ends, always_save_context, save_context_on_train_end,
            preprocess_files, is_persistent_storage, delete_unfinished_ckpt_on_start, priority: of the guide this
                project
            implements; they concern NeMo and are accepted without effect.
        use_in_cluster_local_ckpts, enable_high_scale_ckpt: likewise, but True is refused with what to pass instead.

    Raises:
        ConfigError: a value that cannot work (also Lightning's own exception where the stock class raises that).
        TypeError: an unknown argument, or a value of a wrong type.
    """

    def __init__(
        self,
        *args: Any,
        lazy: bool = True,
        auto_resume: bool = True,
        exact_resume: bool = True,
        local_dir: str | os.PathLike[str] | None = None,
        persist: Interval | None = None,
        remotes: Sequence[RemoteTierOptions] = (),
        run: str | None = None,
        options: CheckpointerOptions | None = None,
        flush_timeout: timedelta = timedelta(minutes=10),
        save_optim_on_train_end: bool = False,
        save_optim_on_train_ends: bool = False,
        always_save_context: bool = False,
        save_context_on_train_end: bool = False,
        preprocess_files: bool = False,
        use_in_cluster_local_ckpts: bool | None = None,
        is_persistent_storage: bool = True,
        enable_high_scale_ckpt: bool = False,
        delete_unfinished_ckpt_on_start: bool = True,
        priority: int = 0,
        **kwargs: Any,
    ) -> None:
        if enable_high_scale_ckpt:
            raise ConfigError(
                "enable_high_scale_ckpt=True needs the GKE replicator, which is not supported; pass local_dir='/local'"
                " instead"
            )
        if use_in_cluster_local_ckpts:
            raise ConfigError(
                "use_in_cluster_local_ckpts=True: pass local_dir= with the folder of the local tier instead"
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
        check_stock(super().__init__.__func__, EngineModelCheckpoint.__init__, args, kwargs)  # type: ignore[attr-defined]
        self.save_optim_on_train_end = save_optim_on_train_end or save_optim_on_train_ends
        self.always_save_context = always_save_context
        self.save_context_on_train_end = save_context_on_train_end
        self.preprocess_files = preprocess_files
        self.is_persistent_storage = is_persistent_storage
        self.delete_unfinished_ckpt_on_start = delete_unfinished_ckpt_on_start
        self.priority = priority
        self._lazy = lazy
        self._auto_resume = auto_resume
        self._exact_resume = exact_resume
        self._local_dir = local_dir
        self._persist = persist or Interval()
        self._remotes = tuple(remotes)
        self._run_name = run
        self._engine_options = options or CheckpointerOptions()
        self._flush_timeout = flush_timeout
        self._session: TrainerSession | None = None
        self._key: EngineKey | None = None
        self._engine: Checkpointer | None = None
        self._stock_way = True  # until a fit has an engine; then False, even when the engine cannot be opened
        self._collecting = False
        self._overlap = False
        self._requests: list[str] = []
        self._removals: list[str] = []
        self._owed_removals: list[str] = []
        self._stock_removals: list[tuple[int, str]] = []
        self._saved_as: dict[str, int] = {}
        self._saves = 0
        self._missed = 0
        self._announced_tier = "local"
        namespace: str = type(self).namespace  # type: ignore[attr-defined]
        misconfiguration = importlib.import_module(f"{namespace}.utilities.exceptions").MisconfigurationException
        try:
            super().__init__(*args, **kwargs)
        except misconfiguration as error:
            raise misconfigured(error) from error

    def __reduce_ex__(self, protocol: Any) -> Any:
        cls: type[Any] = type(self)
        if cls is not _built.get(cls.namespace):
            return super().__reduce_ex__(protocol)
        # Two classes answer to one name; which of them this is must travel along.
        return _rebuild, (cls.namespace,), self.__dict__

    # -- where things are ---------------------------------------------------------------------------------------------

    def _tiers(self) -> tuple[LocalTierOptions, list[RemoteTierOptions]]:
        dirpath = str(self.dirpath)
        remotes = list(self._remotes)
        local = self._local_dir or environment().local_dir
        if local is None and "://" not in dirpath:
            return LocalTierOptions(directory=dirpath), remotes
        if local is None:
            local = f"/dev/shm/resiliency-{os.getuid()}/{dirpath.replace('://', '-').replace('/', '-')}"
        remotes.insert(0, RemoteTierOptions(address=dirpath, name="persistent", interval=self._persist))
        self._announced_tier = "persistent"
        ramdisk = os.path.abspath(local).startswith("/dev/shm")
        return LocalTierOptions(directory=os.fspath(local), keep=1, keep_named=False, durable=not ramdisk), remotes

    def _engine_key(self) -> EngineKey:
        run = self._run_name or environment().run
        if self.save_weights_only:  # type: ignore[attr-defined]
            run += "-weights"  # nothing can resume from these, so they never stand beside full checkpoints
        return EngineKey(self._tiers()[0].directory, run)

    # -- start --------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Opens the engine and decides what to resume from. Collective: yes."""
        _check_namespace(self, trainer)
        with warnings.catch_warnings():
            # Our own files are why it is not empty: that is how a run resumes.
            warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
            super().setup(trainer, pl_module, stage)  # type: ignore[misc]
        _lightning.install_loading(
            trainer, lambda path, weights_only: trainer_session(trainer).load(path, weights_only)
        )
        _lightning.teach_load_from_checkpoint(type(self).namespace)  # type: ignore[attr-defined]
        if stage != "fit" or trainer.fast_dev_run or self._engine is not None:
            return
        if not _lightning.is_supported(trainer.strategy):
            logger.warning(
                "%s is not supported by the checkpoint engine; its checkpoints go the stock way (slow, not verified)",
                type(trainer.strategy).__name__,
            )
            return
        self._attach(trainer)

    def _attach(self, trainer: Any) -> None:
        shared = self._session = trainer_session(trainer)
        self._stock_way = False
        self._key = key = self._engine_key()
        self._requests, self._removals, self._owed_removals, self._stock_removals = [], [], [], []
        self._saved_as, self._missed = {}, 0
        if self._exact_resume and shared.rank_state is None:
            shared.rank_state = RankState()
            shared.rank_state.attach(trainer)
        opened = self._open(trainer)
        resumable = not self.save_weights_only  # type: ignore[attr-defined]
        if not opened and resumable:
            shared.unwritable.append(key)
        shared.intercept()
        if self._auto_resume and resumable and trainer.global_step == 0:
            shared.offer_resume(key)

    def _open(self, trainer: Any) -> bool:
        """Opens the engine; False when it cannot be used, on all ranks alike. Collective: yes."""
        assert self._session is not None and self._key is not None
        local, remotes = self._tiers()
        try:
            opened = self._session.open(
                self._key, root=str(self.dirpath), local=local, remotes=remotes, options=self._engine_options
            )
        except (TierError, AgentError, OSError) as error:
            if isinstance(error, Timeout):
                raise  # a rank is missing: nothing works without it
            level = logging.ERROR if self._missed == 0 else logging.DEBUG
            logger.log(
                level,
                "no checkpoints are written to %s: %s; training goes on, and later saves try again",
                local.directory,
                error,
            )
            return False
        self._engine = opened.engine
        found = names_on_disk(str(self.dirpath), self._key.run, self.FILE_EXTENSION) if trainer.is_global_zero else []  # type: ignore[attr-defined]
        self._known.update(trainer.strategy.broadcast(found))
        return True

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)  # type: ignore[misc]
        weights_only: bool = self.save_weights_only  # type: ignore[attr-defined]
        if self._engine is not None and self._session is not None and self._key is not None and not weights_only:
            self._session.warm_up(self._key)
        if self._clock is not None:
            self._clock.on_train_start(trainer.global_step)

    @property
    def _clock(self) -> Any:
        return self._session.clock if self._session is not None else None

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        found: set[str] = super()._find_last_checkpoints(trainer)  # type: ignore[misc]
        if self.save_weights_only:  # type: ignore[attr-defined]
            return found
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dirpath = self.dirpath or self._ModelCheckpoint__resolve_ckpt_dir(trainer)  # type: ignore[attr-defined, has-type]
        previous, self.dirpath = self.dirpath, dirpath  # type: ignore[has-type]
        try:
            newest = self._engine_key().newest
        finally:
            self.dirpath = previous
        ours = {path for path in found if not is_stock(path)}
        # "last" is the newest step, whatever it is called: every rank will find the same one.
        candidates = {newest} if os.path.isdir(newest) else ours
        trainer_session(trainer).last_candidates |= candidates | {newest}
        return (found - ours) | candidates

    # -- hooks of training --------------------------------------------------------------------------------------------

    @contextmanager
    def _collect(self, trainer: Any, *, overlap: bool = False) -> Iterator[None]:
        """Saves asked for inside one hook are one step under several names, written once."""
        self._collecting, self._overlap = True, overlap
        try:
            yield
        finally:
            self._collecting = False
            self._save_requests(trainer)
            self._overlap = False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_start(trainer, pl_module, *args, **kwargs)  # type: ignore[misc]
        if self._clock is not None:
            self._clock.on_train_batch_start()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        super().on_before_backward(trainer, pl_module, loss)  # type: ignore[misc]
        if self._clock is not None:
            self._clock.on_before_backward()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        if self._stock_way:
            super().on_train_batch_end(trainer, pl_module, *args, **kwargs)  # type: ignore[misc]
            return
        assert self._session is not None
        self._session.take_news()
        if is_step_boundary(
            trainer
        ):  # gradients of half a step are in no checkpoint; triggers are looked at again at its end
            if _saves_weights_of_before(pl_module):
                # The stock class puts other weights into the module while it saves: the copy must be taken in there.
                super().on_train_batch_end(trainer, pl_module, *args, **kwargs)  # type: ignore[misc]
            else:
                # The module's own hook runs after this one and may change what is still being copied.
                overlap = _lightning.next_is_another_batch(trainer) and not _lightning.module_overrides(
                    trainer, "on_train_batch_end"
                )
                with self._collect(trainer, overlap=overlap):
                    super().on_train_batch_end(trainer, pl_module, *args, **kwargs)  # type: ignore[misc]
        if self._clock is not None:
            self._clock.on_train_batch_end(trainer.global_step)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._fence()
        super().on_before_optimizer_step(trainer, pl_module, optimizer)  # type: ignore[misc]

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._fence()
        if self._clock is not None and not trainer.sanity_checking:
            self._clock.on_validation_start()
        super().on_validation_start(trainer, pl_module)  # type: ignore[misc]

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._clock is not None and not trainer.sanity_checking:
            self._clock.on_validation_end()
        with self._collect(trainer):
            super().on_validation_end(trainer, pl_module)  # type: ignore[misc]

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._fence()
        with self._collect(trainer):
            super().on_train_epoch_end(trainer, pl_module)  # type: ignore[misc]

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        with self._collect(trainer):
            super().on_train_end(trainer, pl_module)  # type: ignore[misc]
        self._fence()
        if self._engine is not None:
            # Before strategies tear down the model; the wait for slower tiers is in teardown.
            self._settle(Stage.COMMITTED, self._flush_timeout)
            if trainer.world_size > 1:
                # Ranks learn of each other's shards through the store of rank 0, which goes when that process ends.
                trainer.strategy.barrier("resiliency: every shard is recorded")
        if self._clock is not None:
            self._clock.on_train_end(trainer.global_step)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._stock_way:
            super().on_exception(trainer, pl_module, exception)  # type: ignore[misc]
            return
        try:
            self._fence()
            with self._collect(trainer):
                super().on_exception(trainer, pl_module, exception)  # type: ignore[misc]
            self._settle(Stage.RECORDED, _EXCEPTION_WAIT)  # the other ranks may never come here
        except Exception:  # Boundary: what ended the training must reach the user, not what went wrong after it.
            logger.warning("no checkpoint could be saved after the exception", exc_info=True)
        finally:
            self._release(lambda engine: engine.close(flush=False, reason="exception"))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)  # type: ignore[misc]
        if stage != "fit" or self._stock_way:
            return
        self._settle(Stage.DURABLE, self._flush_timeout)
        self._release(lambda engine: engine.close(timeout=self._flush_timeout))

    def _settle(self, stage: Stage, timeout: timedelta) -> None:
        """Waits until what was saved has come to ``stage``, and tells whom it concerns. Blocks: up to ``timeout``,
        twice."""
        if self._engine is None or self._session is None:
            return
        try:
            for _ in range(
                2
            ):  # the first wait brings the news that shards are recorded, the second waits for those of the others
                self._engine.flush(stage, timeout=timeout)
                self._session.take_news()
        except (OSError, RuntimeError):
            # Boundary: torch's store raises these when another rank is gone. The training is over, and what is sealed
            # is safe.
            logger.warning("not everything was %s before the end; the next start finishes it", stage, exc_info=True)

    def _release(self, close: Callable[[Checkpointer], None]) -> None:
        shared, engine = self._session, self._engine
        self._session, self._engine, self._stock_way = None, None, True
        if shared is None or self._key is None:
            return
        if engine is not None:
            try:
                shared.release(self._key, close=close)
            except (OSError, RuntimeError):  # Boundary: as in _settle.
                logger.warning("the checkpoint engine did not close in order; what is sealed is safe", exc_info=True)
        else:
            shared.end_if_unused()

    def _fence(self) -> None:
        if self._session is not None:
            self._session.fence()


def _saves_weights_of_before(module: Any) -> bool:
    """With manual optimisation the stock class (2.6) saves weights the module kept from before the optimizer step, if
    it did."""
    return not module.automatic_optimization and bool(getattr(module, "saved_models", None))


def _check_namespace(callback: Any, trainer: Any) -> None:
    namespace = type(callback).namespace
    theirs = type(trainer).__module__.split(".")[0]
    if any(cls.__module__.startswith(namespace.split(".")[0] + ".") for cls in type(trainer).__mro__):
        return
    raise ConfigError(
        f"this ModelCheckpoint is built for {namespace}, the Trainer comes from {theirs}; import {theirs} before"
        " resiliency.callbacks.model_checkpoint, or use"
        f" build({'pytorch_lightning' if theirs == 'pytorch_lightning' else 'lightning.pytorch'!r})"
    )


def build(namespace: str) -> type[Any]:
    """The class for ``lightning.pytorch`` or ``pytorch_lightning``; the same object each time."""
    found = _built.get(namespace)
    if found is None:
        stock = importlib.import_module(f"{namespace}.callbacks").ModelCheckpoint
        # Named like the stock class, because Lightning stores callback states under the class's name.
        attributes = {"__module__": __name__, "namespace": namespace, "__doc__": EngineModelCheckpoint.__doc__}
        found = _built[namespace] = type("ModelCheckpoint", (EngineModelCheckpoint, stock), attributes)
    return found


_built: dict[str, type[Any]] = {}


def _rebuild(namespace: str) -> Any:
    return object.__new__(build(namespace))


def __getattr__(name: str) -> Any:
    if name == "ModelCheckpoint":
        return build(default_namespace())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
