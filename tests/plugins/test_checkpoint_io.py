"""The CheckpointIO plugin under real Trainers of both Lightning namespaces, and called by hand."""

from __future__ import annotations

import copy
import errno
import gc
import importlib
import inspect
import logging
import os
import pickle
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.checkpoint.options import CheckpointerOptions
from resiliency.errors import CorruptShard
from resiliency.inspection.by_path import load_path, locate
from resiliency.plugins import _io_engines, _lightning, checkpoint_io
from resiliency.plugins.checkpoint_io import build
from resiliency.storage.catalog import scan
from resiliency.storage.manifest import META_DIR
from resiliency.storage.stage import Stage
from resiliency.storage.tiers.local import LocalTier
from resiliency.testing.checkpoints import flip_bits

NAMESPACES = ["lightning.pytorch", "pytorch_lightning"]
EMBEDDED = CheckpointerOptions(agent="embedded")
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # Lightning sets it and leaves it


@pytest.fixture(params=NAMESPACES)
def namespace(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def io() -> Iterator[Any]:
    plugin = build("lightning.pytorch")(options=EMBEDDED)
    yield plugin
    plugin.teardown()


@dataclass
class Settings:
    """A hyper-parameter of the user's own class."""

    depth: int


def make_model(namespace: str, **hparams: Any) -> Any:
    lightning = importlib.import_module(namespace)

    class Model(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self, settings: Any = None, data: Any = None) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Linear(3, 2)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(batch).square().mean()
            # Ever better, so that top-k has something to throw away.
            self.log("score", -float(self.trainer.global_step))
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    return Model(**hparams)


def make_trainer(namespace: str, folder: Path, plugin: Any, *, steps: int, **settings: Any) -> Any:
    lightning = importlib.import_module(namespace)
    callback = importlib.import_module(f"{namespace}.callbacks").ModelCheckpoint
    wanted = {"save_top_k": -1, "every_n_train_steps": 1, "filename": "{step}"} | settings
    return lightning.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_steps=steps,
        callbacks=[callback(dirpath=folder / "ck", **wanted)],
        plugins=[plugin] if plugin is not None else [],
    )


class Batches:
    """A loader that knows its place, so that Lightning resumes within an epoch at the right batch."""

    def __init__(self) -> None:
        self.at = self.start = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        start, self.start = self.start, 0
        for index in range(start, len(self)):
            self.at = index + 1
            yield torch.full((2, 3), (index + 1) / 7)

    def __len__(self) -> int:
        return 4

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["at"]


def fit(
    namespace: str, folder: Path, *, steps: int = 4, model: Any = None, ckpt: str | None = None, **settings: Any
) -> Any:
    """A finished trainer whose checkpoints went through the plugin."""
    trainer = make_trainer(namespace, folder, build(namespace)(options=EMBEDDED), steps=steps, **settings)
    torch.manual_seed(1)
    trainer.fit(model if model is not None else make_model(namespace), Batches(), ckpt_path=ckpt)
    return trainer


def read(path: Path) -> Any:
    located = locate(str(path))
    assert located is not None, f"{path} is not ours"
    return load_path(located)[0]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.ckpt"))


def checkpoint(step: int, value: float = 0.0) -> dict[str, Any]:
    return {"global_step": step, "state_dict": {"w": torch.full((300, 300), value)}}


@pytest.mark.parametrize("what", [torch.ones(3), None, 7, [1, 2]], ids=str)
def test_what_is_no_mapping_is_saved_too(what: Any, io: Any, tmp_path: Path) -> None:
    io.save_checkpoint(what, tmp_path / "a.ckpt")
    found = torch.load(tmp_path / "a.ckpt")
    assert torch.equal(found, what) if isinstance(what, torch.Tensor) else found == what


@pytest.mark.parametrize("forbidden", ["sockets", "threads"])
def test_torch_saves_where_the_engine_cannot_start(
    forbidden: str, io: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        raise RuntimeError("not here")

    with monkeypatch.context() as patched:
        owner = (socket, "socket") if forbidden == "sockets" else (threading.Thread, "start")
        patched.setattr(*owner, refuses)
        io.save_checkpoint(checkpoint(1), tmp_path / "a.ckpt")
        assert torch.load(tmp_path / "a.ckpt")["global_step"] == 1
    (said,) = [record for record in caplog.records if "written by torch.save" in record.getMessage()]
    assert "not here" in said.getMessage()
    assert said.exc_info or "pids.max" in said.getMessage(), "nobody could find out why"
    io.save_checkpoint(checkpoint(2), tmp_path / "b.ckpt")
    assert torch.load(tmp_path / "b.ckpt")["global_step"] == 2 and locate(str(tmp_path / "b.ckpt")) is not None


# ---- under a trainer


def test_a_fit_saves_through_the_engine_and_resumes(namespace: str, tmp_path: Path) -> None:
    whole = fit(namespace, tmp_path / "whole", steps=6)
    fit(namespace, tmp_path, steps=3)
    assert files(tmp_path / "ck") == ["step=1.ckpt", "step=2.ckpt", "step=3.ckpt"]
    assert torch.load(tmp_path / "ck" / "step=3.ckpt")["global_step"] == 3
    assert read(tmp_path / "ck" / "step=2.ckpt")["global_step"] == 2
    resumed = fit(namespace, tmp_path, steps=6, ckpt=str(tmp_path / "ck" / "step=3.ckpt"), model=make_model(namespace))
    assert resumed.global_step == 6
    weights = resumed.lightning_module.state_dict(), whole.lightning_module.state_dict()
    assert all(torch.equal(a, b) for a, b in zip(weights[0].values(), weights[1].values(), strict=True))


def test_what_is_restored_is_what_was_saved(namespace: str, tmp_path: Path) -> None:
    trainer = fit(namespace, tmp_path, steps=3)
    fresh = make_model(namespace)
    resumed = fit(namespace, tmp_path, steps=3, ckpt=str(tmp_path / "ck" / "step=3.ckpt"), model=fresh)
    assert resumed.global_step == 3
    for key, value in trainer.lightning_module.state_dict().items():
        assert torch.equal(value, fresh.state_dict()[key]), key
    before, after = (t.optimizers[0].state_dict()["state"][0] for t in (trainer, resumed))
    assert all(torch.equal(before[key], after[key]) for key in ("step", "exp_avg", "exp_avg_sq"))


def test_last_and_top_k_at_the_same_step_both_load_it(namespace: str, tmp_path: Path) -> None:
    """Two saves of one step, and a removal after each: both names mean the newest step, and nothing is lost."""
    trainer = fit(namespace, tmp_path, steps=5, monitor="score", save_top_k=1, save_last=True)
    assert files(tmp_path / "ck") == ["last.ckpt", "step=5.ckpt"]
    for name in ("last.ckpt", "step=5.ckpt"):
        saved = read(tmp_path / "ck" / name)
        assert saved["global_step"] == 5
        assert torch.equal(saved["state_dict"]["net.weight"], trainer.lightning_module.net.weight)
    steps = [path.name for path in (tmp_path / "ck").glob(".resiliency/default/steps/*")]
    assert all(name.startswith("0000000005-") for name in steps), steps


def test_trainer_test_after_fit_finds_the_best(namespace: str, tmp_path: Path) -> None:
    """The path is loaded although the fit that saved it has only just ended; and "last" is found for the next fit."""
    trainer = fit(namespace, tmp_path, steps=3, save_last=True)
    resumed = fit(namespace, tmp_path, steps=4, ckpt="last", model=make_model(namespace), save_last=True)
    assert resumed.global_step == 4
    assert trainer.checkpoint_callback.best_model_path.endswith("step=3.ckpt")


def test_stock_checkpoints_still_load_and_are_removed_by_their_callback(namespace: str, tmp_path: Path) -> None:
    best = {"save_top_k": 2, "monitor": "score"}
    make_trainer(namespace, tmp_path, None, steps=2, **best).fit(make_model(namespace), Batches())
    assert torch.load(tmp_path / "ck" / "step=1.ckpt", weights_only=False)["global_step"] == 1
    resumed = fit(
        namespace, tmp_path, steps=4, ckpt=str(tmp_path / "ck" / "step=2.ckpt"), model=make_model(namespace), **best
    )
    assert resumed.global_step == 4
    # Lightning itself keeps the file it resumed from.
    assert files(tmp_path / "ck") == ["step=2.ckpt", "step=3.ckpt", "step=4.ckpt"]
    assert read(tmp_path / "ck" / "step=4.ckpt")["global_step"] == 4


def test_hyper_parameters_of_own_classes_are_unpickled_only_when_allowed(namespace: str, tmp_path: Path) -> None:
    own = {"settings": Settings(3), "data": Path("/data")}
    fit(namespace, tmp_path, steps=2, model=make_model(namespace, **own))
    path = tmp_path / "ck" / "step=2.ckpt"
    plugin = build(namespace)(options=EMBEDDED)
    assert plugin.load_checkpoint(path, weights_only=False)["hyper_parameters"] == own
    default = inspect.signature(
        importlib.import_module(f"{namespace}.plugins.io").TorchCheckpointIO.load_checkpoint
    ).parameters.get("weights_only")
    for safe in (True, None) if default is not None else (True,):
        with pytest.raises(pickle.UnpicklingError, match="add_safe_globals"):
            plugin.load_checkpoint(path, weights_only=safe)  # nothing is unpickled
    trainer = make_trainer(namespace, tmp_path, plugin, steps=3)
    trusting = (
        {"weights_only": False} if "weights_only" in inspect.signature(trainer.fit).parameters else {}
    )  # Lightning >= 2.6
    trainer.fit(make_model(namespace, **own), Batches(), ckpt_path=str(path), **trusting)
    assert trainer.global_step == 3


@pytest.mark.parametrize("way", ["plugin", "callback"])
def test_before_lightning_2_6_files_are_trusted_as_its_own_class_trusts_them(
    namespace: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There neither ``load_checkpoint`` nor ``fit`` has an argument by which the user could say so."""
    own = {"settings": Settings(3), "data": Path("/data")}
    fit(namespace, tmp_path, steps=2, model=make_model(namespace, **own))
    path = tmp_path / "ck" / "step=2.ckpt"
    stock = importlib.import_module(f"{namespace}.plugins.io").TorchCheckpointIO

    def load_checkpoint(self: Any, path: Any, map_location: Any = None) -> Any:
        return torch.load(path, map_location=map_location, weights_only=False)

    load_checkpoint.__module__ = stock.__module__  # as Lightning's own, which it stands for
    monkeypatch.setattr(stock, "load_checkpoint", load_checkpoint)
    if way == "plugin":
        load = build(namespace)(options=EMBEDDED).load_checkpoint
    else:
        trainer = make_trainer(namespace, tmp_path, None, steps=3)
        _lightning.patch_load_checkpoint(trainer, lambda path, weights_only: {"weights_only": weights_only})
        assert trainer.strategy.checkpoint_io.load_checkpoint(path) == {"weights_only": False}
        _lightning.patch_load_checkpoint(trainer, lambda path, weights_only: None)
        load = trainer.strategy.checkpoint_io.load_checkpoint
    assert load(path)["hyper_parameters"] == own


def test_a_fit_with_an_agent_process_leaves_nothing(namespace: str, tmp_path: Path) -> None:
    """The fixture for leftovers judges threads, processes and /dev/shm."""
    trainer = make_trainer(namespace, tmp_path, build(namespace)(options=CheckpointerOptions()), steps=2)
    trainer.fit(make_model(namespace), Batches())
    assert files(tmp_path / "ck") == sorted(os.listdir(tmp_path / "ck")) == ["step=1.ckpt", "step=2.ckpt"]
    assert read(tmp_path / "ck" / "step=2.ckpt")["global_step"] == 2


SAVES_AND_ENDS = """
import torch
from resiliency.checkpoint.options import CheckpointerOptions
from resiliency.plugins.checkpoint_io import TieredIO
io = TieredIO(options=CheckpointerOptions(agent="embedded"))
io.save_checkpoint({"global_step": 1, "state_dict": {"w": torch.ones(3)}}, "one.ckpt")
"""


def test_a_save_without_teardown_is_committed_when_the_process_ends(tmp_path: Path) -> None:
    """As after ``trainer.save_checkpoint()`` at the end of a script."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RESILIENCY_EVENTS_DIR": str(tmp_path / "events")}
    result = subprocess.run(
        [sys.executable, "-c", SAVES_AND_ENDS], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert torch.equal(read(tmp_path / "one.ckpt")["state_dict"]["w"], torch.ones(3))
    log = (tmp_path / "events" / "rank-00000.jsonl").read_text()
    assert "job_terminated" in log


def test_a_forgotten_plugin_is_closed(tmp_path: Path) -> None:
    plugin = build("lightning.pytorch")(options=EMBEDDED)
    plugin.save_checkpoint(checkpoint(1), tmp_path / "one.ckpt")
    del plugin
    gc.collect()
    assert read(tmp_path / "one.ckpt")["global_step"] == 1


# ---- by hand


def test_changing_tensors_right_after_a_save_changes_nothing(io: Any, tmp_path: Path) -> None:
    for step in range(1, 6):
        state = checkpoint(step, float(step)) | {"list": [1, {"a": step}]}
        io.save_checkpoint(state, tmp_path / f"{step}.ckpt")
        state["state_dict"]["w"].fill_(-1.0)
        state["list"][1]["a"] = -1
    for step in range(1, 6):
        loaded = io.load_checkpoint(tmp_path / f"{step}.ckpt")
        assert torch.equal(loaded["state_dict"]["w"], torch.full((300, 300), float(step)))
        assert loaded["list"] == [1, {"a": step}]


def fail(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """No engine saves, and no torch.save either."""

    def refused(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(Checkpointer, "save", lambda *_, **__: None)
    monkeypatch.setattr("lightning.fabric.plugins.io.torch_io._atomic_save", refused)


def test_the_file_can_be_read_by_a_stock_reader_when_the_save_returns(io: Any, tmp_path: Path) -> None:
    for step in range(1, 20):
        io.save_checkpoint(checkpoint(step, float(step)), tmp_path / "sub" / f"{step}.ckpt")
        loaded = torch.load(tmp_path / "sub" / f"{step}.ckpt", mmap=bool(step % 2))
        assert loaded["global_step"] == step and loaded["state_dict"]["w"].unique().tolist() == [step]
    again = subprocess.run(
        [sys.executable, "-c", "import torch, sys; print(torch.load(sys.argv[1])['global_step'])", "sub/19.ckpt"],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert again.stdout == "19\n", again.stderr


def test_a_removal_deletes_file_and_step(io: Any, tmp_path: Path) -> None:
    io.save_checkpoint(checkpoint(1), tmp_path / "1.ckpt")
    io.save_checkpoint(checkpoint(2), tmp_path / "2.ckpt")
    io.remove_checkpoint(tmp_path / "1.ckpt")
    assert files(tmp_path) == ["2.ckpt"]
    io.teardown()
    assert files(tmp_path) == ["2.ckpt"]
    assert os.listdir(tmp_path) == ["2.ckpt"]


def test_the_step_of_the_newest_save_stays_when_its_file_is_removed(io: Any, tmp_path: Path) -> None:
    """A user who throws everything away still has what a restart needs."""
    io.save_checkpoint(checkpoint(1), tmp_path / "1.ckpt")
    io.remove_checkpoint(tmp_path / "1.ckpt")
    assert files(tmp_path) == []
    io.teardown()
    assert read(tmp_path)["global_step"] == 1


def test_checkpoints_with_a_folder_each_are_removed_with_their_steps(io: Any, tmp_path: Path) -> None:
    """As a name with the metric "val/loss" makes it."""
    for step in range(1, 8):
        io.save_checkpoint(checkpoint(step), tmp_path / f"epoch={step}-val" / "loss=0.1.ckpt")
        if step > 1:
            io.remove_checkpoint(tmp_path / f"epoch={step - 1}-val" / "loss=0.1.ckpt")
            assert not (tmp_path / f"epoch={step - 1}-val" / META_DIR).exists()
    io.teardown()
    left = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()]
    assert left == ["epoch=7-val/loss=0.1.ckpt"]
    assert sorted(os.listdir(tmp_path)) == [f"epoch={step}-val" for step in range(1, 8)], "stock leaves empty folders"


def test_folders_without_end_do_not_keep_engines_without_end(io: Any, tmp_path: Path) -> None:
    used = set()
    for step in range(1, 10):
        io.save_checkpoint(checkpoint(step), tmp_path / str(step) / "a.ckpt")
        io.save_checkpoint(checkpoint(step), tmp_path / "often" / "last.ckpt")
        assert len(_io_engines._engines) <= checkpoint_io._MOST_FOLDERS
        (often,) = (found.engine for key, found in _io_engines._engines.items() if key[1].endswith("often"))
        used.add(id(often))
    assert len(used) == 1, "the engine that is used most was closed"
    for step in (9, 3):  # one of them is open, of the other nothing is left but the file
        io.remove_checkpoint(tmp_path / str(step) / "a.ckpt")
        io.save_checkpoint(checkpoint(step + 10), tmp_path / str(step) / "b.ckpt")
    assert torch.load(tmp_path / "3" / "b.ckpt")["global_step"] == 13
    io.teardown()
    assert not _io_engines._engines
    assert {path.parent.name for path in tmp_path.rglob("*") if path.is_file()} == {"often", *map(str, range(1, 10))}
    assert not list(tmp_path.rglob(".resiliency"))


def test_a_stock_file_is_removed_as_stock_does(io: Any, tmp_path: Path) -> None:
    torch.save(checkpoint(1), tmp_path / "1.ckpt")
    assert io.load_checkpoint(tmp_path / "1.ckpt")["global_step"] == 1
    io.remove_checkpoint(tmp_path / "1.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_what_the_engine_cannot_save_is_written_by_torch(
    io: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    io.save_checkpoint(checkpoint(1), tmp_path / "1.ckpt")
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(Checkpointer, "save", lambda *_, **__: None)
        io.save_checkpoint(checkpoint(2), tmp_path / "2.ckpt")
        io.save_checkpoint(checkpoint(3), tmp_path / "1.ckpt")  # in the place of one of ours
    assert caplog.text.count("is written by torch.save") == 2
    assert torch.load(tmp_path / "2.ckpt")["global_step"] == 2 and locate(str(tmp_path / "2.ckpt")) is None
    assert io.load_checkpoint(tmp_path / "1.ckpt")["global_step"] == 3
    assert [listing.id.step for listing in scan(LocalTier(tmp_path), "default")] == [1], "the step itself is as it was"


def test_an_object_that_cannot_be_stored_raises_as_stock(io: Any, tmp_path: Path) -> None:
    state = checkpoint(1) | {"function": lambda: None}
    stock = importlib.import_module("lightning.pytorch.plugins.io").TorchCheckpointIO()
    with pytest.raises(Exception) as expected:  # noqa: PT011 - of whatever class
        stock.save_checkpoint(state, tmp_path / "stock.ckpt")
    with pytest.raises(type(expected.value)):
        io.save_checkpoint(state, tmp_path / "ours.ckpt")
    assert files(tmp_path) == []


def test_a_name_that_no_file_can_have_raises_as_stock_and_leaves_nothing(io: Any, tmp_path: Path) -> None:
    for name in ("x" * 252 + ".ckpt", "ü" * 126 + ".ckpt"):
        with pytest.raises(OSError, match="File name too long"):
            io.save_checkpoint({"global_step": 1, "x": torch.zeros(2)}, tmp_path / name)
    io.teardown()
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_gone_before_the_teardown_is_no_news(
    io: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A save into a temporary folder, which the script has removed when the process ends."""
    folder = tmp_path / "temporary"
    io.save_checkpoint({"global_step": 1, "x": torch.zeros(2)}, folder / "x.ckpt")
    assert io._take(str(folder)).engine.flush(Stage.DURABLE)
    shutil.rmtree(folder)
    with caplog.at_level(logging.WARNING):
        io.teardown()
    assert caplog.records == [] and os.listdir(tmp_path) == []


def test_a_full_disk_costs_no_other_checkpoint(
    io: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    io.save_checkpoint(checkpoint(1), tmp_path / "1.ckpt")
    torch.save(checkpoint(0), tmp_path / "0.ckpt")
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        fail(patch, OSError(errno.ENOSPC, "No space left on device"))
        io.save_checkpoint(checkpoint(2), tmp_path / "2.ckpt")
        io.remove_checkpoint(tmp_path / "1.ckpt")
        io.remove_checkpoint(tmp_path / "0.ckpt")
    assert "2.ckpt was not saved" in caplog.text and "is kept, because" in caplog.text
    assert files(tmp_path) == ["0.ckpt", "1.ckpt"]
    io.save_checkpoint(checkpoint(3), tmp_path / "0.ckpt")  # the name is wanted again
    assert files(tmp_path) == ["0.ckpt"] and io.load_checkpoint(tmp_path / "0.ckpt")["global_step"] == 3


def test_a_folder_that_cannot_be_used_raises_as_stock(io: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):  # noqa: PT011 - NotADirectoryError or FileExistsError, as the platform has it
        io.save_checkpoint(checkpoint(1), tmp_path / "file" / "1.ckpt")
    fail(monkeypatch, PermissionError(errno.EACCES, "Permission denied"))
    with pytest.raises(PermissionError):
        io.save_checkpoint(checkpoint(1), tmp_path / "1.ckpt")


# ---- several users of one folder


def test_several_trainers_use_one_folder_one_after_the_other(namespace: str, tmp_path: Path) -> None:
    """Each with a plugin of its own; the first ones still hold the folder, because they saved after their fit."""
    before = set(threading.enumerate())
    began = time.monotonic()
    trainers = []
    for number in range(3):
        trainer = make_trainer(namespace, tmp_path, build(namespace)(options=EMBEDDED), steps=2)
        trainer.fit(make_model(namespace), Batches())
        trainer.save_checkpoint(tmp_path / "ck" / f"after-{number}.ckpt")
        assert torch.load(tmp_path / "ck" / f"after-{number}.ckpt")["global_step"] == 2
        trainers.append(trainer)
    assert time.monotonic() - began < 15  # a refused engine waits 20 s
    assert set(threading.enumerate()) <= before, "no thread is left"
    for trainer in trainers:
        trainer.save_checkpoint(tmp_path / "ck" / "again.ckpt")
    assert set(threading.enumerate()) <= before, "no thread is left"


def test_a_trainer_that_never_runs_saves_and_leaves_no_thread(namespace: str, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    trainer = make_trainer(namespace, tmp_path, build(namespace)(options=EMBEDDED), steps=2)
    trainer.strategy.connect(make_model(namespace))
    for name in ("one.ckpt", "two.ckpt"):
        trainer.save_checkpoint(tmp_path / "ck" / name)
        assert set(threading.enumerate()) <= before, "a thread is left"
    assert sorted(os.listdir(tmp_path / "ck")) == ["one.ckpt", "two.ckpt"]


def test_a_run_keeps_one_engine_for_its_saves(namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = build(namespace)(options=EMBEDDED)
    released: list[str] = []
    monkeypatch.setattr(plugin._engines, "release_one", lambda directory, *_: released.append(directory))
    trainer = make_trainer(namespace, tmp_path, plugin, steps=3)
    trainer.fit(make_model(namespace), Batches())
    assert released == []


def test_plugins_that_save_in_turns_share_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")  # the run's folder stays at the end
    one, other = (build("lightning.pytorch")(options=EMBEDDED) for _ in range(2))
    for step in range(1, 7):
        (one, other)[step % 2].save_checkpoint(checkpoint(step), tmp_path / f"{step}.ckpt")
    one.teardown()
    other.save_checkpoint(checkpoint(7), tmp_path / "7.ckpt")
    one.save_checkpoint(checkpoint(8), tmp_path / "8.ckpt")
    other.teardown()
    assert [read(tmp_path / f"{step}.ckpt")["global_step"] for step in range(1, 9)] == list(range(1, 9))
    assert (tmp_path / ".resiliency" / "default" / "attempt").read_text() == "1", "one engine for all"


def test_a_plugin_used_by_another_thread_saves_too(tmp_path: Path) -> None:
    """As Lightning's AsyncCheckpointIO does, which never tears down the plugin it wraps."""
    before = set(threading.enumerate())
    plugin = build("lightning.pytorch")(options=EMBEDDED)
    asynchronous = importlib.import_module("lightning.pytorch.plugins.io").AsyncCheckpointIO(plugin)
    for step in range(1, 4):
        asynchronous.save_checkpoint(checkpoint(step), tmp_path / f"{step}.ckpt")
    asynchronous.remove_checkpoint(tmp_path / "none.ckpt")
    asynchronous.teardown()
    assert set(threading.enumerate()) <= before, "no thread is left"
    assert [torch.load(tmp_path / f"{step}.ckpt")["global_step"] for step in (1, 2, 3)] == [1, 2, 3]


def test_save_last_as_a_link_loads_and_is_replaced(namespace: str, tmp_path: Path) -> None:
    best: dict[str, Any] = {"save_last": "link", "monitor": "score", "save_top_k": 1}
    fit(namespace, tmp_path, steps=3, **best)
    last = tmp_path / "ck" / "last.ckpt"
    assert last.is_symlink() and torch.load(last)["global_step"] == 3 and read(last)["global_step"] == 3
    resumed = fit(namespace, tmp_path, steps=5, ckpt="last", model=make_model(namespace), **best)
    assert resumed.global_step == 5 and torch.load(last)["global_step"] == 5
    plugin = build(namespace)(options=EMBEDDED)
    plugin.remove_checkpoint(last)
    assert not last.is_symlink() and files(tmp_path / "ck")  # the checkpoint itself stays


def test_load_from_checkpoint_needs_nothing_of_ours(namespace: str, tmp_path: Path) -> None:
    trainer = fit(namespace, tmp_path, steps=2)
    model = type(trainer.lightning_module).load_from_checkpoint(tmp_path / "ck" / "step=2.ckpt")
    assert torch.equal(model.net.weight, trainer.lightning_module.net.weight)


def test_addresses_are_written_as_stock_does(io: Any, namespace: str, tmp_path: Path) -> None:
    address = f"memory://{tmp_path.name}-{namespace}/1.ckpt"
    io.save_checkpoint(checkpoint(1, 5.0), address)
    assert torch.equal(io.load_checkpoint(address)["state_dict"]["w"], torch.full((300, 300), 5.0))
    io.remove_checkpoint(address)
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint(address)
    io.save_checkpoint(checkpoint(2), f"file://{tmp_path}/2.ckpt")
    assert read(tmp_path / "2.ckpt")["global_step"] == 2


def test_a_location_is_honoured_after_the_check(io: Any, tmp_path: Path) -> None:
    io.save_checkpoint(checkpoint(1), tmp_path / "1.ckpt")
    assert io.load_checkpoint(tmp_path / "1.ckpt", map_location="cpu")["global_step"] == 1
    assert io.load_checkpoint(tmp_path / "1.ckpt", map_location="meta")["state_dict"]["w"].is_meta
    seen: list[str] = []
    io.load_checkpoint(tmp_path / "1.ckpt", map_location=lambda storage, location: seen.append(location) or storage)
    assert seen == ["cpu"]
    flip_bits(tmp_path / "1.ckpt", [(100_000, 100_001)])
    for location in (None, "meta"):
        with pytest.raises(CorruptShard, match=r"1\.ckpt"):
            io.load_checkpoint(tmp_path / "1.ckpt", map_location=location)


def test_a_plugin_that_saved_can_be_pickled_and_copied(io: Any, tmp_path: Path) -> None:
    io.save_checkpoint(checkpoint(1), tmp_path / "1.ckpt")
    for other in (pickle.loads(pickle.dumps(io)), copy.deepcopy(io)):
        other.save_checkpoint(checkpoint(2), tmp_path / "2.ckpt")
        other.teardown()
    assert read(tmp_path / "2.ckpt")["global_step"] == 2


def test_many_saves_of_one_step_stay_apart(io: Any, tmp_path: Path) -> None:
    """As when a user calls ``trainer.save_checkpoint`` again and again between two steps."""
    for number in range(70):
        io.save_checkpoint(checkpoint(7, float(number)), tmp_path / f"{number}.ckpt")
    for number in (0, 63, 64, 65, 69):
        assert io.load_checkpoint(tmp_path / f"{number}.ckpt")["state_dict"]["w"][0, 0] == number


def test_checkpoints_without_a_step_stay_in_order(io: Any, tmp_path: Path) -> None:
    """Fabric's states have no global_step."""
    for value in range(3):
        io.save_checkpoint({"w": torch.full((2,), float(value))}, tmp_path / f"{value}.ckpt")
    io.save_checkpoint({"w": torch.full((2,), 9.0)}, tmp_path / "0.ckpt")
    assert torch.equal(io.load_checkpoint(tmp_path / "0.ckpt")["w"], torch.full((2,), 9.0))
    assert torch.equal(io.load_checkpoint(tmp_path / "1.ckpt")["w"], torch.full((2,), 1.0))


def test_removing_what_is_not_there_does_nothing(io: Any, tmp_path: Path) -> None:
    io.remove_checkpoint(tmp_path / "none.ckpt")
    assert list(tmp_path.iterdir()) == []
    io.save_checkpoint(checkpoint(1), tmp_path / "1.ckpt")
    io.remove_checkpoint(tmp_path / "none.ckpt")
    (tmp_path / "sharded.ckpt").mkdir()  # what some strategies write by themselves
    (tmp_path / "sharded.ckpt" / "part").write_text("x")
    io.remove_checkpoint(tmp_path / "sharded.ckpt")
    io.teardown()
    assert files(tmp_path) == ["1.ckpt"]


def test_storage_options_are_refused_as_stock_does(io: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"`storage_options` arg.*is not supported.*CheckpointerOptions"):
        io.save_checkpoint(checkpoint(1), tmp_path / "1.ckpt", storage_options={"a": 1})
    assert list(tmp_path.iterdir()) == []


def test_a_missing_file_raises_file_not_found(io: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint(tmp_path / "none.ckpt")


def test_each_namespace_has_one_class_which_pickles(namespace: str) -> None:
    assert build(namespace) is build(namespace)
    assert issubclass(build(namespace), importlib.import_module(f"{namespace}.plugins.io").CheckpointIO)
    if isinstance(checkpoint_io.TieredCheckpointIO(), build(namespace)):
        assert isinstance(pickle.loads(pickle.dumps(checkpoint_io.TieredCheckpointIO(run="a"))), build(namespace))


def test_a_function_in_the_place_of_torch_save_writes_the_checkpoints(
    io: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may encrypt or upload; it is called, and that is said once."""
    real, seen = torch.save, []
    monkeypatch.setattr(torch, "save", lambda *arguments, **named: (seen.append(1), real(*arguments, **named))[1])
    for step in (1, 2):
        io.save_checkpoint(checkpoint(step), tmp_path / f"{step}.ckpt")
    assert len(seen) == 2 and not (tmp_path / META_DIR).exists()
    assert caplog.text.count("has replaced torch.save") == 1
