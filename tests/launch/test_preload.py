"""Which modules are imported in advance, and which command lines can be forked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from resiliency.launch.fresh import ScriptCommand, parse_command
from resiliency.launch.preload import modules_to_preload


def preloaded(folder: Path, *, target: str = "train.py", is_module: bool = False) -> list[str]:
    return modules_to_preload(ScriptCommand(target=target, is_module=is_module, arguments=()), str(folder))


def test_a_script_without_torch_needs_nothing_in_advance(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import json, sys\nfrom . import x\nfrom os import path")
    assert preloaded(tmp_path) == []


def test_what_a_script_imports_anywhere_is_found_without_running_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(1)\ndef main():\n    import torch.nn\n")
    assert preloaded(tmp_path) == ["torch", "torch.distributed"]


@pytest.mark.parametrize("text", ["import os; import torch; x = 1", "try: import torch as t, os", "import torch# it"])
def test_an_import_may_share_its_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(text)
    assert preloaded(tmp_path) == ["torch", "torch.distributed"]


def test_names_taken_from_a_package_and_relative_imports_are_no_packages(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from ours import numpy, torch\nfrom .helpers import x\nfrom . import lightning")
    (tmp_path / "helpers.py").write_text("import torch")  # of another package than the one that is meant
    assert preloaded(tmp_path) == []


def test_what_the_files_beside_it_import_counts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from model import Net\nimport package.part")
    (tmp_path / "model.py").write_text("import train\nfrom lightning.pytorch import Trainer")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("raise RuntimeError('is not run')")
    (tmp_path / "package" / "part.py").write_text("from resiliency import ModelCheckpoint")
    found = preloaded(tmp_path)
    assert found[:2] == ["torch", "torch.distributed"] and "pytorch_lightning" not in found
    assert found[-3:] == ["lightning.pytorch", "resiliency.agent.server", "resiliency.callbacks.model_checkpoint"]


def test_a_module_of_an_installed_package_is_followed_through_that_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "elsewhere" / "ours"
    (package / "deep").mkdir(parents=True)
    for folder in (package, package / "deep"):
        (folder / "__init__.py").write_text("raise RuntimeError('is not run')")
    (package / "deep" / "job.py").write_text("from ours.other import x\nimport json")
    (package / "other.py").write_text("import torch")
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    (tmp_path / "here").mkdir()
    assert preloaded(tmp_path / "here", target="ours.deep.job", is_module=True) == ["torch", "torch.distributed"]
    assert not [name for name in sys.modules if name.startswith("ours")]


@pytest.mark.parametrize("text", ["import (", "import ,", "\xff\xfe"], ids=["syntax", "comma", "bytes"])
def test_a_script_that_cannot_be_read_is_left_to_its_own_run(text: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_bytes(text.encode("latin-1"))
    assert preloaded(tmp_path) == []
    assert preloaded(tmp_path / "nowhere") == []


def test_modules_that_are_not_installed_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("import numpy, torchmetrics")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torchmetrics" else object())
    assert preloaded(tmp_path) == ["numpy", "torch", "torch.distributed"]


PYTHON = sys.executable


@pytest.mark.parametrize(
    "words, expected",
    [
        (
            [PYTHON, "-u", "train.py", "-m", "x"],
            ScriptCommand(target="train.py", is_module=False, arguments=("-m", "x")),
        ),
        ([PYTHON, "-u", "-m", "a.b", "-u"], ScriptCommand(target="a.b", is_module=True, arguments=("-u",))),
        ([PYTHON, "train.py"], ScriptCommand(target="train.py", is_module=False, arguments=())),
        (["numactl", "--cpunodebind=0", PYTHON, "train.py"], "numactl is not this interpreter"),
        ([PYTHON, "-u", "-O", "train.py"], "options of the interpreter"),
        ([PYTHON, "-u"], "options of the interpreter"),
        ([PYTHON, "-u", "archive.zip"], "is not a .py file"),
    ],
)
def test_command_lines(words: list[str], expected: ScriptCommand | str) -> None:
    found = parse_command(words)
    if isinstance(expected, str):
        assert isinstance(found, str) and expected in found
    else:
        assert found == expected
