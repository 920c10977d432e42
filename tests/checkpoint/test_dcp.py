"""dcp.save and dcp.load through the engine: committed, checked, and readable by stock torch."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor as dtensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from resiliency import faultpoints
from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.dcp import StorageReader, StorageWriter, load_folder
from resiliency.errors import ConfigError, CorruptShard, NoCheckpointFound
from resiliency.testing.checkpoints import QUICK, RUN, flip_bits, make_checkpointer, step_dir
from tests.checkpoint.gloo_ranks import run_gloo

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state(number: int = 1) -> dict[str, Any]:
    return {
        "model": {"a/b%c": torch.arange(12.0).view(4, 3) * number, "bias": torch.ones(3, dtype=torch.bfloat16)},
        "list": [torch.arange(3), {"x": number}],
        "note": ("a", number),
    }


def empty() -> dict[str, Any]:
    zeros = {"a/b%c": torch.zeros(4, 3), "bias": torch.zeros(3, dtype=torch.bfloat16)}
    return {"model": zeros, "list": [torch.zeros(3, dtype=torch.int64), {"x": None}], "note": None}


def same(found: dict[str, Any], number: int) -> bool:
    wanted = state(number)
    return (
        all(torch.equal(found["model"][key], tensor) for key, tensor in wanted["model"].items())
        and torch.equal(found["list"][0], wanted["list"][0])
        and (found["list"][1], found["note"]) == (wanted["list"][1], wanted["note"])
    )


def save(directory: Path, number: int = 1, **arguments: Any) -> Path:
    with make_checkpointer(directory) as checkpointer:
        writer = StorageWriter(checkpointer, number, names=["x.ckpt"], **arguments)
        dcp.save(state(number), storage_writer=writer, no_dist=True)
        assert (directory / "x.ckpt" / ".metadata").exists(), "it is committed when dcp.save returns"
    return directory / "x.ckpt"


def test_what_dcp_saves_is_read_by_our_reader_by_stock_and_by_the_engine(tmp_path: Path) -> None:
    folder = save(tmp_path)
    for reader in (StorageReader(folder), dcp.FileSystemReader(folder)):
        found = empty()
        dcp.load(found, storage_reader=reader, no_dist=True)
        assert same(found, 1)
    dcp_to_torch_save(folder, tmp_path / "flat.pt")
    assert same(torch.load(tmp_path / "flat.pt", weights_only=True), 1)
    with make_checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.load()
    assert restored is not None and torch.equal(restored.state["model.a%2Fb%25c"], state()["model"]["a/b%c"])
    assert torch.load(io.BytesIO(restored.state["note"])) == ("a", 1)


def test_a_step_that_is_not_committed_is_an_error_of_the_save(tmp_path: Path) -> None:
    faultpoints.arm("agent.manifest.write:error")
    try:
        with pytest.raises(dcp.CheckpointException, match="step 1 failed"), make_checkpointer(tmp_path) as checkpointer:
            dcp.save(state(), storage_writer=StorageWriter(checkpointer, 1), no_dist=True)
    finally:
        faultpoints.arm("")


def test_the_checkpoint_id_of_dcp_is_a_name_of_the_step(tmp_path: Path) -> None:
    with make_checkpointer(tmp_path) as checkpointer:
        writer = StorageWriter(checkpointer, 1, names=["last.ckpt"])
        dcp.save(state(), checkpoint_id=str(tmp_path / "sub" / "step=1"), storage_writer=writer, no_dist=True)
    for name in ("last.ckpt", "sub/step=1"):
        found = empty()
        dcp.load(found, storage_reader=StorageReader(tmp_path / name), no_dist=True)
        assert same(found, 1)


def test_damaged_bytes_never_reach_the_caller(tmp_path: Path) -> None:
    folder = save(tmp_path)
    metadata = dcp.FileSystemReader(folder).read_metadata()
    place = next(info for index, info in metadata.storage_data.items() if index.fqn == "model.a/b%c")
    flip_bits(folder / "__0_0.distcp", [(place.offset + 128, place.offset + 129)])
    found = empty()
    with pytest.raises(dcp.CheckpointException, match=r"__0_0\.distcp: bytes [\d,]+ to [\d,]+ are damaged"):
        dcp.load(found, storage_reader=StorageReader(folder), no_dist=True)
    assert not found["model"]["a/b%c"].any()


def test_a_metadata_file_of_another_step_is_not_believed(tmp_path: Path) -> None:
    folder = save(tmp_path / "one")
    (folder / ".metadata").write_bytes(b"anything")
    found = empty()
    dcp.load(found, storage_reader=StorageReader(folder), no_dist=True)
    assert same(found, 1)


@pytest.mark.parametrize(
    ("gone", "error"), [("manifest.json", "no manifest.json"), ("__0_0.distcp", "__0_0.distcp is missing")]
)
def test_an_incomplete_folder_is_an_error_that_names_the_file(tmp_path: Path, gone: str, error: str) -> None:
    folder = save(tmp_path)
    (folder / gone).unlink()
    reader = StorageReader(folder)
    with pytest.raises((CorruptShard, NoCheckpointFound), match=error):
        reader.read_metadata()


def _save_and_load(rank: int, directory: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))

    def cut(tree: dict[str, Any], placement: Any) -> dict[str, Any]:
        weight = dtensor.distribute_tensor(tree["model"]["a/b%c"], mesh, [placement])
        objects = {f"of rank {other}": other for other in range(2) if other == rank}  # some that one rank alone has
        return {**tree, "model": {**tree["model"], "a/b%c": weight}, **objects}

    with Checkpointer(directory, run=RUN, options=QUICK) as checkpointer:
        for number in (1, 2):
            writer = StorageWriter(checkpointer, number, names=["last.ckpt"])
            dcp.save(cut(state(number), dtensor.Shard(0)), storage_writer=writer)
    found = cut(empty(), dtensor.Shard(1))
    found[f"of rank {rank}"] = None
    dcp.load(found, storage_reader=StorageReader(Path(directory) / "last.ckpt"))
    assert found[f"of rank {rank}"] == rank
    found["model"]["a/b%c"] = found["model"]["a/b%c"].full_tensor()
    assert same(found, 2)
    if rank == 0:
        alone = {**empty(), "of rank 1": None}
        dcp.load(alone, checkpoint_id=Path(directory) / "last.ckpt", no_dist=True)
        assert same(alone, 2) and alone["of rank 1"] == 1


def test_several_ranks_save_and_load_at_another_placement(tmp_path: Path) -> None:
    run_gloo(2, _save_and_load, str(tmp_path))
    assert (step_dir(tmp_path, RUN, 2) / "__1_0.distcp").exists()


def _save_async(rank: int, directory: str) -> None:
    with Checkpointer(directory, run=RUN, options=QUICK) as checkpointer:
        tree = state()
        future = dcp.async_save(tree, storage_writer=StorageWriter(checkpointer, 1, names=["x.ckpt"]))
        tree["model"]["a/b%c"].zero_()  # DCP has a copy of its own
        future.result(timeout=40)
    found = empty()
    dcp.load(found, storage_reader=StorageReader(Path(directory) / "x.ckpt"))
    assert same(found, 1)


def test_an_asynchronous_save_is_written_too(tmp_path: Path) -> None:
    run_gloo(1, _save_async, str(tmp_path))


# -- folders by path --------------------------------------------------------------------------------------------------


def stock(folder: Path, number: int = 1) -> Path:
    dcp.save(state(number), checkpoint_id=folder, no_dist=True)
    return folder


@pytest.mark.parametrize("write", [save, stock])
def test_a_folder_is_loaded_whoever_wrote_it(tmp_path: Path, write: Any) -> None:
    folder = write(tmp_path / "c")
    assert same(load_folder(folder), 1)
    found = empty()
    assert load_folder(folder, into=found) is found and same(found, 1)
    with pytest.raises(ConfigError, match="does not fit: .*another"):
        load_folder(folder, into={"another": torch.zeros(2)})


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda folder: (folder / ".metadata").unlink(), r"c/\.metadata is missing"),
        (lambda folder: (folder / ".metadata").write_bytes(b"?"), r"c/\.metadata cannot be read"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), r"c/__0_0\.distcp is missing"),
        (lambda folder: (folder / "__0_0.distcp").write_bytes(bytes(1 << 20)), r"c/__0_0\.distcp .*another checkpoint"),
        (lambda folder: (folder / "__0_0.distcp").write_bytes(b"PK"), r"c/__0_0\.distcp is cut off"),
    ],
)
def test_what_is_wrong_with_a_stock_folder_is_said_with_the_name_of_the_file(
    tmp_path: Path, damage: Any, error: str
) -> None:
    folder = stock(tmp_path / "c")
    damage(folder)
    with pytest.raises((CorruptShard, NoCheckpointFound), match=error):
        load_folder(folder)


def test_damage_in_a_step_of_ours_is_found_by_its_digest(tmp_path: Path) -> None:
    folder = save(tmp_path / "c")
    flip_bits(folder / "__0_0.distcp", [(1300, 1301)])
    with pytest.raises(CorruptShard, match=r"__0_0\.distcp: bytes"):
        load_folder(folder)
