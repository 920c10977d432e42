"""What scripts do around the callback leaves what it leaves with the stock class. Each is run with both."""

from __future__ import annotations

import copy
import importlib
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest

from resiliency.callbacks.model_checkpoint import build
from resiliency.storage.manifest import META_DIR
from tests.callbacks.harness import (
    EITHER,
    content,
    differences,
    loader,
    make_net,
    make_trainer,
    names,
    stock,
)
from tests.rings import few

PL = "lightning.pytorch"

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning's advice

#: Makes the callback; the options are those a script has, none of ours.
Make = Callable[..., Any]


def both(root: Path, script: Callable[[Make, Path], Any], namespace: str = PL) -> None:
    """Runs a script with the stock class and with ours in one folder, one after the other, and compares what it returns
    and the weights and names in the files it leaves."""
    found = []
    folder = root / "run"
    for made in (stock(namespace), build(namespace)):
        result = script(made, folder)
        files = {name: content(folder / name)["state_dict"] for name in sorted(names(folder))}
        rest = sorted(
            os.path.relpath(os.path.join(at, name), folder) for at, _, all_ in os.walk(folder) for name in all_
        )
        found.append((result, files, rest))
        if folder.exists():
            folder.rename(root / f"done-{len(found)}")
    assert differences(*found) == []


def fit(callbacks: Any, root: Path, *, module: Any = None, namespace: str = PL, **settings: Any) -> Any:
    ckpt_path = settings.pop("ckpt_path", None)
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    trainer = make_trainer(namespace, callbacks, root=root, **settings)
    trainer.fit(module or make_net(namespace), loader(), ckpt_path=ckpt_path)
    return trainer


def other_callback(**hooks: Any) -> Any:
    kinds = importlib.import_module(f"{PL}.callbacks")
    return type("Other", (kinds.Callback,), hooks)()


# -- derived classes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("namespace", EITHER)
def test_a_derived_class_may_use_the_file_when_it_is_saved(namespace: str, tmp_path: Path) -> None:
    """An upload or a copy after ``super()._save_checkpoint``, and files of its own beside each checkpoint."""

    def script(made: Any, folder: Path) -> Any:
        class Mine(made):  # type: ignore[misc]
            def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
                super()._save_checkpoint(trainer, filepath)
                seen.append((os.path.basename(filepath), content(Path(filepath))["global_step"]))
                shutil.copy(filepath, f"{filepath}.uploaded")

            def _remove_checkpoint(self, trainer: Any, filepath: str) -> None:
                super()._remove_checkpoint(trainer, filepath)
                os.remove(f"{filepath}.uploaded")

        seen: list[Any] = []
        callback = Mine(dirpath=folder, monitor="wave", save_top_k=2, every_n_train_steps=1, save_last=True)
        fit(callback, folder, namespace=namespace)
        return seen

    both(tmp_path, script, namespace)


@pytest.mark.parametrize("save_last", few([True, "link"], ["link"]))
@pytest.mark.parametrize(
    "method",
    [
        "_save_topk_checkpoint",
        "_save_monitor_checkpoint",
        "_save_none_monitor_checkpoint",
        "_save_last_checkpoint",
        "_update_best_and_save",
        "_link_checkpoint",
    ],
)
def test_a_derived_class_may_use_the_file_after_any_method_that_saves(
    method: str, save_last: bool | str, tmp_path: Path
) -> None:
    def step_in(path: str) -> tuple[str, int]:
        return os.path.basename(path), content(Path(path))["global_step"]

    def script(made: Any, folder: Path) -> Any:
        original = getattr(made, method)
        if method == "_link_checkpoint":  # a static method

            def replaced(*arguments: Any) -> None:
                original(*arguments)
                seen.append([step_in(path) for path in arguments[1:]])

            mine = type("Mine", (made,), {method: staticmethod(replaced)})
        else:

            def replaced(self: Any, *arguments: Any) -> None:
                original(self, *arguments)
                path = self.last_model_path if "last" in method else self.best_model_path
                seen.append(path and step_in(path))

            mine = type("Mine", (made,), {method: replaced})
        seen: list[Any] = []
        monitor = None if "none" in method else "wave"
        fit(mine(dirpath=folder, monitor=monitor, save_top_k=1, every_n_train_steps=1, save_last=save_last), folder)
        return seen

    both(tmp_path, script)


def test_a_derived_class_may_rename_what_is_to_be_removed(tmp_path: Path) -> None:
    def script(made: Any, folder: Path) -> None:
        class Mine(made):  # type: ignore[misc]
            def _remove_checkpoint(self, trainer: Any, filepath: str) -> None:
                os.rename(filepath, f"{filepath}.old")

        fit(Mine(dirpath=folder, monitor="wave", save_top_k=1, every_n_train_steps=2), folder)

    both(tmp_path, script)


def test_a_derived_class_that_saves_by_itself_has_its_older_files_removed(tmp_path: Path) -> None:
    def script(made: Any, folder: Path) -> None:
        class Mine(made):  # type: ignore[misc]
            def _save_checkpoint(self, trainer: Any, filepath: str) -> None:
                trainer.save_checkpoint(filepath, True)
                self._last_global_step_saved = trainer.global_step
                self._last_checkpoint_saved = filepath

        fit(Mine(dirpath=folder, every_n_train_steps=3, save_top_k=1, save_last=True), folder)

    both(tmp_path, script)


# -- copies in the middle of a fit ------------------------------------------------------------------------------------


def test_the_callback_can_be_copied_in_a_hook(tmp_path: Path) -> None:
    """It holds locks and threads then; so does a pickle of it, where the module can be pickled."""

    def script(made: Any, folder: Path) -> Any:
        def on_train_batch_end(self: Any, trainer: Any, *_: Any) -> None:
            taken = copy.deepcopy(trainer.checkpoint_callback)
            states.append((taken.state_dict(), taken.best_model_path == "" or os.path.exists(taken.best_model_path)))

        states: list[Any] = []
        callback = made(dirpath=folder, monitor="wave", every_n_train_steps=2)
        fit([other_callback(on_train_batch_end=on_train_batch_end), callback], folder, max_epochs=1)
        return states

    both(tmp_path, script)


# -- where it saves ---------------------------------------------------------------------------------------------------


class Kept(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """A store that only its owner knows."""

    protocol = "keptstore"
    files: dict[str, bytes] = {}

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        files, path = self.files, self._strip_protocol(path)
        if "r" in mode:
            return io.BytesIO(files[path])

        class File(io.BytesIO):
            def close(self) -> None:
                if not self.closed:
                    files[path] = self.getvalue()
                super().close()

            def commit(self) -> None: ...

        return File()

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        if path in self.files:
            return {"name": path, "size": len(self.files[path]), "type": "file"}
        if any(name.startswith(f"{path}/") for name in self.files):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        path = self._strip_protocol(path)
        found = [self.info(name) for name in self.files if name.startswith(f"{path}/")]
        return found if detail else [entry["name"] for entry in found]

    def makedirs(self, path: str, exist_ok: bool = False) -> None: ...

    def rm_file(self, path: str) -> None:
        del self.files[self._strip_protocol(path)]

    _rm = rm_file


@pytest.mark.parametrize("address", ["memory://scripts/{}", "keptstore://bucket/{}"])
def test_a_store_that_the_agent_does_not_reach_is_written_by_the_stock_class(
    address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fsspec.register_implementation("keptstore", Kept, clobber=True)
    numbers = iter("12")

    def script(made: Any, folder: Path) -> Any:
        dirpath = address.format(next(numbers))
        callback = made(dirpath=dirpath, monitor="wave", save_top_k=2, every_n_train_steps=1, save_last=True)
        trainer, last = fit(callback, folder), callback.last_model_path
        tested = trainer.test(dataloaders=loader(), ckpt_path="best", verbose=False)
        fit(made(dirpath=dirpath, save_last=True), folder, max_epochs=3, ckpt_path=last)
        there = fsspec.core.url_to_fs(dirpath)[0].find(dirpath)
        return tested, sorted(os.path.basename(path) for path in there)

    both(tmp_path, script)
    assert "Lightning's own code saves these checkpoints" in caplog.text


def test_a_strategy_with_its_own_save_checkpoint_is_called(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    strategies = importlib.import_module(f"{PL}.strategies")

    class Mine(strategies.SingleDeviceStrategy):  # type: ignore[name-defined,misc]
        def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
            seen.append(os.path.basename(filepath))
            super().save_checkpoint(checkpoint | {"mine": 1}, filepath, storage_options)

        def remove_checkpoint(self, filepath: Any) -> None:
            seen.append(f"removed {os.path.basename(filepath)}")
            super().remove_checkpoint(filepath)

    seen: list[str] = []

    def script(made: Any, folder: Path) -> Any:
        seen.clear()
        fit(made(dirpath=folder, monitor="wave", every_n_train_steps=2), folder, strategy=Mine(device="cpu"))
        return list(seen), [content(path)["mine"] for path in folder.glob("*.ckpt")]

    both(tmp_path, script)
    assert "the strategy Mine of this Trainer" in caplog.text


def test_a_fit_within_a_fit_may_save_to_the_same_folder(tmp_path: Path) -> None:
    def script(made: Any, folder: Path) -> None:
        def on_train_epoch_end(self: Any, trainer: Any, *_: Any) -> None:
            if trainer.current_epoch == 0:
                fit(made(dirpath=folder, save_last=True, filename="inner"), folder, max_epochs=1)

        callback = made(dirpath=folder, every_n_train_steps=2, save_top_k=-1)
        fit([other_callback(on_train_epoch_end=on_train_epoch_end), callback], folder)

    both(tmp_path, script)


def test_a_dirpath_that_changes_after_setup_is_used(tmp_path: Path) -> None:
    """Older files go there too."""

    def script(made: Any, folder: Path) -> None:
        def on_train_start(self: Any, trainer: Any, *_: Any) -> None:
            trainer.checkpoint_callback.dirpath = str(folder / "later")

        callback = made(dirpath=folder / "first", every_n_train_steps=4)
        fit([other_callback(on_train_start=on_train_start), callback], folder)

    both(tmp_path, script)


def test_names_with_folders_and_links_to_nothing_are_as_with_the_stock_class(tmp_path: Path) -> None:
    def script(made: Any, folder: Path) -> Any:
        folder.mkdir()
        (folder / "last.ckpt").symlink_to("nowhere.ckpt")
        fit(made(dirpath=folder, save_last="link", filename="{epoch}-val/{wave:.2f}"), folder)
        return os.readlink(folder / "last.ckpt")

    both(tmp_path, script)


@pytest.mark.parametrize("error", [RuntimeError, OSError, KeyError])
def test_what_a_logger_raises_ends_the_training(error: type[Exception], tmp_path: Path) -> None:
    """Also at the last save, whose outcome is awaited at the end."""
    loggers = importlib.import_module(f"{PL}.loggers")

    class Failing(loggers.CSVLogger):  # type: ignore[name-defined,misc]
        def after_save_checkpoint(self, callback: Any) -> None:
            raise error("the logger is down")

    def script(made: Any, folder: Path) -> None:
        logger = Failing(str(tmp_path / "logs"))
        with pytest.raises(error, match="the logger is down"):
            fit(made(dirpath=folder), folder, max_epochs=1, logger=logger)

    both(tmp_path, script)


# -- when it saves, and what "last" is --------------------------------------------------------------------------------


def test_the_last_checkpoint_is_there_in_on_train_end_of_other_callbacks(tmp_path: Path) -> None:
    """Also when nobody reads its path first."""

    def script(made: Any, folder: Path) -> Any:
        there: list[bool] = []
        callback = made(dirpath=folder, every_n_train_steps=2)
        path = folder / "epoch=1-step=12.ckpt"
        fit([other_callback(on_train_end=lambda self, *_: there.append(path.exists())), callback], folder)
        return there

    both(tmp_path, script)


@pytest.mark.parametrize("save_last", [True, False])
def test_last_means_the_file_of_that_name_outside_of_fits(save_last: bool, tmp_path: Path) -> None:
    def script(made: Any, folder: Path) -> Any:
        trainer = fit(made(dirpath=folder, save_last=save_last), folder)
        net = make_net(PL)
        tested = trainer.test(net, loader(), ckpt_path="last", verbose=False)
        return tested, trainer.ckpt_path, trainer.validate(net, loader(), ckpt_path="last", verbose=False)

    both(tmp_path, script)


def test_last_is_the_newest_file_under_its_usual_name_in_a_fit(tmp_path: Path) -> None:
    def script(made: Any, folder: Path) -> Any:
        fit(made(dirpath=folder, save_last=True), folder)
        trainer = fit(made(dirpath=folder, save_last=True), folder, max_epochs=3, ckpt_path="last")
        return trainer.ckpt_path, trainer.global_step

    both(tmp_path, script)


# -- a hook that fails -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("namespace", EITHER)
def test_a_save_that_a_hook_prevented_is_tried_again_when_the_exception_ends_the_fit(
    namespace: str, tmp_path: Path
) -> None:
    """A hook of another callback fails once, in the save of step 4; the stock class has not noted that save."""

    def script(made: Any, folder: Path) -> Any:
        failed: list[int] = []

        def on_save_checkpoint(self: Any, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            if trainer.global_step == 4 and not failed:
                failed.append(trainer.global_step)
                raise ConnectionError("the tracker is away")

        kinds = importlib.import_module(f"{namespace}.callbacks")
        other = type("Other", (kinds.Callback,), {"on_save_checkpoint": on_save_checkpoint})()
        callback = made(dirpath=folder, filename="{step}", every_n_train_steps=2, save_top_k=-1, save_on_exception=True)
        with pytest.raises(ConnectionError, match="the tracker is away"):
            fit([callback, other], folder, namespace=namespace)
        return failed, callback._last_global_step_saved, os.path.basename(callback._last_checkpoint_saved)

    both(tmp_path, script, namespace)
    assert content(tmp_path / "done-2" / "step=4.ckpt")["global_step"] == 4


# -- searches below the folder ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("namespace", EITHER)
def test_a_search_below_the_folder_of_a_running_fit_finds_each_checkpoint_once(namespace: str, tmp_path: Path) -> None:
    """In ``.resiliency`` the same files have names of another ending."""

    def script(made: Any, folder: Path) -> Any:
        class Looking(made):  # type: ignore[misc]
            def on_train_batch_end(self, *arguments: Any) -> None:
                super().on_train_batch_end(*arguments)
                saved.append(os.path.basename(self.last_model_path))  # there once this has been read
                before = set(os.listdir(folder))
                found = search(folder)
                seen.append([path for path in found if os.path.dirname(path) != str(folder)])
                # The agent may give or take a name between the listings.
                listed = before & set(os.listdir(folder))
                missed.append([name for name in listed if name.endswith(".ckpt") and str(folder / name) not in found])
                hidden.append((folder / META_DIR).is_dir())

        seen, missed, saved, hidden = [], [], [], []  # type: ignore[var-annotated]
        callback = Looking(
            dirpath=folder,
            filename="{step}-{wave:.1f}",
            monitor="wave",
            save_top_k=2,
            every_n_train_steps=1,
            save_last=True,
        )
        fit(callback, folder, namespace=namespace)
        assert any(hidden) == (made is not stock(namespace)), "or there was nothing to be found"
        return seen, missed, saved, len(search(folder))

    both(tmp_path, script, namespace)


def search(folder: Path) -> list[str]:
    """``rglob``; that of Python 3.11 raises when a folder goes that it is about to look into."""
    for _ in range(1000):
        try:
            return sorted(map(str, folder.rglob("*.ckpt")))
        except FileNotFoundError:
            continue
    raise AssertionError("it never got through")
