"""The import rules in .importlinter bite: each breach below is noticed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BREACHES = {
    "agent/__init__.py": "import torch",
    "goodput/__init__.py": "import resiliency.storage.manifest",
    "storage/manifest.py": "def f():\n    import lightning.pytorch",
    "errors.py": "import resiliency.settings",
    "plugins/__init__.py": "import resiliency.callbacks",
    "cli/main.py": "import nemo",
    "checkpoint/__init__.py": "import resiliency.launch.orders",
    "monitor/__init__.py": "import resiliency.supervisor.model",
    "supervisor/__init__.py": "import resiliency.testing.hosts.inject",
    "runtime/__init__.py": "import resiliency.storage.manifest",
}


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command(['--no-cache'])"
    env = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=folder, env=env, capture_output=True, text=True, timeout=120
    )


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tree")
    for name in ("resiliency", "recipes"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / ".importlinter", folder)
    return folder


def test_the_tree_keeps_the_rules(tree: Path) -> None:
    result = lint(tree)
    assert result.returncode == 0, result.stdout + result.stderr
    assert " 0 broken" in result.stdout


@pytest.mark.parametrize("file", BREACHES)
def test_a_breach_is_noticed(tree: Path, file: str) -> None:
    path = tree / "resiliency" / file
    before = path.read_text()
    path.write_text(f"{before}\n{BREACHES[file]}\n")
    try:
        result = lint(tree)
    finally:
        path.write_text(before)
    assert result.returncode == 1
    assert "BROKEN" in result.stdout
