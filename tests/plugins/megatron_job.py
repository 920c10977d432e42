"""What each rank runs in :mod:`tests.plugins.test_megatron`: saves and loads with the real megatron-core, over gloo."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

warnings.filterwarnings("ignore")

#: Rows of the tables, which 1, 2 and 4 ranks divide evenly.
ROWS, COLUMNS = 8, 4


def run_acts(*, acts: list[dict[str, Any]], result: str) -> None:
    """Does each act on all ranks, and writes down what came of it."""
    logging.basicConfig(level=logging.INFO)
    # All that stands between megatron-core's checkpoints and a machine without a GPU.
    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    dist.init_process_group("gloo")
    answers = []
    job = Job()
    for act in acts:
        answer: dict[str, Any] = {"error": ""}
        try:
            answer |= getattr(job, act.pop("do"))(**act) or {}
        except (Exception, CheckpointException) as error:  # torch's is none of the former
            logging.exception("%s", act)
            answer["error"] = f"{type(error).__name__}: {error}"
        answers.append(answer)
        dist.barrier()
    job.end()
    Path(f"{result}.{dist.get_rank()}").write_text(json.dumps(answers))
    dist.destroy_process_group()


def sharded(values: Mapping[str, torch.Tensor], *, by: str, step: int) -> dict[str, Any]:
    """What a Megatron model gives: tables split by rows or columns, a bias that all have, a layer of each rank's own
    that is one slice of a larger tensor, a fused weight that is split by a factory, and an object of each rank.

    Args:
        values: the whole tensors, from which each rank takes its own part (a view).
        by: "rows" or "columns".
    """
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory

    rank, world = dist.get_rank(), dist.get_world_size()
    axis = 0 if by == "rows" else 1
    layers = values["layers"].shape[0] // world
    mine = range(rank * layers, (rank + 1) * layers)

    def split(key: str, whole: torch.Tensor, replica: Any, _: Any) -> dict[str, Any]:
        gate, up = whole.chunk(2)
        return {
            "gate": ShardedTensor.from_rank_offsets(f"{key}.gate", gate, replica_id=replica),
            "up": ShardedTensor.from_rank_offsets(f"{key}.up", up, replica_id=replica),
        }

    return {
        "step": step,
        "common": {"lr": 0.5, "betas": [0.9, 0.99]},
        "table": ShardedTensor.from_rank_offsets(
            "table", values["table"].chunk(world, dim=axis)[rank].contiguous(), (axis, rank, world)
        ),
        "bias": ShardedTensor.from_rank_offsets("bias", values["bias"], replica_id=rank),
        **{
            f"layer.{number}": ShardedTensor.from_rank_offsets(
                "layers", values["layers"][number], (0, number, values["layers"].shape[0]), prepend_axis_num=1
            )
            for number in mine
        },
        "fused": ShardedTensorFactory(
            "fused", values["fused"], split, lambda parts: torch.cat(list(parts.values())), rank
        ),
        "rng": ShardedObject("rng", {"rank": rank, "state": [step] * 50}, (world,), (rank,)),
        "extra": ShardedObject("extra", {"scale": step}, (1,), (0,), replica_id=rank),
    }


def whole(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {
        "table": torch.randn(ROWS, COLUMNS),
        "bias": torch.randn(5).to(torch.bfloat16),
        "layers": torch.randn(4, 3, 2),
        "fused": torch.randn(6, 2),
    }


def digest(state: Mapping[str, Any]) -> dict[str, str]:
    """Of each tensor, as it lies on this rank; of everything else its text."""
    return {
        key: hashlib.sha256(value.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:12]
        if isinstance(value, torch.Tensor)
        else repr(value)
        for key, value in sorted(state.items())
        if key != "content_metadata"
    }


class Job:
    """The acts, in the order in which a test asks for them."""

    def __init__(self) -> None:
        self._strategies: dict[str, Any] = {}
        self._queues: dict[str, Any] = {}

    def end(self) -> None:
        for strategy in self._strategies.values():
            strategy.close()

    def save(
        self,
        *,
        folder: str,
        step: int,
        by: str = "rows",
        stock: bool = False,
        wrapped: bool = False,
        queue: str = "",
    ) -> dict[str, Any]:
        """Saves ``folder/iter_<step>``; with ``queue`` asynchronously, and changes the tensors at once.

        Args:
            queue: "ours" or "stock".
        """
        from megatron.core.dist_checkpointing import save
        from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

        place = _place(folder, step)
        values = whole(step)
        state = sharded(values, by=by, step=step)
        strategy = None if stock else self._ours(folder)
        if wrapped:
            strategy = FullyParallelSaveStrategyWrapper(strategy, None, True)
        request = save(state, place, strategy, async_sharded_save=bool(queue), content_metadata={"kind": by})
        if not queue:
            return {"calls": 0 if stock else self._ours(folder).calls}
        for tensor in values.values():
            tensor.zero_()  # as an optimizer would
        finalized: list[str] = []
        request.add_finalize_fn(lambda: finalized.append(f"{sorted(os.listdir(place))}"))
        calls = self._queue(queue)
        calls.schedule_async_request(request)
        polls = 0
        deadline = time.monotonic() + 60
        while calls.get_num_unfinalized_calls() and time.monotonic() < deadline:
            calls.maybe_finalize_async_calls(blocking=False)
            polls += 1
        return {"finalized": finalized, "polls": polls}

    def load(
        self, *, folder: str, step: int, by: str = "rows", stock: bool = False, without: str = ""
    ) -> dict[str, Any]:
        from megatron.core.dist_checkpointing import load, load_content_metadata

        from resiliency.plugins.megatron import MegatronLoadStrategy

        target = sharded({key: torch.zeros_like(value) for key, value in whole(0).items()}, by=by, step=0)
        target.pop(without, None)
        loaded = load(target, _place(folder, step, made=False), None if stock else MegatronLoadStrategy())
        wanted = sharded(whole(step), by=by, step=step)
        wanted.pop(without, None)
        tensors = {key: getattr(value, "data", value) for key, value in wanted.items()}
        kind = load_content_metadata(_place(folder, step, made=False))
        return {"loaded": digest(loaded), "wanted": digest(tensors), "kind": kind}

    def close(self, *, folder: str) -> None:
        self._ours(folder).close()
        del self._strategies[folder]

    def save_odd(self, *, folder: str, step: int, by: str = "rows") -> dict[str, Any]:
        """Saves with a tensor of which only one half is there."""
        from megatron.core.dist_checkpointing import ShardedTensor, save

        state = sharded(whole(step), by=by, step=step)
        if dist.get_rank() == 1:
            state["odd"] = ShardedTensor.from_rank_offsets("odd", torch.zeros(2), (0, 1, 2))
        save(state, _place(folder, step), self._ours(folder), validate_access_integrity=False)
        return {}

    def save_flat(self, *, folder: str, step: int) -> dict[str, Any]:
        """Saves with a tensor that is a range of a flattened one, as old versions of the distributed optimizer do."""
        from megatron.core.dist_checkpointing import ShardedTensor

        tensor = ShardedTensor.from_rank_offsets("flat", torch.zeros(4), replica_id=dist.get_rank())
        tensor.flattened_range = slice(0, 4)  # new versions do not make such a one
        self._ours(folder).save({"flat": tensor}, _place(folder, step))
        return {}

    def _ours(self, folder: str) -> Any:
        from resiliency.plugins.megatron import MegatronSaveStrategy

        if folder not in self._strategies:
            self._strategies[folder] = MegatronSaveStrategy()
        return self._strategies[folder]

    def _queue(self, kind: str) -> Any:
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        from resiliency.plugins.megatron import CommitQueue

        make: Callable[[], Any] = {"ours": CommitQueue, "stock": AsyncCallsQueue}[kind]
        return self._queues.setdefault(kind, make())


def _place(folder: str, step: int, *, made: bool = True) -> str:
    place = os.path.join(folder, f"iter_{step:07d}")
    if made:
        if dist.get_rank() == 0:
            os.makedirs(place, exist_ok=True)
        dist.barrier()
    return place
