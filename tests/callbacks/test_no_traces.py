"""What a fit does not need is not there: no engine, folder or hook before the first save, and none after a fit that Lightning
left without its last hooks."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import io
import os
import shutil
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from resiliency.callbacks.model_checkpoint import build
from resiliency.checkpoint.checkpointer import Checkpointer
from resiliency.testing.zygote import Zygote
from tests.callbacks.harness import EITHER, content, differences, loader, make_net, make_trainer, names, ours, stock
from tests.rings import few
from tests.zygote import start_script

PL = "lightning.pytorch"
EVERY: dict[str, Any] = {"every_n_train_steps": 2, "save_top_k": -1, "filename": "{step}"}


def hooks() -> int:
    return len(torch_optimizer._global_optimizer_pre_hooks)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("resiliency")]


@pytest.mark.parametrize("namespace", EITHER)
def test_setup_alone_leaves_nothing(namespace: str, tmp_path: Path) -> None:
    """As Lightning's own tests call it, and tools that look at a callback before they train."""
    net = make_net(namespace)
    callback = build(namespace)(dirpath=tmp_path / "ckpts")
    trainer = make_trainer(namespace, [callback], root=tmp_path)
    trainer.strategy.connect(net)
    before = hooks()
    callback.setup(trainer, net, "fit")
    assert (hooks(), threads()) == (before, [])
    assert not (tmp_path / "ckpts").exists()

    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    optimizer.step()  # of other code in the same process


UNSAVED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no steps": ({}, {"max_steps": 0}),
    "no epochs": ({}, {"max_epochs": 0}),
    "no batches": ({}, {"limit_train_batches": 0}),
    "fast_dev_run": ({}, {"fast_dev_run": True}),
    "nothing to save": ({"save_top_k": 0}, {}),
    "too rarely": ({"every_n_train_steps": 100}, {}),
    "asked to resume": ({"auto_resume": True, "save_top_k": 0}, {}),
}


@pytest.mark.parametrize("name", UNSAVED)
def test_a_fit_that_saves_nothing_starts_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Checkpointer, "open", lambda self: pytest.fail("the engine was opened"))
    arguments, settings = UNSAVED[name]
    (tmp_path / "ckpts").mkdir()
    callback = build(PL)(dirpath=tmp_path / "ckpts", **arguments)
    make_trainer(PL, [callback], root=tmp_path, **settings).fit(make_net(PL), loader())
    assert os.listdir(tmp_path) == ["ckpts"]
    assert os.listdir(tmp_path / "ckpts") == []


def test_the_engine_of_a_small_model_is_opened_by_its_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []
    original = Checkpointer.open
    callback = ours(PL, tmp_path, every_n_train_steps=5)
    trainer = make_trainer(PL, [callback], root=tmp_path)
    monkeypatch.setattr(Checkpointer, "open", lambda self: (opened.append(trainer.global_step), original(self))[1])
    trainer.fit(make_net(PL), loader())
    assert opened == [5]


def test_the_engine_of_a_large_model_is_warm_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first save is as fast as later ones."""
    monkeypatch.setattr("resiliency.callbacks.checkpointing.saver._LARGE_BYTES", 1)
    warmed: list[int] = []
    original = Checkpointer.warm_up_for
    callback = ours(PL, tmp_path, every_n_train_steps=5)
    trainer = make_trainer(PL, [callback], root=tmp_path)
    monkeypatch.setattr(
        Checkpointer, "warm_up_for", lambda self, *a, **k: (warmed.append(trainer.global_step), original(self, *a, **k))
    )
    trainer.fit(make_net(PL), loader())
    assert warmed == [0]


def spoiler(namespace: str, *, at: int = 5) -> Any:
    class Spoiler(importlib.import_module(namespace).Callback):  # type: ignore[misc,name-defined]
        """Raises in training and again when it is told of that: Lightning tells nobody after it."""

        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == at:
                raise RuntimeError("in training")

        def on_exception(self, *args: Any) -> None:
            raise ValueError("in on_exception")

    return Spoiler()


@pytest.mark.parametrize("agent", few(["embedded", "process"], ["process"]))
@pytest.mark.parametrize("how", ["new", "same trainer", "same callback"])
def test_after_an_exception_in_on_exception_of_another_callback_the_next_fit_saves(
    how: str, agent: str, tmp_path: Path
) -> None:
    arguments = EVERY | ({"options": None} if agent == "process" else {})
    before = hooks()
    bad, callback, net = spoiler(PL), ours(PL, tmp_path, **arguments), make_net(PL)
    trainer = make_trainer(PL, [bad, callback], root=tmp_path)
    with pytest.raises(ValueError, match="in on_exception"):
        trainer.fit(net, loader())
    assert threads(), "the engine is closed already: the test proves nothing"

    began = time.monotonic()
    if how == "same trainer":
        trainer.callbacks.remove(bad)
        trainer.fit(net, loader())
    else:
        callback = callback if how == "same callback" else ours(PL, tmp_path, **arguments)
        make_trainer(PL, [callback], root=tmp_path).fit(make_net(PL), loader())
    assert time.monotonic() - began < 15, "it waited for the engine of the fit before it"
    assert "step=12.ckpt" in names(tmp_path)
    assert content(tmp_path / "step=12.ckpt")["global_step"] == 12
    assert (hooks(), threads()) == (before, [])


def lazy_net(namespace: str) -> Any:
    net = make_net(namespace)
    net.layers = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.LazyLinear(1))
    return net


@pytest.mark.parametrize("namespace", EITHER)
def test_lazy_modules_are_saved_as_with_the_stock_class(namespace: str, tmp_path: Path) -> None:
    results = []
    for make in (lambda d: stock(namespace)(d, **EVERY), lambda d: ours(namespace, d, **EVERY)):
        directory = tmp_path / "run"
        torch.manual_seed(1)
        make_trainer(namespace, [make(directory)], root=directory).fit(lazy_net(namespace), loader())
        results.append({name: content(directory / name)["state_dict"] for name in sorted(names(directory))})
        directory.rename(tmp_path / str(len(results)))
    assert len(results[0]) == 6
    assert differences(*results) == []


@pytest.mark.parametrize("namespace", EITHER)
@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_a_trainer_can_be_pickled_and_copied_afterwards(namespace: str, stage: str, tmp_path: Path) -> None:
    boring = importlib.import_module(f"{namespace}.demos.boring_classes").BoringModel
    callback = ours(namespace, tmp_path, every_n_train_steps=2)
    trainer = make_trainer(namespace, [callback], root=tmp_path, max_steps=4, limit_val_batches=1)
    net = boring()
    trainer.fit(net)
    if stage == "validate":
        trainer.validate(net, ckpt_path=callback.best_model_path, verbose=False)
    file = io.BytesIO()
    torch.save(trainer, file)
    file.seek(0)
    for twin in (torch.load(file, weights_only=False), copy.deepcopy(trainer)):
        assert twin.global_step == 4
        assert twin.checkpoint_callback.best_model_path == callback.best_model_path
        twin.fit_loop.epoch_loop.max_steps = 6
        twin.fit(boring())  # it is a trainer of its own
        assert twin.global_step == 6
    assert trainer.global_step == 4


@pytest.mark.parametrize("way", few(["link", "real", "last", "auto", "linked name"], ["link", "last"]))
def test_a_linked_directory_is_the_directory(way: str, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    arguments = EVERY | {"save_last": True}

    def fit(directory: Path, max_steps: int, path: str | None, **more: Any) -> int:
        net = make_net(PL)
        callback = ours(PL, directory, **arguments, **more)
        make_trainer(PL, [callback], root=tmp_path, max_steps=max_steps, max_epochs=-1).fit(
            net, loader(), ckpt_path=path
        )
        ran: int = net.ran
        return ran

    fit(tmp_path / "link", 4, None)
    assert names(tmp_path / "real") == {"step=2.ckpt", "step=4.ckpt", "last.ckpt"}
    (tmp_path / "newest.ckpt").symlink_to("real/step=4.ckpt")
    path = {
        "link": str(tmp_path / "link" / "step=4.ckpt"),
        "real": str(tmp_path / "real" / "step=4.ckpt"),
        "last": "last",
        "auto": None,
        "linked name": str(tmp_path / "newest.ckpt"),
    }[way]
    for written in (tmp_path / "link", tmp_path / "real"):
        assert fit(written, 6 if written.name == "link" else 8, path, auto_resume=way == "auto" or None) in (2, 4)
    assert "step=8.ckpt" in names(tmp_path / "real")


def test_nothing_is_written_into_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an address as dirpath and a ramdisk as local folder, the event log is below the Trainer's root folder, as
    that of a GoodputCallback is."""
    monkeypatch.chdir(tmp_path)
    local = Path(f"/dev/shm/resiliency-test-{os.getpid()}-{os.environ.get('PYTEST_XDIST_WORKER', '')}")
    callback = ours(PL, "memory://bucket/traces", local_dir=local, **EVERY)
    try:
        make_trainer(PL, [callback], root=tmp_path / "root").fit(make_net(PL), loader())
        assert os.listdir(tmp_path) == ["root"]
        assert {path.name for path in (tmp_path / "root/.resiliency/default/events").iterdir()} > {"rank-00000.jsonl"}
    finally:
        shutil.rmtree(local, ignore_errors=True)


def test_no_package_of_an_object_store_is_imported_for_a_local_folder(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, zygote: Zygote
) -> None:
    """The stock class imports each that is installed, on rank 0: seconds of every restart."""
    script = f"""
import sys
from tests.callbacks.harness import loader, make_net, make_trainer, ours, stock
import warnings; warnings.simplefilter("ignore")
from pathlib import Path
directory = Path({str(tmp_path)!r})
for steps in (2, 4):
    callback = ours({PL!r}, directory, every_n_train_steps=2, auto_resume=True)
    make_trainer({PL!r}, [callback], root=directory, max_steps=steps, max_epochs=-1).fit(make_net({PL!r}), loader())
assert callback.best_model_path.endswith("step=4.ckpt")
print("loaded:", sorted({{"gcsfs", "adlfs", "s3fs"}} & set(sys.modules)))
make_trainer({PL!r}, [stock({PL!r})(directory)], root=directory, max_steps=1).fit(make_net({PL!r}), loader())
print("then:", sorted({{"gcsfs", "adlfs", "s3fs"}} & set(sys.modules)))
"""
    output = tmp_path_factory.mktemp("output") / "printed"
    worker = start_script(zygote, script, output)  # what a fork inherits is counted too: it is in sys.modules
    code, printed = worker.wait(timeout_s=120), output.read_text()
    assert code == 0, printed
    assert "loaded: []" in printed
    if importlib.util.find_spec("gcsfs"):
        assert "then: ['gcsfs']" in printed, "the stock class does not import it either: the test proves nothing"


@pytest.mark.filterwarnings("default:Checkpoint directory")
@pytest.mark.parametrize("namespace", EITHER)
def test_a_folder_that_is_not_empty_is_warned_of_as_by_the_stock_class(namespace: str, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    told = []
    for callback in (
        stock(namespace)(tmp_path),
        ours(namespace, tmp_path),
        ours(namespace, tmp_path, auto_resume=True),
    ):
        trainer = make_trainer(namespace, [callback], root=tmp_path, max_steps=0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(make_net(namespace), loader())
        told.append(
            [(str(item.message), item.category, item.filename) for item in caught if "not empty" in str(item.message)]
        )
    (stock_warning,) = told[0]
    assert stock_warning[0] == f"Checkpoint directory {tmp_path} exists and is not empty."
    assert told == [[stock_warning], [stock_warning], []]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", module=namespace.replace(".", r"\."))
        make_trainer(namespace, [ours(namespace, tmp_path)], root=tmp_path, max_steps=0).fit(
            make_net(namespace), loader()
        )
