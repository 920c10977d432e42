"""A checkpoint from outside becomes a step like any other: listed, verified, uploaded, resumed from."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

from resiliency.callbacks.model_checkpoint import build
from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.cli.ckpt import app
from resiliency.errors import ConfigError, CorruptShard, NoCheckpointFound, ResiliencyError
from resiliency.inspection.export import export
from resiliency.inspection.importing import import_checkpoint
from resiliency.testing.checkpoints import QUICK, differences, flip_bits, make_checkpointer, save_steps
from tests.callbacks.harness import loader, make_net, make_trainer
from tests.inspection.test_stock_state import lightning_folder

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
PL = "lightning.pytorch"


def verified(folder: Path) -> bool:
    return CliRunner().invoke(app, ["verify", str(folder)]).exit_code == 0


@pytest.mark.parametrize("weights", ["state_dict", "model"])
def test_a_folder_of_lightning_becomes_a_step(tmp_path: Path, weights: str) -> None:
    dumped = lightning_folder(tmp_path / "step=4.ckpt", weights=weights)
    read: list[int] = []
    done = import_checkpoint(tmp_path / "step=4.ckpt", tmp_path / "run", run="mine", advance=read.append)
    assert (done.path, done.id.step, done.run) == (str(tmp_path / "run" / "step=4.ckpt"), 4, "mine")
    assert sum(read) == (tmp_path / "step=4.ckpt" / "__0_0.distcp").stat().st_size
    assert not differences(torch.load(done.path, weights_only=True), dumped), "and it is a stock file"
    assert verified(tmp_path / "run")
    with Checkpointer(str(tmp_path / "run"), run="mine", options=QUICK) as checkpointer:
        restored = checkpointer.load()
    assert restored is not None and not differences(restored.state, dumped)


def test_a_folder_of_torch_and_a_file_become_steps_whose_number_is_said(tmp_path: Path) -> None:
    state = {"model": {"w": torch.arange(6.0)}, "note": "n"}
    dcp.save(state, checkpoint_id=tmp_path / "folder", no_dist=True)
    torch.save(state, tmp_path / "file.pt")
    for number, source in enumerate(("folder", "file.pt")):
        with pytest.raises(ConfigError, match="no 'global_step'.*--step"):
            import_checkpoint(tmp_path / source, tmp_path / "run")
        assert not (tmp_path / "run" / f"{source}.ckpt").exists()
        done = import_checkpoint(tmp_path / source, tmp_path / "run", step=number, run=source)
        assert not differences(torch.load(done.path), state)
    assert sorted(path.name for path in (tmp_path / "run").glob("*.ckpt")) == ["file.ckpt", "folder.ckpt"]
    assert verified(tmp_path / "run")


def fit(folder: Path, *, stock: bool = False, max_steps: int = 4, **arguments: Any) -> tuple[pl.Trainer, Any]:
    given = {"dirpath": str(folder), "filename": "{step}", "every_n_train_steps": 2, "save_top_k": -1}
    callback = pl.callbacks.ModelCheckpoint(**given) if stock else build(PL)(**given, options=QUICK, **arguments)
    torch.manual_seed(1)
    trainer, net = make_trainer(PL, [callback], root=folder, max_steps=max_steps, max_epochs=-1), make_net(PL)
    trainer.fit(net, loader(batches=4))
    return trainer, net


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_fit_goes_on_from_an_imported_file_of_lightning(tmp_path: Path) -> None:
    fit(tmp_path / "stock", stock=True)
    _, straight = fit(tmp_path / "straight", stock=True, max_steps=6)
    import_checkpoint(tmp_path / "stock" / "step=4.ckpt", tmp_path / "run")
    trainer, net = fit(tmp_path / "run", max_steps=6, auto_resume=True)
    assert trainer.global_step == 6
    assert not differences(dict(net.state_dict()), dict(straight.state_dict()))


def test_a_run_with_steps_goes_on_from_the_imported_one_only_when_asked(tmp_path: Path) -> None:
    save_steps(tmp_path / "run", 2, 9, run="default")
    lightning_folder(tmp_path / "old", step=4)
    with pytest.raises(ConfigError, match="has step 9 already.*--force"):
        import_checkpoint(tmp_path / "old", tmp_path / "run", run="default")
    import_checkpoint(tmp_path / "old", tmp_path / "run", run="default", force=True)
    with make_checkpointer(tmp_path / "run", run="default") as checkpointer:
        assert [step.step for step, _ in checkpointer.steps()] == [4, 9, 2]
    assert verified(tmp_path / "run")


def test_nothing_is_overwritten_unless_that_is_asked(tmp_path: Path) -> None:
    lightning_folder(tmp_path / "run" / "a.ckpt")
    with pytest.raises(ConfigError, match=r"run/a\.ckpt is a folder.*--name"):
        import_checkpoint(tmp_path / "run" / "a.ckpt", tmp_path / "run", force=True)
    torch.save({"global_step": 3}, tmp_path / "run" / "b.ckpt")
    for source, step in (("a.ckpt", 4), ("b.ckpt", 4)):
        with pytest.raises(ConfigError, match=r"run/b\.ckpt exists.*--force"):
            import_checkpoint(tmp_path / "run" / source, tmp_path / "run", name="b.ckpt")
        forced = import_checkpoint(tmp_path / "run" / source, tmp_path / "run", name="b.ckpt", force=True)
        assert forced.id.step == step
    assert sorted(os.listdir(tmp_path / "run")) == [".resiliency", "a.ckpt", "b.ckpt"]
    assert verified(tmp_path / "run")


def test_an_exported_step_is_imported_with_its_digests_compared(tmp_path: Path) -> None:
    save_steps(tmp_path / "ck", 7, run="duo", world_size=2, name="duo={step}.ckpt", sharded=True)
    export(tmp_path / "ck" / "duo=7.ckpt", tmp_path / "out", format="dcp")
    export(tmp_path / "ck" / "duo=7.ckpt", tmp_path / "whole.ckpt")
    done = import_checkpoint(tmp_path / "out", tmp_path / "run", run="other")
    assert not differences(torch.load(done.path), torch.load(tmp_path / "whole.ckpt"))
    flip_bits(tmp_path / "out" / "__1_0.distcp", [(900, 901)])
    with pytest.raises(CorruptShard, match=r"__1_0\.distcp"):
        import_checkpoint(tmp_path / "out", tmp_path / "run2")


def test_what_torch_writes_of_a_replicated_step_comes_back(tmp_path: Path) -> None:
    """Numbers that are keys have become text, which an optimizer would not take."""
    save_steps(tmp_path / "ck", 7, run="solo")
    export(tmp_path / "ck" / "step=7.ckpt", tmp_path / "out.dcp")
    done = import_checkpoint(tmp_path / "out.dcp", tmp_path / "run")
    assert not differences(torch.load(done.path), torch.load(tmp_path / "ck" / "step=7.ckpt"))


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_code_is_run_only_when_that_is_asked(tmp_path: Path) -> None:
    torch.save({"global_step": 3, "bomb": Bomb(tmp_path / "made")}, tmp_path / "a.ckpt")
    lightning_folder(tmp_path / "b")
    torch.save({"global_step": 3, "bomb": Bomb(tmp_path / "made")}, tmp_path / "b" / "meta.pt")
    lightning_folder(tmp_path / "c")
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "made")))
    for source, error in (("a.ckpt", "--allow-pickle"), ("b", "--allow-pickle"), ("c", "names posix.mkdir")):
        with pytest.raises((ConfigError, CorruptShard), match=error):
            import_checkpoint(tmp_path / source, tmp_path / "run")
    assert not (tmp_path / "made").exists() and not (tmp_path / "run").exists()
    import_checkpoint(tmp_path / "a.ckpt", tmp_path / "run", allow_pickle=True)
    assert (tmp_path / "made").exists()


def test_what_is_no_checkpoint_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.ckpt").write_text("no checkpoint")
    lightning_folder(tmp_path / "torn")
    (tmp_path / "torn" / ".metadata").unlink()
    for source, kind, error in (
        ("gone", NoCheckpointFound, "does not exist"),
        ("empty", NoCheckpointFound, "no files of a distributed checkpoint"),
        ("torn", NoCheckpointFound, r"\.metadata is missing"),
        ("text.ckpt", CorruptShard, r"text\.ckpt"),
    ):
        with pytest.raises(kind, match=error):
            import_checkpoint(tmp_path / source, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_that_a_job_uses_is_left_alone(tmp_path: Path) -> None:
    lightning_folder(tmp_path / "a")
    with make_checkpointer(tmp_path / "run", run="busy") as checkpointer:
        checkpointer.open()
        with pytest.raises(ResiliencyError, match=r"'busy' in .*run is in use.*End the job first"):
            import_checkpoint(tmp_path / "a", tmp_path / "run", run="busy", assume_ended=True)


def test_the_command_says_what_it_has_made(tmp_path: Path) -> None:
    lightning_folder(tmp_path / "step=4.ckpt")
    words = ["import", str(tmp_path / "step=4.ckpt"), "--into", str(tmp_path / "run"), "--run", "mine"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0 and f"{tmp_path}/run/step=4.ckpt: step 4 of run mine, " in shown.output
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 2 and "exists; say another --name" in again.output
    listed = CliRunner().invoke(app, ["ls", str(tmp_path / "run"), "--json"])
    assert '"step=4.ckpt"' in listed.output
