"""Odd names of files and folders: what the stock class can write is there in the end, under the same names."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from resiliency.checkpoint.checkpointer import Checkpointer
from tests.callbacks.harness import EITHER, EMBEDDED, NAMESPACES, loader, make_net, make_trainer, ours, stock


def fit(namespace: str, who: str, folder: Path, inside: str, filename: str) -> tuple[list[str], str]:
    """Names below the folder, and the best path within it."""
    made: Any = ours if who == "ours" else (lambda name, dirpath, **given: stock(name)(dirpath=dirpath, **given))
    dirpath = os.path.join(folder, inside)
    callback = made(namespace, dirpath, filename=filename, every_n_train_steps=3, save_top_k=-1, save_last=True)
    make_trainer(namespace, [callback], root=folder / "root", max_epochs=1).fit(make_net(namespace), loader())
    best = callback.best_model_path
    assert torch.load(best, weights_only=False)["global_step"] == 6
    found = []
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "root"]
        found += [os.path.relpath(os.path.join(where, name), folder) for name in names]
    return sorted(found), os.path.relpath(best, folder)


@pytest.mark.parametrize(
    ("inside", "filename"),
    [
        ("c", "s//x-{step}"),
        ("c", "s/./x-{step}"),
        ("c//d", "{step}"),
        ("c/", "s/x-{step}"),
        ("c", "\udcff-{step}"),
        ("c", "a\udc80b/{step}"),
        ("c-\udcff", "{step}"),
        ("ü", "ö-{step}"),
        ("c", "a b-{step}"),
        ("c", ".{step}"),
        ("c", "s/.{step}"),
        ("c", ".s/{step}"),
        ("c", "{step}/"),
    ],
    ids=[
        "s//x",
        "s/./x",
        "c//d",
        "c/",
        "not UTF-8",
        "folder not UTF-8",
        "dirpath not UTF-8",
        "umlauts",
        "space",
        "hidden",
        "hidden in a folder",
        "hidden folder",
        "folder alone",
    ],
)
@pytest.mark.parametrize("namespace", EITHER)
def test_checkpoints_have_the_names_that_the_stock_class_gives(
    namespace: str, inside: str, filename: str, tmp_path: Path
) -> None:
    assert fit(namespace, "ours", tmp_path / "ours", inside, filename) == fit(
        namespace, "stock", tmp_path / "stock", inside, filename
    )


def test_a_file_that_somebody_puts_there_during_the_fit_stays(tmp_path: Path) -> None:
    """Two trainings save to one folder under the same names: the later one gets numbers, as with the stock class."""
    left = []
    for made in (stock(NAMESPACES[0]), partial(ours, NAMESPACES[0])):
        folder = tmp_path / f"{len(left)}"
        net = make_net(NAMESPACES[0])

        def another_job(folder: Path = folder, net: Any = net) -> None:
            folder.mkdir(exist_ok=True)
            (folder / f"{net.current_epoch}.ckpt").write_text("of another job")

        net.on_train_epoch_start = another_job
        callback = made(dirpath=folder, filename="{epoch}", auto_insert_metric_name=False, save_top_k=-1)
        make_trainer(NAMESPACES[0], [callback], root=tmp_path / "root", max_epochs=3).fit(net, loader())
        left.append(sorted(os.listdir(folder)))
        assert (folder / "2.ckpt").read_text() == "of another job"
    assert left[0] == left[1] == [f"{epoch}{version}.ckpt" for epoch in range(3) for version in ("-v1", "")]


def test_a_name_that_is_saved_and_removed_in_turns_gets_no_number(tmp_path: Path) -> None:
    """A removed file is there until a newer save is safe; the stock class has deleted it at once."""
    left = []
    for made in (stock(NAMESPACES[0]), partial(ours, NAMESPACES[0])):
        folder = tmp_path / f"{len(left)}"
        net = make_net(NAMESPACES[0])
        net.on_train_batch_end = lambda *_, net=net: net.log("turn", float(net.trainer.global_step % 2))
        callback = made(dirpath=folder, filename="{turn}", every_n_train_steps=1)  # the newest alone is kept
        saved: list[str] = []
        net.on_before_zero_grad = lambda *_, callback=callback, saved=saved: saved.append(
            os.path.basename(callback.best_model_path)
        )
        make_trainer(NAMESPACES[0], [callback], root=tmp_path / "root").fit(net, loader())
        left.append((sorted(os.listdir(folder)), saved))
    assert left[0] == left[1]


def test_a_name_that_the_user_has_deleted_after_a_crash_is_free(tmp_path: Path) -> None:
    """The step of a killed job is still in the hidden folder; the stock class sees only what has gone."""
    with Checkpointer(tmp_path, options=EMBEDDED) as crashed:
        crashed.save(1, {"x": torch.zeros(1)}, names=["last.ckpt", "step=1.ckpt"]).wait()
    (tmp_path / "last.ckpt").unlink()
    callback = ours(NAMESPACES[0], tmp_path, save_last=True, every_n_train_steps=3, filename="{step}")
    make_trainer(NAMESPACES[0], [callback], root=tmp_path / "root").fit(make_net(NAMESPACES[0]), loader())
    assert os.path.basename(callback.last_model_path) == "last.ckpt"
    assert torch.load(tmp_path / "last.ckpt", weights_only=False)["global_step"] == 12


@pytest.mark.parametrize("namespace", EITHER)
@pytest.mark.parametrize("kind", ["a file", "below a file", "long name", "long path", "loop", "none", "forbidden"])
def test_a_place_where_no_folder_can_be_ends_the_fit_as_with_the_stock_class(
    kind: str, namespace: str, tmp_path: Path
) -> None:
    """Nothing helps there, and a training without checkpoints would be noticed when it is over."""
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    dirpath = {
        "a file": tmp_path / "file",
        "below a file": tmp_path / "file" / "ckpts",
        "long name": tmp_path / ("d" * 256),
        "long path": tmp_path.joinpath(*["d" * 200] * 30),
        "loop": tmp_path / "loop" / "ckpts",
        "none": Path("/proc/none/ckpts"),  # a file system that takes no new folders
        "forbidden": Path("/sys/kernel/none/ckpts"),  # so says this one
    }[kind]
    raised = []
    for made in (stock(namespace), partial(ours, namespace)):
        callback = made(dirpath=dirpath, every_n_train_steps=3)
        trainer = make_trainer(namespace, [callback], root=tmp_path / "root", max_epochs=1)
        with pytest.raises(OSError) as error:
            trainer.fit(make_net(namespace), loader())
        raised.append((type(error.value), error.value.errno, error.value.filename, trainer.global_step))
    assert raised[0] == raised[1]


@pytest.mark.parametrize("namespace", EITHER)
def test_an_empty_dirpath_means_the_working_directory_as_with_the_stock_class(
    namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A configuration with an empty string in that place."""
    left = []
    for made in (stock(namespace), partial(ours, namespace)):
        folder = tmp_path / f"{len(left)}"
        folder.mkdir()
        monkeypatch.chdir(folder)
        callback = made(dirpath="", every_n_train_steps=3, filename="{step}", save_last=True)
        make_trainer(namespace, [callback], root=tmp_path / "root").fit(make_net(namespace), loader())
        left.append((sorted(os.listdir(folder)), callback.dirpath, callback.best_model_path, callback.last_model_path))
    assert left[0] == left[1]
    assert left[0][:2] == (["last.ckpt", "step=12.ckpt"], "")
    assert "dirpath='' means the folder that is the working directory" in caplog.text
