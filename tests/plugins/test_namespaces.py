"""Adapter classes: one per Lightning package, found by name, and copied and pickled as what they are."""

from __future__ import annotations

import copy
import importlib
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resiliency.errors import ConfigError
from resiliency.plugins import namespaces
from tests.rings import few

NAMESPACES = ["lightning.pytorch", "pytorch_lightning"]
#: module -> (name of the class, where the stock class lies, its name)
ADAPTERS = {
    "resiliency.callbacks.model_checkpoint": ("ModelCheckpoint", "callbacks", "ModelCheckpoint"),
    "resiliency.callbacks.goodput": ("GoodputCallback", "callbacks", "Callback"),
    "resiliency.plugins.checkpoint_io": ("TieredCheckpointIO", "plugins.io", "CheckpointIO"),
}


@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize("module", ADAPTERS)
def test_each_namespace_has_one_class_under_the_known_name(module: str, namespace: str) -> None:
    name, where, base = ADAPTERS[module]
    build = importlib.import_module(module).build
    cls = build(namespace)
    assert cls is build(namespace)
    assert cls is not build(next(other for other in NAMESPACES if other != namespace))
    assert (cls.__module__, cls.__name__, cls.namespace) == (module, name, namespace)
    assert issubclass(cls, getattr(importlib.import_module(f"{namespace}.{where}"), base))
    assert cls.__doc__ and "Args:" in cls.__doc__


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("namespace", NAMESPACES)
@pytest.mark.parametrize("module", ADAPTERS)
def test_pickles_and_copies_are_of_their_namespace(module: str, namespace: str, protocol: int) -> None:
    original = importlib.import_module(module).build(namespace)()
    original.note = ["kept"]
    for twin in (pickle.loads(pickle.dumps(original, protocol)), copy.deepcopy(original), copy.copy(original)):
        assert type(twin) is type(original)
        assert twin.note == ["kept"]
    assert copy.deepcopy(original).note is not original.note


class Derived(importlib.import_module("resiliency.callbacks.goodput").build("pytorch_lightning")):  # type: ignore[misc]
    pass


def test_a_class_derived_from_ours_is_pickled_as_itself() -> None:
    twin = pickle.loads(pickle.dumps(Derived(prog_bar=False)))
    assert type(twin) is Derived
    assert twin._prog_bar is False


@pytest.mark.parametrize(("first", "expected"), few([(name, name) for name in NAMESPACES], [(NAMESPACES[0],) * 2]))
def test_a_pickle_is_read_in_a_process_that_imported_nothing(first: str, expected: str, tmp_path: Path) -> None:
    """Where the launcher of a strategy starts workers; and the module's own name follows what is imported first."""
    module = importlib.import_module("resiliency.callbacks.goodput")
    other = next(name for name in NAMESPACES if name != first)
    (tmp_path / "callback").write_bytes(pickle.dumps(module.build(other)()))
    code = (
        f"import pickle, {first}\n"
        "from resiliency.callbacks.goodput import GoodputCallback\n"
        f"callback = pickle.loads(open({str(tmp_path / 'callback')!r}, 'rb').read())\n"
        "print(GoodputCallback.namespace, type(callback).namespace)"
    )
    root = Path(namespaces.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == [expected, other], done.stderr


def test_the_only_namespace_that_is_imported_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces, "namespaces", lambda: NAMESPACES)
    monkeypatch.delitem(sys.modules, "lightning.pytorch", raising=False)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", importlib.import_module("pytorch_lightning"))
    assert namespaces.default_namespace() == "pytorch_lightning"
    monkeypatch.setattr(namespaces, "namespaces", lambda: [])
    with pytest.raises(ConfigError, match="pip install"):
        namespaces.default_namespace()


def test_other_names_are_no_attributes() -> None:
    for module in ADAPTERS:
        with pytest.raises(AttributeError, match="Nothing"):
            importlib.import_module(module).Nothing  # noqa: B018


def test_a_trainer_of_the_other_package_is_refused_with_what_to_import() -> None:
    trainer: Any = importlib.import_module("pytorch_lightning").Trainer.__new__(
        importlib.import_module("pytorch_lightning").Trainer
    )
    namespaces.require_trainer_of("pytorch_lightning", trainer, "X", "a.b")
    with pytest.raises(ConfigError, match=r"import pytorch_lightning before a\.b, or use build\('pytorch_lightning'\)"):
        namespaces.require_trainer_of("lightning.pytorch", trainer, "X", "a.b")
