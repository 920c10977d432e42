"""What can be known of a folder that torch wrote: whole and undamaged files, no code from outside, signs of two saves."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

from resiliency.checkpoint.dcp import load_folder
from resiliency.checkpoint.stock_reader import StockReader
from resiliency.errors import CorruptShard
from resiliency.testing.checkpoints import differences, flip_bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Settings:
    """A class that a user's checkpoint may hold."""


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def stock(folder: Path, **more: Any) -> Path:
    dcp.save({"w": torch.arange(5000.0), "n": 1, **more}, checkpoint_id=folder, no_dist=True)
    return folder


def test_a_flipped_bit_in_a_stock_folder_is_found(tmp_path: Path) -> None:
    folder = stock(tmp_path / "c")
    place = next(at for key, at in dcp.FileSystemReader(folder).read_metadata().storage_data.items() if key.fqn == "w")
    flip_bits(folder / "__0_0.distcp", [(place.offset + 9000, place.offset + 9001)])
    assert not torch.equal(loaded_by_torch(folder), torch.arange(5000.0)), "torch does not see it"
    with pytest.raises(CorruptShard, match=r"__0_0\.distcp is damaged: 'w' in it"):
        load_folder(folder)


def loaded_by_torch(folder: Path) -> torch.Tensor:
    found = {"w": torch.zeros(5000)}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found["w"]


def test_no_code_of_a_folder_from_outside_is_run(tmp_path: Path) -> None:
    folder = stock(tmp_path / "c")
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "made")))
    with pytest.raises(CorruptShard, match=r"\.metadata names posix\.mkdir"):
        load_folder(folder)
    objects = stock(tmp_path / "objects", bomb=Bomb(tmp_path / "made"))
    with pytest.raises(pickle.UnpicklingError, match="mkdir"):
        load_folder(objects)
    with pytest.raises(pickle.UnpicklingError, match="mkdir"):
        load_folder(objects, into={"bomb": None})
    assert not (tmp_path / "made").exists()
    load_folder(objects, allow_pickle=True)
    assert (tmp_path / "made").exists()


def test_objects_of_own_classes_are_loaded_where_the_caller_says_so(tmp_path: Path) -> None:
    folder = stock(tmp_path / "c", settings=Settings())
    assert isinstance(load_folder(folder, allow_pickle=True)["settings"], Settings)


@pytest.mark.parametrize("place", ["missing", "short", "another"])
def test_a_torn_folder_is_refused_before_anything_is_read(tmp_path: Path, place: str) -> None:
    folder = stock(tmp_path / "c")
    file = folder / "__0_0.distcp"
    if place == "missing":
        file.unlink()
    elif place == "short":
        os.truncate(file, file.stat().st_size - 1)
    else:
        shutil.copy(stock(tmp_path / "d", w=torch.zeros(3), x="longer" * 100) / file.name, file)
    with pytest.raises(CorruptShard, match=r"__0_0\.distcp is (missing|cut off)"):
        StockReader(folder).check()


def newer(folder: Path) -> None:
    later = os.stat(folder / ".metadata").st_mtime_ns + 1
    os.utime(folder / "__0_0.distcp", ns=(later, later))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (newer, r"__0_0.distcp is newer than .metadata"),
        (lambda folder: shutil.copy(folder / "__0_0.distcp", folder / "__7_0.distcp"), "__7_0.distcp is not read"),
    ],
)
def test_signs_of_two_saves_in_one_folder_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changed: Callable[[Path], Any], said: str
) -> None:
    folder = stock(tmp_path / "c")
    load_folder(folder)
    assert not [record for record in caplog.records if record.name.startswith("resiliency")]
    changed(folder)
    load_folder(folder)
    assert [said in record.message for record in caplog.records if record.name.startswith("resiliency")] == [True]


@pytest.mark.parametrize("properties", [None, TensorProperties])
def test_the_description_that_earlier_torch_writes_is_read(tmp_path: Path, properties: Any) -> None:
    """Without the fields that torch has added since 2.6; before 2.4 with a class of another module."""
    folder = stock(tmp_path / "c")
    metadata = dcp.FileSystemReader(folder).read_metadata()
    vars(metadata).pop("version", None)
    for place in metadata.storage_data.values():
        vars(place).pop("transform_descriptors", None)
    vars(metadata.storage_meta).pop("modules", None)
    if properties is not None:
        metadata.state_dict_metadata["w"].properties = properties(torch.float32)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    os.utime(folder / ".metadata")
    assert not differences(load_folder(folder), {"w": torch.arange(5000.0), "n": 1})
