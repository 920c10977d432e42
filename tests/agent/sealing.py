"""Shard files for an agent without a trainer: real ones, small, in their place in the step, with what a rank says of
them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from resiliency.agent.config import AgentConfig, TierSpec
from resiliency.agent.messages import Seal, SealedFile
from resiliency.checkpoint.shard_writer import OwnState, small_file
from resiliency.state.structure import dump
from resiliency.storage.blocks import Blocks, block_digest
from resiliency.storage.catalog import step_prefix
from resiliency.storage.manifest import shard_file
from resiliency.storage.shard_file import Identity
from resiliency.storage.step_id import StepId

RUN = "run"
TOKEN = "0a0b0c"


def config_for(local: Path, /, **values: Any) -> AgentConfig:
    """Settings of an agent of one rank in its first attempt; ``values`` replace fields."""
    fields: dict[str, Any] = {
        "run": RUN,
        "node": "n",
        "attempt": 1,
        "token": TOKEN,
        "world_size": 1,
        "local_ranks": (0,),
        "shared": True,
        "local": TierSpec(address=str(local), name="local", keep=3),
        "durable": True,
        "drain_s": 5.0,
        **values,
    }
    return AgentConfig(**fields)


def step_of(config: AgentConfig, step: int) -> StepId:
    return StepId(step, config.attempt, config.token)


def shard_path(config: AgentConfig, step: int, shard: int = 0) -> Path:
    """Where the shard of a step is; where that of a sharded step would be when there is none."""
    folder = Path(config.local.address, step_prefix(config.run, step_of(config, step)))
    sharded, replicated = (folder / shard_file(shard, replicated=whole) for whole in (False, True))
    return replicated if replicated.exists() else sharded


def write_shard(
    config: AgentConfig, step: int, shard: int = 0, *, replicated: bool = False, block_bytes: int = 1024, pad: int = 0
) -> SealedFile:
    """Writes a shard file as the trainer does, and describes it.

    Args:
        pad: at least so many bytes of state.
    """
    identity = Identity(
        id=step_of(config, step), run=config.run, rank=shard, world_size=config.world_size, replicated=replicated
    )
    data = small_file(identity, OwnState.of(dump({"step": step, "shard": shard, "pad": "x" * pad})))
    path = shard_path(config, step, shard).with_name(shard_file(shard, replicated=replicated))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    blocks = Blocks(len(data), block_bytes)
    return SealedFile(
        shard=shard,
        path=str(path),
        inode=path.stat().st_ino,
        nbytes=len(data),
        block_bytes=block_bytes,
        digests=tuple(block_digest(memoryview(data)[slice(*blocks.bounds(at))]) for at in range(blocks.count)),
    )


def seal_of(config: AgentConfig, step: int, *files: SealedFile, **values: Any) -> Seal:
    fields: dict[str, Any] = {"plan": "p", "created": time.time(), "info": {}, **values}
    return Seal(id=step_of(config, step), files=files, **fields)


def sealed(config: AgentConfig, step: int = 1, shard: int = 0, **values: Any) -> Seal:
    """What a rank says of a shard that it has just written."""
    return seal_of(config, step, write_shard(config, step, shard), **values)


def manifest_of(config: AgentConfig, step: int) -> dict[str, Any] | None:
    """The manifest of a step on the local tier; None when it is not committed."""
    path = shard_path(config, step).with_name("manifest.json")
    return json.loads(path.read_text()) if path.exists() else None


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below a folder, logs apart: its inode and bytes."""
    return {
        str(path.relative_to(folder)): (path.stat().st_ino, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "logs" not in path.parts and not os.path.islink(path)
    }
