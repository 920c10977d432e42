"""The guide's example runs as written; wrong arguments are refused where they stand, with what to pass instead."""

from __future__ import annotations

import copy
import importlib
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from resiliency.callbacks.model_checkpoint import build
from resiliency.errors import ConfigError
from resiliency.storage.interval import Interval
from tests.callbacks.harness import EMBEDDED, NAMESPACES, loader, make_net, make_trainer, names, stock

GUIDE: dict[str, Any] = {
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
def test_the_example_of_the_guide_runs_as_written(namespace: str, spelling: str, tmp_path: Path) -> None:
    arguments = {key: value for key, value in GUIDE.items() if key != "save_optim_on_train_ends"} | {spelling: True}
    callback = build(namespace)(dirpath=tmp_path, **arguments)  # with its agent as a process of its own
    trainer = make_trainer(namespace, [callback], root=tmp_path, max_steps=12, max_epochs=-1)
    trainer.fit(make_net(namespace), loader())
    assert callback.save_optim_on_train_end is True
    assert names(tmp_path) == {"step=10.ckpt"}
    assert callback.best_model_path == str(tmp_path / "step=10.ckpt")


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"every_n_train_step": 5}, TypeError, "did you mean 'every_n_train_steps'"),
    ({"lasy": True}, TypeError, "did you mean 'lazy'"),
    ({"zzz": 1}, TypeError, "known are dirpath"),
    ({"every_n_train_steps": "5"}, TypeError, "every_n_train_steps=100"),
    ({"every_n_train_steps": 2.5}, TypeError, "whole number"),
    ({"every_n_train_steps": -1}, ValueError, "1 or more"),
    ({"every_n_epochs": -3}, ValueError, "1 or more"),
    ({"every_n_epochs": True}, TypeError, "whole number"),
    ({"save_top_k": "all"}, TypeError, "-1 keeps all"),
    ({"save_top_k": -2}, ValueError, ">= -1"),
    ({"save_top_k": 3}, ValueError, "monitor"),
    ({"mode": "best"}, ValueError, "min, max"),
    ({"save_last": "yes"}, ValueError, "'link'"),
    ({"save_weights_only": "False"}, TypeError, "True or False"),
    ({"train_time_interval": 60}, TypeError, "timedelta"),
    ({"train_time_interval": timedelta(seconds=-1)}, ValueError, "negative"),
    ({"every_n_train_steps": 2, "every_n_epochs": 1}, ValueError, "mutually exclusive"),
    ({"dirpath": 7}, TypeError, "path of a folder"),
    ({"filename": "/abs/{step}"}, ValueError, "dirpath="),
    ({"filename": "../{step}"}, ValueError, "dirpath="),
    ({"filename": ".hidden"}, ValueError, "dirpath="),
    ({"monitor": 3}, TypeError, "pass a str"),
    ({"local_dir": 3}, TypeError, "path of a folder"),
    ({"local_dir": "gs://bucket/x"}, ValueError, "dirpath= or in remotes="),
    ({"remotes": "gs://bucket/x"}, TypeError, "RemoteTierOptions"),
    ({"remotes": ["gs://bucket/x"]}, TypeError, "RemoteTierOptions(address='gs://bucket/x')"),
    ({"persist": 10}, TypeError, "Interval"),
    ({"run": "a/b"}, ValueError, "name a folder"),
    ({"options": {"agent": "embedded"}}, TypeError, "CheckpointerOptions"),
    ({"flush_timeout": 10}, TypeError, "timedelta"),
    ({"lazy": "no"}, TypeError, "True or False"),
    ({"enable_high_scale_ckpt": True}, ValueError, "local_dir='/local'"),
    ({"use_in_cluster_local_ckpts": True}, ValueError, "local_dir="),
]


@pytest.mark.parametrize(("arguments", "kind", "advice"), WRONG, ids=[str(list(item[0].items())) for item in WRONG])
def test_wrong_arguments_say_what_to_pass(arguments: dict[str, Any], kind: type[Exception], advice: str) -> None:
    with pytest.raises(kind) as caught:
        build("lightning.pytorch")(**arguments)
    assert advice in str(caught.value)


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_lightnings_own_exception_still_catches(namespace: str) -> None:
    kind = importlib.import_module(f"{namespace}.utilities.exceptions").MisconfigurationException
    with pytest.raises(kind) as caught:
        build(namespace)(save_top_k=-2)
    assert isinstance(caught.value, ConfigError)


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
