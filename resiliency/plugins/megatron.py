"""Saves megatron-core's distributed checkpoints with the checkpoint engine: a save strategy for every loop that calls
``megatron.core.dist_checkpointing``.

::

    strategy = MegatronSaveStrategy()
    dist_checkpointing.save(state, f"{folder}/iter_{step:07d}", sharded_strategy=strategy)

Megatron's own planner says what each rank writes: main replicas, prepended axes, ShardedObjects and factories are its
work. The engine writes it, and the folder is one that stock megatron-core reads: ``.metadata``, a ``.distcp`` file for
each rank, ``common.pt`` and ``metadata.json``. All of them appear when the step is committed.

Needs megatron-core 0.13 or newer (0.15.3, 0.16.1 and 0.19.2 were run). Importing this module imports it, and raises
ConfigError where that does not work.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import os
import re
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.dcp import check_folder, write_plan_of
from resiliency.checkpoint.options import CheckpointerOptions, LocalTierOptions, RemoteTierOptions
from resiliency.checkpoint.ticket import LOCAL, Ticket
from resiliency.checkpoint.write_plan import WritePlan
from resiliency.errors import ConfigError, ResiliencyError
from resiliency.events import EventSink, EventWriter
from resiliency.plugins._missing import no_megatron
from resiliency.storage.shard_file import STOCK_METADATA
from resiliency.storage.stage import Stage

try:
    from megatron.core.dist_checkpointing.core import CheckpointingConfig
    from megatron.core.dist_checkpointing.strategies import torch as megatron
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
except ImportError as error:
    raise no_megatron(error) from error

__all__ = ["CommitQueue", "MegatronLoadStrategy", "MegatronSaveStrategy"]

logger = logging.getLogger(__name__)

#: Folder of a NeMo checkpoint in which Megatron's files are.
_WEIGHTS = "weights"
#: Written by megatron-core on rank 0 before it calls the strategy (before 0.19, which has it among the objects).
_COMMON = "common.pt"
_CONFIG = "metadata.json"
_ITERATION = re.compile(r"(?:iter_|step=)(\d+)")


class MegatronSaveStrategy(megatron.TorchDistSaveShardedStrategy):
    """Writes the sharded part of a Megatron checkpoint through the checkpoint engine. Make one for a whole run.

    The functions of an asynchronous request run when the step is committed on all hosts, see :class:`CommitQueue`.

    Thread: training. Collective: every rank calls it; ranks exchange a digest of what each of them writes.

    Args:
        directory: in which the checkpoints lie; None: the folder above each checkpoint (of NeMo: above the one that
            holds ``weights``).
        run, options, remotes: as for :class:`~resiliency.Checkpointer`.
        lazy: copy large tensors of an asynchronous save in the background, until an optimizer's step begins. Nothing
            else may change them until then (``overlap_param_gather`` does). False: copy before ``async_save`` returns.
        timeout: most time that a rank waits for the commit of one save.
        keep_only_main_replica: as for the stock strategy.
    """

    def __init__(
        self,
        *,
        directory: str | os.PathLike[str] | None = None,
        run: str | None = None,
        options: CheckpointerOptions | None = None,
        remotes: Sequence[RemoteTierOptions] = (),
        lazy: bool = False,
        timeout: timedelta = timedelta(minutes=10),
        keep_only_main_replica: bool = True,
    ) -> None:
        super().__init__("torch_dist", 1, keep_only_main_replica)
        self._directory = None if directory is None else os.path.abspath(directory)
        self._run, self._options, self._remotes, self._timeout = run, options, tuple(remotes), timeout
        self._engine: Checkpointer | None = None
        self._close: Callable[[], object] = lambda: None
        #: Names that the run's steps have; those whose folder somebody has deleted are deleted from the engine, too.
        self._names: dict[str, Ticket | None] = {}
        self.lazy = lazy
        #: Number of the step that is saved next; None: it follows from the name of the folder.
        self.step: int | None = None
        #: Further places for the engine's events, and how its log says that this process has ended.
        self.sinks: tuple[EventSink, ...] = ()
        self.end = _End()
        #: Saves so far. Megatron replaces strategies that it does not know in silence; then this stays 0.
        self.calls = 0

    # -- what megatron-core calls -------------------------------------------------------------------------------------

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | os.PathLike[str]) -> None:
        """Saves, and returns when the step is committed, and on this host safe from a power loss. Blocks: until then.

        Raises:
            ConfigError: the state cannot be stored.
            ResiliencyError, Timeout: the step is not committed.
        """
        ticket = self._start(sharded_state_dict, checkpoint_dir, lazy=False)
        if ticket is None and self._engine is not None and self._engine.flush(Stage.COMMITTED, timeout=self._timeout):
            ticket = self._start(sharded_state_dict, checkpoint_dir, lazy=False)
        _Commit(self, ticket, self._timeout)()

    def async_save(
        self, sharded_state_dict: Any, checkpoint_dir: str | os.PathLike[str], *_: Any, **__: Any
    ) -> AsyncRequest:
        """Returns a request whose first function waits for the commit. Blocks: while it copies what is not lazy."""
        ticket = self._start(sharded_state_dict, checkpoint_dir, lazy=self.lazy)
        return AsyncRequest(None, (), [_Commit(self, ticket, self._timeout)])

    # -- the engine ---------------------------------------------------------------------------------------------------

    def _start(self, sharded_state_dict: Any, checkpoint_dir: str | os.PathLike[str], *, lazy: bool) -> Ticket | None:
        """None: the engine skips this save, because the one before it is not recorded, or its agent keeps dying."""
        self.calls += 1
        if "://" in os.fspath(checkpoint_dir):
            raise ConfigError(f"{checkpoint_dir} is an address; save in a folder, and pass remotes= for the bucket")
        folder = os.path.abspath(checkpoint_dir)
        above = os.path.dirname(folder)
        engine = self.open(
            self._directory or (os.path.dirname(above) if os.path.basename(folder) == _WEIGHTS else above)
        )
        name = os.path.relpath(folder, engine.directory)
        if name.startswith(os.pardir) or name == os.curdir:
            raise ConfigError(
                f"the checkpoint {folder} is not in {engine.directory}; pass MegatronSaveStrategy(directory=...)"
            )
        step = self._step_of(name, engine)
        self.forget_deleted()
        plan = self._planned(sharded_state_dict)
        beside = _files_of_rank_0(folder, self.backend, self.version) if torch.distributed.get_rank() == 0 else {}
        ticket = engine.save(step, plan, names=[name], beside=beside, lazy=lazy)
        if ticket is not None:
            self._names[name] = ticket
        return ticket

    def _planned(self, sharded_state_dict: Any) -> WritePlan:
        """What this rank writes. A problem of this rank alone is refused on all ranks, so that none waits for it."""
        try:
            by_key = megatron._replace_state_dict_keys_with_sharded_keys
            flat, _, _ = by_key(sharded_state_dict, self.keep_only_main_replica)
            for key, parts in flat.items():
                if any(getattr(part, "flattened_range", None) is not None for part in parts):
                    raise ConfigError(
                        f"{key!r} has a flattened_range, as the optimizer's format fully_sharded_model_space makes it:"
                        " newer megatron-core refuses it, and so does the engine; save the distributed optimizer as"
                        " dp_reshardable or fully_reshardable"
                    )
            state = megatron.mcore_to_pyt_state_dict(flat, False)
            planner = _planner(self.keep_only_main_replica)
            planner.set_up_planner(state, None, torch.distributed.get_rank() == 0)
            return write_plan_of(planner.finish_plan(planner.create_local_plan()), planner)
        except ConfigError as error:
            return WritePlan(chunks=(), problem=str(error))
        except Exception as error:  # Boundary: Megatron asserts much of the states that it is given.
            logger.warning("rank %d cannot plan its part of a checkpoint", torch.distributed.get_rank(), exc_info=True)
            return WritePlan(chunks=(), problem=f"Megatron's planner raised {type(error).__name__}: {error}")

    def open(self, directory: str) -> Checkpointer:
        """The engine of the checkpoints in this directory; the first save opens it by itself. Collective: yes."""
        if self._engine is not None and self._engine.directory != directory:
            self.close()
        if self._engine is None:
            engine = Checkpointer(
                LocalTierOptions(directory=directory, keep=1),  # and those that have a name
                remotes=self._remotes,
                run=self._run,
                rank=torch.distributed.get_rank(),
                world_size=torch.distributed.get_world_size(),
                options=self._options,
                sinks=self.sinks,
            )
            self._names = {name: None for _, names in engine.steps() for name in names}
            self._engine, self._close = engine, weakref.finalize(self, self.end.close, engine)
        return self._engine

    def _step_of(self, name: str, engine: Checkpointer) -> int:
        if self.step is not None:
            return self.step
        numbers = _ITERATION.findall(name)
        return int(numbers[-1]) if numbers else max((known.step for known, _ in engine.steps()), default=-1) + 1

    def forget_deleted(self) -> None:
        """Megatron, NeMo and people delete folders of checkpoints by themselves: their bytes go with them."""
        engine = self._engine
        if engine is None:
            return
        gone = [
            name
            for name, ticket in self._names.items()
            if (ticket is None or ticket.has_reached(Stage.COMMITTED))
            and not os.path.exists(os.path.join(engine.directory, name, STOCK_METADATA))
        ]
        if gone:
            engine.delete(*gone)
            for name in gone:
                del self._names[name]

    @property
    def events(self) -> EventWriter | None:
        """The engine's event log; None while the engine is not open."""
        return None if self._engine is None else self._engine.session.events

    def poll(self) -> None:
        """Takes note of what the agent has done since the last call. Blocks: no."""
        if self._engine is not None:
            self._engine.poll()

    def close(self) -> None:
        """Waits until the saves are durable, and closes the engine. Idempotent. Not collective."""
        self.forget_deleted()
        self._engine = None
        self._close()


@dataclasses.dataclass
class _End:
    """Attributes: reason: "finished", "exception" or "signal"."""

    reason: str = "finished"

    def close(self, engine: Checkpointer) -> None:
        engine.close(reason=self.reason)


class _Commit:
    """The first function of an asynchronous request: waits for the commit, and until this host's part of it would
    survive a power loss, because what follows may delete older checkpoints."""

    def __init__(self, strategy: MegatronSaveStrategy, ticket: Ticket | None, timeout: timedelta) -> None:
        self._strategy, self._ticket, self._timeout = strategy, ticket, timeout
        can_be_durable = ticket is not None and LOCAL in ticket.can_be_durable
        self._stage = Stage.DURABLE if can_be_durable else Stage.COMMITTED

    def is_done(self) -> bool:
        """True also when the save has failed. Blocks: no."""
        self._strategy.poll()
        ticket, stage = self._ticket, self._stage
        return ticket is None or ticket.has_reached(stage, tier=LOCAL) or ticket.is_hopeless(stage, tier=LOCAL)

    def forget_deleted(self) -> None:
        """Of checkpoints that the request's other functions have deleted: the next save may use their files."""
        self._strategy.forget_deleted()

    def __call__(self) -> None:
        if self._ticket is None:
            raise ResiliencyError("a checkpoint was skipped, because the save before it was not recorded in time")
        self._ticket.wait(self._stage, tier=LOCAL, timeout=self._timeout)


class CommitQueue:
    """Takes the place of Megatron's queue of asynchronous saves (``AsyncCallsQueue``), for requests of
    :class:`MegatronSaveStrategy`: a request is done when its step is committed, for which Megatron's own queue would
    wait on the training thread. No process is forked.

    A save that fails (a full disk, an agent that died) is said, and training goes on: the functions of its request are
    not run, so that its checkpoint stays marked as unfinished and what it would have replaced is kept.

    Thread: training. Collective: every rank schedules the same requests, and asks at the same steps.
    """

    def __init__(self) -> None:
        self._requests: deque[tuple[int, AsyncRequest]] = deque()
        self._scheduled = 0

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Returns the number of the request. The engine has begun already. Blocks: no."""
        if not isinstance(async_request.finalize_fns[0], _Commit):
            raise ConfigError("CommitQueue takes requests of MegatronSaveStrategy; another strategy made this one")
        self._requests.append((self._scheduled, async_request))
        self._scheduled += 1
        return self._scheduled - 1

    def maybe_finalize_async_calls(self, blocking: bool = False, no_dist: bool = False) -> list[int]:
        """Runs the functions of the requests whose steps are committed, in their order, on all ranks alike.

        Args:
            blocking: wait for the commit of all.
            no_dist: do not ask the other ranks whether they are as far.

        Returns:
            Numbers of the requests whose functions were run.
        """
        finalized = []
        while self._requests:
            number, request = self._requests[0]
            commit, *functions = request.finalize_fns
            if not blocking and not _all_ranks(commit.is_done(), alone=no_dist):
                break
            self._requests.popleft()
            problem = ""
            try:
                commit()
            except ResiliencyError as error:
                problem = str(error)
            if not _all_ranks(not problem, alone=no_dist):
                logger.warning(
                    "%s; training goes on, and the checkpoints before it are kept",
                    problem or "a checkpoint failed on another rank",
                )
                continue
            for function in functions:
                function()
            commit.forget_deleted()
            finalized.append(number)
        return finalized

    def get_num_unfinalized_calls(self) -> int:
        return len(self._requests)

    def close(self, abort: bool = False) -> None:
        """Waits for all requests and runs their functions, unless ``abort``. Collective: yes."""
        if not abort:
            self.maybe_finalize_async_calls(blocking=True)


def _all_ranks(true: bool, *, alone: bool) -> bool:
    """True when it is true on all ranks; with ``alone``, on this one. Collective: unless ``alone``."""
    if alone or torch.distributed.get_world_size() == 1:
        return true
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    answer = torch.tensor([int(true)], dtype=torch.int, device=device)
    torch.distributed.all_reduce(answer, op=torch.distributed.ReduceOp.MIN)
    return bool(answer.item())


class MegatronLoadStrategy(megatron.TorchDistLoadShardedStrategy):
    """Loads a Megatron checkpoint after comparing it with its digests, if the engine wrote it; each rank compares its
    share of the files. Checkpoints that others wrote are loaded as they are.

    Collective: yes. Blocks: for reading.
    """

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """
        Raises:
            CorruptShard: bytes are damaged or missing, on all ranks; names the file.
        """
        check_folder(checkpoint_dir)
        return super().load(sharded_state_dict, checkpoint_dir, *args, **kwargs)


def _planner(keep_only_main_replica: bool) -> Any:
    wanted = {
        "dedup_replicated_tensors": not keep_only_main_replica,
        "flatten_state_dict": False,
        "flatten_sharded_tensors": False,
    }
    known = inspect.signature(megatron.MCoreSavePlanner.__init__).parameters
    takes_all = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values())
    return megatron.MCoreSavePlanner(**{key: value for key, value in wanted.items() if takes_all or key in known})


def _files_of_rank_0(folder: str, backend: str, version: int) -> Mapping[str, bytes]:
    """What belongs to the checkpoint besides the sharded part, and is committed with it."""
    config = dataclasses.asdict(CheckpointingConfig(backend, version))
    files = {_CONFIG: json.dumps(config).encode()}
    common = os.path.join(folder, _COMMON)
    if os.path.exists(common):
        with open(common, "rb") as file:
            files[_COMMON] = file.read()
    return files
