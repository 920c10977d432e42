"""What is exported is what was saved, in files that need nothing of ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.errors import ConfigError, CorruptShard, NoCheckpointFound, TierError
from resiliency.inspection.by_path import locate
from resiliency.inspection.export import export, format_of
from resiliency.storage.stage import Stage
from resiliency.testing.checkpoints import (
    QUICK,
    copy_to_memory,
    differences,
    flip_bits,
    make_flat_state,
    make_lightning_state,
    make_write_plan,
    save_steps,
    step_dir,
)
from tests.storage.joining import unjoined


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    save_steps(folder, 10, 20, run="solo")
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    save_steps(folder, 7, run="duo", world_size=2, name="duo={step}.ckpt", sharded=True)
    return folder


@dataclass
class Settings:
    """An object of a class of the user's own."""

    width: int


class Words(str):
    """A str with something on top."""


def test_a_ckpt_is_what_was_saved(one: Path, tmp_path: Path) -> None:
    done = export(one / "step=10.ckpt", tmp_path / "out.ckpt")
    loaded = torch.load(tmp_path / "out.ckpt", weights_only=True)
    assert not differences(loaded, make_lightning_state(10))
    assert loaded["state_dict"]["net.weight"].data_ptr() == loaded["state_dict"]["head.weight"].data_ptr()
    assert (done.id.step, done.run, done.format, done.weights_only, done.tensors) == (10, "solo", "ckpt", True, 4)
    assert done.nbytes == (tmp_path / "out.ckpt").stat().st_size
    assert os.listdir(tmp_path) == ["out.ckpt"]


def test_a_folder_means_its_newest_step(one: Path, tmp_path: Path) -> None:
    assert export(one, tmp_path / "a.ckpt").id.step == 20
    assert export(one / "step=10.ckpt", tmp_path / "b.ckpt").id.step == 10
    assert export(step_dir(one, "solo", 10), tmp_path / "c.ckpt").id.step == 10


@pytest.mark.parametrize("remote", [False, True])
def test_shards_of_two_ranks_become_one_file(two: Path, tmp_path: Path, remote: bool) -> None:
    source = f"{copy_to_memory(two)}/duo=7.ckpt" if remote else str(two / "duo=7.ckpt")
    export(source, tmp_path / "out.ckpt")
    flat = make_flat_state(7, world_size=2)
    assert not differences(torch.load(tmp_path / "out.ckpt", weights_only=True), flat)
    export(source, tmp_path / "out.safetensors", key="state_dict/big")
    assert not differences(load_file(tmp_path / "out.safetensors"), {"state_dict/big": flat["state_dict/big"]})


@pytest.mark.parametrize("remote", [False, True])
def test_the_ckpt_of_a_replicated_step_is_its_own_file_byte_by_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, remote: bool
) -> None:
    save_steps(tmp_path / "ck", 7, run="pair", world_size=2)
    source = f"{copy_to_memory(tmp_path / 'ck')}/step=7.ckpt" if remote else str(tmp_path / "ck" / "step=7.ckpt")
    export(source, tmp_path / "out.ckpt")
    assert (tmp_path / "out.ckpt").read_bytes() == (tmp_path / "ck" / "step=7.ckpt").read_bytes()
    assert not differences(torch.load(tmp_path / "out.ckpt"), make_lightning_state(7, world_size=2))
    export(source, tmp_path / "out.safetensors")
    weights = dict(sorted(make_lightning_state(7, world_size=2)["state_dict"].items()))
    assert not differences(load_file(tmp_path / "out.safetensors"), weights)


def test_overwriting_an_export_leaves_the_checkpoint_as_it_is(one: Path, tmp_path: Path) -> None:
    export(one / "step=10.ckpt", tmp_path / "out.ckpt")
    torch.save({"a": 1}, tmp_path / "out.ckpt")
    assert not differences(torch.load(one / "step=10.ckpt"), make_lightning_state(10))


def test_weights_of_any_strides_are_exported(tmp_path: Path) -> None:
    whole = torch.randn(6, 4)
    weights = {
        "t": whole.t(),
        "rows": whole[2:4],
        "columns": whole[:, 1:3],
        "empty": torch.zeros(0, 3),
        "one": whole[0, 0],
    }
    weights |= {"half": whole.to(torch.bfloat16), "float8": whole.to(torch.float8_e4m3fn)}
    save_steps(tmp_path, 1, what={"state_dict": weights}, run="solo")
    export(tmp_path, tmp_path / "out.safetensors")
    loaded = dict(sorted(load_file(tmp_path / "out.safetensors").items()))  # sorted by alignment in the file
    assert not differences(loaded, dict(sorted(weights.items())))


def test_weights_that_safetensors_cannot_hold_are_named(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, what={"state_dict": {"w": torch.ones(2), "s": torch.eye(2).to_sparse()}}, run="solo")
    with pytest.raises(ConfigError, match=r"cannot hold s, a sparse tensor; export a \.ckpt"):
        export(tmp_path, tmp_path / "out.safetensors")
    export(tmp_path, tmp_path / "out.ckpt")
    assert torch.equal(torch.load(tmp_path / "out.ckpt")["state_dict"]["s"].to_dense(), torch.eye(2))


def test_safetensors_holds_every_name_of_tied_tensors(one: Path, tmp_path: Path) -> None:
    done = export(one / "step=10.ckpt", tmp_path / "out.safetensors")
    loaded = load_file(tmp_path / "out.safetensors")
    assert {
        key: not differences(loaded[key], value) for key, value in make_lightning_state(10)["state_dict"].items()
    } == dict.fromkeys(loaded, True)
    assert done.tied == {"head.weight": "net.weight"}
    assert done.weights_only is None


def test_a_tensor_tied_to_another_branch_is_exported_too(tmp_path: Path) -> None:
    weight = torch.randn(3)
    save_steps(
        tmp_path,
        1,
        what={"ema": {"w": weight}, "state_dict": {"w": weight, "_extra_state": {"version": 1}}},
        run="solo",
    )
    done = export(tmp_path, tmp_path / "out.safetensors")
    assert not differences(load_file(tmp_path / "out.safetensors"), {"w": weight})
    assert done.left_out == ("_extra_state.version",)
    assert export(tmp_path, tmp_path / "ema.safetensors", key="ema").tensors == 1


def test_nothing_is_overwritten_unless_asked(one: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.ckpt"
    out.write_text("mine")
    with pytest.raises(ConfigError, match="exists"):
        export(one, out)
    assert out.read_text() == "mine"
    export(one, out, force=True)
    assert not differences(torch.load(out, weights_only=True), make_lightning_state(20))


def test_a_file_that_appears_meanwhile_is_not_overwritten(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.ckpt"
    stock = torch.load

    def load(*args: object, **more: object) -> object:
        out.write_text("mine")
        return stock(*args, **more)

    monkeypatch.setattr(torch, "load", load)  # the new file is looked at before it gets its name
    with pytest.raises(ConfigError, match="another program"):
        export(one, out)
    assert out.read_text() == "mine"
    assert os.listdir(tmp_path) == ["out.ckpt"]


def test_a_checkpoint_is_never_replaced(one: Path) -> None:
    before = (one / "step=10.ckpt").read_bytes()
    with pytest.raises(ConfigError, match=r"step=10\.ckpt is step 10 .*choose another name"):
        export(one, one / "step=10.ckpt", force=True)
    assert (one / "step=10.ckpt").read_bytes() == before


def test_a_copy_that_cannot_be_checked_is_not_exported(tmp_path: Path) -> None:
    with unjoined():
        save_steps(tmp_path / "two", 10, world_size=2)
    (tmp_path / "copy").mkdir()
    shutil.copy(tmp_path / "two" / "step=10.ckpt", tmp_path / "copy" / "copy.ckpt")
    with pytest.raises(NoCheckpointFound, match="cannot be checked; torch.load reads it"):
        export(tmp_path / "copy" / "copy.ckpt", tmp_path / "copy" / "out.ckpt")
    assert os.listdir(tmp_path / "copy") == ["copy.ckpt"]


def test_a_copy_of_a_step_that_is_one_file_is_exported(one: Path, tmp_path: Path) -> None:
    shutil.copy(one / "step=10.ckpt", tmp_path / "copy.ckpt")
    export(tmp_path / "copy.ckpt", tmp_path / "out.ckpt")
    assert differences(torch.load(tmp_path / "out.ckpt"), torch.load(one / "step=10.ckpt")) == []
    flip_bits(tmp_path / "copy.ckpt", [(5000, 5001)])
    with pytest.raises(CorruptShard):
        export(tmp_path / "copy.ckpt", tmp_path / "out2.ckpt")
    assert sorted(os.listdir(tmp_path)) == ["copy.ckpt", "out.ckpt"]


@pytest.mark.parametrize("suffix", ["ckpt", "safetensors"])
def test_a_failed_write_leaves_nothing_behind(
    one: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TierError, match="No space left") as caught:
        export(one, tmp_path / f"out.{suffix}")
    assert caught.value.retryable
    assert os.listdir(tmp_path) == []


def test_versions_of_modules_survive(tmp_path: Path) -> None:
    """Modules read state dicts by the versions that torch keeps beside them; without, they take the oldest."""
    saved = torch.nn.BatchNorm1d(2).state_dict()
    save_steps(tmp_path, 1, what={"state_dict": saved}, run="solo")
    export(tmp_path, tmp_path / "out.ckpt")
    loaded = torch.load(tmp_path / "out.ckpt", weights_only=True)["state_dict"]
    assert loaded._metadata == saved._metadata


def test_a_name_with_a_slash_is_located(tmp_path: Path) -> None:
    """As Lightning makes them of metrics called "val/loss"."""
    with Checkpointer(tmp_path, run="r", rank=0, world_size=1, options=QUICK) as checkpointer:
        ticket = checkpointer.save(4, make_lightning_state(4), names=["epoch=1-val/loss=0.5.ckpt"])
        assert ticket is not None
        ticket.wait(Stage.DURABLE)
    assert export(tmp_path / "epoch=1-val" / "loss=0.5.ckpt", tmp_path / "out.ckpt").id.step == 4
    located = locate(str(tmp_path / "epoch=1-val" / "loss=0.5.ckpt"))
    assert located is not None
    assert located.listing.id.step == 4


@pytest.mark.parametrize("remote", [False, True])
def test_bad_bytes_are_named_and_not_exported(tmp_path: Path, remote: bool) -> None:
    save_steps(tmp_path / "ck", 5, run="solo")
    shard = step_dir(tmp_path / "ck", "solo", 5) / "shard-00000.shard"
    size = shard.stat().st_size
    flip_bits(shard, [(size - 200_000, size - 199_999)])
    with pytest.raises(CorruptShard, match=r"shard-00000\.shard.*(bytes|0)"):
        export(copy_to_memory(tmp_path / "ck") if remote else tmp_path / "ck", tmp_path / "out.ckpt")
    assert not (tmp_path / "out.ckpt").exists()


def test_objects_of_own_classes_are_exported_without_making_them(tmp_path: Path) -> None:
    own = {"settings": Settings(3), "words": Words("hello")}
    save_steps(tmp_path, 1, what={"state_dict": {"w": torch.ones(2)}, "hparams": own}, run="solo")
    out = tmp_path / "out.ckpt"
    done = export(tmp_path, out)
    assert done.weights_only is False
    assert any("Settings" in name for name in done.unsafe)
    loaded = torch.load(out, weights_only=False)
    assert loaded["hparams"] == own
    assert type(loaded["hparams"]["words"]) is Words
    export(tmp_path, tmp_path / "out.safetensors")
    assert torch.equal(load_file(tmp_path / "out.safetensors")["w"], torch.ones(2))


def test_objects_of_own_classes_in_a_sharded_step_need_allow_pickle(tmp_path: Path) -> None:
    plan = make_write_plan({"w": torch.ones(2), "settings": Settings(3)}, rank=0, world_size=1)
    save_steps(tmp_path, 1, what=plan, run="solo")
    out = tmp_path / "out.ckpt"
    with pytest.raises(ConfigError, match=r"--allow-pickle.*Settings"):
        export(tmp_path, out)
    assert not out.exists()
    export(tmp_path, out, allow_pickle=True)
    assert torch.load(out, weights_only=False)["settings"] == Settings(3)


def test_paths_in_the_state_are_exported_without_allow_pickle(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, what={"state_dict": {"w": torch.ones(2)}, "data": Path("/data")}, run="solo")
    export(tmp_path, tmp_path / "out.ckpt")
    assert torch.load(tmp_path / "out.ckpt", weights_only=False)["data"] == Path("/data")


@pytest.mark.parametrize(
    ("out", "wanted", "error", "text"),
    [
        ("out.bin", None, ConfigError, "suffix"),
        ("out.ckpt", "gguf", ConfigError, "gguf"),
        ("none/out.ckpt", None, ConfigError, "make it first"),
        (".", "ckpt", ConfigError, "is a folder"),
        ("gs://bucket/out.ckpt", None, ConfigError, "local file"),
    ],
)
def test_wrong_targets_are_refused_with_what_to_change(
    one: Path, tmp_path: Path, out: str, wanted: str | None, error: type[Exception], text: str
) -> None:
    target = out if "://" in out else str(tmp_path / out)
    with pytest.raises(error, match=text):
        export(one, target, format=format_of(target, wanted))


def test_wrong_sources_are_refused_with_what_to_change(one: Path, two: Path, tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointFound, match="no such checkpoint"):
        export(one / "step=99.ckpt", tmp_path / "out.ckpt")
    torch.save({"a": 1}, tmp_path / "stock.ckpt")
    with pytest.raises(ConfigError, match="not one of our checkpoints"):
        export(tmp_path / "stock.ckpt", tmp_path / "out.ckpt")
    with pytest.raises(ConfigError, match="--key: epoch, global_step, state_dict, optimizer_states"):
        export(one, tmp_path / "out.safetensors", key="model")
    with pytest.raises(ConfigError, match="holds no tensors"):
        export(one, tmp_path / "out.safetensors", key="epoch")


def test_of_several_runs_one_must_be_chosen(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, run="a")
    save_steps(tmp_path, 2, run="b")
    with pytest.raises(ConfigError, match="a, b"):
        export(tmp_path, tmp_path / "out.ckpt")
    assert export(tmp_path, tmp_path / "out.ckpt", run="a").id.step == 1


STOCK_MODEL = """
import lightning.pytorch as pl, torch
from torch.utils.data import DataLoader

class Model(pl.LightningModule):
    def __init__(self, width=4):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(3, width)
        self.head = torch.nn.Linear(3, width)
        self.head.weight = self.net.weight

    def training_step(self, batch, batch_idx):
        return (self.net(batch) + self.head(batch)).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

def loader():
    return DataLoader(torch.tensor([[1.0, 2.0, 3.0]] * 8), batch_size=2)  # alike: stock Lightning repeats batches on resume

def trainer(folder, **settings):
    return pl.Trainer(
        default_root_dir=folder, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        **settings,
    )
"""

STOCK_READER = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
from safetensors.torch import load_file
from stock_model import Model, loader, trainer
saved = torch.load("out.ckpt", weights_only=True)
model = Model.load_from_checkpoint("out.ckpt")
assert model.hparams.width == 5
assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), saved["state_dict"].values(), strict=True))
assert set(load_file("out.safetensors")) == set(saved["state_dict"])
model.load_state_dict(load_file("out.safetensors"))
resumed = trainer(".", max_steps=6, enable_checkpointing=False)
resumed.fit(Model(5), loader(), ckpt_path="out.ckpt")
assert resumed.global_step == 6
assert not [name for name in sys.modules if name.startswith("resiliency")]
print("weight", resumed.lightning_module.net.weight.detach().double().sum().item())
"""


@pytest.fixture
def stock_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "stock_model.py").write_text(STOCK_MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # Lightning sets it and leaves it
    yield tmp_path
    sys.modules.pop("stock_model", None)


def test_stock_lightning_goes_on_from_an_export(stock_model: Path) -> None:
    """In a process that never imports this library; and to the weights of a run that was not interrupted."""
    import importlib

    from resiliency.callbacks.model_checkpoint import build

    module = importlib.import_module("stock_model")
    torch.manual_seed(0)
    model = module.Model(5)
    first = {key: value.clone() for key, value in model.state_dict().items()}
    callback = build("lightning.pytorch")(
        dirpath=stock_model / "ck",
        filename="{step}",
        every_n_train_steps=3,
        save_top_k=-1,
        options=QUICK,
        auto_resume=False,
    )
    module.trainer(stock_model, max_steps=3, callbacks=[callback]).fit(model, module.loader())
    export(stock_model / "ck" / "step=3.ckpt", stock_model / "out.ckpt")
    export(stock_model / "ck" / "step=3.ckpt", stock_model / "out.safetensors")

    whole = module.Model(5)
    whole.load_state_dict(first)
    module.trainer(stock_model, max_steps=6, enable_checkpointing=False).fit(whole, module.loader())

    command = [sys.executable, "-c", STOCK_READER]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(command, cwd=stock_model, env=env, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout.split()[-1]) == whole.net.weight.detach().double().sum().item()


# -- a distributed checkpoint -----------------------------------------------------------------------------------------


def loaded_by_torch(folder: Path, target: Path) -> Any:
    """The whole state, by torch's own tool."""
    dcp_to_torch_save(folder, target)
    return torch.load(target, weights_only=True)


@pytest.mark.parametrize("remote", [False, True])
def test_a_sharded_step_becomes_a_stock_folder(two: Path, tmp_path: Path, remote: bool) -> None:
    source = f"{copy_to_memory(two)}/duo=7.ckpt" if remote else str(two / "duo=7.ckpt")
    done = export(source, tmp_path / "out", format="dcp")
    assert sorted(os.listdir(tmp_path / "out")) == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"]
    assert done.nbytes == sum(file.stat().st_size for file in (tmp_path / "out").iterdir()) and done.tensors == 3
    found = loaded_by_torch(tmp_path / "out", tmp_path / "flat.pt")
    weights = {f"state_dict/{name}": tensor for name, tensor in found.pop("state_dict").items()}
    assert (
        differences(dict(sorted({**weights, **found}.items())), dict(sorted(make_flat_state(7, world_size=2).items())))
        == []
    )
    located = locate(str(tmp_path / "out"))
    assert located is not None and located.is_checked, "it is also a copy of the step"


def test_a_replicated_step_becomes_a_stock_folder_of_one_file(one: Path, tmp_path: Path) -> None:
    done = export(one / "step=10.ckpt", tmp_path / "out.dcp")
    assert sorted(os.listdir(tmp_path / "out.dcp")) == [".metadata", "__0_0.distcp"] and done.format == "dcp"
    found = loaded_by_torch(tmp_path / "out.dcp", tmp_path / "flat.pt")
    saved = torch.load(one / "step=10.ckpt", weights_only=True)
    (optimizer,) = saved["optimizer_states"]
    optimizer["state"] = {str(number): value for number, value in optimizer["state"].items()}  # as torch stores them
    assert not differences(found, saved)
    assert sorted(os.listdir(tmp_path)) == ["flat.pt", "out.dcp"]


def test_torch_is_another_word_for_the_stock_file(two: Path, tmp_path: Path) -> None:
    assert format_of(tmp_path / "anything", "torch") == "ckpt"
    export(two / "duo=7.ckpt", tmp_path / "out", format=format_of("out", "torch"))
    assert not differences(torch.load(tmp_path / "out"), make_flat_state(7, world_size=2))


def test_an_existing_folder_is_replaced_only_when_asked_and_only_a_checkpoint(one: Path, tmp_path: Path) -> None:
    export(one / "step=10.ckpt", tmp_path / "out", format="dcp")
    with pytest.raises(ConfigError, match="exists; .*--force"):
        export(one / "step=20.ckpt", tmp_path / "out", format="dcp")
    export(one / "step=20.ckpt", tmp_path / "out", format="dcp", force=True)
    assert loaded_by_torch(tmp_path / "out", tmp_path / "flat.pt")["global_step"] == 20
    (tmp_path / "out" / "notes.txt").touch()
    with pytest.raises(ConfigError, match="holds other files than a distributed checkpoint"):
        export(one / "step=20.ckpt", tmp_path / "out", format="dcp", force=True)
    with pytest.raises(ConfigError, match=r"flat\.pt is a file"):
        export(one / "step=20.ckpt", tmp_path / "flat.pt", format="dcp", force=True)


def test_a_damaged_shard_leaves_no_folder_and_the_one_that_was_there(two: Path, tmp_path: Path) -> None:
    export(two / "duo=7.ckpt", tmp_path / "out", format="dcp")
    before = sorted(os.listdir(tmp_path / "out"))
    with pytest.raises(ConfigError, match=r"duo=7\.ckpt is step 7"):
        export(two / "duo=7.ckpt", two / "duo=7.ckpt", format="dcp", force=True)
    shutil.copytree(two, tmp_path / "ck")
    flip_bits(step_dir(tmp_path / "ck", "duo", 7) / "__1_0.distcp", [(900, 901)])
    with pytest.raises(CorruptShard, match=r"__1_0\.distcp"):
        export(step_dir(tmp_path / "ck", "duo", 7), tmp_path / "out", format="dcp", force=True)
    assert sorted(os.listdir(tmp_path)) == ["ck", "out"] and sorted(os.listdir(tmp_path / "out")) == before
