"""The record in a file that is a whole step: it is the one beside the file, and it notices every changed byte."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from resiliency.errors import CorruptShard
from resiliency.storage.manifest import ShardRecord, shard_file
from resiliency.storage.own_record import OWN_RECORD, read_own_manifest
from resiliency.storage.shard_file import IDENTITY_BYTES, read_identity
from resiliency.testing.checkpoints import make_checkpointer, make_state, save_steps, step_dirs
from tests.storage.joining import unjoined


def save(folder: Path, *, rows: int = 96, info: dict[str, object] | None = None) -> Path:
    with make_checkpointer(folder) as checkpointer:
        ticket = checkpointer.save(3, make_state(3, rows=rows), names=["a.ckpt"], per_rank={"x": 1}, info=info)
        assert ticket is not None
        ticket.wait()
    return folder / "a.ckpt"


def own_record(data: bytes) -> ShardRecord:
    identity = read_identity(data[:IDENTITY_BYTES], where="x")
    assert identity is not None
    step = read_own_manifest(identity, lambda start, end: data[start:end], len(data), where="x")
    assert step is not None
    (record,) = step.shards
    return record


@pytest.mark.parametrize("rows", [1, 96, 200_000])
def test_it_is_the_record_beside_the_file(tmp_path: Path, rows: int) -> None:
    path = save(tmp_path, rows=rows, info={"loss": float("inf"), "text": "ä" * 300})
    (folder,) = step_dirs(tmp_path).values()
    assert own_record(path.read_bytes()).to_dict() == json.loads((folder / "shard-00000.json").read_text())
    assert torch.load(path, weights_only=True)["loops"]["step"] == 3


def test_every_changed_byte_behind_the_storages_is_noticed(tmp_path: Path) -> None:
    data = bytearray(save(tmp_path).read_bytes())
    record = own_record(bytes(data))
    unnoticed = []
    for at in range(record.sections[-1], len(data)):
        data[at] ^= 0x21
        try:
            found = own_record(bytes(data))
        except CorruptShard:
            continue
        finally:
            data[at] ^= 0x21
        # The last digit of a float that is not needed to tell it from its neighbours.
        if found.to_dict() | {"digests": ()} != record.to_dict() | {"digests": ()}:
            unnoticed.append(at)
    assert unnoticed == []


@pytest.mark.parametrize("cut", [1, 100, 2000])
def test_a_file_that_was_cut_has_none(tmp_path: Path, cut: int) -> None:
    data = save(tmp_path).read_bytes()[:-cut]
    with pytest.raises(CorruptShard):
        own_record(data)


def test_a_file_with_the_record_of_another_step_has_none(tmp_path: Path) -> None:
    one, other = save(tmp_path / "one").read_bytes(), save(tmp_path / "other").read_bytes()
    assert len(one) == len(other)
    begin = own_record(one).sections[-1]
    with pytest.raises(CorruptShard, match="another file"):
        own_record(one[:begin] + other[begin:])


@pytest.mark.parametrize("shape", [{"world_size": 2}, {"world_size": 2, "sharded": True}], ids=str)
def test_a_step_that_several_agents_commit_has_none_in_its_files(tmp_path: Path, shape: dict[str, Any]) -> None:
    with unjoined():
        save_steps(tmp_path, 3, **shape)
    (folder,) = step_dirs(tmp_path).values()
    shard = folder / shard_file(0, replicated="sharded" not in shape)
    assert OWN_RECORD not in torch._C.PyTorchFileReader(os.fspath(shard)).get_all_records()


def test_torch_does_not_mind_it(tmp_path: Path) -> None:
    reader = torch._C.PyTorchFileReader(os.fspath(save(tmp_path)))
    assert OWN_RECORD in reader.get_all_records()
