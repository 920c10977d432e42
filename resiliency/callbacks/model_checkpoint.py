"""A drop-in ``ModelCheckpoint``: stock semantics, our engine underneath.

``from resiliency.callbacks.model_checkpoint import ModelCheckpoint`` gives the class for the Lightning that is imported
(``lightning.pytorch`` or ``pytorch_lightning``); ``build(namespace)`` gives it for a named one.

When and what to save, names, top-k and exceptions are the stock class's own code. Replaced is only what touches storage:
a save is captured on every rank and committed in the background, a removal waits for the newer commit, ``last`` is a
second name of the same step, loggers hear of a checkpoint once it exists, and a fit that names no checkpoint resumes
from the newest step of its run.
"""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from weakref import proxy

from resiliency.callbacks._attach import Attachment, EngineKey, attachment, lazy_filter
from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.manifest import META_DIR
from resiliency.checkpoint.options import CheckpointerOptions, LocalTierOptions, RemoteTierOptions
from resiliency.checkpoint.policy import Interval
from resiliency.checkpoint.ticket import Outcome
from resiliency.errors import AgentError, ConfigError, TierError
from resiliency.plugins import _lightning
from resiliency.plugins._gradients import accumulated, place
from resiliency.plugins._namespace import default_namespace
from resiliency.plugins._rank_state import RankState, is_step_boundary
from resiliency.settings import environment

__all__ = ["ModelCheckpoint", "build"]  # noqa: F822 - ModelCheckpoint is built on first use

logger = logging.getLogger(__name__)

_GUIDE_ONLY = "accepted so that the guide's example runs; it has no effect without NeMo"


class EngineModelCheckpoint:
    """Adds the engine to a stock ``ModelCheckpoint``; see the module docstring.

    Args:
        *args, **kwargs: those of the stock class.
        lazy: copy parameters and optimizer state while the next forward and backward run. False copies before the
            hook returns; choose it when something changes parameters outside the optimizer step.
        auto_resume: a fit without ``ckpt_path`` continues from the newest step of this run in ``dirpath``.
        exact_resume: keep generators and data loader positions of every rank.
        local_dir: a faster folder (ramdisk, local SSD) for the newest step; ``dirpath`` then is a tier the agent uploads
            to. Needed, and chosen as ``/dev/shm/...``, when ``dirpath`` is an address.
        persist: which saves also go to ``dirpath`` when ``local_dir`` is used.
        remotes: further tiers.
        run: name of the run; None: ``RESILIENCY_RUN``, ``JOB_IDENTIFIER`` or "default".
        options: of the engine.
        flush: how long the end of training waits for uploads.
        save_optim_on_train_end, save_optim_on_train_ends, always_save_context, save_context_on_train_end,
            preprocess_files, is_persistent_storage, delete_unfinished_ckpt_on_start, priority: of the guide this project
            implements; they concern NeMo and are accepted without effect.
        use_in_cluster_local_ckpts, enable_high_scale_ckpt: likewise, but True is refused with what to pass instead.
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
        flush: timedelta = timedelta(minutes=10),
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
            raise ConfigError("enable_high_scale_ckpt=True needs the GKE replicator, which is not supported; pass local_dir='/local' instead")
        if use_in_cluster_local_ckpts:
            raise ConfigError("use_in_cluster_local_ckpts=True: pass local_dir= with the folder of the local tier instead")
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
        self._flush_timeout = flush
        self._attachment: Attachment | None = None
        self._key: EngineKey | None = None
        self._engine: Checkpointer | None = None
        self._collecting = False
        self._requests: list[str] = []
        self._removals: list[str] = []
        self._stock_removals: list[tuple[int, str]] = []
        self._known: set[str] = set()
        self._announced_tier = "local"
        self._last_committed_step = -1
        super().__init__(*args, **kwargs)

    # -- where things are ---------------------------------------------------------------------------------------------

    def _relative(self, path: str) -> str | None:
        """A path below ``dirpath`` relative to it; None for anything else."""
        root = str(self.dirpath).rstrip("/") + "/"  # type: ignore[attr-defined]
        return path.removeprefix(root) if str(path).startswith(root) else None

    def _tiers(self) -> tuple[LocalTierOptions, list[RemoteTierOptions]]:
        dirpath = str(self.dirpath)  # type: ignore[attr-defined]
        remotes = list(self._remotes)
        local = self._local_dir or environment().local_dir
        if local is None and "://" not in dirpath:
            return LocalTierOptions(directory=dirpath), remotes
        if local is None:
            local = f"/dev/shm/resiliency-{os.getuid()}/{dirpath.replace('://', '-').replace('/', '-')}"
        remotes.insert(0, RemoteTierOptions(address=dirpath, name="persistent", interval=self._persist))
        self._announced_tier = "persistent"
        ramdisk = os.path.abspath(local).startswith("/dev/shm")
        return LocalTierOptions(directory=os.fspath(local), keep=1, names_hold=False, durable=not ramdisk), remotes

    # -- start --------------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Opens the engine and decides what to resume from. Collective: yes."""
        _check_namespace(self, trainer)
        with warnings.catch_warnings():
            # Our own files are why it is not empty: that is how a run resumes.
            warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
            super().setup(trainer, pl_module, stage)  # type: ignore[misc]
        _install_loading(trainer)
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
        shared = attachment(trainer)
        local, remotes = self._tiers()
        run = self._run_name or environment().run
        if self.save_weights_only:  # type: ignore[attr-defined]
            run += "-weights"  # nothing can resume from these, so they never stand beside full checkpoints
        key = EngineKey(local.directory, run)
        try:
            self._engine = shared.open(key, local=local, remotes=remotes, options=self._engine_options)
        except (TierError, AgentError) as error:
            # Every rank hears the same; training must start all the same.
            logger.error("no checkpoints will be written or resumed from: %s", error)
            return
        self._attachment, self._key = shared, key
        if self._exact_resume and shared.rank_state is None:
            shared.rank_state = RankState()
            shared.rank_state.attach(trainer)
        self._known = {name for _, names in self._engine.steps() for name in names}
        self._known |= set(trainer.strategy.broadcast(self._stock_files() if trainer.is_global_zero else []))
        if self._auto_resume and not self.save_weights_only:  # type: ignore[attr-defined]
            shared.offer_resume(key)

    def _stock_files(self) -> list[str]:
        """Names of stock checkpoints in ``dirpath``, which version counters must step over."""
        dirpath = str(self.dirpath)  # type: ignore[attr-defined]
        if not self._fs.exists(dirpath):  # type: ignore[attr-defined]
            return []
        names = [os.path.basename(str(p).rstrip("/")) for p in self._fs.ls(dirpath, detail=False)]  # type: ignore[attr-defined]
        return [name for name in names if name.endswith(self.FILE_EXTENSION)]  # type: ignore[attr-defined]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)  # type: ignore[misc]
        if self._engine is not None and not self.save_weights_only:  # type: ignore[attr-defined]
            self._engine.warm_up_for(_lightning.expected_tensors(trainer))

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        found: set[str] = super()._find_last_checkpoints(trainer)  # type: ignore[misc]
        if self.save_weights_only:  # type: ignore[attr-defined]
            return found
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dirpath = self.dirpath or self._ModelCheckpoint__resolve_ckpt_dir(trainer)  # type: ignore[attr-defined]
        previous, self.dirpath = self.dirpath, dirpath  # type: ignore[has-type]
        try:
            local, _ = self._tiers()
        finally:
            self.dirpath = previous
        virtual = Attachment.virtual(EngineKey(local.directory, self._run_name or environment().run))
        ours = {path for path in found if not _is_stock(path)}
        return (found - ours) | ({virtual} if os.path.isdir(os.path.join(virtual, "steps")) else ours)

    # -- saving -------------------------------------------------------------------------------------------------------

    @contextmanager
    def _collect(self, trainer: Any) -> Any:
        """Saves asked for inside one hook are one step under several names, written once."""
        self._collecting = True
        try:
            yield
        finally:
            self._collecting = False
            self._save_requests(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        if self._attachment is not None and self._attachment.gradients is not None:
            gradients, self._attachment.gradients = self._attachment.gradients, None
            place(trainer, gradients)
        super().on_train_batch_start(trainer, pl_module, *args, **kwargs)  # type: ignore[misc]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        if self._engine is not None:
            self._take_news(trainer)
            if self._train_time_interval is not None and not is_step_boundary(trainer):  # type: ignore[attr-defined]
                return  # gradients of half a step are in no checkpoint; the clock is looked at again at the next batch
        with self._collect(trainer):
            super().on_train_batch_end(trainer, pl_module, *args, **kwargs)  # type: ignore[misc]
        if self._engine is not None and self._engine.pending and _lightning.validation_follows(trainer):
            self._engine.fence()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._engine is not None and self._engine.pending:
            self._engine.fence()
        super().on_before_optimizer_step(trainer, pl_module, optimizer)  # type: ignore[misc]

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._fence()
        super().on_validation_start(trainer, pl_module)  # type: ignore[misc]

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
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
            self._engine.flush("committed", timeout=self._flush_timeout)
            self._take_news(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._engine is None:
            super().on_exception(trainer, pl_module, exception)  # type: ignore[misc]
            return
        self._fence()
        with self._collect(trainer):
            super().on_exception(trainer, pl_module, exception)  # type: ignore[misc]
        self._fence()
        self._engine.flush("committed", timeout=timedelta(seconds=30))
        self._take_news(trainer)
        self._release(lambda engine: engine.close(flush=False, reason="exception"))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)  # type: ignore[misc]
        if stage == "fit" and self._engine is not None:
            self._engine.flush("uploaded", timeout=self._flush_timeout)
            self._take_news(trainer)
            self._release(lambda engine: engine.close(timeout=self._flush_timeout))

    def _release(self, close: Callable[[Checkpointer], None]) -> None:
        assert self._attachment is not None and self._key is not None
        shared, self._engine = self._attachment, None
        shared.release(self._key, close=close)
        self._attachment = None

    def _fence(self) -> None:
        if self._engine is not None:
            self._engine.fence()

    def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
        if self._engine is None:
            super()._save_checkpoint(trainer, filepath)  # type: ignore[misc]
            return
        self._requests.append(filepath)
        self._last_global_step_saved = trainer.global_step
        self._last_checkpoint_saved = filepath
        if not self._collecting:
            self._save_requests(trainer)

    def _save_requests(self, trainer: Any) -> None:
        requests, self._requests = self._requests, []
        removals, self._removals = self._removals, []
        engine = self._engine
        if engine is None:
            return
        names = list(dict.fromkeys(name for name in map(self._relative, requests) if name is not None))
        if names:
            state = _lightning.dump_checkpoint(trainer, self.save_weights_only)  # type: ignore[attr-defined]
            per_rank = None
            if self._attachment is not None and self._attachment.rank_state is not None and not self.save_weights_only:  # type: ignore[attr-defined]
                gradients = accumulated(trainer)
                per_rank = {"rank_state": self._attachment.rank_state.capture(trainer, gradients_kept=True), "gradients": gradients}
            # Buffers differ between DDP ranks until the next forward, callback tensors may too: rank 0 writes all of those.
            live = lazy_filter(trainer)
            score = self.best_k_models.get(requests[0])  # type: ignore[attr-defined]
            info = {"epoch": trainer.current_epoch, **({self.monitor: float(score)} if score is not None and self.monitor else {})}  # type: ignore[attr-defined]
            if per_rank is not None and per_rank["rank_state"]["caveats"]:
                info["exact"] = False  # resume prefers another save of this step
            ticket = engine.save(
                trainer.global_step, state, per_rank=per_rank, names=names, supersedes=[n for n in removals if n not in names], info=info,
                lazy=live if self._lazy else False, replicated=live,
            )  # fmt: skip
            if ticket is None:
                self._last_global_step_saved = 0  # not saved: the next occasion may try again
            self._known.update(names)
        if removals:
            engine.delete(*[name for name in removals if name not in names])
            self._known.difference_update(name for name in removals if name not in names)

    def _take_news(self, trainer: Any) -> None:
        assert self._engine is not None
        for outcome in self._engine.poll():
            self._hear(trainer, outcome)

    def _hear(self, trainer: Any, outcome: Outcome) -> None:
        announced = outcome.kind == ("committed" if self._announced_tier == "local" else "durable")
        if outcome.tier != self._announced_tier or not announced:
            return
        self._last_committed_step = outcome.step
        if trainer.is_global_zero and outcome.names:
            for log in trainer.loggers:
                log.after_save_checkpoint(proxy(self))
        due = [path for step, path in self._stock_removals if step <= outcome.step]
        self._stock_removals = [item for item in self._stock_removals if item[0] > outcome.step]
        for path in due:
            trainer.strategy.remove_checkpoint(path)

    # -- names and removal ----------------------------------------------------------------------------------------------

    def _link_checkpoint(self, trainer: Any, filepath: str, linkpath: str) -> None:
        if self._engine is None:
            super()._link_checkpoint(trainer, filepath, linkpath)  # type: ignore[misc]
            return
        # A link is one more name of the same step. When that step was saved in an earlier hook, save the name anew.
        if linkpath not in self._requests:
            self._requests.append(linkpath)
        if not self._collecting:
            self._save_requests(trainer)

    def file_exists(self, filepath: Any, trainer: Any) -> bool:
        if self._engine is None:
            exists: bool = super().file_exists(filepath, trainer)  # type: ignore[misc]
            return exists
        # Every rank knows the same names, so no talk is needed; names on their way to the disk count too.
        return self._relative(str(filepath)) in self._known

    def _should_remove_checkpoint(self, trainer: Any, previous: str, current: str) -> bool:
        if self._engine is None:
            remove: bool = super()._should_remove_checkpoint(trainer, previous, current)  # type: ignore[misc]
            return remove
        if previous == current or self._relative(str(previous)) is None:
            return False
        # What the user named to resume from is theirs; what we resumed from ourselves is one of a series.
        explicit = self._attachment.explicit_path if self._attachment is not None else None
        return explicit is None or os.path.abspath(explicit) != os.path.abspath(previous)

    def _remove_checkpoint(self, trainer: Any, filepath: str) -> None:
        if self._engine is None:
            super()._remove_checkpoint(trainer, filepath)  # type: ignore[misc]
            return
        name = self._relative(str(filepath))
        if name is None or _is_stock(str(filepath)):
            self._stock_removals.append((trainer.global_step, filepath))
            return
        self._removals.append(name)
        if not self._collecting:
            self._save_requests(trainer)


def _is_stock(path: str) -> bool:
    """True when a local file or folder is a checkpoint of stock Lightning, not a name file of ours."""
    if "://" in path or not os.path.exists(path):
        return False
    if os.path.isdir(path):
        return META_DIR not in path
    with open(path, "rb") as file:
        return not file.read(1) == b"{"


def _check_namespace(callback: Any, trainer: Any) -> None:
    namespace = type(callback).namespace
    theirs = type(trainer).__module__.split(".")[0]
    if any(cls.__module__.startswith(namespace.split(".")[0] + ".") for cls in type(trainer).__mro__):
        return
    raise ConfigError(
        f"this ModelCheckpoint is built for {namespace}, the Trainer comes from {theirs}; import {theirs} before"
        f" resiliency.callbacks.model_checkpoint, or use build({'pytorch_lightning' if theirs == 'pytorch_lightning' else 'lightning.pytorch'!r})"
    )


def _install_loading(trainer: Any) -> None:
    """Makes the strategy's CheckpointIO understand our checkpoints; everything else goes to the user's own."""
    io = trainer.strategy.checkpoint_io
    if getattr(io, "resiliency_loading", False):
        return
    shared = attachment(trainer)
    original = io.load_checkpoint

    def load_checkpoint(path: Any, *args: Any, **kwargs: Any) -> Any:
        found = attachment(trainer).load(os.fspath(path), weights_only=kwargs.get("weights_only"))
        return original(path, *args, **kwargs) if found is None else found

    del shared
    io.load_checkpoint = load_checkpoint
    io.resiliency_loading = True


def build(namespace: str) -> type[Any]:
    """The class for ``lightning.pytorch`` or ``pytorch_lightning``; the same object each time."""
    found = _built.get(namespace)
    if found is None:
        stock = importlib.import_module(f"{namespace}.callbacks").ModelCheckpoint
        # Named like the stock class, because Lightning stores callback states under the class's name.
        found = type("ModelCheckpoint", (EngineModelCheckpoint, stock), {"__module__": __name__, "namespace": namespace, "__doc__": EngineModelCheckpoint.__doc__})
        _built[namespace] = found
    return found


_built: dict[str, type[Any]] = {}


def __getattr__(name: str) -> Any:
    if name == "ModelCheckpoint":
        return build(default_namespace())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
