"""A path that a user has is there: in hooks of other callbacks, in loggers, at the end, and while commits are slow."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from resiliency import faultpoints
from resiliency.callbacks.checkpointing.saver import CheckpointSaver
from resiliency.checkpoint.ticket import LOCAL
from resiliency.errors import Timeout
from tests.callbacks.harness import EITHER, content, loader, make_net, make_trainer, ours, stock
from tests.callbacks.test_removal import Log
from tests.rings import few

PL = "lightning.pytorch"
BEST: dict[str, Any] = {
    "monitor": "step",
    "mode": "max",
    "save_top_k": 2,
    "every_n_train_steps": 2,
    "filename": "{step}",
    "save_last": True,
}
#: Long against a step of these trainings (a millisecond), so that no commit is done by the next hook.
SLOW = "agent.manifest.write:delay=0.05@*"
HOOKS = (
    "on_train_batch_start on_train_batch_end on_before_optimizer_step on_train_epoch_end on_validation_start"
    " on_validation_end on_train_end on_fit_end"
).split()


@pytest.fixture(autouse=True)
def slow_commits() -> Iterator[None]:
    faultpoints.arm(SLOW)
    yield
    faultpoints.arm("")


def reader(namespace: str, found: list[tuple[str, str, bool]], hooks: list[str]) -> Any:
    """A callback that reads all paths in each hook and looks whether they are there."""

    def look(hook: str) -> Any:
        def read(self: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
            callback = trainer.checkpoint_callback
            for name in ("best_model_path", "last_model_path", "kth_best_model_path"):
                if path := getattr(callback, name):
                    found.append((f"{hook} {name}", path, os.path.exists(path)))
            found.extend((f"{hook} best_k_models", path, os.path.exists(path)) for path in callback.best_k_models)

        return read

    base = importlib.import_module(namespace).Callback
    return type("Reader", (base,), {hook: look(hook) for hook in hooks})()


@pytest.mark.parametrize("namespace", EITHER)
@pytest.mark.parametrize("hook", HOOKS)
def test_every_path_is_there_in_hooks_of_other_callbacks(namespace: str, hook: str, tmp_path: Path) -> None:
    found: list[tuple[str, str, bool]] = []
    callback = ours(namespace, tmp_path, **BEST)
    trainer = make_trainer(namespace, [reader(namespace, found, [hook]), callback], root=tmp_path, max_steps=7)
    trainer.fit(make_net(namespace), loader(), loader(batches=1))
    assert [item for item in found if not item[2]] == []
    assert found


def test_what_is_read_is_what_the_stock_class_has_there(tmp_path: Path) -> None:
    results = []
    for make in (stock, ours):
        found: list[tuple[str, str, bool]] = []
        directory = tmp_path / "run"
        callback = stock(PL)(directory, **BEST) if make is stock else ours(PL, directory, **BEST)
        trainer = make_trainer(PL, [reader(PL, found, HOOKS), callback], root=tmp_path, max_steps=7)
        trainer.fit(make_net(PL), loader(), loader(batches=1))
        results.append(found)
        directory.rename(tmp_path / f"run-{len(results)}")
    assert results[0] == results[1]


@pytest.mark.parametrize("save_last", few([True, "link"], ["link"]))
def test_a_path_is_there_when_the_module_reads_it_in_the_hook_of_its_save(save_last: Any, tmp_path: Path) -> None:
    """Lightning calls the module's hook after those of callbacks."""
    results = []
    for make in (stock, ours):
        found: list[tuple[str, int]] = []
        directory, module = tmp_path / "run", make_net(PL)
        arguments = BEST | {"save_last": save_last}
        callback = stock(PL)(directory, **arguments) if make is stock else ours(PL, directory, **arguments)

        def read(*_: Any, found: list[tuple[str, int]] = found, callback: Any = callback) -> None:
            for path in (callback.best_model_path, callback.last_model_path, *callback.best_k_models):
                if path:
                    found.append((path, content(Path(path))["global_step"]))

        module.on_train_batch_end = read
        trainer = make_trainer(PL, [callback], root=tmp_path, max_steps=7)
        trainer.fit(module, loader(), loader(batches=1))
        results.append(found)
        directory.rename(tmp_path / f"run-{len(results)}")
    assert results[0] == results[1] and len(results[0]) > 10


@pytest.mark.parametrize("lazy", [True, False])
def test_what_the_hook_changes_after_it_has_read_a_path_is_in_the_save(lazy: bool, tmp_path: Path) -> None:
    """As without the read. A logger of another callback, which is told in between, may read paths, too."""
    module, found = make_net(PL), []
    module.register_buffer("batches", torch.zeros(()))
    callback = ours(PL, tmp_path, lazy=lazy, **BEST)

    def read(*_: Any) -> None:
        path = callback.best_model_path
        if path:
            found.append((path, content(Path(path))["global_step"]))
        module.batches += 1

    module.on_train_batch_end = read
    trainer = make_trainer(PL, [callback], root=tmp_path, max_steps=6)
    trainer.fit(module, loader())
    assert len(found) == 5 and [step for _, step in found] == [2, 2, 4, 4, 6]
    for step in (4, 6):
        assert content(tmp_path / f"step={step}.ckpt")["state_dict"]["batches"] == step
    assert content(tmp_path / "last.ckpt")["state_dict"]["batches"] == 6


@pytest.mark.parametrize("does", ["annotates", "writes into", "moves", "deletes"])
def test_what_the_hook_does_with_the_file_stays(does: str, tmp_path: Path) -> None:
    """The save at the end of the hook does not write over it, as the stock class would not."""
    results = []
    for make in (stock, ours):
        folder, module = tmp_path / make.__name__, make_net(PL)
        callback = stock(PL)(folder, **BEST) if make is stock else ours(PL, folder, **BEST)

        def use(*_: Any, module: Any = module, callback: Any = callback) -> None:
            path = callback.best_model_path
            if module.trainer.global_step % 2 or not os.path.exists(path):
                return
            if does == "moves":
                os.rename(path, f"{path}.kept")
            elif does == "deletes":
                os.remove(path)
            else:
                found = torch.load(path) | {"mine": module.trainer.global_step}
                torch.save(found, path if does == "writes into" else f"{path}.new")
                if does == "annotates":
                    os.replace(f"{path}.new", path)

        module.on_train_batch_end = use
        make_trainer(PL, [callback], root=tmp_path, max_steps=6).fit(module, loader())
        made = {path.name: torch.load(path) for path in folder.glob("step*")}
        results.append({name: (one["global_step"], one.get("mine")) for name, one in made.items()})
    assert results[0] == results[1]


def test_a_logger_that_reads_paths_of_another_callback_finds_files_with_what_the_hook_changes(tmp_path: Path) -> None:
    """It is told of earlier saves while that callback's save waits for the end of the module's hook."""
    module = make_net(PL)
    module.register_buffer("batches", torch.zeros(()))

    def count(*_: Any) -> None:
        module.batches += 1

    module.on_train_batch_end = count
    first = ours(PL, tmp_path, **BEST | {"filename": "a-{step}", "every_n_train_steps": 1, "save_last": None})
    second = ours(PL, tmp_path, **BEST | {"filename": "b-{step}"})

    class Reads(Log):
        def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
            paths = (first.best_model_path, second.best_model_path, second.last_model_path)
            self.heard.append([os.path.exists(path) for path in paths if path])

    log = Reads(tmp_path)
    trainer = make_trainer(PL, [first, second], root=tmp_path, max_steps=8, logger=log)
    trainer.fit(module, loader())
    assert len(log.heard) > 5 and all(map(all, log.heard))
    for path in (*first.best_k_models, *second.best_k_models, second.last_model_path):
        found = content(Path(path))
        assert found["state_dict"]["batches"] == found["global_step"]


def test_a_path_through_a_folder_that_nothing_is_in_leads_there(tmp_path: Path) -> None:
    callback = ours(PL, tmp_path, **BEST | {"filename": "a/b/../{step}"})
    trainer = make_trainer(PL, [callback], root=tmp_path, max_steps=4)
    trainer.fit(make_net(PL), loader())
    assert "/b/../" in callback.best_model_path
    assert torch.load(callback.best_model_path, weights_only=False)["global_step"] == 4


def test_the_content_of_a_path_read_in_a_hook_is_that_of_its_step(tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []

    class Reader(importlib.import_module(PL).Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if path := trainer.checkpoint_callback.last_model_path:
                steps.append((trainer.global_step // 2 * 2, content(Path(path))["global_step"]))

    trainer = make_trainer(PL, [Reader(), ours(PL, tmp_path, **BEST)], root=tmp_path, max_steps=6)
    trainer.fit(make_net(PL), loader())
    assert [wanted for wanted, _ in steps] == [found for _, found in steps] == [2, 2, 4, 4]


@pytest.mark.parametrize("namespace", EITHER)
def test_a_logger_gets_paths_that_are_there(namespace: str, tmp_path: Path) -> None:
    found: list[tuple[str, bool]] = []

    class Uploader(importlib.import_module(f"{namespace}.loggers.logger").DummyLogger):  # type: ignore[misc,name-defined]
        def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
            for path in {checkpoint_callback.best_model_path, checkpoint_callback.last_model_path}:
                found.append((Path(path).name, os.path.exists(path)))

    trainer = make_trainer(namespace, [ours(namespace, tmp_path, **BEST)], root=tmp_path, logger=Uploader())
    trainer.fit(make_net(namespace), loader())
    assert found
    assert all(there for _, there in found), found
    assert {"step=12.ckpt", "last.ckpt"} <= {name for name, _ in found}


def test_a_path_is_there_after_an_exception(tmp_path: Path) -> None:
    net = make_net(PL)
    step = net.training_step

    def failing(batch: Any, batch_idx: int) -> Any:
        return 1 / 0 if net.trainer.global_step == 4 else step(batch, batch_idx)

    net.training_step = failing
    callback = ours(PL, tmp_path, **BEST)
    with pytest.raises(ZeroDivisionError):
        make_trainer(PL, [callback], root=tmp_path).fit(net, loader())
    assert callback.best_model_path.endswith("step=4.ckpt")
    assert os.path.exists(callback.best_model_path)
    assert os.path.exists(callback.last_model_path)


def test_reading_waits_no_longer_than_told_and_gives_the_path(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    faultpoints.arm("agent.manifest.write:delay=1.5@1")
    paths: list[str] = []

    class Reader(importlib.import_module(PL).Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 2:
                paths.append(trainer.checkpoint_callback.best_model_path)

    callback = ours(PL, tmp_path, flush_timeout=timedelta(milliseconds=100), **BEST)
    make_trainer(PL, [Reader(), callback], root=tmp_path, max_steps=3).fit(make_net(PL), loader())
    assert paths == [str(tmp_path / "step=2.ckpt")]
    assert "there is no checkpoint at" in caplog.text


def test_our_own_hooks_and_other_threads_do_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stock class's code reads the path of the save before each save; that must not make steps wait for commits."""
    from resiliency.checkpoint.ticket import Ticket

    waits: list[int] = []
    original = Ticket.wait
    monkeypatch.setattr(Ticket, "wait", lambda self, *a, **k: (waits.append(self.step), original(self, *a, **k)))
    read: list[str] = []

    class Reader(importlib.import_module(PL).Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 4:
                thread = threading.Thread(target=lambda: read.append(trainer.checkpoint_callback.best_model_path))
                thread.start()
                thread.join(10)

    make_trainer(PL, [Reader(), ours(PL, tmp_path, **BEST)], root=tmp_path).fit(make_net(PL), loader())
    assert read == [str(tmp_path / "step=4.ckpt")]
    assert waits == []


def test_paths_that_do_not_come_are_waited_for_once_and_not_each_for_the_whole_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, waited = [0.0], []

    def wait(*_: object, timeout: timedelta) -> None:
        waited.append(timeout.total_seconds())
        now[0] += waited[-1]
        raise Timeout("not there yet")

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    ticket = SimpleNamespace(failed=None, wait=wait)
    saver = SimpleNamespace(
        _thread=threading.get_ident(),
        _later=False,
        _tickets=dict.fromkeys("abc", ticket),
        _is_there=lambda _: False,
        name_of=lambda path: path,
        session=SimpleNamespace(fence=lambda: None),
        places=SimpleNamespace(announced_tier=LOCAL),
    )
    CheckpointSaver.wait_for(saver, "abc", timedelta(seconds=30))  # type: ignore[arg-type]
    assert waited == [30.0, 0.0, 0.0]
