"""Steps of several ranks as the agents of several hosts leave them, and as the one agent of a host does: one file
each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from resiliency.agent import core
from resiliency.agent._fence import Fence
from resiliency.agent.join import join_shards
from resiliency.storage.catalog import scan, step_prefix
from resiliency.storage.manifest import MANIFEST, Manifest
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.checkpoints import RUN, save_steps
from tests.agent.sealing import config_for


@contextmanager
def unjoined() -> Iterator[None]:
    """Within it an agent does not make one file of the ranks' parts, as if other hosts had some of them."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(core, "join_shards", lambda tier, step, fence: step)
        yield


def join_steps(folder: Path, run: str = RUN) -> list[Manifest]:
    """Does to all steps of a folder what the one agent of a host does before it commits them."""
    tier = LocalTier(folder)
    joined = []
    for listing in scan(tier, run):
        assert listing.manifest is not None
        manifest_file = folder / step_prefix(run, listing.id) / MANIFEST
        manifest_file.unlink()  # a step that is committed is not touched
        step = join_shards(tier, listing.manifest, Fence(config_for(folder, run=run, attempt=99)))
        manifest_file.write_text(step.to_json())
        joined.append(step)
    return joined


def save_joined(folder: Path, *steps: int, world_size: int = 2, name: str = "step={step}.ckpt") -> list[Manifest]:
    """Saves steps on several ranks as :func:`~resiliency.testing.checkpoints.save_steps` does, each as one file."""
    with unjoined():
        save_steps(folder, *steps, world_size=world_size, name=name)
    return join_steps(folder)
