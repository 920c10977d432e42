"""The state of folders and files that torch and Lightning wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from resiliency.checkpoint.lightning_forms import META
from resiliency.errors import CorruptShard, NoCheckpointFound
from resiliency.inspection.stock_state import load_lightning_folder, load_stock_file
from resiliency.plugins.checkpoint_io import build
from resiliency.testing.checkpoints import differences, flip_bits
from tests.storage.samples import make_stock

SAMPLES = Path(make_stock.__file__).parent
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def lightning_folder(folder: Path, *, weights: str = "state_dict", step: int = 4) -> dict[str, Any]:
    """Writes what ModelParallelStrategy writes (with "model": FSDPStrategy); returns it as Lightning dumps it."""
    names, weight = ["net.weight", "net.bias"], torch.arange(12.0).view(3, 4) + step
    moments = {name: {"exp_avg": weight * number} for number, name in enumerate(names)}
    groups = [{"lr": 0.1, "params": names}]
    meta = {"pytorch-lightning_version": "2.6.6", "global_step": step, "epoch": 1, "lr_schedulers": [{"last": 2}]}
    sharded = {weights: {"net.weight": weight, "net.bias": weight[0]}, "optimizer_0": {"state": moments}}
    sharded["optimizer_0"]["param_groups"] = groups
    dcp.save(sharded, checkpoint_id=folder, no_dist=True)
    torch.save(meta, folder / "meta.pt")
    numbered = {"state": dict(enumerate(moments.values())), "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    return {**meta, "state_dict": sharded[weights], "optimizer_states": [numbered]}


@pytest.mark.parametrize("weights", ["state_dict", "model"])
def test_the_plugin_loads_a_folder_of_lightning_as_it_was_dumped(tmp_path: Path, weights: str) -> None:
    dumped = lightning_folder(tmp_path / "c.ckpt", weights=weights)
    assert not differences(build("lightning.pytorch")().load_checkpoint(tmp_path / "c.ckpt"), dumped)


@pytest.mark.parametrize("sample", sorted(SAMPLES.glob("stock-torch-*")), ids=lambda sample: sample.name)
def test_folders_of_other_versions_of_torch_are_read(sample: Path) -> None:
    assert not differences(load_lightning_folder(sample), {**make_stock.state(), META: make_stock.meta()})


def test_a_folder_without_the_rest_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    lightning_folder(tmp_path / "c")
    (tmp_path / "c" / "meta.pt").unlink()
    with pytest.raises(NoCheckpointFound, match=r"c has no meta\.pt"):
        load_lightning_folder(tmp_path / "c")


def test_a_folder_whose_save_was_cut_off_is_no_folder_for_torch_load(tmp_path: Path) -> None:
    lightning_folder(tmp_path / "c.ckpt")
    (tmp_path / "c.ckpt" / ".metadata").unlink()
    with pytest.raises(NoCheckpointFound, match=r"\.metadata is missing"):
        build("lightning.pytorch")().load_checkpoint(tmp_path / "c.ckpt")


@pytest.mark.parametrize("legacy", [False, True])
def test_a_damaged_file_is_found_by_its_crc(tmp_path: Path, legacy: bool) -> None:
    path = tmp_path / "a.pt"
    torch.save({"w": torch.ones(3000)}, path, _use_new_zipfile_serialization=not legacy)
    assert torch.equal(load_stock_file(path)["w"], torch.ones(3000))
    if legacy:
        path.write_bytes(path.read_bytes()[:5000])
    else:
        flip_bits(path, [(6000, 6001)])
    with pytest.raises(CorruptShard, match=r"a\.pt"):
        load_stock_file(path)
