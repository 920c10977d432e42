"""Importing does no work, and public names are exactly the pinned ones."""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import resiliency

ROOT = Path(resiliency.__file__).parent
#: Modules that must load without these: they run in the agent, on login nodes, in the report.
HEAVY = (
    "torch",
    "lightning",
    "pytorch_lightning",
    "kubernetes",
    "nemo",
    "google",
    "gcsfs",
    "jinja2",
    "typer",
    "rich",
    "numpy",
)
LIGHT_MODULES = [
    "resiliency",
    "resiliency.agent",
    "resiliency.callbacks",
    "resiliency.checkpoint",
    "resiliency.storage.manifest",
    "resiliency.storage.tiers.base",
    "resiliency.cli.main",
    "resiliency.errors",
    "resiliency.events",
    "resiliency.faultpoints",
    "resiliency.goodput",
    "resiliency.launch",
    "resiliency.runtime.heartbeat_files",
    "resiliency.plugins",
    "resiliency.settings",
]

REPORT = """
import json, os, sys, threading, logging
before = dict(os.environ)
handlers = list(logging.getLogger().handlers)
import {module}
print(json.dumps({{
    "heavy": sorted(name for name in {heavy!r} if name in sys.modules),
    "threads": [t.name for t in threading.enumerate() if t is not threading.main_thread()],
    "files": os.listdir("."),
    "env": before != dict(os.environ),
    "handlers": handlers != logging.getLogger().handlers,
}}))
"""


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_import_does_no_work(module: str, tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT.parent)!r})\n" + REPORT.format(module=module, heavy=HEAVY)
    command = [sys.executable, "-B", "-c", code]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(result.stdout) == {"heavy": [], "threads": [], "files": [], "env": False, "handlers": False}


def test_help_is_quick_and_imports_no_torch() -> None:
    code = (
        "import sys, resiliency.cli.main as m\n"
        "try: m.main(['--help'])\n"
        "finally: print('torch' in sys.modules, 'typer' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.endswith("False False\n")
    for name in ("ckpt", "goodput"):
        assert f"\n  {name} " in result.stdout


PINNED = {
    "resiliency.callbacks.heartbeat": ["HeartbeatCallback", "build"],
    "resiliency.callbacks.logging": [
        "LogDirectoryCallback",
        "MemoryLoggingCallback",
        "StepLoggingCallback",
        "StragglerLoggingCallback",
        "TPSLoggingCallback",
        "TensorboardCallback",
        "build",
    ],
    "resiliency.launch": ["AttemptEnded", "beat", "pause", "restartable"],
    "resiliency.runtime.heartbeat_files": ["HeartbeatFile", "RankHeartbeat", "read_heartbeats"],
    "resiliency": [
        "AgentError",
        "AutoCheckpointCallback",
        "Checkpointer",
        "CheckpointerOptions",
        "ConfigError",
        "CorruptShard",
        "DirectoryInUse",
        "Interval",
        "LocalTierOptions",
        "ModelCheckpoint",
        "NoCheckpointFound",
        "Outcome",
        "RemoteTierOptions",
        "ResiliencyError",
        "Restored",
        "Stage",
        "StepId",
        "Ticket",
        "TierError",
        "Timeout",
        "TornSnapshot",
        "UnsupportedFormat",
        "__version__",
    ],
    "resiliency.checkpoint": [
        "Checkpointer",
        "CheckpointerOptions",
        "Coordinator",
        "EventSink",
        "Interval",
        "LocalTierOptions",
        "Outcome",
        "Read",
        "RemoteTierOptions",
        "Restored",
        "Stage",
        "StepId",
        "StoreCoordinator",
        "Ticket",
        "WriteChunk",
        "WritePlan",
    ],
    "resiliency.errors": [
        "AgentError",
        "ConfigError",
        "CorruptShard",
        "DirectoryInUse",
        "NoCheckpointFound",
        "ResiliencyError",
        "TierError",
        "Timeout",
        "TornSnapshot",
        "UnsupportedFormat",
    ],
}


@pytest.mark.parametrize("module", PINNED)
def test_public_names_are_pinned_and_there(module: str) -> None:
    """Adding a name is a decision: add it here too. Removing one breaks users."""
    loaded = importlib.import_module(module)
    assert sorted(loaded.__all__) == PINNED[module]
    for name in loaded.__all__:
        assert getattr(loaded, name) is not None
        assert name in dir(loaded)
    with pytest.raises(AttributeError, match="no_such_name"):
        loaded.no_such_name  # noqa: B018


def all_modules() -> list[str]:
    return sorted(
        info.name for info in pkgutil.walk_packages([str(ROOT)], "resiliency.") if not info.name.endswith("__main__")
    )


def module_file(name: str) -> Path:
    path = ROOT.parent.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def test_every_module_has_a_docstring_and_names_its_public_things() -> None:
    for name in all_modules():
        tree = ast.parse(module_file(name).read_text(), feature_version=(3, 10))
        assert ast.get_docstring(tree), f"{name} has no docstring"
        if not name.split(".")[-1].startswith("_"):
            assigned = [node for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign))]
            assert any("__all__" in ast.unparse(node) for node in assigned), f"{name} has no __all__"


#: settings.py is the one reader; the test kit sets variables of the processes it forks.
MAY_TOUCH_ENVIRON = ("resiliency.settings", "resiliency.testing.")


def test_only_settings_reads_the_environment() -> None:
    for name in (name for name in all_modules() if not name.startswith(MAY_TOUCH_ENVIRON)):
        for node in ast.walk(ast.parse(module_file(name).read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.environb", "os.getenv"):
                pytest.fail(f"{name}:{node.lineno} touches {ast.unparse(node)}; ask resiliency.settings instead")


def test_every_folder_with_code_is_a_package() -> None:
    """setuptools drops a folder without __init__.py in silence."""
    missing = [path.parent for path in ROOT.rglob("*.py") if not (path.parent / "__init__.py").exists()]
    assert not missing
