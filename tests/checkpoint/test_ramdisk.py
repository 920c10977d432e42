"""What is said of a save on a ramdisk: it is committed, and it is never durable there."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from resiliency.checkpoint import RemoteTierOptions, Stage
from resiliency.errors import ConfigError
from tests.checkpoint.test_checkpointer import make_checkpointer

SOON = timedelta(seconds=60)


@pytest.fixture
def ramdisk() -> Iterator[Path]:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no ramdisk")
    made = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


def stages_in_the_log(*folders: Path) -> set[tuple[str, str]]:
    lines = [line for folder in folders for path in folder.rglob("*.jsonl") for line in path.read_text().splitlines()]
    kinds = {"checkpoint_saved": "committed", "checkpoint_durable": "durable"}
    events = [json.loads(line) for line in lines]
    return {(kinds[event["event_type"]], event["tier"]) for event in events if event["event_type"] in kinds}


def test_a_save_on_a_ramdisk_is_committed_and_never_durable(ramdisk: Path, tmp_path: Path) -> None:
    remote = RemoteTierOptions(address=str(tmp_path / "disk"))
    with make_checkpointer(ramdisk / "c", remotes=[remote]) as checkpointer:
        assert not checkpointer.can_be_durable
        ticket = checkpointer.save(1, {"w": torch.ones(8)})
        assert ticket is not None and "local" not in ticket.can_be_durable
        assert checkpointer.flush(Stage.DURABLE, timeout=SOON)
        told = {(outcome.stage, outcome.tier) for outcome in checkpointer.poll()}
        assert told == {("committed", "local"), ("durable", "object_store")}
        assert ticket.stage() is Stage.COMMITTED and ticket.stage("object_store") is Stage.DURABLE
        with pytest.raises(ConfigError, match="on a ramdisk and never durable there"):
            ticket.wait(Stage.DURABLE, tier="local", timeout=SOON)
    assert stages_in_the_log(ramdisk, tmp_path) == {("committed", "local"), ("durable", "object_store")}


def test_without_another_tier_nothing_of_it_says_durable(ramdisk: Path) -> None:
    with make_checkpointer(ramdisk / "c") as checkpointer:
        ticket = checkpointer.save(1, {"w": torch.ones(8)})
        assert ticket is not None
        with pytest.raises(ConfigError, match="never durable"):
            ticket.wait(Stage.DURABLE, timeout=SOON)
        assert checkpointer.flush(Stage.DURABLE, timeout=SOON)  # waits for what can be had
        assert {(outcome.stage, outcome.tier) for outcome in checkpointer.poll()} == {("committed", "local")}
    assert stages_in_the_log(ramdisk) == {("committed", "local")}
