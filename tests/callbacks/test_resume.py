"""Every way to continue, evaluate or fine-tune from a checkpoint, ours or stock."""

from __future__ import annotations

import dataclasses
import datetime
import logging
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from resiliency.errors import NoCheckpointFound
from resiliency.plugins.checkpoint_io import build as build_io
from tests.callbacks.harness import (
    EITHER,
    content,
    differences,
    loader,
    make_net,
    make_trainer,
    names,
    ours,
    stock,
    weights,
)
from tests.rings import few

PL = "lightning.pytorch"
EVERY: dict[str, Any] = {"every_n_train_steps": 4, "save_top_k": -1, "filename": "{step}", "save_last": True}


def fit(
    namespace: str, directory: Path, callback: Any, *, max_steps: int, net: Any = None, **more: Any
) -> tuple[Any, Any]:
    """Trains with dropout and shuffling to ``max_steps``; returns trainer and module."""
    trainer = make_trainer(namespace, [callback], root=directory, max_steps=max_steps, max_epochs=-1)
    net = net or make_net(namespace, dropout=0.3)
    torch.manual_seed(3)
    trainer.fit(net, loader(shuffle=True), **more)
    return trainer, net


def straight(namespace: str, directory: Path, *, max_steps: int = 14) -> dict[str, torch.Tensor]:
    return weights(fit(namespace, directory, ours(namespace, directory, **EVERY), max_steps=max_steps)[1])


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("how", ["nothing", "last", "name", "folder", "directory"])
@pytest.mark.parametrize("namespace", EITHER)
def test_every_way_to_resume_gives_the_uninterrupted_run(how: str, namespace: str, tmp_path: Path) -> None:
    expected = straight(namespace, tmp_path / "straight")
    directory = tmp_path / "run"
    fit(namespace, directory, ours(namespace, directory, **EVERY), max_steps=8)
    folder = next((directory / ".resiliency/default/steps").glob("*0008-*"))
    path = {
        "nothing": None,
        "last": "last",
        "name": str(directory / "step=8.ckpt"),
        "folder": str(folder),
        "directory": str(directory),
    }[how]

    # Warnings are errors here: "resuming from a checkpoint that ended before the epoch ended" would be wrong.
    callback = ours(namespace, directory, auto_resume=True if path is None else None, **EVERY)
    trainer, net = fit(namespace, directory, callback, max_steps=14, ckpt_path=path)
    assert differences(expected, weights(net)) == []
    assert (net.ran, trainer.global_step) == (6, 14)


def test_the_warning_about_the_middle_of_an_epoch_stays_where_it_is_right(tmp_path: Path) -> None:
    fit(PL, tmp_path, ours(PL, tmp_path, **EVERY), max_steps=8)
    with pytest.warns(UserWarning, match="ended before the epoch ended"):
        fit(PL, tmp_path, ours(PL, tmp_path, exact_resume=False, auto_resume=True, **EVERY), max_steps=10)


class Augmented(Dataset[Any]):
    def __len__(self) -> int:
        return 18

    def __getitem__(self, index: int) -> tuple[torch.Tensor]:
        return (torch.sin(torch.arange(4.0) + index) + 0.1 * torch.rand(4),)


@pytest.mark.parametrize("exact_resume", few(["reread", True], ["reread"]))
def test_workers_that_draw_random_numbers_are_exact_when_batches_are_read_again(
    exact_resume: Any, tmp_path: Path
) -> None:
    def trained(directory: Path, max_steps: int) -> dict[str, torch.Tensor]:
        callback = ours(PL, directory, exact_resume=exact_resume, auto_resume=True, **EVERY)
        net = make_net(PL)
        torch.manual_seed(3)
        data: DataLoader[Any] = DataLoader(
            Augmented(), batch_size=3, shuffle=True, num_workers=2, multiprocessing_context="fork"
        )
        make_trainer(PL, [callback], root=directory, max_steps=max_steps, max_epochs=-1).fit(net, data)
        return weights(net)

    expected = trained(tmp_path / "straight", 12)
    trained(tmp_path / "run", 8)  # two batches into the second epoch
    found = differences(expected, trained(tmp_path / "run", 12))
    assert (found == []) == (exact_resume == "reread")


def test_what_a_plugin_has_saved_is_said_to_lack_what_a_rank_has_for_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plugin = build_io(PL)()
    make_trainer(PL, [stock(PL)(tmp_path)], root=tmp_path, max_epochs=1, plugins=[plugin]).fit(make_net(PL), loader())
    callback = ours(PL, tmp_path, auto_resume=True)
    make_trainer(PL, [callback], root=tmp_path, max_epochs=2).fit(make_net(PL), loader())
    said = [record.getMessage() for record in caplog.records if "start anew on this rank" in record.getMessage()]
    assert len(said) == 1 and "nothing of this rank alone" in said[0]


def test_nothing_is_resumed_when_told_so(tmp_path: Path) -> None:
    fit(PL, tmp_path, ours(PL, tmp_path, **EVERY), max_steps=8)
    callback = ours(PL, tmp_path, auto_resume=False, **EVERY)
    trainer = make_trainer(PL, [callback], root=tmp_path, max_steps=2, max_epochs=-1)
    net = make_net(PL)
    trainer.fit(net, loader())
    assert (net.ran, trainer.global_step) == (2, 2)
    assert {"step=4.ckpt", "step=8.ckpt"} <= names(tmp_path)


def test_last_is_found_when_nothing_is_resumed_by_itself(tmp_path: Path) -> None:
    fit(PL, tmp_path, ours(PL, tmp_path, **EVERY), max_steps=8)
    _, net = fit(PL, tmp_path, ours(PL, tmp_path, auto_resume=False, **EVERY), max_steps=9, ckpt_path="last")
    assert net.ran == 1


@pytest.mark.filterwarnings(r'ignore:.*ckpt_path="last".* is set, but there is no last checkpoint')
def test_last_at_the_first_start_trains_from_scratch(tmp_path: Path) -> None:
    trainer, _ = fit(PL, tmp_path, ours(PL, tmp_path, **EVERY), max_steps=2, ckpt_path="last")
    assert trainer.global_step == 2


def test_runs_in_one_folder_do_not_see_each_other(tmp_path: Path) -> None:
    fit(PL, tmp_path, ours(PL, tmp_path, run="a", **EVERY), max_steps=8)
    trainer = make_trainer(PL, [ours(PL, tmp_path, run="b", **EVERY)], root=tmp_path, max_steps=5, max_epochs=-1)
    net = make_net(PL)
    trainer.fit(net, loader())
    assert net.ran == 5
    assert {"step=4.ckpt", "step=8.ckpt", "step=4-v1.ckpt"} <= names(tmp_path)


@pytest.mark.parametrize("namespace", EITHER)
def test_a_second_fit_goes_on_with_what_is_in_memory(namespace: str, tmp_path: Path) -> None:
    """As with the stock class: not back to the last save."""
    results = []
    for make in (lambda d: stock(namespace)(d, **EVERY), lambda d: ours(namespace, d, **EVERY)):
        directory = tmp_path / str(len(results))
        trainer = make_trainer(namespace, [make(directory)], root=directory, max_epochs=1)
        net = make_net(namespace)
        trainer.fit(net, loader())  # 6 steps, saved at 4
        trainer.fit_loop.max_epochs = 2
        trainer.fit(net, loader())
        results.append((trainer.global_step, weights(net), names(directory)))
    assert results[0][0] == results[1][0] == 12
    assert differences(results[0][1], results[1][1]) == []
    assert results[0][2] == results[1][2]


def test_fit_after_an_exception_goes_on_in_the_same_trainer(tmp_path: Path) -> None:
    callback = ours(PL, tmp_path, **EVERY)
    trainer = make_trainer(PL, [callback], root=tmp_path, max_epochs=2)
    net = make_net(PL)
    step, calls = net.training_step, []

    def failing(batch: Any, batch_idx: int) -> Any:
        calls.append(batch_idx)
        if len(calls) == 6:
            raise RuntimeError("once")
        return step(batch, batch_idx)

    net.training_step = failing
    with pytest.raises(RuntimeError, match="once"):
        trainer.fit(net, loader())
    assert trainer.global_step == 5
    trainer.fit(net, loader())
    assert trainer.global_step >= 11
    assert "step=8.ckpt" in names(tmp_path)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create the checkpoint need")
@pytest.mark.parametrize("namespace", EITHER)
def test_evaluation_in_a_fresh_trainer_and_of_the_best(namespace: str, tmp_path: Path) -> None:
    callback = ours(namespace, tmp_path, monitor="wave", every_n_train_steps=1, save_top_k=1, filename="{step}")
    trainer = make_trainer(namespace, [callback], root=tmp_path)
    trainer.fit(make_net(namespace), loader())
    best = callback.best_model_path
    expected = float(
        sum(
            v.double().abs().sum()
            for k, v in content(Path(best))["state_dict"].items()
            if not k.endswith(("mean", "var", "tracked"))
        )
    )

    assert trainer.test(dataloaders=loader(batches=1), ckpt_path="best")[0]["weights"] == pytest.approx(expected)
    assert len(trainer.predict(dataloaders=loader(batches=2), ckpt_path="best")) == 2
    trainer.validate(dataloaders=loader(batches=1), ckpt_path="best")

    fresh = make_trainer(namespace, [ours(namespace, tmp_path / "elsewhere")], root=tmp_path)
    found = fresh.test(make_net(namespace), loader(batches=1), ckpt_path=best)
    assert found[0]["weights"] == pytest.approx(expected)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("namespace", EITHER)
def test_load_from_checkpoint_reads_our_names_and_stock_files(namespace: str, tmp_path: Path) -> None:
    callback = ours(namespace, tmp_path / "ours")
    trainer = make_trainer(namespace, [callback], root=tmp_path)
    net = make_net(namespace, hparams={"width": 8})
    trainer.fit(net, loader())
    file = tmp_path / "stock.ckpt"
    trainer.save_checkpoint(file)
    for path in (callback.best_model_path, file):
        loaded = type(net).load_from_checkpoint(path, weights_only=True)
        assert differences(weights(net), weights(loaded)) == []
        assert loaded.hparams["width"] == 8


@dataclasses.dataclass
class Settings:
    size: int = 8


@pytest.mark.parametrize("weights_only", [True, False, None])
def test_stock_checkpoints_still_load(weights_only: bool | None, tmp_path: Path) -> None:
    trainer = make_trainer(
        PL,
        [stock(PL)(tmp_path / "stock", every_n_train_steps=4, filename="{step}", save_top_k=-1)],
        root=tmp_path,
        max_epochs=2,
    )
    trainer.fit(
        make_net(PL, hparams={"root": tmp_path, "settings": Settings()} if weights_only is False else {"x": 1}),
        loader(),
    )
    file = tmp_path / "stock" / "step=12.ckpt"
    before = file.read_bytes()

    callback = ours(PL, tmp_path / "ours", every_n_train_steps=4, filename="{step}")
    trainer = make_trainer(PL, [callback], root=tmp_path, max_epochs=3)
    with pytest.warns(UserWarning, match="dirpath has changed"):
        net = make_net(PL)
        trainer.fit(net, loader(), ckpt_path=str(file), weights_only=weights_only)
    assert (net.ran, trainer.global_step) == (6, 18)
    assert file.read_bytes() == before


def test_hyper_parameters_of_user_classes_are_refused_with_the_instruction_as_by_the_stock_class(
    tmp_path: Path,
) -> None:
    hparams = {"root": tmp_path, "settings": Settings(3)}
    fit(PL, tmp_path, ours(PL, tmp_path, **EVERY), max_steps=4, net=make_net(PL, hparams=hparams, dropout=0.3))

    def resume(**arguments: Any) -> int:
        net = make_net(PL, hparams=hparams)
        fit(PL, tmp_path, ours(PL, tmp_path, auto_resume=True, **EVERY), max_steps=5, net=net, **arguments)
        return int(net.ran)

    with pytest.raises(pickle.UnpicklingError, match="add_safe_globals"):
        resume()
    assert resume(weights_only=False) == 1


def test_hyper_parameters_of_user_classes_that_were_allowed_resume(tmp_path: Path) -> None:
    hparams = {"settings": Settings(3)}
    fit(PL, tmp_path, ours(PL, tmp_path, **EVERY), max_steps=4, net=make_net(PL, hparams=hparams, dropout=0.3))
    net = make_net(PL, hparams=hparams)
    with torch.serialization.safe_globals([Settings]):
        fit(PL, tmp_path, ours(PL, tmp_path, auto_resume=True, **EVERY), max_steps=5, net=net)
    assert net.ran == 1


def test_hyper_parameters_with_paths_and_dates_resume(tmp_path: Path) -> None:
    """Where the stock class needs weights_only=False: objects that only hold values are harmless."""
    hparams = {"root": tmp_path, "day": datetime.date(2026, 1, 2), "rate": np.float64(0.5)}
    fit(PL, tmp_path, ours(PL, tmp_path, **EVERY), max_steps=4, net=make_net(PL, hparams=hparams, dropout=0.3))
    net = make_net(PL, hparams=hparams)
    fit(PL, tmp_path, ours(PL, tmp_path, auto_resume=True, **EVERY), max_steps=5, net=net)
    assert net.ran == 1


def test_a_stock_run_in_the_same_folder_is_continued_by_its_path_and_replaced_when_due(tmp_path: Path) -> None:
    """A user changes the import in the middle of a run: `last` and the best of before are found and looked after."""
    arguments: dict[str, Any] = {
        "monitor": "step",
        "mode": "max",
        "save_top_k": 1,
        "every_n_train_steps": 4,
        "filename": "{step}",
    }
    fit(PL, tmp_path, stock(PL)(tmp_path, save_last=True, **arguments), max_steps=8)
    assert names(tmp_path) == {"step=8.ckpt", "last.ckpt"}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*ended before the epoch ended")
        fit(PL, tmp_path, ours(PL, tmp_path, save_last=True, **arguments), max_steps=12, ckpt_path="last")
    assert names(tmp_path) == {"step=12.ckpt", "last.ckpt"}
    assert content(tmp_path / "last.ckpt")["global_step"] == 12


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize("inside", [True, False])
def test_what_the_user_resumed_from_is_never_deleted(inside: bool, tmp_path: Path) -> None:
    """By name, and by step folder, from the directory that is written to or from another one."""
    first = tmp_path / "first"
    arguments: dict[str, Any] = {
        "monitor": "step",
        "mode": "max",
        "save_top_k": 1,
        "every_n_train_steps": 4,
        "filename": "{step}",
    }
    fit(PL, first, ours(PL, first, **arguments), max_steps=4)
    directory = first if inside else tmp_path / "second"
    path = first / "step=4.ckpt" if inside else next((first / ".resiliency/default/steps").iterdir())
    before = content(first / "step=4.ckpt")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The dirpath has changed")
        fit(PL, directory, ours(PL, directory, **arguments), max_steps=12, ckpt_path=str(path))
    assert names(first) == ({"step=4.ckpt", "step=12.ckpt"} if inside else {"step=4.ckpt"})
    assert differences(before, content(first / "step=4.ckpt")) == []
    if not inside:
        assert names(directory) == {"step=12.ckpt"}


@pytest.mark.usefixtures("launched")
def test_a_step_folder_that_was_named_keeps_its_names(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        "monitor": "step",
        "mode": "max",
        "save_top_k": 1,
        "every_n_train_steps": 4,
        "filename": "{step}",
    }
    fit(PL, tmp_path, ours(PL, tmp_path, **arguments), max_steps=4)
    folder = next((tmp_path / ".resiliency/default/steps").iterdir())
    fit(PL, tmp_path, ours(PL, tmp_path, **arguments), max_steps=12, ckpt_path=str(folder))
    assert names(tmp_path) == {"step=4.ckpt", "step=12.ckpt"}


def test_a_path_that_is_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        fit(PL, tmp_path, ours(PL, tmp_path), max_steps=2, ckpt_path=str(tmp_path / "no.ckpt"))
    with pytest.raises(NoCheckpointFound):
        fit(
            PL,
            tmp_path,
            ours(PL, tmp_path),
            max_steps=2,
            ckpt_path=str(tmp_path / ".resiliency/default/steps/0000000007-a0001-abcdef-00"),
        )


def test_the_newest_of_several_directories_is_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def callbacks() -> list[Any]:
        return [
            ours(PL, tmp_path / "a", auto_resume=True, every_n_train_steps=3),
            ours(PL, tmp_path / "b", auto_resume=True, every_n_train_steps=4, save_last=True),
        ]

    make_trainer(PL, callbacks(), root=tmp_path, max_steps=5, max_epochs=-1).fit(make_net(PL), loader())
    for path in (None, "last"):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            trainer = make_trainer(PL, callbacks(), root=tmp_path, max_steps=4, max_epochs=-1)
            trainer.fit(make_net(PL), loader(), ckpt_path=path)
        assert "Resuming from step 4" in caplog.text
