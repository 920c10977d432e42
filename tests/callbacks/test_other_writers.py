"""What else writes the checkpoints of a trainer is used and said: a CheckpointIO of the user, a function in the place of
``torch.save``, the stock class beside another job. And a link is a link in the end."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from resiliency.callbacks.model_checkpoint import build
from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.plugins.checkpoint_io import build as build_io
from tests.callbacks.harness import EITHER, EMBEDDED, NAMESPACES, loader, make_net, make_trainer, names, ours, stock

PL = "lightning.pytorch"
EVERY: dict[str, Any] = {"every_n_train_steps": 3, "save_top_k": -1, "filename": "{step}"}
FILES = ["step=12.ckpt", "step=3.ckpt", "step=6.ckpt", "step=9.ckpt"]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "checkpoints are written by" in text]


@pytest.mark.parametrize("subclass", [True, False])
@pytest.mark.parametrize("namespace", EITHER)
def test_the_users_plugin_saves_loads_and_removes(
    namespace: str, subclass: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    io = importlib.import_module(f"{namespace}.plugins.io")
    calls: list[str] = []

    class Encrypting(io.TorchCheckpointIO if subclass else io.CheckpointIO):  # type: ignore[misc]
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            calls.append("save")
            torch.save({"secret": checkpoint}, path)

        def load_checkpoint(self, path: Any, *_: Any, **__: Any) -> Any:
            calls.append("load")
            return torch.load(path, weights_only=False)["secret"]

        def remove_checkpoint(self, path: Any) -> None:
            calls.append("remove")
            os.remove(path)

    for epochs, ckpt in ((2, None), (3, str(tmp_path / "step=12.ckpt"))):
        callback = ours(namespace, tmp_path, **EVERY)
        trainer = make_trainer(namespace, [callback], root=tmp_path, max_epochs=epochs, plugins=[Encrypting()])
        with caplog.at_level(logging.WARNING):
            trainer.fit(make_net(namespace), loader(), ckpt_path=ckpt)
    assert calls == ["save"] * 4 + ["load"] + ["save"] * 2
    assert sorted(os.listdir(tmp_path)) == sorted([*FILES, "step=15.ckpt", "step=18.ckpt"])
    assert list(torch.load(tmp_path / "step=3.ckpt", weights_only=False)) == ["secret"]
    assert len(said(caplog)) == 2 and "Encrypting" in said(caplog)[0]


@pytest.mark.parametrize(
    ("name", "makes_one", "passed"),
    [("MegatronStrategy", True, False), ("MegatronStrategy", True, True), ("Mine", True, True), ("Mine", False, True)],
)
def test_a_strategy_that_writes_its_own_checkpoints_is_not_taken_for_a_plugin(
    name: str, makes_one: bool, passed: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As NeMo's does: it makes a CheckpointIO when somebody asks for it. To remove a plugin helps only where the engine
    supports the strategy."""
    lightning = importlib.import_module(PL)

    class OfMegatron(lightning.plugins.io.TorchCheckpointIO):  # type: ignore[name-defined,misc]
        pass

    class Plain(lightning.strategies.SingleDeviceStrategy):  # type: ignore[name-defined,misc]
        pass

    class Making(Plain):
        @property
        def checkpoint_io(self) -> Any:
            self._checkpoint_io = self._checkpoint_io or OfMegatron()
            return self._checkpoint_io

        @checkpoint_io.setter
        def checkpoint_io(self, io: Any) -> None:
            self._checkpoint_io = io

    kind = Making if makes_one else Plain
    kind.__name__ = name
    plugins = [OfMegatron()] if passed else []
    trainer = make_trainer(
        PL, [ours(PL, tmp_path, **EVERY)], root=tmp_path, plugins=plugins, strategy=kind(device="cpu")
    )
    trainer.fit(make_net(PL), loader())
    (line,) = said(caplog)
    own = f"the strategy {name}, which has set a CheckpointIO of its own, OfMegatron"
    assert ("the CheckpointIO plugin OfMegatron of this Trainer" if passed else own) in line
    assert ("Without it the checkpoint engine writes them" in line) is not makes_one
    where = f"does not write those of {name}, whatever plugins the Trainer has; docs/guarantees.md lists"
    assert (where in line) is makes_one
    assert "NeMo" in (Path(__file__).parents[2] / "docs" / "guarantees.md").read_text()
    assert sorted(os.listdir(tmp_path)) == FILES


def test_in_nemo_the_message_says_what_to_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lightning = importlib.import_module(PL)

    class MegatronStrategy(lightning.strategies.SingleDeviceStrategy):  # type: ignore[name-defined,misc]
        __module__ = "nemo.lightning.pytorch.strategies.megatron_strategy"

    trainer = make_trainer(PL, [ours(PL, tmp_path, **EVERY)], root=tmp_path, strategy=MegatronStrategy(device="cpu"))
    trainer.fit(make_net(PL), loader())
    (line,) = said(caplog)
    assert "NeMo's MegatronStrategy" in line and "CheckpointEngine() to the Trainer's callbacks" in line
    assert sorted(os.listdir(tmp_path)) == FILES, "as with the stock class"


def test_our_own_plugin_is_no_other_writer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    namespace = NAMESPACES[0]
    trainer = make_trainer(
        namespace, [ours(namespace, tmp_path, **EVERY)], root=tmp_path, plugins=[build_io(namespace)()]
    )
    trainer.fit(make_net(namespace), loader())
    assert said(caplog) == [] and sorted(os.listdir(tmp_path)) == FILES


def test_with_our_own_plugin_a_resume_is_exact_too(tmp_path: Path) -> None:
    """The plugin's own method, which knows nothing of loaders, is no function of others."""
    for path in (None, str(tmp_path / "step=3.ckpt")):
        trainer = make_trainer(PL, [ours(PL, tmp_path, **EVERY)], root=tmp_path, plugins=[build_io(PL)()])
        trainer.fit(make_net(PL), loader(), ckpt_path=path)
        assert trainer.global_step == 12, "the batches before the save were trained on again"


@pytest.mark.parametrize("namespace", EITHER)
def test_a_function_in_the_place_of_torch_save_is_called(
    namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, seen = torch.save, []
    monkeypatch.setattr(torch, "save", lambda *arguments, **named: (seen.append(1), real(*arguments, **named))[1])
    make_trainer(namespace, [ours(namespace, tmp_path, **EVERY)], root=tmp_path).fit(make_net(namespace), loader())
    assert len(seen) == 4 and len(said(caplog)) == 1 and "torch.save" in said(caplog)[0]
    assert sorted(os.listdir(tmp_path)) == FILES


@pytest.mark.parametrize("where", ["instance", "class", "wrapper of the class", "module"])
@pytest.mark.parametrize("namespace", EITHER)
def test_a_function_in_the_place_of_one_of_the_stock_plugin_is_called(
    where: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As tracing libraries and tests put it there."""
    trainer = make_trainer(namespace, [ours(namespace, tmp_path, **EVERY)], root=tmp_path)
    io, seen = trainer.strategy.checkpoint_io, []
    owner, name = {
        "instance": (io, "save_checkpoint"),
        "class": (type(io), "save_checkpoint"),
        "wrapper of the class": (type(io), "save_checkpoint"),
        "module": (sys.modules[type(io).__module__], "_atomic_save"),
    }[where]
    real = getattr(owner, name)

    def replaced(*arguments: Any, **named: Any) -> Any:
        seen.append(1)
        return real(*arguments, **named)

    monkeypatch.setattr(owner, name, functools.wraps(real)(replaced) if "wrapper" in where else replaced)
    trainer.fit(make_net(namespace), loader())
    assert len(seen) == 4 and len(said(caplog)) == 1 and "TorchCheckpointIO" in said(caplog)[0]
    assert sorted(os.listdir(tmp_path)) == FILES


@pytest.mark.parametrize("where", ["instance", "class"])
def test_a_function_in_the_place_of_the_stock_plugins_remove_is_called(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that keeps what others would delete loses nothing."""
    trainer = make_trainer(PL, [ours(PL, tmp_path, **EVERY | {"save_top_k": 1})], root=tmp_path)
    io, kept = trainer.strategy.checkpoint_io, []
    value: Any = lambda path: kept.append(Path(path).name)  # noqa: E731
    if where == "class":
        monkeypatch.setattr(type(io), "remove_checkpoint", lambda self, path: value(path))
    else:
        io.remove_checkpoint = value
    trainer.fit(make_net(PL), loader())
    assert len(kept) > 2 and len(said(caplog)) == 1 and "TorchCheckpointIO" in said(caplog)[0]
    assert set(kept) < set(os.listdir(tmp_path))


@pytest.mark.parametrize("where", ["instance", "class"])
def test_a_function_in_the_place_of_the_stock_plugins_load_gets_every_file(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_trainer(PL, [ours(PL, tmp_path, **EVERY)], root=tmp_path).fit(make_net(PL), loader())
    path, seen = next(tmp_path.glob("*.ckpt")), []
    trainer = make_trainer(PL, [ours(PL, tmp_path, **EVERY)], root=tmp_path, max_epochs=3)
    io = trainer.strategy.checkpoint_io
    real = type(io).load_checkpoint

    def load(path: Any, *arguments: Any, **named: Any) -> Any:
        seen.append(Path(path).name)
        return real(io, path, *arguments, **named)

    if where == "class":
        monkeypatch.setattr(type(io), "load_checkpoint", lambda self, *arguments, **named: load(*arguments, **named))
    else:
        io.load_checkpoint = load
    trainer.fit(make_net(PL), loader(), ckpt_path=str(path))
    assert seen == [path.name]


def links(folder: Path) -> dict[str, str]:
    """What is in a folder; of a link, what it says."""
    return {path.name: os.readlink(path) if path.is_symlink() else "" for path in folder.iterdir()}


@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # as with the stock class: the folder was renamed
@pytest.mark.parametrize("namespace", EITHER)
def test_last_is_a_link_where_the_stock_class_makes_one(namespace: str, tmp_path: Path) -> None:
    def fits(kind: str, **resume: Any) -> tuple[dict[str, str], dict[str, str]]:
        made = stock(namespace) if kind == "stock" else build(namespace)
        before, after = tmp_path / f"{kind}-before", tmp_path / kind
        make_trainer(namespace, [made(dirpath=before, save_last="link", **EVERY)], root=tmp_path).fit(
            make_net(namespace), loader()
        )
        first = links(before)
        before.rename(after)
        assert torch.load(after / "last.ckpt", weights_only=False)["global_step"] == 12
        net = make_net(namespace)
        again = made(dirpath=after, save_last="link", **EVERY)
        make_trainer(namespace, [again], root=tmp_path, max_epochs=3).fit(net, loader(), ckpt_path="last")
        assert net.ran == 6
        return first, links(after)

    first, second = fits("ours")
    assert first["last.ckpt"] == "step=12.ckpt"
    assert (first, second) == fits("stock")


def hold(folder: Path) -> Checkpointer:
    """Another job that saves there."""
    holder = Checkpointer(folder, options=EMBEDDED)
    holder.save(1, {"x": torch.zeros(1)}, names=["other.ckpt"]).wait()
    return holder


@pytest.mark.parametrize("namespace", EITHER)
def test_beside_another_job_in_the_folder_the_stock_class_writes(
    namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Trainings of a sweep with one folder, each with names of its own."""
    monkeypatch.setattr("resiliency.agent.server._OLD_CLIENTS_S", 0.1)
    left = []
    for who in ("stock", "ours"):
        folder = tmp_path / who
        with hold(folder):
            options = {"monitor": "wave", "save_top_k": 2, "every_n_train_steps": 2, "save_last": True}
            made = stock(namespace)(dirpath=folder, **options) if who == "stock" else ours(namespace, folder, **options)
            make_trainer(namespace, [made], root=tmp_path / "root").fit(make_net(namespace), loader())
            assert torch.load(made.best_model_path, weights_only=False)["global_step"] > 0
            left.append((names(folder), os.path.basename(made.best_model_path)))
        assert "other.ckpt" in names(folder)
    assert left[0] == left[1]
    told = [text for text in caplog.messages if "is still using" in text]
    assert len(told) == 1 and "Lightning's own code saves" in told[0]


def test_a_restart_writes_nothing_beside_the_job_that_it_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That job may be an earlier attempt of its own, which was only stopped."""
    monkeypatch.setattr("resiliency.agent.server._OLD_CLIENTS_S", 0.1)
    monkeypatch.setenv("RESILIENCY_ATTEMPT", "2")
    with hold(tmp_path):
        made = ours(NAMESPACES[0], tmp_path, every_n_train_steps=2, save_top_k=-1, auto_resume=False)
        make_trainer(NAMESPACES[0], [made], root=tmp_path / "root").fit(make_net(NAMESPACES[0]), loader())
        assert names(tmp_path) == {"other.ckpt"}
