"""Sharded checkpoints that other versions of torch wrote. Those below ``other_torch`` are from ``stock_torch.py``, which
also reads, with any torch, what this library writes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.dcp import StorageWriter, load_folder
from tests.checkpoint.other_torch import stock_torch

HERE = Path(stock_torch.__file__).parent


def flat(state: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if isinstance(value, dict):
            yield from flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


@pytest.mark.parametrize("allow_pickle", [False, True])
@pytest.mark.parametrize("folder", sorted(HERE.glob("torch-*")), ids=lambda path: path.name)
def test_a_folder_that_another_torch_wrote_is_loaded(folder: Path, allow_pickle: bool) -> None:
    """Torch itself does not load what a newer one wrote: the properties of a tensor have a field more since 2.15."""
    found = dict(flat(load_folder(folder, allow_pickle=allow_pickle)))
    assert {key: found.pop(key) for key in stock_torch.OBJECTS} == stock_torch.OBJECTS
    assert found.keys() == stock_torch.WHOLE.keys()
    assert all(torch.equal(found[key], value) for key, value in stock_torch.WHOLE.items())


@pytest.mark.long
def test_what_this_library_writes_is_read_by_torch_alone(tmp_path: Path) -> None:
    state = {**stock_torch.WHOLE, **stock_torch.OBJECTS}
    with Checkpointer(tmp_path, run="run") as checkpointer:
        dcp.save(state, storage_writer=StorageWriter(checkpointer, 1, names=["x.ckpt"]), no_dist=True)
    for ranks in ("1", "2"):
        command = [sys.executable, str(HERE / "stock_torch.py"), "read", str(tmp_path / "x.ckpt"), ranks]
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
        assert "read done" in done.stdout, done.stderr
