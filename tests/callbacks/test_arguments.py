"""The older library's example runs as written; arguments of the stock class are taken or refused as the stock class does; wrong
arguments of ours are refused where they stand, with what to pass instead."""

from __future__ import annotations

import copy
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from resiliency.callbacks.model_checkpoint import build
from resiliency.storage.interval import Interval
from tests.callbacks.harness import (
    EMBEDDED,
    NAMESPACES,
    content,
    differences,
    loader,
    make_net,
    make_trainer,
    names,
    state_of,
    stock,
)

EXAMPLE: dict[str, Any] = {
    "save_last": False,
    "monitor": "step",
    "save_top_k": 1,
    "mode": "max",
    "save_weights_only": False,
    "every_n_train_steps": 5,
    "save_on_train_epoch_end": True,
    "save_optim_on_train_ends": True,
    "always_save_context": False,
    "filename": "{step}",
    "enable_version_counter": False,
    "use_in_cluster_local_ckpts": None,
    "enable_high_scale_ckpt": False,
    "preprocess_files": True,
}


@pytest.mark.parametrize("spelling", ["save_optim_on_train_end", "save_optim_on_train_ends"])
@pytest.mark.parametrize("namespace", NAMESPACES)
def test_the_older_librarys_example_runs_as_written(namespace: str, spelling: str, tmp_path: Path) -> None:
    arguments = {key: value for key, value in EXAMPLE.items() if key != "save_optim_on_train_ends"} | {spelling: True}
    callback = build(namespace)(dirpath=tmp_path, **arguments)  # with its agent as a process of its own
    trainer = make_trainer(namespace, [callback], root=tmp_path, max_steps=12, max_epochs=-1)
    trainer.fit(make_net(namespace), loader())
    assert callback.save_optim_on_train_end is True
    assert names(tmp_path) == {"step=10.ckpt"}
    assert callback.best_model_path == str(tmp_path / "step=10.ckpt")


REFUSED_BY_STOCK: list[dict[str, Any]] = [
    {"every_n_train_steps": "5"},
    {"every_n_train_steps": -1},
    {"every_n_epochs": -3},
    {"save_top_k": "all"},
    {"save_top_k": -2},
    {"save_top_k": 3},
    {"mode": "best"},
    {"mode": ["min"]},
    {"every_n_train_steps": 2, "every_n_epochs": 1},
    {"every_n_epochs": 1, "train_time_interval": timedelta(minutes=1)},
    {"dirpath": 7},
]

#: What the stock class takes without a word at construction, however odd.
TAKEN_BY_STOCK: list[dict[str, Any]] = [
    {"verbose": 1},
    {"save_last": 1},
    {"save_last": "yes"},
    {"every_n_train_steps": 2.0},
    {"every_n_train_steps": 2.5},
    {"every_n_epochs": True},
    {"save_top_k": True},
    {"save_weights_only": 0},
    {"train_time_interval": timedelta(seconds=-1)},
    {"filename": "/abs/{step}"},
    {"filename": "../{step}"},
    {"filename": ".hidden"},
    {"filename": "a//b"},
    {"monitor": 3},
]


def made(kind: type[Any], arguments: dict[str, Any]) -> Any:
    """What came of making it: the exception, or the attributes of the stock class."""
    try:
        callback = kind(**arguments)
    except Exception as error:
        return type(error), str(error)
    return {name: value for name, value in vars(callback).items() if name != "_fs"}


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize("arguments", [*REFUSED_BY_STOCK, *TAKEN_BY_STOCK], ids=str)
def test_arguments_of_the_stock_class_are_taken_or_refused_as_the_stock_class_does(
    arguments: dict[str, Any], namespace: str
) -> None:
    theirs, mine = made(stock(namespace), arguments), made(build(namespace), arguments)
    if arguments in REFUSED_BY_STOCK:
        assert mine == theirs
        assert issubclass(theirs[0], Exception)
    else:
        assert isinstance(theirs, dict)
        assert isinstance(mine, dict), mine
        assert {name: mine[name] for name in theirs} == theirs


#: name -> arguments that are odd, accepted, and used in a fit.
ODD: dict[str, dict[str, Any]] = {
    "numbers for flags": {"verbose": 1, "save_last": 1, "save_weights_only": 0, "every_n_train_steps": 4},
    "a float of steps": {"every_n_train_steps": 2.0},
    "above dirpath": {"filename": "../up-{step}", "every_n_train_steps": 4, "save_last": True},
    "hidden": {"filename": ".hidden-{step}", "every_n_train_steps": 4},
    "hidden, all kept": {"filename": ".hidden", "every_n_train_steps": 4, "save_top_k": -1},
    "hidden, best": {"filename": ".{step}", "monitor": "wave", "save_top_k": 2, "every_n_train_steps": 1},
    "hidden folder": {"filename": ".folder/{step}", "every_n_train_steps": 4, "save_last": "link"},
    "dots": {"filename": "./a//b/../{step}", "every_n_train_steps": 4, "save_top_k": -1},
}


@pytest.mark.parametrize("name", ODD)
def test_odd_arguments_leave_what_the_stock_class_leaves(name: str, tmp_path: Path) -> None:
    namespace = NAMESPACES[list(ODD).index(name) % 2]
    results = []
    for own in (False, True):
        root = tmp_path / "run"
        extra = {"options": EMBEDDED} if own else {}
        callback = (build if own else stock)(namespace)(dirpath=root / "ckpts", **ODD[name], **extra)
        trainer = make_trainer(namespace, [callback], root=tmp_path)
        trainer.fit(make_net(namespace), loader())
        found = names(root)
        results.append((state_of(callback), found, [content(root / path)["global_step"] for path in sorted(found)]))
        root.rename(tmp_path / f"own-{own}")
    assert results[0][1], "the stock class wrote nothing: the test proves nothing"
    assert differences(results[0], results[1]) == []


def test_checkpoints_outside_dirpath_are_told_of_once_and_can_be_resumed_from_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    namespace = NAMESPACES[0]

    def callback() -> Any:
        return build(namespace)(
            dirpath=tmp_path / "ckpts", filename="../{step}", every_n_train_steps=6, save_top_k=-1, options=EMBEDDED
        )

    make_trainer(namespace, [callback()], root=tmp_path).fit(make_net(namespace), loader())
    told = [record for record in caplog.records if "written by the stock class" in record.getMessage()]
    assert len(told) == 1
    assert names(tmp_path) == {"step=6.ckpt", "step=12.ckpt"}
    net = make_net(namespace)
    make_trainer(namespace, [callback()], root=tmp_path).fit(net, loader(), ckpt_path=str(tmp_path / "step=6.ckpt"))
    assert net.ran == 6


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"every_n_train_step": 5}, TypeError, "did you mean 'every_n_train_steps'"),
    ({"lasy": True}, TypeError, "did you mean 'lazy'"),
    ({"zzz": 1}, TypeError, "known are dirpath"),
    ({"local_dir": 3}, TypeError, "path of a folder"),
    ({"local_dir": "gs://bucket/x"}, ValueError, "dirpath= or in remotes="),
    ({"remotes": "gs://bucket/x"}, TypeError, "RemoteTierOptions"),
    ({"remotes": ["gs://bucket/x"]}, TypeError, "RemoteTierOptions(address='gs://bucket/x')"),
    ({"persist": 10}, TypeError, "Interval"),
    ({"run": "a/b"}, ValueError, "name a folder"),
    ({"options": {"agent": "embedded"}}, TypeError, "CheckpointerOptions"),
    ({"flush_timeout": 10}, TypeError, "timedelta"),
    ({"flush_timeout": timedelta(seconds=-1)}, ValueError, "negative"),
    ({"lazy": "no"}, TypeError, "True or False"),
    ({"enable_high_scale_ckpt": True}, ValueError, "needs what talks to the GKE replicator"),
    ({"use_in_cluster_local_ckpts": "yes"}, TypeError, "True, False or None"),
    ({"priority": 1.5}, TypeError, "whole number"),
    ({"save_optim_on_train_end": True, "save_optim_on_train_ends": False}, ValueError, "one argument"),
]


@pytest.mark.parametrize(("arguments", "kind", "advice"), WRONG, ids=[str(list(item[0].items())) for item in WRONG])
def test_wrong_arguments_say_what_to_pass(arguments: dict[str, Any], kind: type[Exception], advice: str) -> None:
    with pytest.raises(kind) as caught:
        build("lightning.pytorch")(**arguments)
    assert advice in str(caught.value)


def test_too_many_positional_arguments_are_a_type_error() -> None:
    with pytest.raises(TypeError):
        build("lightning.pytorch")(*range(20))


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_state_key_and_type_are_those_of_the_stock_class(namespace: str) -> None:
    arguments: dict[str, Any] = {"monitor": "x", "mode": "max", "every_n_train_steps": 7}
    callback = build(namespace)(**arguments)
    assert callback.state_key == stock(namespace)(**arguments).state_key
    assert isinstance(callback, stock(namespace))
    assert build(namespace) is build(namespace)


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_copies_and_pickles_stay_of_their_namespace(namespace: str, tmp_path: Path) -> None:
    callback = build(namespace)(
        dirpath=tmp_path, monitor="x", save_top_k=2, persist=Interval(steps=5), options=EMBEDDED
    )
    callback.best_k_models = {"a": torch.tensor(1.0)}
    for twin in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert type(twin) is build(namespace)
        assert twin.state_key == callback.state_key
        assert twin.best_k_models == callback.best_k_models
        assert twin.best_k_models is not callback.best_k_models


def test_a_trainer_of_the_other_lightning_is_refused(tmp_path: Path) -> None:
    """Lightning itself refuses it first, or we do; nobody trains without checkpoints."""
    callback = build("lightning.pytorch")(dirpath=tmp_path)
    with pytest.raises(Exception, match="pytorch_lightning|Callback|callback"):
        make_trainer("pytorch_lightning", [callback], root=tmp_path).fit(make_net("pytorch_lightning"), loader())


def test_a_class_derived_from_ours_works(tmp_path: Path) -> None:
    class Mine(build("lightning.pytorch")):  # type: ignore[misc]
        def format_checkpoint_name(self, *args: Any, **kwargs: Any) -> str:
            path: str = super().format_checkpoint_name(*args, **kwargs)
            return path.replace("epoch", "Epoch")

    callback = Mine(dirpath=tmp_path, options=EMBEDDED)
    make_trainer("lightning.pytorch", [callback], root=tmp_path).fit(make_net("lightning.pytorch"), loader())
    assert callback.state_key.startswith(Mine.__qualname__)
    assert names(tmp_path) == {"Epoch=1-step=12.ckpt"}


@pytest.mark.parametrize("ending", ["max_steps", "should_stop"])
def test_the_last_save_is_persisted_whatever_the_interval(ending: str, tmp_path: Path) -> None:
    """Otherwise what a finished training has learnt would be lost with the host's ramdisk."""
    callback = build("lightning.pytorch")(
        dirpath=tmp_path / "slow",
        local_dir=tmp_path / "fast",
        persist=Interval(steps=1000),
        every_n_train_steps=2,
        save_top_k=-1,
        filename="{step}",
        options=EMBEDDED,
    )

    class Stops(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.should_stop = ending == "should_stop" and trainer.global_step == 6

    steps = 6 if ending == "max_steps" else 8
    trainer = make_trainer("lightning.pytorch", [Stops(), callback], root=tmp_path, max_steps=steps)
    trainer.fit(make_net("lightning.pytorch"), loader())
    assert names(tmp_path / "slow") == {"step=6.ckpt"}
