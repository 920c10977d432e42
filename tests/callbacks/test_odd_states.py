"""A fit with odd tensors in its state ends as it would without checkpoints: what the stock class keeps is kept bit for
bit, and a save that cannot be taken is a warning and an event."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from resiliency.callbacks.checkpointing.stock_writer import StockWriter
from resiliency.errors import ConfigError
from resiliency.plugins import _lightning
from resiliency.state.leaf_kinds import register_leaf_kind
from resiliency.testing.zygote import Zygote
from tests import odd_tensors
from tests.callbacks import odd_fits
from tests.callbacks.harness import EITHER, content, differences, loader, make_net, make_trainer, ours, stock


def found(zygote: Zygote, folder: Path, **given: str) -> Any:
    """What became of a fit in a process of its own, of a job whose event log stays."""
    launched = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "0"}
    return odd_tensors.found_by(zygote, "tests.callbacks.odd_fits:run", folder, env=launched, **given)


@pytest.mark.parametrize("namespace", EITHER)
@pytest.mark.parametrize("place", ["buffers", "optimizer"])
def test_odd_tensors_are_in_the_checkpoint_as_the_stock_class_has_them(
    zygote: Zygote, namespace: str, place: str, tmp_path: Path
) -> None:
    assert found(zygote, tmp_path, namespace=namespace, place=place, name="") == []


@pytest.mark.parametrize("namespace", EITHER)
@pytest.mark.parametrize("name", odd_fits.SOME)
def test_a_save_that_cannot_be_taken_is_a_warning_and_an_event_and_training_goes_on(
    zygote: Zygote, namespace: str, name: str, tmp_path: Path
) -> None:
    place = "optimizer" if name == "fake" else "buffers"
    assert found(zygote, tmp_path, namespace=namespace, place=place, name=name) == []


class Part:
    """A tensor of a made-up framework, of which each rank holds a part."""

    def __init__(self) -> None:
        self.held = torch.arange(3.0)


class PartKind:
    name, replicated = "part", False

    def takes(self, class_: type) -> bool:
        return class_ is Part

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(name)


class Model:
    """An object with such a tensor: the engine cannot cut it up, and ``torch.save`` pickles it as any object."""

    def __init__(self) -> None:
        self.part = Part()


@pytest.fixture
def parts() -> Iterator[None]:
    remove = register_leaf_kind(PartKind())
    yield
    remove()


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("until", [4, 99], ids=["for a while", "to the end"])
@pytest.mark.parametrize("namespace", EITHER)
def test_what_only_torch_save_can_write_is_written_by_it(
    namespace: str, until: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Names, removals, links and loggers follow, and when the engine can again, it does."""

    def fit(who: str) -> tuple[list[str], list[int]]:
        net = make_net(namespace)

        def on_save_checkpoint(checkpoint: dict[str, Any]) -> None:
            if checkpoint["global_step"] <= until:
                checkpoint["model"] = Model()

        net.on_save_checkpoint = on_save_checkpoint
        made = ours if who == "ours" else (lambda name, dirpath, **given: stock(name)(dirpath=dirpath, **given))
        arguments: dict[str, Any] = {"every_n_train_steps": 2, "monitor": "step", "mode": "max", "filename": "{step}"}
        callback = made(namespace, tmp_path / who, save_top_k=2, save_last=True, **arguments)
        make_trainer(namespace, [callback], root=tmp_path, max_epochs=1).fit(net, loader())
        folder = tmp_path / who
        assert callback.best_model_path == str(folder / "step=6.ckpt")
        found = sorted(path.name for path in folder.iterdir() if path.name.endswith(".ckpt"))
        return found, [torch.load(folder / name, weights_only=False)["global_step"] for name in found]

    theirs, mine = fit("stock"), fit("ours")
    assert mine == theirs == (["last.ckpt", "step=4.ckpt", "step=6.ckpt"], [6, 4, 6])
    assert not list((tmp_path / "ours").glob(".resiliency-*")), "a partial file was left"
    state_of = [content(tmp_path / who / "step=4.ckpt") for who in ("stock", "ours")]
    for state in state_of:
        state.pop("callbacks")
        assert type(state.pop("model")) is Model
    assert differences(*state_of) == []
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [text for text in warned if "torch.save has written" in text]


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("namespace", EITHER)
def test_a_stock_file_takes_the_place_of_a_name_and_not_of_the_step_behind_it(
    namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsspec may write into the file that is there (a move from another file system); of a name that is the step's."""
    module = __import__(f"{namespace}.plugins.io", fromlist=["TorchCheckpointIO"])
    written: list[str] = []

    def save(self: Any, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        written.append(str(path))
        with open(path, "wb") as file:
            file.write(b"x")

    net = make_net(namespace)

    def on_save_checkpoint(checkpoint: dict[str, Any]) -> None:
        if checkpoint["global_step"] >= 6:
            # Not before the fit: then it would write every checkpoint.
            monkeypatch.setattr(module.TorchCheckpointIO, "save_checkpoint", save)
            checkpoint["model"] = Model()

    net.on_save_checkpoint = on_save_checkpoint
    callback = ours(namespace, tmp_path, save_last=True, **odd_fits.EVERY)
    make_trainer(namespace, [callback], root=tmp_path, max_epochs=1).fit(net, loader())
    assert len(written) == 1 and (tmp_path / "last.ckpt").read_bytes() == b"x"
    assert content(tmp_path / "step=4.ckpt")["global_step"] == 4


def test_what_nobody_foresaw_is_said_once_with_its_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's own words say what to do; of anything else the place is needed."""
    trainer = SimpleNamespace(global_step=3, is_global_zero=True)
    written: list[str] = []

    def save(trainer: Any, state: dict[str, Any], path: str) -> None:
        if state:
            raise RuntimeError("the disk of the writer")
        Path(path).touch()
        written.append(path)

    monkeypatch.setattr(_lightning, "save_as_stock", save)
    for state, refusal, traced in (
        ({}, ConfigError("a foreseen refusal"), False),
        ({}, ZeroDivisionError("a bug of ours"), True),
        ({"w": 1}, ConfigError("a foreseen refusal"), True),
    ):
        caplog.clear()
        writer = StockWriter(trainer)
        saved = [writer.write(state, [str(tmp_path / "a.ckpt")], refusal) for _ in range(2)]
        assert saved == [not state] * 2
        (said,) = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert (said.exc_info is not None) == traced and "step 3" in said.getMessage()
    assert len(written) == 4 and os.listdir(tmp_path) == ["a.ckpt"]
