"""What tools and scripts find out about the class, and what they put in its way, is as with the stock class."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import pickle
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from resiliency.callbacks import goodput
from resiliency.callbacks.model_checkpoint import build
from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.storage.stage import Stage
from tests.callbacks.harness import NAMESPACES, content, differences, loader, make_net, make_trainer, names, ours, stock
from tests.rings import few

PL = "lightning.pytorch"
EVERY: dict[str, Any] = {"every_n_train_steps": 4, "save_top_k": -1, "filename": "{step}", "save_last": True}


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_the_signature_shows_the_arguments_of_the_stock_class_and_ours(namespace: str) -> None:
    theirs = inspect.signature(stock(namespace)).parameters
    mine = inspect.signature(build(namespace)).parameters
    for (name, parameter), (own_name, own) in zip(theirs.items(), mine.items(), strict=False):
        assert (name, parameter.default, parameter.kind) == (own_name, own.default, own.kind)
        assert own.annotation is not inspect.Parameter.empty
    added = list(mine.values())[len(theirs) :]
    assert {"lazy", "auto_resume", "options"} <= {parameter.name for parameter in added}
    assert {parameter.kind for parameter in added} == {inspect.Parameter.KEYWORD_ONLY}

    class Mine(build(namespace)):  # type: ignore[misc]
        def __init__(self, color: str) -> None:
            super().__init__(save_top_k=2, monitor=color)

    assert list(inspect.signature(Mine).parameters) == ["color"]
    assert Mine("x").save_top_k == 2
    assert list(inspect.signature(goodput.build(namespace)).parameters)[0] == "events_dir"


def test_the_name_of_the_stock_class_is_found_once_among_all_callbacks() -> None:
    """A LightningCLI looks up a short name so; two classes of one name end it."""

    def subclasses(cls: type[Any]) -> set[type[Any]]:
        return {cls}.union(*(subclasses(derived) for derived in cls.__subclasses__()))

    for namespace in NAMESPACES:
        build(namespace)
        found = [
            cls
            for cls in subclasses(importlib.import_module(f"{namespace}.callbacks").Callback)
            if cls.__qualname__ == "ModelCheckpoint"
        ]
        assert found == [stock(namespace)]
        assert build(namespace).__name__ == "ModelCheckpoint"


@pytest.mark.filterwarnings("ignore")  # of jsonargparse, about how Lightning calls it
@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("ModelCheckpoint", "lightning.pytorch.callbacks.model_checkpoint"),
        ("resiliency.ModelCheckpoint", "resiliency.callbacks.model_checkpoint"),
        ("resiliency.callbacks.model_checkpoint.ModelCheckpoint", "resiliency.callbacks.model_checkpoint"),
        ("ResilientModelCheckpoint", "resiliency.callbacks.model_checkpoint"),
    ],
)
def test_a_lightning_cli_finds_the_class_that_is_named(name: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse", reason="needs jsonargparse[signatures]")
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

    monkeypatch.setattr(sys, "argv", ["train.py"])
    build(PL)
    own = ["--trainer.callbacks.lazy=false"] if wanted.startswith("resiliency") else []
    cli = LightningCLI(
        BoringModel,
        BoringDataModule,
        run=False,
        args=[f"--trainer.callbacks={name}", "--trainer.callbacks.save_top_k=-1", *own],
        trainer_defaults={"logger": False, "accelerator": "cpu", "enable_progress_bar": False},
        save_config_callback=None,
        seed_everything_default=False,
    )
    assert type(cli.trainer.checkpoint_callback).__module__ == wanted
    assert cli.trainer.checkpoint_callback.save_top_k == -1


def test_a_static_method_of_the_stock_class_is_one_of_ours(tmp_path: Path) -> None:
    (tmp_path / "a.ckpt").write_text("a")
    trainer = make_trainer(PL, [], root=tmp_path, enable_checkpointing=False)
    build(PL)._link_checkpoint(trainer, filepath=str(tmp_path / "a.ckpt"), linkpath=str(tmp_path / "b.ckpt"))
    assert (tmp_path / "b.ckpt").is_symlink()


def test_the_class_itself_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(build(PL))) is build(PL)


# -- a trainer.save_checkpoint of other code --------------------------------------------------------------------------------

Wrap = Callable[[Any, list[Any]], None]


def on_the_instance(trainer: Any, seen: list[Any]) -> None:
    original = trainer.save_checkpoint

    def save_checkpoint(filepath: Any, *args: Any, **kwargs: Any) -> None:
        seen.append((Path(filepath).name, trainer.global_step, args, kwargs))
        original(filepath, *args, **kwargs)

    trainer.save_checkpoint = save_checkpoint


def with_wraps(trainer: Any, seen: list[Any]) -> None:
    original = trainer.save_checkpoint

    @functools.wraps(original)
    def save_checkpoint(filepath: Any, *args: Any, **kwargs: Any) -> None:
        seen.append((Path(filepath).name, trainer.global_step, args, kwargs))
        original(filepath, *args, **kwargs)

    trainer.save_checkpoint = save_checkpoint


def in_a_subclass(trainer: Any, seen: list[Any]) -> None:
    class Mine(type(trainer)):  # type: ignore[misc]
        def save_checkpoint(self, filepath: Any, *args: Any, **kwargs: Any) -> None:
            seen.append((Path(filepath).name, self.global_step, args, kwargs))
            super().save_checkpoint(filepath, *args, **kwargs)

    trainer.__class__ = Mine


@pytest.mark.parametrize("wrap", [on_the_instance, with_wraps, in_a_subclass])
@pytest.mark.parametrize("arguments", [EVERY, {"monitor": "wave", "save_top_k": 2, "every_n_train_steps": 1}], ids=str)
def test_a_wrapped_save_checkpoint_is_called_as_by_the_stock_class(
    wrap: Wrap, arguments: dict[str, Any], tmp_path: Path
) -> None:
    results = []
    for make in (stock, ours):
        directory, seen = tmp_path / "run", list[Any]()
        callback = stock(PL)(directory, **arguments) if make is stock else ours(PL, directory, **arguments)
        trainer = make_trainer(PL, [callback], root=tmp_path)
        wrap(trainer, seen)
        trainer.fit(make_net(PL), loader())
        results.append((seen, {name: content(directory / name)["state_dict"] for name in sorted(names(directory))}))
        directory.rename(tmp_path / f"run-{len(results)}")
    assert results[0][0]
    assert differences(*results) == []


@pytest.mark.parametrize("save_last", [None, True, "link"])
def test_a_wrapper_may_use_the_file_when_lightnings_method_has_returned(save_last: Any, tmp_path: Path) -> None:
    """It uploads the file, say."""
    results = []
    for make in (stock, ours):
        directory, seen = tmp_path / "run", list[Any]()
        arguments: dict[str, Any] = {
            "monitor": "wave",
            "save_top_k": 2,
            "every_n_train_steps": 1,
            "save_last": save_last,
        }
        callback = stock(PL)(directory, **arguments) if make is stock else ours(PL, directory, **arguments)
        trainer = make_trainer(PL, [callback], root=tmp_path)
        original = trainer.save_checkpoint

        def save_checkpoint(path: Any, *further: Any, seen: list[Any] = seen, original: Any = original) -> None:
            original(path, *further)
            seen.append((Path(path).name, torch.load(path, weights_only=False)["global_step"]))

        trainer.save_checkpoint = save_checkpoint
        trainer.fit(make_net(PL), loader())
        results.append((seen, {name: content(directory / name)["state_dict"] for name in sorted(names(directory))}))
        directory.rename(tmp_path / f"run-{len(results)}")
    assert len(results[0][0]) > 3
    assert differences(*results) == []


@pytest.mark.parametrize("save_last", few([None, True, "link"], ["link"]))
@pytest.mark.parametrize("does", ["renames", "skips the second", "moves"])
def test_what_a_wrapper_does_with_the_file_is_left_as_with_the_stock_class(
    does: str, save_last: Any, tmp_path: Path
) -> None:
    results = []
    for make in (stock, ours):
        directory, saves = tmp_path / "run", []
        arguments: dict[str, Any] = EVERY | {"monitor": "step", "mode": "max", "save_top_k": 1, "save_last": save_last}
        callback = stock(PL)(directory, **arguments) if make is stock else ours(PL, directory, **arguments)
        trainer = make_trainer(PL, [callback], root=tmp_path)
        original = trainer.save_checkpoint

        def save_checkpoint(path: Any, *further: Any, saves: list[Any] = saves, original: Any = original) -> None:
            saves.append(Path(path).name)
            if does == "renames":
                original(f"{path}.tmp", *further)
                os.replace(f"{path}.tmp", path)
            elif does == "moves":
                original(path, *further)
                os.replace(path, tmp_path / f"moved-{Path(path).name}")
            elif len(saves) != 2:
                original(path, *further)

        trainer.save_checkpoint = save_checkpoint
        error = None
        try:
            trainer.fit(make_net(PL), loader())
        except OSError as failure:
            error = type(failure)
        left = {path.name: os.path.islink(path) for path in directory.glob("*.ckpt*")}
        results.append((saves, error, left, {path.name for path in tmp_path.glob("moved-*")}))
        directory.rename(tmp_path / f"run-{len(results)}")
    assert results[0] == results[1]


@pytest.mark.parametrize("does", ["writes beside and renames", "replaces"])
def test_what_a_wrapper_moves_or_replaces_is_not_kept_for_ever(does: str, tmp_path: Path) -> None:
    """The engine's own copy of a step goes like one of a step whose file is there."""
    arguments: dict[str, Any] = {"every_n_train_steps": 1, "monitor": "step", "mode": "max", "filename": "{step}"}
    trainer = make_trainer(PL, [ours(PL, tmp_path, **arguments)], root=tmp_path)
    original, steps = trainer.save_checkpoint, []

    def save_checkpoint(path: Any, *further: Any) -> None:
        written = f"{path}.tmp" if does.startswith("writes") else path
        original(written, *further)
        trainer.checkpoint_callback._saver.settle(Stage.DURABLE, timedelta(seconds=20))
        if does == "replaces":
            torch.save(torch.load(path), f"{path}.tmp")
        os.replace(f"{path}.tmp", path)
        steps.append(trainer.global_step)

    trainer.save_checkpoint = save_checkpoint
    trainer.fit(make_net(PL), loader())
    assert len(steps) == 12
    assert [path.name for path in tmp_path.glob("*.ckpt*")] == [Path(trainer.checkpoint_callback.best_model_path).name]
    assert len(list(tmp_path.glob(".resiliency/*/steps/*"))) <= 2


def test_a_save_by_a_wrapper_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callback = ours(PL, tmp_path / "ckpts", every_n_train_steps=4, save_top_k=-1, filename="{step}")
    trainer = make_trainer(PL, [callback], root=tmp_path)
    original, real, left = trainer.save_checkpoint, Checkpointer.save, [1]

    def full(self: Checkpointer, *arguments: Any, **further: Any) -> Any:
        if left and left.pop():
            raise OSError(28, "No space left on device")
        return real(self, *arguments, **further)

    monkeypatch.setattr(Checkpointer, "save", full)
    trainer.save_checkpoint = lambda *arguments: (original(*arguments), steps.append(callback._last_global_step_saved))
    steps: list[int] = []
    trainer.fit(make_net(PL), loader())
    assert names(tmp_path / "ckpts") == {"step=8.ckpt", "step=12.ckpt"} and steps[0] == 0


def test_a_save_checkpoint_that_saves_nothing_saves_nothing(tmp_path: Path) -> None:
    callback = ours(PL, tmp_path / "ckpts", **EVERY)
    trainer = make_trainer(PL, [callback], root=tmp_path)
    trainer.save_checkpoint = mock.Mock()
    trainer.fit(make_net(PL), loader())
    assert trainer.save_checkpoint.call_count == 6
    assert names(tmp_path / "ckpts") == set()


def test_a_save_checkpoint_that_writes_elsewhere_writes_there(tmp_path: Path) -> None:
    callback = ours(PL, tmp_path / "ckpts", every_n_train_steps=4, save_top_k=-1, filename="{step}")
    trainer = make_trainer(PL, [callback], root=tmp_path)
    original = trainer.save_checkpoint
    trainer.save_checkpoint = lambda path, *args: original(tmp_path / "other" / Path(path).name, *args)
    trainer.fit(make_net(PL), loader())
    assert names(tmp_path / "other") == {"step=4.ckpt", "step=8.ckpt", "step=12.ckpt"}
    assert content(tmp_path / "other" / "step=4.ckpt")["global_step"] == 4
    assert names(tmp_path / "ckpts") == set()


def test_a_save_checkpoint_that_raises_ends_training_as_with_the_stock_class(tmp_path: Path) -> None:
    for make in (stock, ours):
        callback = stock(PL)(tmp_path / "s", **EVERY) if make is stock else ours(PL, tmp_path / "o", **EVERY)
        trainer = make_trainer(PL, [callback], root=tmp_path)
        trainer.save_checkpoint = mock.Mock(side_effect=PermissionError("of the wrapper"))
        with pytest.raises(PermissionError, match="of the wrapper"):
            trainer.fit(make_net(PL), loader())
        assert trainer.global_step == 4
        assert callback._last_global_step_saved == 0
