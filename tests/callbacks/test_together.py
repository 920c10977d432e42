"""Each callback of this library alone, and all of them in one Trainer in any order: metrics, weights, files and the states
of stock callbacks are those of a fit without them."""

from __future__ import annotations

import importlib
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.callbacks.harness import (
    EITHER,
    NAMESPACES,
    content,
    differences,
    loader,
    make_net,
    make_trainer,
    names,
    ours,
    stock,
)
from tests.rings import few

PL = "lightning.pytorch"
#: (module, class, arguments; a folder's name stands for its path)
CALLBACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "AutoCheckpointCallback": ("autocheckpoint", {}),
    "GoodputCallback": ("goodput", {"log": False, "prog_bar": False}),  # else it logs a metric
    "StepLoggingCallback": ("logging", {}),
    "TPSLoggingCallback": ("logging", {"gbs": 3, "seq_length": 4}),
    "MemoryLoggingCallback": ("logging", {}),
    "TensorboardCallback": ("logging", {"tb_dir": Path("tb")}),
    "StragglerLoggingCallback": ("logging", {}),
    "LogDirectoryCallback": ("logging", {"log_dir": Path("logs")}),
    "HeartbeatCallback": ("heartbeat", {"directory": Path("memory")}),
    "ProfileCheckpointCallback": ("profile", {"trace_dir": Path("traces"), "profile_checkpoint_interval": 2}),
    "ElasticityCallback": ("elasticity", {"rule": "keep_global_batch"}),
}


@pytest.fixture
def memory() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="together-"))
    yield folder
    shutil.rmtree(folder)


def make(name: str, root: Path, memory: Path, namespace: str = PL) -> Any:
    module, arguments = CALLBACKS[name]
    given = {
        key: (memory if value == Path("memory") else root / value) if isinstance(value, Path) else value
        for key, value in arguments.items()
    }
    package = importlib.import_module(f"resiliency.callbacks.{module}")
    if namespace == PL:
        return getattr(package, name)(**given)
    homes = {**getattr(package, "_MODULES", {})}
    return homes.get(name, package).build(namespace)(**given)


def fit(namespace: str, root: Path, callbacks: list[Any], saver: Any) -> tuple[Any, ...]:
    """What a fit of two epochs with validation leaves: weights, metrics, files, and in the newest file all but states of
    callbacks that are not Lightning's."""
    lightning = importlib.import_module(namespace)
    more = [lightning.callbacks.LearningRateMonitor("step"), lightning.callbacks.EarlyStopping("val_loss", patience=9)]
    net = make_net(namespace, dropout=0.3)
    logger = importlib.import_module(f"{namespace}.loggers").CSVLogger(root / "csv")
    trainer = make_trainer(
        namespace, [*callbacks, *more, saver], root=root, accumulate_grad_batches=2, logger=logger, log_every_n_steps=1
    )
    torch.manual_seed(3)
    trainer.fit(net, loader(), loader(batches=2))
    newest = content(root / "ckpts" / "last.ckpt")
    known = {key: value for key, value in newest["callbacks"].items() if not str(key).startswith(tuple(CALLBACKS))}
    states = {str(key).split("{")[0]: value for key, value in known.items() if "ModelCheckpoint" not in str(key)}
    rest = {key: value for key, value in newest.items() if key not in ("callbacks", "pytorch-lightning_version")}
    csv = (root / "csv" / "lightning_logs" / "version_0" / "metrics.csv").read_text()
    keys = sorted(str(key).replace(str(root), "") for key in known)
    return dict(trainer.callback_metrics), names(root / "ckpts"), rest, states, keys, csv


def saver(kind: str, namespace: str, root: Path) -> Any:
    arguments = {"monitor": "val_loss", "save_top_k": 2, "save_last": True}
    if kind == "stock":
        return stock(namespace)(dirpath=root / "ckpts", **arguments)
    return ours(namespace, root / "ckpts", **arguments)


def same(first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    assert differences(list(first[:4]), list(second[:4])) == []
    assert first[4:] == second[4:]


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, ...]]:
    """The fit with nothing but stock callbacks, in each package."""
    found = {}
    for namespace in NAMESPACES:
        root = tmp_path_factory.mktemp("without")
        found[namespace] = fit(namespace, root, [], saver("stock", namespace, root))
    return found


@pytest.mark.parametrize("kind", few(["stock", "ours"], ["ours"]))
@pytest.mark.parametrize("name", CALLBACKS)
def test_alone(name: str, kind: str, without: Any, tmp_path: Path, memory: Path) -> None:
    same(without[PL], fit(PL, tmp_path, [make(name, tmp_path, memory)], saver(kind, PL, tmp_path)))


@pytest.mark.parametrize("kind", ["stock", "ours"])
@pytest.mark.parametrize("order", few(["as listed", "reversed", "shuffled"], ["reversed"]))
@pytest.mark.parametrize("namespace", EITHER)
def test_all_together(namespace: str, order: str, kind: str, without: Any, tmp_path: Path, memory: Path) -> None:
    listed = list(CALLBACKS)
    if order == "reversed":
        listed.reverse()
    if order == "shuffled":
        random.Random(7).shuffle(listed)
    callbacks = [make(name, tmp_path, memory, namespace) for name in listed]
    same(without[namespace], fit(namespace, tmp_path, callbacks, saver(kind, namespace, tmp_path)))
